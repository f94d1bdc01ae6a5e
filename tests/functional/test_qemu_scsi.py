# SPDX-License-Identifier: Apache-2.0
"""A SCSI disk that a VM gets whole (scsi-block, libvirt's device='lun'): the kernel accesses its
buffers by SG_IO.
"""

from collections.abc import Iterator
import contextlib
import itertools
import os
from pathlib import Path
import subprocess
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_errors as errors
from tests.functional import test_qemu_kernel_access as access
from tests.functional import virtio

DISK_SIZE = 16 * images.MIB  # sg_disk.c
SLOT = 6


class ScsiBlockTest(backend.QemuTestCase):
    """With a loop device to which sg_disk.c adds SG_IO; whoever has scsi_debug can give its disk to
    this.
    """

    def setUp(self) -> None:
        super().setUp()
        self.overlay()
        disk = self.directory / 'disk.raw'
        disk.write_bytes(access.disk_bytes(0, DISK_SIZE))
        self.device = Path(
            subprocess.run(
                ['losetup', '--show', '-f', disk], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        self.addCleanup(subprocess.run, ['losetup', '-d', str(self.device)], check=True)
        self.environment = qemu.preload(self.directory, 'sg_disk.c', 'slow_disk.c')

    @contextlib.contextmanager
    def start(
        self, more: str = '', *arguments: str, iothread: bool = False
    ) -> Iterator[tuple[qemu.Qemu, virtio.Scsi]]:
        disk = (
            *(('-object', 'iothread,id=io0') if iothread else ()),
            '-blockdev',
            f'host_device,node-name=disk,filename={self.device}',
            '-device',
            f'virtio-scsi-pci,addr={SLOT}' + (',iothread=io0' if iothread else ''),
            '-device',
            'scsi-block,drive=disk',
        )
        vm = qemu.Qemu(self.directory, *backend.backend(self.image, more), *disk, *arguments)
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, self.environment):
                stack.enter_context(vm)
            scsi = virtio.Scsi(vm, SLOT)
            scsi.transfer(virtio.BLOCK_IN, 0, [(scsi.scratch + 0x1000, 512)])  # "reset occurred"
            yield vm, scsi
            vm.quit()
        self.assertEqual(0, vm.process.returncode)
        backend.tool('pcow-img', 'check', self.image)

    def test_input_and_output(self) -> None:
        """In the main loop, and in an iothread, where the memory was not prepared (Q4)."""
        for engine, iothread in itertools.product(('minor', 'signal'), (False, True)):
            start = self.start(f',pcow-engine={engine}', iothread=iothread)
            with self.subTest(engine, iothread=iothread), start as (vm, scsi):
                address = vm.address('nv0')
                vm.write(address + 16 * images.MIB, b'\x11' * 16384)
                vm.qmp('pcow-snapshot-create', id='mem0', name=f'{engine}{iothread}')
                for sector, offset in (
                    (3, 5 * images.MIB),
                    (9, 16 * images.MIB),
                    (99, 20 * images.MIB - 4096),
                ):
                    buffers = [(address + offset, 512), (address + offset + 512, 12288)]
                    self.assertEqual(0, scsi.transfer(virtio.BLOCK_IN, sector, buffers))
                    self.assertEqual(
                        access.disk_bytes(sector * 512, 12800), vm.read(address + offset, 12800)
                    )
                for sector, offset in ((8192, 40 * images.MIB), (8200, 16 * images.MIB)):
                    self.assertEqual(
                        0, scsi.transfer(virtio.BLOCK_OUT, sector, [(address + offset, 4096)])
                    )
                    with self.device.open('rb') as file:
                        file.seek(sector * 512)
                        self.assertEqual(vm.read(address + offset, 4096), file.read(4096))
                self.assertIsNone(vm.take_event('PCOW_ERROR'))

    def test_snapshot_before_it_begins(self) -> None:
        """The command waits for a snapshot, which undoes what was prepared when its buffer was
        mapped (Q4).
        """
        slow_file = self.directory / 'disk.slow'
        slow_file.write_bytes(bytes(images.MIB))
        slow_disk = (
            '-blockdev',
            f'file,node-name=slow,filename={slow_file}',
            '-device',
            f'virtio-blk-pci,drive=slow,addr={SLOT + 1}',
        )
        for engine, iothread in itertools.product(('minor', 'signal'), (False, True)):
            start = self.start(f',pcow-engine={engine}', *slow_disk, iothread=iothread)
            with self.subTest(engine, iothread=iothread), start as (vm, scsi):
                slow = virtio.Block(vm, SLOT + 1)
                buffer = vm.address('nv0') + 16 * images.MIB
                for kind in (virtio.BLOCK_IN, virtio.BLOCK_OUT):
                    vm.write(buffer, b'\x11' * 4096)
                    slow.post_input(0, [(vm.address('nv0'), 4096)])
                    slow.notify()
                    time.sleep(0.05)
                    name = f'{engine}{iothread}{kind}'
                    waits = {'id': 'mem0', 'name': name, 'max-wait': 20000}
                    vm.begin_qmp('pcow-snapshot-create', **waits)
                    time.sleep(0.05)
                    scsi.post_transfer(kind, 8192, [(buffer, 4096)])
                    scsi.notify()
                    time.sleep(0.05)
                    self.assertFalse(scsi.served())
                    self.assertIn('return', vm.end_qmp('pcow-snapshot-create'))
                    scsi.wait()
                    self.assertEqual(0, scsi.status())
                    slow.wait()
                    with self.device.open('rb') as file:
                        file.seek(8192 * 512)
                        self.assertEqual(vm.read(buffer, 4096), file.read(4096))
                    raw = self.directory / 'raw'
                    convert = ('pcow-img', 'convert', '-U', '-O', 'raw', '-l', name)
                    backend.tool(*convert, self.image, raw)
                    with raw.open('rb') as file:
                        file.seek(16 * images.MIB)
                        self.assertEqual(b'\x11' * 4096, file.read(4096))

    def test_buffer_that_cannot_be_prepared(self) -> None:
        with self.start() as (vm, scsi):
            last = vm.address('nv0') + backend.SIZE - errors.PAGE
            errors.cut(self.directory / 'base.pcow')
            for kind in (virtio.BLOCK_IN, virtio.BLOCK_OUT):
                self.assertNotEqual(0, scsi.transfer(kind, 0, [(last, errors.PAGE)]))
            vm.wait_event('PCOW_ERROR')
            self.assertEqual('running', vm.wait_status('running'))
