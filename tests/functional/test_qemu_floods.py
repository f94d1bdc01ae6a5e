# SPDX-License-Identifier: Apache-2.0
"""Accesses that fail by the thousand: a guest can make them, if its neighbour fills the pool."""

import contextlib
import itertools
import re
from typing import Any

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio
from tests.functional.qtest_devices import virtio_gpu
from tests.functional.test_qemu_errors import cut

PAGE = 4096
SLOT = 6
HALF = backend.SIZE // 2
BGRX = 2  # VIRTIO_GPU_FORMAT_B8G8R8X8_UNORM
LOST = 100  # pages; QEMU covers 64 at once (backends/pcow/cover.c)
EVENT_SECOND = 'clock_step 1000000001'  # of the monitor, whose clock the test moves
RNG = (
    '-object',
    'rng-builtin,id=random',
    '-device',
    f'virtio-rng-pci,rng=random,addr={SLOT},ioeventfd=off',
)


def stderr_of(vm: qemu.Qemu) -> str:
    assert vm.process.stderr is not None
    return vm.process.stderr.read()


class FloodTest(backend.PoolTest):
    def fill_pool(self, vm: qemu.Qemu, *devices: str) -> None:
        """By a neighbour, and what the image has prepared by the guest, in the lower half."""
        with (self.pool / 'neighbour').open('wb', 0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        for device in devices:
            for at in range(0, HALF, 4 * PAGE):
                vm.write(vm.address(device) + at, b'x')

    def empty_pool(self) -> None:
        (self.pool / 'neighbour').unlink()
        self.grow()

    def events(self, vm: qemu.Qemu, name: str) -> list[dict[str, Any]]:
        """Those that come now, and what the monitor has kept back."""
        vm.ask(EVENT_SECOND)
        vm.qmp('query-status')
        found = []
        while (event := vm.take_event(name)) is not None:
            found.append(event)
        return found

    def test_buffers_of_a_device(self) -> None:
        """A request of 700 pages that cannot be had is lost, and the VM is stopped."""
        for engine in ('minor', 'signal'):
            memory = backend.backend(self.image, f',pcow-full=fail,pcow-engine={engine}')
            with qemu.Qemu(self.directory, *memory, *RNG) as vm:
                address = vm.address('nv0')
                random = virtio.Random(vm, SLOT)
                beside = range(HALF, backend.SIZE, images.SLAB)
                for at in beside:
                    vm.write(address + at + PAGE, at.to_bytes(8, 'little'))
                self.fill_pool(vm, 'nv0')
                for step in (8 * PAGE, PAGE):
                    with self.subTest(engine=engine, step=step):
                        pages = (
                            at
                            for at in range(HALF, backend.SIZE, step)
                            if at % images.SLAB >= images.SLAB // 4
                        )
                        buffers = [(address + at, 16) for at in itertools.islice(pages, 700)]
                        random.fill(buffers)
                        self.assertEqual('io-error', vm.wait_status('io-error'))
                        vm.qmp('cont')
                        self.assertEqual({bytes(16)}, {vm.read(*buffer) for buffer in buffers})
                events = self.events(vm, 'PCOW_POOL_FULL')
                last = events[-1]
                self.assertEqual(
                    ('mem0', 'fail', 1400), (last['id'], last['policy'], last['count'])
                )
                self.assertEqual(2, len(events))
                self.empty_pool()
                random.fill(buffers)
                self.assertNotIn(bytes(16), [vm.read(*buffer) for buffer in buffers])
                self.assertEqual('running', vm.wait_status('running'))
                for at in beside:
                    self.assertEqual(at.to_bytes(8, 'little'), vm.read(address + at + PAGE, 8))
                vm.quit()
            self.assertEqual(0, vm.process.returncode)
            backend.tool('pcow-img', 'check', self.image)
            self.image.unlink()
            self.shrink()
            backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    def test_picture_from_memory_that_is_lost(self) -> None:
        """A card that has mapped it before loads it by a pointer, from more pages than can be
        covered: it gets zeros, and the VM is stopped.
        """
        self.image = self.directory / 'overlay.pcow'
        self.overlay()
        card = ('-device', f'virtio-gpu-pci,addr={SLOT:#x}')
        with qemu.Qemu(self.directory, *backend.backend(self.image), *card) as vm:
            gpu = virtio_gpu.Gpu(vm, SLOT)
            size = (PAGE // 4, LOST)  # a line lies in a page
            gpu.create(1, BGRX, *size)
            end = vm.address('nv0') + backend.SIZE
            gpu.attach(1, [(end - number * PAGE, PAGE) for number in range(1, LOST + 1)])
            gpu.show(1, *size)
            gpu.transfer(1, (0, 0, *size), 0)
            gpu.flush(1, (0, 0, *size))
            self.assertEqual({0x5A}, self.screen(vm))
            cut(self.directory / 'base.pcow', LOST)
            gpu.transfer(1, (0, 0, *size), 0)
            self.assertEqual('io-error', vm.wait_status('io-error'))
            events = self.events(vm, 'PCOW_ERROR')
            self.assertEqual(LOST, events[-1]['count'], events)
            vm.qmp('cont')
            gpu.flush(1, (0, 0, *size))
            self.assertEqual({0}, self.screen(vm))
            self.assertEqual('running', vm.wait_status('running'))
            self.assertEqual(b'\x5a' * 8, vm.read(vm.address('nv0') + HALF, 8))
            vm.quit()
        self.assertEqual(0, vm.process.returncode)

    def screen(self, vm: qemu.Qemu) -> set[int]:
        """Which bytes a picture of it has."""
        path = self.directory / 'screen.ppm'
        vm.qmp('screendump', filename=str(path))
        return set(path.read_bytes().split(b'\n', 3)[3])

    def test_events_of_stores_that_fail(self) -> None:
        other = self.pool / 'other.pcow'
        backend.tool('pcow-img', 'create', '-q', other, backend.SIZE)
        second = (
            '-object',
            f'memory-backend-file,id=mem1,mem-path={other},share=on',
            '-device',
            'nvdimm,memdev=mem1,id=nv1',
        )
        with qemu.Qemu(self.directory, *backend.backend(self.image), *second) as vm:
            self.fill_pool(vm, 'nv0', 'nv1')
            before = {event['id']: event['count'] for event in self.events(vm, 'PCOW_ERROR')}
            vm.ask(EVENT_SECOND)
            for number_of in range(2):
                for number in range(500):
                    for device in ('nv0', 'nv1'):
                        vm.write(vm.address(device) + HALF + number % 7 * PAGE, b'x')
                events = self.events(vm, 'PCOW_ERROR')
                for identity in ('mem0', 'mem1'):
                    counts = [event['count'] for event in events if event['id'] == identity]
                    first = before[identity] + 500 * number_of
                    self.assertEqual([first + 1, first + 500], counts)
                vm.ask(EVENT_SECOND)
            vm.quit()

    def test_log_of_a_guest_that_goes_on(self) -> None:
        """It meets two pages in turn: one line, and how many more there were."""
        with qemu.Qemu(self.directory, *backend.backend(self.image, ',pcow-full=fail'), *RNG) as vm:
            random = virtio.Random(vm, SLOT)
            vm.write(vm.address('nv0'), b'x')
            self.fill_pool(vm, 'nv0')
            for number in range(30):
                random.fill([(vm.address('nv0') + HALF + number % 2 * PAGE, 16)])
                self.assertEqual('io-error', vm.wait_status('io-error'))
                vm.qmp('cont')
            vm.quit()
            said = stderr_of(vm)
        self.assertEqual(1, said.count('the pool is full, and a store of the guest'), said)
        more = re.findall(r'(\d+) more stores failed for want of space', said)
        self.assertEqual(29, sum(map(int, more)), said)
