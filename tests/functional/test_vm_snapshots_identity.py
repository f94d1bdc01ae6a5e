# SPDX-License-Identifier: Apache-2.0
"""A VM state is loaded with the images that it was saved with, on the bases that these had then,
and with no others.
"""

from pathlib import Path

from tests.functional import test_qemu_backend
from tests.functional import vm_snapshot_case
from tests.functional import vm_state

SIZE = vm_snapshot_case.SIZE


class IdentityTestCase(vm_snapshot_case.VmSnapshotTestCase):
    def vm(self, *arguments: str) -> vm_state.Vm:
        return vm_state.Vm(self.directory, *arguments, *vm_state.carrier_arguments(self.carrier))

    def assert_refused(self, arguments: tuple[str, ...], *words: str) -> None:
        with self.vm(*arguments) as vm:
            message = vm.load('s')
            for word in words:
                self.assertIn(word, message)
            # nobody's memory of one time runs beside disks of another
            self.assertNotEqual('running', vm.status())
            vm.quit()

    def assert_loads(self, arguments: tuple[str, ...]) -> None:
        with self.vm(*arguments) as vm:
            self.assertEqual('', vm.load('s'))
            self.assertEqual(b'then', vm.read(vm_state.RAM, 4))
            vm.quit()

    def save(self, arguments: tuple[str, ...]) -> None:
        with self.vm(*arguments) as vm:
            vm.write(vm_state.RAM, b'then')
            self.assertEqual('', vm.save('s'))
            vm.quit()


class BasesTest(IdentityTestCase):
    def base(self, name: str, pattern: int) -> Path:
        path = self.directory / name
        vm_state.run('pcow-img', 'create', '-q', path, SIZE)
        vm_state.run('pcow-io', '-c', f'write -q -P {pattern} 0 1M', path)
        return path

    def on(self, *base: object) -> None:
        vm_state.run('pcow-img', 'rebase', '-q', '-u', '-b', *base, self.image)

    def test_another_base(self) -> None:
        base, other = self.base('base.pcow', 1), self.base('other.pcow', 2)
        lowest = self.base('lowest.pcow', 3)
        for path in (lowest, other):
            vm_state.run('pcow-img', 'seal', path)
        vm_state.run('pcow-img', 'rebase', '-q', '-b', lowest, base)
        vm_state.run('pcow-img', 'seal', base)
        self.image.unlink()
        vm_state.run('pcow-img', 'create', '-q', '-b', base, self.image)
        arguments = test_qemu_backend.backend(self.image)
        self.save(arguments)
        self.on(other)
        self.assert_refused(arguments, str(self.image), 'stands on other bases', 'rebase -u')
        self.on('')
        self.assert_refused(arguments, str(self.image), 'stands on other bases')
        self.on(base)
        self.assert_loads(arguments)
        # the same name, but what is below the base is another file
        vm_state.run('pcow-img', 'unseal', base)
        vm_state.run('pcow-img', 'rebase', '-q', '-u', '-b', other, base)
        vm_state.run('pcow-img', 'seal', base)
        self.on(base)
        self.assert_refused(arguments, 'stands on other bases')

    def test_snapshot_of_a_base(self) -> None:
        """Which one counts; not what it is called, nor what the base does after it."""
        base = self.base('base.pcow', 1)
        for name in ('first', 'second'):
            vm_state.run('pcow-img', 'snapshot', '-c', name, base)
        self.image.unlink()
        vm_state.run(
            'pcow-img', 'create', '-q', '-b', base, '-o', 'base_snapshot=first', self.image
        )
        arguments = test_qemu_backend.backend(self.image)
        self.save(arguments)
        vm_state.run('pcow-io', '-c', 'write -q -P 9 0 1M', base)
        vm_state.run('pcow-img', 'snapshot', '--rename', 'first', 'new-name', base)
        self.assert_loads(arguments)
        self.on(base, '-o', 'base_snapshot=second')
        self.assert_refused(arguments, 'stands on other bases')
        self.on(base, '-o', 'base_snapshot=new-name')
        self.assert_loads(arguments)


class ImagesTest(IdentityTestCase):
    def test_two_that_changed_places(self) -> None:
        """Both have a snapshot of that name and date."""
        other = self.directory / 'other.pcow'
        vm_state.run('pcow-img', 'create', '-q', other, SIZE)

        def arguments(first: Path, second: Path) -> tuple[str, ...]:
            more = (
                '-object',
                f'memory-backend-file,id=mem1,mem-path={second},share=on',
                '-device',
                'nvdimm,id=nv1,memdev=mem1,pcow-volatile=on',
            )
            return (*test_qemu_backend.backend(first), *more)

        self.save(arguments(self.image, other))
        self.assert_refused(
            arguments(other, self.image), 'belongs to another pcow image', 'UUIDs differ'
        )
        self.assert_loads(arguments(self.image, other))

    def check_places(self, device: str, options: str = '') -> None:
        """The guest goes on with the addresses that it had, whatever the backends are called."""
        other = self.directory / 'other.pcow'
        vm_state.run('pcow-img', 'create', '-q', other, SIZE)

        def arguments(*order: int) -> tuple[str, ...]:
            return tuple(
                word
                for number in order
                for word in (
                    '-object',
                    f'memory-backend-file,id=mem{number},'
                    f'mem-path={(self.image, other)[number]},share=on',
                    '-device',
                    f'{device},id=nv{number},memdev=mem{number}{options}',
                )
            )

        self.save(arguments(0, 1))
        self.assert_refused(arguments(1, 0), 'give the memory devices their old order')
        self.assert_loads(arguments(0, 1))

    def test_nvdimms_that_changed_places(self) -> None:
        self.check_places('nvdimm', ',pcow-volatile=on')

    def test_virtio_pmems_that_changed_places(self) -> None:
        self.check_places('virtio-pmem-pci')

    def test_read_only(self) -> None:
        """It takes no snapshot, so that it must be what it was."""
        arguments = (
            '-object',
            f'memory-backend-file,id=mem0,mem-path={self.image},share=on,readonly=on',
            '-device',
            'nvdimm,id=nv0,memdev=mem0,unarmed=on,pcow-volatile=on',
        )
        self.save(arguments)
        self.assert_loads(arguments)
        vm_state.run('pcow-io', '-c', 'write -q -P 9 0 4k', self.image)
        self.assert_refused(arguments, str(self.image), 'was changed after the VM state was saved')
