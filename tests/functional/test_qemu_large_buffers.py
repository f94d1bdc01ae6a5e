# SPDX-License-Identifier: Apache-2.0
"""A guest decides how large the buffers of its requests are: QEMU's main loop does not stand for
that, and nothing is taken from the pool that nobody stores to.
"""

import time

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional.test_qemu_kernel_access import disk_bytes

SIZE = 512 * images.MIB
LENGTH = 256 * images.MIB
SLOT = 6
GET_ID = 8  # virtio 1.2, 5.2.6: 20 bytes
FAILED = 1
PLACES = (0, 65536 - 512, 65536, 3 * images.MIB - 8, LENGTH // 2 + 4000, LENGTH - 4096)


class LargeBufferTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disk = self.directory / 'disk'
        with self.disk.open('wb') as file:
            file.truncate(LENGTH)
            for place in PLACES:
                file.seek(place)
                file.write(disk_bytes(place, 4096))

    def arguments(self, engine: str, more: str = 'ioeventfd=off') -> tuple[str, ...]:
        self.image.unlink(missing_ok=True)
        backend.tool('pcow-img', 'create', '-q', self.image, SIZE)
        return (
            *backend.backend(self.image, f',pcow-engine={engine}'),
            '-object',
            'iothread,id=io0',
            '-blockdev',
            f'file,node-name=disk,filename={self.disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,serial=abc,addr={SLOT},{more}',
        )

    def held(self, vm: qemu.Qemu) -> int:
        """Bytes that the image holds."""
        (info,) = vm.qmp('query-pcow')
        return int(info['data-size'])

    def check(self, vm: qemu.Qemu, address: int) -> None:
        for place in PLACES:
            self.assertEqual(disk_bytes(place, 512), vm.read(address + place, 512), place)
        self.assertEqual(bytes(512), vm.read(address + LENGTH - images.MIB, 512))

    def test_what_nobody_stores_to(self) -> None:
        for engine in ('signal', 'minor'):
            with self.subTest(engine), qemu.Qemu(self.directory, *self.arguments(engine)) as vm:
                block = virtio.Block(vm, SLOT)
                buffers = [(vm.address('nv0'), SIZE - images.SLAB)]
                self.assertEqual(0, block.transfer(GET_ID, 0, buffers))  # an input
                self.assertEqual(FAILED, block.transfer(virtio.BLOCK_IN, 0, buffers))  # too long
                self.assertGreater(8 * images.MIB, self.held(vm))
                vm.quit()
            backend.tool('pcow-img', 'check', self.image)

    def test_input_that_takes_long(self) -> None:
        """Its buffer is prepared by a worker."""
        for engine in ('signal', 'minor'):
            with self.subTest(engine), qemu.Qemu(self.directory, *self.arguments(engine)) as vm:
                block, address = virtio.Block(vm, SLOT), vm.address('nv0')
                block.post_input(0, [(address, LENGTH)])
                begin = time.monotonic()
                block.notify()
                returned = time.monotonic() - begin
                block.wait()
                self.assertGreater((time.monotonic() - begin) / 2, returned)
                self.assertEqual(0, block.status())
                self.check(vm, address)
                vm.quit()
            backend.tool('pcow-img', 'check', self.image)

    def test_snapshot_meanwhile(self) -> None:
        for more in ('ioeventfd=off', 'iothread=io0'):
            with self.subTest(more), qemu.Qemu(self.directory, *self.arguments('auto', more)) as vm:
                block, address = virtio.Block(vm, SLOT), vm.address('nv0')
                block.post_input(0, [(address, LENGTH)])
                block.notify()
                vm.begin_qmp(
                    'pcow-snapshot-create', **{'id': 'mem0', 'name': 's', 'max-wait': 60000}
                )
                block.wait()
                self.assertNotIn('error', vm.end_qmp('pcow-snapshot-create'))
                self.assertEqual(0, block.status())
                self.check(vm, address)
                # once more, to what is frozen
                self.assertEqual(0, block.transfer(virtio.BLOCK_IN, 0, [(address, LENGTH)]))
                self.check(vm, address)
                vm.quit()
            backend.tool('pcow-img', 'check', self.image)


class FullPoolTest(backend.PoolTest):
    def test_input_that_does_not_fit(self) -> None:
        disk = self.directory / 'disk'
        with disk.open('wb') as file:
            file.truncate(backend.SIZE)
        with qemu.Qemu(
            self.directory,
            *backend.backend(self.image),
            '-blockdev',
            f'file,node-name=disk,filename={disk}',
            '-device',
            f'virtio-blk-pci,drive=disk,addr={SLOT}',
        ) as vm:
            block = virtio.Block(vm, SLOT)
            buffers = [(vm.address('nv0'), backend.SIZE)]
            self.assertEqual(FAILED, block.transfer(virtio.BLOCK_IN, 0, buffers))
            self.assertIn('No space left', vm.wait_event('PCOW_ERROR')['error'])
            self.grow()
            self.assertEqual(0, block.transfer(virtio.BLOCK_IN, 0, buffers))
            vm.quit()
        backend.tool('pcow-img', 'check', self.image)
