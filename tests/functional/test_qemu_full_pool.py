# SPDX-License-Identifier: Apache-2.0
"""Stores of QEMU itself that find the pool full: they fail, for the thread that would wait holds the lock that everybody needs."""

import struct

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend

DSM_PORT = 0x0a18                  # docs/specs/acpi_nvdimm.rst of QEMU
DSM_PAGE = 0x100000                # in RAM
HANDLE = 1                         # of the first NVDIMM
GET_DATA, SET_DATA = 5, 6
SUCCESS, INPUT_OUTPUT_ERROR = 0, 4


class LabelTest(backend.PoolTest):
    LABEL = b'namespace label ' * 16

    def call(self, vm: qemu.Qemu, function: int, argument: bytes) -> tuple[int, bytes]:
        """A method of the device, as the guest's ACPI calls it: status and what it returns."""
        vm.write(DSM_PAGE, struct.pack('<III', HANDLE, 1, function) + argument)
        vm.ask(f'outl {DSM_PORT:#x} {DSM_PAGE:#x}')
        length, status = struct.unpack('<II', vm.read(DSM_PAGE, 8))
        return status, vm.read(DSM_PAGE + 8, length - 8) if length > 8 else b''

    def set_label(self, vm: qemu.Qemu) -> int:
        return self.call(vm, SET_DATA, struct.pack('<II', 0, len(self.LABEL)) + self.LABEL)[0]

    def get_label(self, vm: qemu.Qemu) -> tuple[int, bytes]:
        return self.call(vm, GET_DATA, struct.pack('<II', 0, len(self.LABEL)))

    def fill(self, vm: qemu.Qemu) -> None:
        for offset in range(0, backend.SIZE // 2, 4096):
            vm.write(vm.address('nv0') + offset, b'x')
        self.assertIn('No space left', vm.wait_event('PCOW_ERROR')['error'])

    def test_label_of_a_namespace(self) -> None:
        for policy in ('wait', 'fail'):
            with self.subTest(policy), qemu.Qemu(self.directory, *backend.backend(self.image, f',pcow-full={policy}')[:2],
                                                 '-device', 'nvdimm,memdev=mem0,id=nv0,label-size=128K') as vm:
                self.fill(vm)
                self.assertEqual(INPUT_OUTPUT_ERROR, self.set_label(vm))
                self.assertEqual('running', vm.wait_status('running'))
                self.assertEqual((SUCCESS, bytes(len(self.LABEL))), self.get_label(vm))
                self.grow()
                self.assertEqual(SUCCESS, self.set_label(vm))
                self.assertEqual((SUCCESS, self.LABEL), self.get_label(vm))
                vm.quit()
            backend.tool('pcow-img', 'check', self.image)
            self.image.unlink()
            self.shrink()
            backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)


class RomTest(backend.PoolTest):
    """RAM is an image, and a reset writes ROMs to it."""

    SIZE = 128 * images.MIB        # of the RAM of qemu.Qemu
    PLACE = 64 * images.MIB

    def test_reset(self) -> None:
        image, rom = self.pool / 'ram.pcow', self.directory / 'rom'
        rom.write_bytes(b'firmware' * 512)
        backend.tool('pcow-img', 'create', '-q', image, self.SIZE)
        with qemu.Qemu(self.directory, '-object', f'memory-backend-file,id=mem0,mem-path={image},share=on,size={self.SIZE}',
                       '-machine', 'memory-backend=mem0',
                       '-device', f'loader,file={rom},addr={self.PLACE:#x},force-raw=on') as vm:
            self.assertEqual(b'firmware', vm.read(self.PLACE, 8))
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            for offset in range(0, self.PLACE, 4096):
                vm.write(offset, b'x')
            self.assertIn('No space left', vm.wait_event('PCOW_ERROR')['error'])
            vm.qmp('system_reset')
            vm.wait_event('RESET')
            self.assertEqual('running', vm.wait_status('running'))
            self.assertEqual(b'firmware', vm.read(self.PLACE, 8))
            vm.quit()
        backend.tool('pcow-img', 'check', image)
