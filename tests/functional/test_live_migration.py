# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM with pcow images between two real QEMUs, without a guest: the test stores
while it goes on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
import random
import time
from typing import Any

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend
from tests.functional import vm_state

SIZE = 64 * images.MIB
SECONDS = 120


class Model:
    """What is on an image, page by page; stores at random."""

    def __init__(self, seed: int, device: str = 'nv0') -> None:
        self._random = random.Random(seed)
        self.device = device
        self.pages: dict[int, bytes] = {}

    def store(self, vm: qemu.Qemu, count: int) -> None:
        for _ in range(count):
            page = self._random.randrange(SIZE // 4096)
            # Some of them zeros, which may be there already
            data = bytes(16) if self._random.random() < 0.2 else self._random.randbytes(16)
            vm.write(vm.address(self.device) + page * 4096, data)
            self.pages[page] = data


class MigrationTestCase(images.ImageTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.here, self.there = self.directory / 'here', self.directory / 'there'
        for host in (self.here, self.there):
            host.mkdir()
        self.base = self.create('here/base.pcow', SIZE)
        for offset in range(0, SIZE, 8 * images.MIB):
            self.io(self.base, f'write -q -P {1 + offset // images.MIB} {offset} 1M')
        self.img('seal', '-q', self.base)
        self.image = self.create('here/top.pcow', None, '-b', self.base.name)

    def copy_base(self, directory: Path) -> None:
        self.run_program('cp', '--sparse=always', self.base, directory)

    def prepare_there(self) -> Path:
        """An empty image on a copy of the base."""
        self.copy_base(self.there)
        return self.create('there/top.pcow', None, '-b', self.base.name)

    def run_vm(self, path: Path, *more: str) -> vm_state.Vm:
        return vm_state.Vm(path.parent, *test_qemu_backend.backend(path), *more)

    def receive(self, path: Path, *more: str) -> vm_state.Vm:
        return self.run_vm(path, '-incoming', f'unix:{self.directory}/migration', *more)

    def migrate(self, vm: qemu.Qemu, to: str = 'migration', **parameters: Any) -> None:
        """As libvirt does it: the source hears from the destination whether it has all."""
        vm.qmp(
            'migrate-set-capabilities', capabilities=[{'capability': 'return-path', 'state': True}]
        )
        if parameters:
            vm.qmp('migrate-set-parameters', **parameters)
        vm.qmp('migrate', uri=f'unix:{self.directory}/{to}')

    def wait(self, vm: qemu.Qemu) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            found = dict(vm.qmp('query-migrate'))
            if found.get('status') in ('completed', 'failed', 'cancelled'):
                return found
            time.sleep(0.02)
        raise AssertionError(f'the migration does not end: {found}')

    def names(self, path: Path) -> list[str]:
        return [snapshot['name'] for snapshot in self.img_json('snapshot', '-l', '-U', path)]

    def assert_undamaged(self, *paths: Path) -> None:
        """What a QEMU that was killed leaves may have blocks that it had prepared."""
        for path in paths:
            self.run_program('pcow-img', 'check', '-q', '-r', 'leaks', path)
        self.assert_clean(*paths)

    def assert_holds(self, vm: qemu.Qemu, model: Model) -> None:
        for page, data in model.pages.items():
            self.assertEqual(
                data, vm.read(vm.address(model.device) + page * 4096, len(data)), f'page {page}'
            )


class CompletedTest(MigrationTestCase):
    def test_stores_go_on(self) -> None:
        """Rounds while the test stores; what is in the base does not travel, what was
        stored does.
        """
        target, model = self.prepare_there(), Model(1)
        with self.run_vm(self.image) as source, self.receive(target) as destination:
            model.store(source, 2000)
            source.write(vm_state.RAM, b'ram')
            # A guest does not store after it was stopped; the test would.
            source.qmp(
                'migrate-set-capabilities',
                capabilities=[{'capability': 'pause-before-switchover', 'state': True}],
            )
            self.migrate(source, max_bandwidth=8 * images.MIB, downtime_limit=1)
            names: set[str] = set()
            end = time.monotonic() + 120
            # Each round has a snapshot of its own; that slow, and with that little time to stop in,
            # they do not come to an end.
            while len(names) < 2:
                self.assertLess(time.monotonic(), end, f'there were no rounds: {names}')
                model.store(source, 50)
                names.update(source.names())
                self.assertIn(source.qmp('query-migrate')['status'], ('setup', 'active'))
            source.qmp(
                'migrate-set-parameters', **{'max-bandwidth': 1 << 40, 'downtime-limit': 1000}
            )
            while source.qmp('query-migrate')['status'] == 'active':
                model.store(source, 5)
            source.qmp('migrate-continue', state='pre-switchover')
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual('running', destination.wait_status('running'))
            self.assert_holds(destination, model)
            self.assertEqual(b'ram', destination.read(vm_state.RAM, 3))
            model.store(destination, 100)
            self.assert_holds(destination, model)
            self.assertEqual([], self.names(self.image))
            source.quit()
            destination.quit()
        self.assert_clean(self.image, target, self.there / self.base.name)
        self.assertLess(self.allocated(target), self.allocated(self.image) + 4 * images.MIB)

    def test_stopped(self) -> None:
        """Byte for byte, with pages of zeros over the base and pages that were stored back as they
        were.
        """
        target = self.prepare_there()
        with self.run_vm(self.image, '-S') as source, self.receive(target) as destination:
            address = source.address('nv0')
            source.write(address + 8 * images.MIB, bytes(8192))
            source.write(address + 16 * images.MIB, bytes([17]) * 4096)
            source.write(address + 3 * images.MIB, b'fresh')
            self.migrate(source)
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual(bytes(8192), destination.read(address + 8 * images.MIB, 8192))
            source.quit()
            destination.quit()
        self.assert_same(self.image, 'pcow', target, 'pcow')

    def test_renamed_while_it_is_open(self) -> None:
        """It is the file that is open, whatever its name is by then; another one has that now."""
        target, model = self.prepare_there(), Model(8)
        with self.run_vm(self.image) as source, self.receive(target) as destination:
            model.store(source, 500)
            self.image.rename(self.image.with_name('renamed.pcow'))
            self.create('here/top.pcow', SIZE)
            self.migrate(source)
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual('running', destination.wait_status('running'))
            self.assert_holds(destination, model)
            self.assertEqual([], self.names(self.image))
            source.quit()
            destination.quit()
        self.assert_clean(target)

    def test_no_base(self) -> None:
        self.image.unlink()
        self.create('here/top.pcow', SIZE)
        target, model = self.create('there/top.pcow', SIZE), Model(2)
        with self.run_vm(self.image) as source, self.receive(target) as destination:
            model.store(source, 500)
            self.migrate(source)
            self.assertEqual('completed', self.wait(source)['status'])
            self.assertEqual('running', destination.wait_status('running'))
            self.assert_holds(destination, model)
            source.quit()
            destination.quit()
        self.assert_clean(target)

    def read_only(self, path: Path) -> tuple[str, ...]:
        return (
            '-object',
            f'memory-backend-file,id=mem0,mem-path={path},share=on,readonly=on',
            '-device',
            'nvdimm,id=nv0,memdev=mem0,unarmed=on',
        )

    def test_read_only_image(self) -> None:
        """Nothing of it travels; it has to be the very file."""
        self.copy_base(self.there)
        for path, status in (
            (self.there / self.base.name, 'completed'),
            (self.there / 'other.pcow', 'failed'),
        ):
            if not path.exists():
                self.create('there/other.pcow', SIZE)
                self.img('seal', '-q', path)
            with (
                vm_state.Vm(self.here, *self.read_only(self.base)) as source,
                vm_state.Vm(
                    self.there,
                    *self.read_only(path),
                    '-incoming',
                    f'unix:{self.directory}/migration',
                ),
            ):
                self.migrate(source)
                self.assertEqual(status, self.wait(source)['status'], path)

    def test_read_only_image_beside_a_file(self) -> None:
        """The state of a VM goes to a file (virsh save), or over a restart of the host; the image
        stays what it is.
        """
        state = self.directory / 'state'
        for mode in ('normal', 'cpr-reboot'):
            with self.subTest(mode=mode):
                with vm_state.Vm(self.here, *self.read_only(self.base)) as source:
                    source.write(vm_state.RAM, mode.encode())
                    source.qmp('migrate-set-parameters', mode=mode)
                    source.qmp('migrate', uri=f'file:{state}')
                    self.assertEqual('completed', self.wait(source)['status'])
                    source.quit()
                with vm_state.Vm(
                    self.here, *self.read_only(self.base), '-incoming', 'defer'
                ) as destination:
                    destination.qmp('migrate-set-parameters', mode=mode)
                    destination.qmp('migrate-incoming', uri=f'file:{state}')
                    self.assertEqual('running', destination.wait_status('running'))
                    self.assertEqual(mode.encode(), destination.read(vm_state.RAM, len(mode)))
                    destination.quit()
        self.create('here/other.pcow', SIZE)
        other = self.here / 'other.pcow'
        with vm_state.Vm(self.here, *self.read_only(other), '-incoming', 'defer') as destination:
            # it may end before it has answered
            destination.begin_qmp('migrate-incoming', uri=f'file:{state}')
            self.assertNotEqual(0, destination.process.wait(SECONDS))
            assert destination.process.stderr is not None
            self.assertIn('belongs to another pcow image', destination.process.stderr.read())


class RefusedTest(MigrationTestCase):
    def test_before_it_begins(self) -> None:
        with self.run_vm(self.image) as vm:
            for uri in (f'file:{self.directory}/state', 'exec:cat >/dev/null'):
                self.assertIn(
                    'cannot be migrated or saved to a file', vm.qmp_error('migrate', uri=uri)
                )
            for capability in ('postcopy-ram', 'background-snapshot'):
                state = {'capability': capability, 'state': True}
                vm.qmp('migrate-set-capabilities', capabilities=[state])
                message = vm.qmp_error('migrate', uri=f'unix:{self.directory}/migration')
                self.assertIn('use a plain live migration', message)
                self.assertIn(str(self.image), message)
                vm.qmp('migrate-set-capabilities', capabilities=[state | {'state': False}])
            vm.qmp('pcow-snapshot-create', id='mem0', name='mine')
            message = vm.qmp_error('migrate', uri=f'unix:{self.directory}/migration')
            self.assertIn('has 1 snapshot(s), which would stay behind', message)
            self.assertEqual(['mine'], vm.names())
            vm.quit()

    def fails(self, target: Path, expected: str, *, store: int = 100) -> None:
        """The migration fails, the destination says why, and the source goes on with all it has."""
        model = Model(3)
        with self.run_vm(self.image) as source:
            model.store(source, store)
            with self.receive(target) as destination:
                self.migrate(source)
                self.assertEqual('failed', self.wait(source)['status'])
                destination.process.wait(SECONDS)
                assert destination.process.stderr is not None
                self.assertIn(expected, destination.process.stderr.read())
            self.assertEqual('running', source.wait_status('running'))
            self.assertEqual([], source.names())
            model.store(source, 100)
            self.assert_holds(source, model)
            source.quit()
        self.assert_clean(self.image)

    def test_another_base(self) -> None:
        # the same, but not the file
        self.img('convert', '-O', 'pcow', self.base, self.there / self.base.name)
        target = self.create('there/top.pcow', None, '-b', self.base.name)
        self.fails(target, f"'{target}' stands on another base")

    def test_data_at_the_destination(self) -> None:
        target = self.prepare_there()
        self.io(target, 'write -q -P 9 0 4k')
        self.fails(target, 'holds data')

    def test_another_size(self) -> None:
        target = self.create('there/top.pcow', SIZE * 2)
        self.fails(target, f'has {2 * SIZE} bytes, that of the source {SIZE}')

    def test_full_pool_at_the_destination(self) -> None:
        pool = self.mount_pool('48M')
        self.copy_base(pool)
        target = self.create('pool/top.pcow', None, '-b', self.base.name)
        self.fails(target, 'its pool is full', store=3000)

    def test_without_the_image_at_the_source(self) -> None:
        """A stream that has nothing of the image, as one that was saved without it."""
        target = self.prepare_there()
        plain = self.here / 'plain'
        with plain.open('wb') as f:
            f.truncate(SIZE)
        arguments = test_qemu_backend.backend(plain, f',size={SIZE}')
        with vm_state.Vm(self.here, *arguments) as source, self.receive(target) as destination:
            self.migrate(source)
            self.assertEqual('failed', self.wait(source)['status'])
            self.assertNotEqual(0, destination.process.wait(SECONDS))


class InterruptedTest(MigrationTestCase):
    def send_some(self, source: vm_state.Vm, model: Model) -> None:
        """Slowly."""
        model.store(source, 2000)
        self.migrate(source, max_bandwidth=128 * images.KIB)
        while not (found := dict(source.qmp('query-migrate'))).get('ram', {}).get('transferred', 0):
            self.assertIn(found['status'], ('setup', 'active'), found)
            time.sleep(0.02)

    def begin(self, source: vm_state.Vm, model: Model) -> None:
        self.send_some(source, model)
        model.store(source, 100)
        self.assertEqual(1, len(source.names()))
        self.assertIn(
            'the VM is being migrated',
            source.qmp_error('pcow-snapshot-create', id='mem0', name='mine'),
        )
        self.assertIn('the VM is being migrated', source.hmp('savevm mine'))

    def test_cancelled(self) -> None:
        target, model = self.prepare_there(), Model(4)
        with self.run_vm(self.image) as source:
            with self.receive(target):
                self.begin(source, model)
                source.qmp('migrate_cancel')
                self.assertEqual('cancelled', self.wait(source)['status'])
            self.assertEqual([], source.names())
            self.assert_holds(source, model)
            self.assertEqual(['.arriving'], self.names(target))
            self.assertIn(
                'has not arrived: the VM is where it was',
                qemu.refused(*test_qemu_backend.backend(target)),
            )
            target.unlink()
            self.create('there/top.pcow', None, '-b', self.base.name)
            self.img('snapshot', '-c', '.arriving', target)  # as who makes it for that may do
            self.assertIn('has not arrived', qemu.refused(*test_qemu_backend.backend(target)))
            with self.receive(target) as destination:
                self.migrate(source, max_bandwidth=1 << 40)
                self.assertEqual('completed', self.wait(source)['status'])
                self.assertEqual('running', destination.wait_status('running'))
                self.assert_holds(destination, model)
                self.assertEqual([], destination.names())
                destination.quit()

    @staticmethod
    def _has_open(vm: qemu.Qemu, path: Path) -> bool:
        """Whether it has it open: what was cancelled is given up some moments later."""
        for entry in Path(f'/proc/{vm.process.pid}/fd').iterdir():
            with contextlib.suppress(OSError):
                if entry.readlink() == path:
                    return True
        return False

    def test_backend_that_no_device_uses(self) -> None:
        """It may be deleted meanwhile: it goes when the migration has ended."""
        target, spare = self.prepare_there(), self.create('here/spare.pcow', SIZE)
        spare_there = self.create('there/spare.pcow', SIZE)
        with self.run_vm(self.image) as source:
            source.qmp(
                'object-add',
                **{
                    'qom-type': 'memory-backend-file',
                    'id': 'spare',
                    'mem-path': str(spare),
                    'size': SIZE,
                    'share': True,
                },
            )
            with self.receive(
                target, '-object', f'memory-backend-file,id=spare,mem-path={spare_there},share=on'
            ):
                self.send_some(source, Model(7))
                source.qmp('object-del', id='spare')
                time.sleep(0.5)
                source.qmp('migrate_cancel')
                self.assertEqual('cancelled', self.wait(source)['status'])
            end = time.monotonic() + 10
            while self._has_open(source, spare) and time.monotonic() < end:
                time.sleep(0.05)
            self.img('snapshot', '-c', 'not locked any more', spare)
            source.quit()
        self.assert_clean(self.image, spare)

    def test_destination_is_killed(self) -> None:
        target, model = self.prepare_there(), Model(5)
        with self.run_vm(self.image) as source:
            with self.receive(target) as destination:
                self.begin(source, model)
                destination.process.kill()
                self.assertEqual('failed', self.wait(source)['status'])
            self.assertEqual([], source.names())
            self.assert_holds(source, model)
            source.quit()
        self.assert_clean(self.image)
        self.assert_undamaged(target)

    def test_source_is_killed(self) -> None:
        """The destination ends; the image keeps all that was stored, and the snapshot only until
        the next start.
        """
        target, model = self.prepare_there(), Model(6)
        with self.receive(target) as destination:
            with self.run_vm(self.image) as source:
                self.begin(source, model)
                source.process.kill()
                source.process.wait()
            self.assertNotEqual(0, destination.process.wait(SECONDS))
        self.assertEqual(['.migrating-0'], self.names(self.image))
        self.assert_undamaged(self.image, target)
        with self.run_vm(self.image) as again:
            self.assertEqual([], again.names())
            self.assert_holds(again, model)
            again.quit()
        self.assert_clean(self.image)
