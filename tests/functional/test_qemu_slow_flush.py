# SPDX-License-Identifier: Apache-2.0
"""A flush that takes its time, and what may happen to the VM meanwhile: stop, reset, quit."""

from collections.abc import Iterator
import contextlib
import os
import signal
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_durability as durability
from tests.functional import virtio

SECONDS = 2  # that a flush takes: slow_flush.c


class SlowFlushTest(durability.DiskTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.begun = self.directory / 'begun'
        self.environment = qemu.preload(self.directory, 'slow_flush.c') | {
            'SLOW_FLUSH': str(self.begun)
        }
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    @contextlib.contextmanager
    def start(self) -> Iterator[qemu.Qemu]:
        vm = qemu.Qemu(self.directory, *durability.image_of(self.image), *durability.VIRTIO_PMEM)
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, self.environment):
                stack.enter_context(vm)
            yield vm

    def wait_for_worker(self) -> None:
        end = time.monotonic() + images.TIMEOUT
        while not self.begun.exists() and time.monotonic() < end:
            time.sleep(0.01)

    def test_stop_waits_for_the_answer(self) -> None:
        """It has to be in guest memory before that is saved."""
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            vm.write(vm.address('nv0'), b'x')
            pmem.post_flush()
            pmem.notify()
            vm.qmp('stop')
            self.assertTrue(pmem.served())
            self.assertEqual(0, pmem.answer())

    def test_nothing_comes_after_a_reset(self) -> None:
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            vm.write(vm.address('nv0'), b'x')
            pmem.post_flush()
            pmem.notify()
            pmem.reset()
            vm.write(pmem.scratch + 4, b'mine')
            end = time.monotonic() + 2 * SECONDS
            while time.monotonic() < end and vm.read(pmem.scratch + 4, 4) == b'mine':
                time.sleep(0.05)
            self.assertEqual(b'mine', vm.read(pmem.scratch + 4, 4))
            self.assertEqual(0, virtio.Pmem(vm, durability.SLOT).flush())

    def test_one_notification_for_several(self) -> None:
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            for number in range(4):
                pmem.post_flush(number)
            pmem.notify()
            pmem.wait()
            self.assertEqual([0] * 4, [pmem.answer(number) for number in range(4)])

    def test_snapshot_does_not_wait(self) -> None:
        """The guest stands for less than any flush takes; who asked waits for those."""
        self.environment['SLOW_MAIN'] = '1'
        with self.start() as vm:
            vm.write(vm.address('nv0'), b'x' * 4096)
            begun = time.monotonic()
            pause = vm.qmp('pcow-snapshot-create', id='mem0', name='s')['pause']
            self.assertGreater(time.monotonic() - begun, SECONDS)
            self.assertLess(pause / 1e9, SECONDS / 4)
            vm.write(vm.address('nv0'), b'y' * 4096)
            vm.process.kill()
            vm.process.wait(images.TIMEOUT)
        self.assertEqual(b'x' * 4096, self.content(4096, '-l', 's'))
        self.assertEqual(b'y' * 4096, self.content(4096))

    def content(self, length: int, *which: str) -> bytes:
        raw = self.directory / 'raw'
        backend.tool('pcow-img', 'convert', '-O', 'raw', *which, self.image, raw)
        return raw.read_bytes()[:length]

    def test_killed_while_a_snapshot_is_flushed(self) -> None:
        """There is none, and what the guest has stored is there, before and after."""
        with self.start() as vm:
            vm.write(vm.address('nv0'), b'x' * 4096)
            vm.qmp('pcow-snapshot-create', id='mem0', name='whole')
            vm.write(vm.address('nv0') + 4096, b'y' * 4096)
            self.begun.unlink()
            vm.begin_qmp('pcow-snapshot-create', id='mem0', name='half')
            # the first flush is over, the record is written, and it is frozen
            for _flush in range(3):
                self.wait_for_worker()
                self.begun.unlink()
            vm.process.kill()
            vm.process.wait(images.TIMEOUT)
        backend.tool('pcow-img', 'check', self.image)
        listed = backend.tool('pcow-img', 'snapshot', '-l', self.image)
        self.assertIn('whole', listed)
        self.assertNotIn('half', listed)
        self.assertEqual(b'x' * 4096 + b'y' * 4096, self.content(8192))

    def test_quit(self) -> None:
        """Nobody who still flushes may find the image closed."""
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            vm.write(vm.address('nv0'), b'x' * 4096)
            pmem.post_flush()
            pmem.notify()
            self.wait_for_worker()
            vm.process.send_signal(signal.SIGTERM)
            self.assertEqual(0, vm.process.wait(images.TIMEOUT))
        backend.tool('pcow-img', 'check', self.image)
