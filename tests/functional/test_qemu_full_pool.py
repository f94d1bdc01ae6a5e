# SPDX-License-Identifier: Apache-2.0
"""Stores of QEMU itself that find the pool full: they fail, for the thread that would wait holds
the lock that everybody needs.
"""

import contextlib
import socket
import struct

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional.qtest_devices import virtio_net

DSM_PORT = 0x0A18  # docs/specs/acpi_nvdimm.rst of QEMU
DSM_PAGE = 0x100000  # in RAM
HANDLE = 1  # of the first NVDIMM
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
            with (
                self.subTest(policy),
                qemu.Qemu(
                    self.directory,
                    *backend.backend(self.image, f',pcow-full={policy}')[:2],
                    '-device',
                    'nvdimm,memdev=mem0,id=nv0,label-size=128K',
                ) as vm,
            ):
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


class PointerTest(backend.PoolTest):
    """The queue of a device is on the image: its store is lost with pcow-full=fail, and nothing
    else is.
    """

    SLOT = 6

    def test_what_is_beside_the_store(self) -> None:
        disk = self.directory / 'disk.raw'
        disk.write_bytes(bytes(images.MIB))
        # without ioeventfd the device stores before the next command is looked at
        device = (
            '-blockdev',
            f'file,node-name=disk,filename={disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={self.SLOT},ioeventfd=off',
        )
        with qemu.Qemu(
            self.directory, *backend.backend(self.image, ',pcow-full=fail'), *device
        ) as vm:
            area = vm.address('nv0') + backend.SIZE // 2
            block = virtio.Block(vm, self.SLOT, area)
            beside = area + 0x1800  # on the page of the ring that the device stores to
            vm.write(beside, b'whole')
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            for offset in range(0, backend.SIZE // 2, 4096):
                vm.write(vm.address('nv0') + offset, b'x')
            self.assertEqual(
                b'whole'.hex(), vm.ask_together(block.notification, f'read {beside:#x} 5')[1][2:]
            )
            self.assertEqual('fail', vm.wait_event('PCOW_POOL_FULL')['policy'])
            self.assertEqual('io-error', vm.wait_status('io-error'))
            self.assertEqual(b'whole', vm.read(beside, 5))
            self.grow()
            vm.write(beside, b'again')
            vm.qmp('cont')
            self.assertEqual(b'again', vm.read(beside, 5))
            vm.quit()
        self.assertEqual(0, vm.process.returncode)
        backend.tool('pcow-img', 'check', self.image)


class RomTest(backend.PoolTest):
    """RAM is an image, and a reset writes ROMs to it."""

    SIZE = 128 * images.MIB  # of the RAM of qemu.Qemu
    PLACE = 64 * images.MIB

    def test_reset(self) -> None:
        image, rom = self.pool / 'ram.pcow', self.directory / 'rom'
        rom.write_bytes(b'firmware' * 512)
        backend.tool('pcow-img', 'create', '-q', image, self.SIZE)
        with qemu.Qemu(
            self.directory,
            '-object',
            f'memory-backend-file,id=mem0,mem-path={image},share=on,size={self.SIZE}',
            '-machine',
            'memory-backend=mem0',
            '-device',
            f'loader,file={rom},addr={self.PLACE:#x},force-raw=on',
        ) as vm:
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


class Console(virtio.Device):
    """virtio-serial with one port, to which it sends."""

    queue = 1


class HolesTest(backend.PoolTest):
    """Zeros that were written have no blocks. On tmpfs a load from them would take some."""

    SLOT = 5
    ZEROS = 256 << 10  # offset, and length

    def test_loads_do_not_need_space(self) -> None:
        backend.tool('pcow-io', '-c', f'write -q -P 7 0 {images.MIB}', self.image)
        backend.tool('pcow-io', '-c', f'write -q -z {self.ZEROS} {self.ZEROS}', self.image)
        disk = self.directory / 'disk'
        disk.write_bytes(b'\xff' * self.ZEROS)
        device = (
            '-blockdev',
            f'file,node-name=disk,filename={disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={self.SLOT}',
        )
        for policy in ('wait', 'fail'):
            with (
                self.subTest(policy),
                qemu.Qemu(
                    self.directory, *backend.backend(self.image, f',pcow-full={policy}'), *device
                ) as vm,
            ):
                zeros = vm.address('nv0') + self.ZEROS
                block = virtio.Block(vm, self.SLOT)
                self.fill()
                # the device first: what QEMU itself has loaded helps it
                buffers = [(zeros + (64 << 10), 64 << 10), (zeros - 4096, 8192)]
                self.assertEqual(0, block.transfer(virtio.BLOCK_OUT, 0, buffers))
                self.assertEqual(
                    bytes(64 << 10) + b'\7' * 4096 + bytes(4096), disk.read_bytes()[: (72 << 10)]
                )
                self.assertEqual(bytes(self.ZEROS), vm.read(zeros, self.ZEROS))
                self.assertIsNone(vm.take_event('PCOW_ERROR'))
                self.grow()
                vm.write(zeros, b'more')
                self.assertEqual(b'more', vm.read(zeros, 4))
                vm.write(zeros, bytes(4))
                vm.quit()
            (self.pool / 'filler').unlink()
            self.shrink()
        backend.tool('pcow-img', 'check', self.image)

    def test_loads_of_system_calls(self) -> None:
        """Of other devices than disks, which do not make them again: QEMU says nothing, and what
        was sent is lost.
        """
        backend.tool('pcow-io', '-c', f'write -q -P 7 0 {images.MIB}', self.image)
        backend.tool('pcow-io', '-c', f'write -q -z {self.ZEROS} {self.ZEROS}', self.image)
        address = str(self.directory / 'net')
        out = self.directory / 'console'
        devices = (
            '-netdev',
            f'dgram,id=net,local.type=unix,local.path={address}-vm,'
            f'remote.type=unix,remote.path={address}',
            '-device',
            f'virtio-net-pci,netdev=net,addr={self.SLOT}',
            '-chardev',
            f'file,id=out,path={out}',
            '-device',
            f'virtio-serial-pci,addr={self.SLOT + 1}',
            '-device',
            'virtconsole,chardev=out',
        )
        length = 3 * images.MIB  # more than is prepared at once
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as peer:
            peer.bind(address)
            peer.settimeout(10)
            for engine in ('signal', 'minor'):
                with (
                    self.subTest(engine),
                    qemu.Qemu(
                        self.directory,
                        *backend.backend(self.image, f',pcow-engine={engine}'),
                        *devices,
                    ) as vm,
                ):
                    vm.qmp('migrate-set-parameters', announce_rounds=0)
                    net = virtio_net.Net(vm, self.SLOT)
                    console = Console(vm, self.SLOT + 1)
                    self.fill()
                    zeros = vm.address('nv0') + self.ZEROS
                    net.send([(zeros + (64 << 10), 1000)])
                    self.assertEqual(bytes(1000), peer.recv(65536)[-1000:])
                    console.request([(vm.address('nv0'), length)], [])
                    expected = b'\7' * self.ZEROS + bytes(self.ZEROS) + b'\7' * 2 * self.ZEROS
                    self.assertEqual(expected + bytes(length - images.MIB), out.read_bytes())
                    self.assertIsNone(vm.take_event('PCOW_ERROR'))
                    vm.quit()
                (self.pool / 'filler').unlink()
        backend.tool('pcow-img', 'check', self.image)

    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.pool / 'filler').open('wb', buffering=0) as file:
            while file.write(bytes(4096)):
                pass
