# SPDX-License-Identifier: Apache-2.0
"""savevm and loadvm of a VM whose image is behind virtio-pmem: the device goes on where it was."""

from tests.functional import test_qemu_durability as durability
from tests.functional import virtio
from tests.functional import vm_snapshot_case
from tests.functional import vm_state


class VirtioPmemTest(vm_snapshot_case.VmSnapshotTestCase):
    def start(self, *more: str, **_: object) -> vm_state.Vm:
        return vm_state.Vm(
            self.directory,
            *durability.image_of(self.image),
            *durability.VIRTIO_PMEM,
            *vm_state.carrier_arguments(self.carrier),
            *more,
        )

    def flushes(self, vm: vm_state.Vm) -> int:
        (info,) = vm.qmp('query-pcow')
        return int(info['stats']['flushes'])

    def assert_flushes(self, vm: vm_state.Vm, pmem: virtio.Pmem) -> None:
        before = self.flushes(vm)
        self.assertEqual(0, pmem.flush())
        self.assertEqual(before + 1, self.flushes(vm))

    def test_flush_after_a_load(self) -> None:
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            self.write(vm, b'then')
            self.assert_flushes(vm, pmem)
            sent = pmem.sent
            self.assertEqual('', vm.save('s'))
            self.write(vm, b'now.')
            self.assert_flushes(vm, pmem)
            for by_hmp in (False, True):
                self.assertEqual('', vm.hmp('loadvm s') if by_hmp else vm.load('s'))
                pmem.loaded(vm, sent)
                self.assert_reads(vm, b'then')
                vm.qmp('cont')
                self.assert_flushes(vm, pmem)
            vm.quit()
        with self.start('-loadvm', 's') as vm:
            pmem.loaded(vm, sent)
            self.assert_reads(vm, b'then')
            self.assert_flushes(vm, pmem)
            vm.quit()
        self.assert_files_clean()

    def test_old_machine_types_have_no_state(self) -> None:
        """As QEMU without the patch could not load theirs; a property brings it there too."""
        wanted = ('-global', 'virtio-pmem.x-migrate-state=on')
        for machine, more, expected in (
            ('q35', (), True),
            ('pc-q35-9.2', (), False),
            ('pc-q35-9.2', wanted, True),
        ):
            with self.subTest(machine, more=more):
                self.image.unlink()
                vm_state.run('pcow-img', 'create', '-q', self.image, vm_snapshot_case.SIZE)
                vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', self.carrier, '1M')
                with self.start('-machine', machine, *more) as vm:
                    self.assertEqual('', vm.save('s'))
                    vm.quit()
                self.assertEqual(expected, b'/virtio-pmem' in self.carrier.read_bytes())
