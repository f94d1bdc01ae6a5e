# SPDX-License-Identifier: Apache-2.0
"""Input and output by the host kernel, straight into and out of an image: virtio-blk whose buffers
lie on the NVDIMM.
"""

import itertools
from pathlib import Path

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional import vm_state

DISK_SIZE = 8 * images.MIB
BASE_BYTE = 0x5A
SLOT = 6
AIO = ('threads', 'native', 'io_uring')
BALLOON_PAGE = 4096


def disk_bytes(offset: int, length: int) -> bytes:
    """What the disk holds: every 8 bytes tell their offset."""
    first = offset // 8 * 8
    data = b''.join((at + 1).to_bytes(8, 'big') for at in range(first, offset + length, 8))
    return data[offset - first : offset - first + length]


class KernelAccessTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.overlay()
        self.disk = self.directory / 'disk.raw'
        self.disk.write_bytes(disk_bytes(0, DISK_SIZE))

    def device(self, aio: str, iothread: bool) -> tuple[str, ...]:
        thread = ('-object', 'iothread,id=io0') if iothread else ()
        direct = 'on' if aio == 'native' else 'off'
        return (
            *thread,
            '-blockdev',
            f'file,node-name=disk,filename={self.disk},aio={aio},cache.direct={direct}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={SLOT}' + (',iothread=io0' if iothread else ''),
        )

    def input_everywhere(self, vm: qemu.Qemu, block: virtio.Block) -> None:
        address = vm.address('nv0')
        expected = {
            # offset: length; on the base, on a frozen page, on an own one, over their borders, in
            # pieces of pages, over slabs
            3 * images.MIB: 4096,
            3 * images.MIB + 8704: 512,
            5 * images.MIB - 1024: 70 * images.KIB,
            16 * images.MIB: 4096,
            16 * images.MIB + 4096 + 512: 8192,
            20 * images.MIB + 512: 4 * images.MIB,
        }
        vm.write(address + 16 * images.MIB, b'\x11' * 16384)
        vm.qmp(
            'pcow-snapshot-create',
            id='mem0',
            name=f'frozen{len(vm.qmp("query-pcow")[0]["snapshots"])}',
        )
        vm.write(address + 16 * images.MIB + 8192, b'\x22' * 64)
        for sector, (offset, length) in enumerate(expected.items()):
            with self.subTest(offset=offset, length=length):
                before = (
                    vm.read(address + offset - 512, 512),
                    vm.read(address + offset + length, 512),
                )
                half = length // 1024 * 512 or length
                buffers = [
                    (address + offset, half),
                    *([(address + offset + half, length - half)] if length > half else ()),
                ]
                self.assertEqual(0, block.transfer(virtio.BLOCK_IN, sector, buffers))
                self.assertEqual(
                    disk_bytes(sector * 512, length), vm.read(address + offset, length)
                )
                self.assertEqual(
                    before,
                    (vm.read(address + offset - 512, 512), vm.read(address + offset + length, 512)),
                )

    def output_everywhere(self, vm: qemu.Qemu, block: virtio.Block) -> None:
        address = vm.address('nv0')
        for sector, offset in (
            (4096, 40 * images.MIB),
            (4097, 16 * images.MIB),
            (8192, 3 * images.MIB),
        ):
            expected = vm.read(address + offset, 8192)
            self.assertEqual(
                0, block.transfer(virtio.BLOCK_OUT, sector, [(address + offset, 8192)])
            )
            with self.disk.open('rb') as file:
                file.seek(sector * 512)
                self.assertEqual(expected, file.read(8192))
        self.disk.write_bytes(disk_bytes(0, DISK_SIZE))

    def test_every_kind_of_asynchronous_io(self) -> None:
        before = images.digest(self.directory / 'base.pcow')
        cases = (
            *itertools.product(('minor',), AIO, (False, True)),
            *itertools.product(('signal',), AIO, (True,)),
        )
        for engine, aio, iothread in cases:
            with self.subTest(engine=engine, aio=aio, iothread=iothread):
                arguments = (
                    *backend.backend(self.image, f',pcow-engine={engine}'),
                    *self.device(aio, iothread),
                )
                with qemu.Qemu(self.directory, *arguments) as vm:
                    block = virtio.Block(vm, SLOT)
                    self.input_everywhere(vm, block)
                    self.output_everywhere(vm, block)
                    self.assertIsNone(vm.take_event('PCOW_ERROR'))
                    vm.quit()
                backend.tool('pcow-img', 'check', self.image)
            self.image.unlink()
            backend.tool('pcow-img', 'create', '-q', '-b', self.directory / 'base.pcow', self.image)
        self.assertEqual(before, images.digest(self.directory / 'base.pcow'))

    def test_iothread_that_reads_a_register_while_the_guest_is_held(self) -> None:
        """It needs the lock that the commands hold as well."""
        with qemu.Qemu(
            self.directory, *backend.backend(self.image), *self.device('threads', True)
        ) as vm:
            block = virtio.Block(vm, SLOT)
            for _ in range(200):
                block.post_output(0, [(block.registers, 2048)])
                block.notify()
                vm.qmp('pcow-snapshot-create', id='mem0', name='one')
                vm.qmp('pcow-snapshot-delete', id='mem0', name='one')
                block.wait()
            vm.quit()

    def test_absent_memory(self) -> None:
        image = self.directory / 'fresh.pcow'
        backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)
        for engine, aio in itertools.product(('signal', 'minor'), AIO):
            with self.subTest(engine=engine, aio=aio):
                with qemu.Qemu(
                    self.directory,
                    *backend.backend(image, f',pcow-engine={engine}'),
                    *self.device(aio, True),
                ) as vm:
                    block = virtio.Block(vm, SLOT)
                    address = vm.address('nv0')
                    for cluster in range(40):  # of a guest that does not fill what it begins
                        vm.write(address + 40 * images.MIB + cluster * 3 * 65536, b'sparse')
                    for cluster in (3, 9, 15):
                        vm.write(address + 30 * images.MIB + cluster * 65536, b'own')
                    self.assertEqual(
                        0, block.transfer(virtio.BLOCK_OUT, 9, [(address + 30 * images.MIB, 4096)])
                    )
                    with Path(self.disk).open('rb') as file:
                        file.seek(9 * 512)
                        self.assertEqual(bytes(4096), file.read(4096))
                    self.disk.write_bytes(disk_bytes(0, DISK_SIZE))
                    offset = 10 * images.MIB + 1536
                    self.assertEqual(
                        0, block.transfer(virtio.BLOCK_IN, 3, [(address + offset, 3 * images.MIB)])
                    )
                    self.assertEqual(
                        disk_bytes(3 * 512, 3 * images.MIB),
                        vm.read(address + offset, 3 * images.MIB),
                    )
                    self.assertEqual(bytes(512), vm.read(address + offset - 512, 512))
                    vm.quit()
                image.unlink()
                backend.tool('pcow-img', 'create', '-q', image, backend.SIZE)


class StreamTest(backend.QemuTestCase):
    def test_request_without_a_buffer(self) -> None:
        """block-stream, which is ``virsh blockpull``, has the block layer read what nobody wants to
        see.
        """
        self.overlay()
        base, top, copied = (
            self.directory / name for name in ('base.raw', 'top.qcow2', 'copied.raw')
        )
        base.write_bytes(disk_bytes(0, DISK_SIZE))
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'raw', '-b', base, top)
        with vm_state.Vm(
            self.directory, *backend.backend(self.image), *vm_state.carrier_arguments(top)
        ) as vm:
            vm.write_disk(0x33)
            vm.qmp('block-stream', job_id='pull', device='disk0')
            self.assertNotIn('error', vm.wait_event('BLOCK_JOB_COMPLETED'))
            vm.write(vm.address('nv0'), b'on')
            self.assertEqual(b'on', vm.read(vm.address('nv0'), 2))
            vm.quit()
        base.unlink()  # nothing is read from it any more
        vm_state.run('qemu-img', 'convert', '-f', 'qcow2', '-O', 'raw', top, copied)
        self.assertEqual(
            b'\x33' * 65536 + disk_bytes(65536, DISK_SIZE - 65536), copied.read_bytes()
        )


class DiscardTest(backend.QemuTestCase):
    def test_pages_that_a_balloon_takes(self) -> None:
        """They stay, and a guest cannot fill the host's log with that."""
        size, place, pages = 128 * images.MIB, 64 * images.MIB, 100
        backend.tool('pcow-img', 'create', '-q', self.image, size)
        with qemu.Qemu(
            self.directory,
            '-object',
            f'memory-backend-file,id=mem0,mem-path={self.image},share=on,size={size}',
            '-machine',
            'memory-backend=mem0',
            '-device',
            f'virtio-balloon-pci,addr={SLOT}',
        ) as vm:
            vm.write(place, b'stays')
            vm.qmp('pcow-snapshot-create', id='mem0', name='frozen')
            inflate = virtio.Device(vm, SLOT)
            numbers = range(place // BALLOON_PAGE, place // BALLOON_PAGE + pages)
            vm.write(inflate.scratch, b''.join(number.to_bytes(4, 'little') for number in numbers))
            inflate.request([(inflate.scratch, 4 * pages)], [])
            self.assertEqual(b'stays', vm.read(place, 5))
            vm.quit()
            assert vm.process.stderr is not None
            said = vm.process.stderr.read()
        self.assertEqual(1, said.count('pcow image'), said)
        self.assertIn("'mem0'", said)
        backend.tool('pcow-img', 'check', self.image)
