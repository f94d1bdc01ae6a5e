# SPDX-License-Identifier: Apache-2.0
"""What the tests of snapshots of a whole VM share: an image, a qcow2 disk beside it, and a QEMU
without a guest that has both.
"""

from pathlib import Path

from tests.functional import images
from tests.functional import test_qemu_backend
from tests.functional import vm_state

SIZE = test_qemu_backend.SIZE


class VmSnapshotTestCase(test_qemu_backend.QemuTestCase):
    options: tuple[str, ...] = ()  # more of them for each QEMU

    def setUp(self) -> None:
        super().setUp()
        self.carrier = self.directory / 'carrier.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', self.carrier, '1M')
        vm_state.run('pcow-img', 'create', '-q', self.image, SIZE)

    def start(self, *more: str, carrier: str = '', image: Path | None = None) -> vm_state.Vm:
        return vm_state.Vm(
            self.directory,
            *test_qemu_backend.backend(image or self.image),
            *self.options,
            *vm_state.carrier_arguments(self.carrier, carrier),
            *more,
        )

    def faulty_disk(self, number: int) -> str:
        """The carrier as a block device that fails once, at that write of a QEMU."""
        rules = [
            f'[set-state]\nevent = "pwritev"\nstate = "{state}"\nnew_state = "{state + 1}"\n'
            for state in range(1, number)
        ]
        rules.append(
            f'[inject-error]\nevent = "pwritev"\nstate = "{number}"\nerrno = "5"\nonce = "on"\n'
        )
        path = self.directory / 'rules'
        path.write_text('\n'.join(rules))
        return (
            f'driver=qcow2,node-name=disk0,file.driver=blkdebug,file.config={path},'
            f'file.image.driver=file,file.image.filename={self.carrier}'
        )

    def start_faulty(self, number: int) -> vm_state.Vm:
        """The carrier fails once, at that write of this QEMU."""
        return vm_state.Vm(
            self.directory,
            *test_qemu_backend.backend(self.image),
            *self.options,
            '-blockdev',
            self.faulty_disk(number),
            '-device',
            'virtio-blk-pci,drive=disk0,id=carrier',
        )

    def write(self, vm: vm_state.Vm, text: bytes) -> None:
        """To the image and to RAM, which have to stay together."""
        vm.write(vm.address('nv0'), text)
        vm.write(vm.address('nv0') + 9 * images.MIB, text)
        vm.write(vm_state.RAM, text)

    def assert_reads(self, vm: vm_state.Vm, text: bytes) -> None:
        for address in (vm.address('nv0'), vm.address('nv0') + 9 * images.MIB, vm_state.RAM):
            self.assertEqual(text, vm.read(address, len(text)))

    def save_and_go_on(self) -> None:
        """A snapshot, and something else on image and disk since then."""
        with self.start() as vm:
            if 's' in vm.names():
                self.assertEqual('', vm.delete('s'))
            self.write(vm, b'then')
            vm.write_disk(1)
            self.assertEqual('', vm.save('s'))
            self.write(vm, b'now.')
            vm.write_disk(2)
            vm.quit()

    def assert_files_clean(self) -> None:
        vm_state.run('pcow-img', 'check', self.image)
        vm_state.run('qemu-img', 'check', '-q', self.carrier)
