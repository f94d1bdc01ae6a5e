# SPDX-License-Identifier: Apache-2.0
"""Stores that wait for space: what QMP tells of them, and how often."""

from collections.abc import Callable
import contextlib
import os
import threading
import time
from typing import Any

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import virtio

SLOT = 6
GET_ID = 8  # virtio 1.2, 5.2.6: the device stores by a pointer
FULL, RESUMED = 'PCOW_POOL_FULL', 'PCOW_POOL_RESUMED'
SECONDS = 3


class WaitingTest(backend.PoolTest):
    def fill(self) -> None:
        with contextlib.suppress(OSError), (self.pool / 'filler').open('ab', buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def free_slowly(self, until: Callable[[], bool], pause: float) -> None:
        """A neighbour gives back a page at a time."""
        size = (self.pool / 'filler').stat().st_size
        time.sleep(pause)
        while size and not until():
            size -= 4096
            os.truncate(self.pool / 'filler', size)
            time.sleep(pause)

    def test_pool_that_is_full_again_and_again(self) -> None:
        """Each store of a device waits for the next page of a neighbour."""
        device = (
            '-object',
            'rng-builtin,id=random',
            '-device',
            f'virtio-rng-pci,rng=random,addr={SLOT}',
        )
        with qemu.Qemu(self.directory, *backend.backend(self.image), *device) as vm:
            random, address = virtio.Random(vm, SLOT), vm.address('nv0')
            begin = time.monotonic()
            page = 0
            while time.monotonic() < begin + SECONDS:
                self.fill()
                waits = threading.Thread(target=random.fill, args=([(address + page * 4096, 64)],))
                waits.start()
                self.free_slowly(lambda thread=waits: not thread.is_alive(), 0.015)
                waits.join()
                page += 1
            self.grow()
            time.sleep(1.5)
            elapsed = time.monotonic() - begin
            (info,) = vm.qmp('query-pcow')
            count = info['stats']['pool-full-waits']
            self.assertGreater(count, 4 * SECONDS)
            told = self.told(vm)
            self.assertGreaterEqual(2 * (elapsed + 1), len(told))
            self.assertEqual(RESUMED, told[-1][0], told)
            self.assertEqual([FULL, RESUMED] * (len(told) // 2), [name for name, _ in told])
            counts = [data['count'] for name, data in told if name == FULL]
            self.assertEqual(sorted(counts), counts)
            self.assertGreaterEqual(count, counts[-1])
            self.assertGreater(counts[-1], count / 3)
            vm.quit()
        backend.tool('pcow-img', 'check', self.image)

    def told(self, vm: qemu.Qemu) -> list[tuple[str, dict[str, Any]]]:
        """In the order in which it came."""
        return [
            (event['event'], event['data'])
            for event in vm.take_events()
            if event['event'] in (FULL, RESUMED)
        ]

    def test_one_of_two_goes_on(self) -> None:
        """It is not told that stores go on while one waits; nor is a snapshot to be tried again
        without space.
        """
        disk = self.directory / 'disk'
        disk.write_bytes(bytes(images.MIB))
        devices: list[str] = []
        for number in range(2):
            devices += [
                '-object',
                f'iothread,id=io{number}',
                '-blockdev',
                f'file,node-name=disk{number},filename={disk},read-only=on',
                '-device',
                f'virtio-blk-pci,drive=disk{number},addr={SLOT + number},serial=abc,'
                f'iothread=io{number}',
            ]
        with qemu.Qemu(self.directory, *backend.backend(self.image), *devices) as vm:
            blocks = [virtio.Block(vm, SLOT + number) for number in range(2)]
            self.fill()
            for number, block in enumerate(blocks):
                place = vm.address('nv0') + (8 + 8 * number) * images.MIB
                block.post_kind(GET_ID, [(place, 20)])
                block.notify()
                # the second one after the interval of a second, or held back to its end
                self.assertEqual(number + 1, vm.wait_event(FULL)['count'])
            self.assertEqual([False, False], [block.served() for block in blocks])
            why = vm.qmp_error('pcow-snapshot-create', id='mem0', name='s')
            self.assertIn('waits for space in its pool', why)
            self.free_slowly(lambda: any(block.served() for block in blocks), 0.03)
            time.sleep(1.5)
            self.assertEqual(1, [block.served() for block in blocks].count(True))
            self.assertEqual([], self.told(vm))
            self.grow()
            for block in blocks:
                block.wait()
            self.assertEqual({'id': 'mem0'}, vm.wait_event(RESUMED))
            time.sleep(1.5)
            self.assertEqual([], self.told(vm))
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            vm.quit()
        backend.tool('pcow-img', 'check', self.image)
