# SPDX-License-Identifier: Apache-2.0
"""A disk that fails in the middle of an operation on the image of a VM."""

from collections.abc import Iterator
import contextlib
import os
import subprocess
from unittest import mock

from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_durability as durability
from tests.functional import virtio

CALLS = 12  # more than a revert makes


class FailingFlushTest(durability.DiskTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.preload = qemu.preload(self.directory, 'failing_flush.c')
        self.number = self.directory / 'number'

    @contextlib.contextmanager
    def start(self) -> Iterator[qemu.Qemu]:
        self.image.unlink(missing_ok=True)
        self.number.unlink(missing_ok=True)
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        vm = qemu.Qemu(self.directory, *durability.image_of(self.image), *durability.VIRTIO_PMEM)
        preload = self.preload | {'FAIL_FLUSH': str(self.number)}
        with contextlib.ExitStack() as stack:
            with mock.patch.dict(os.environ, preload):
                stack.enter_context(vm)
            yield vm

    def test_guest_is_told(self) -> None:
        """Once, of what a flush of the host has met."""
        with self.start() as vm:
            pmem = virtio.Pmem(vm, durability.SLOT)
            vm.write(vm.address('nv0'), b'lost')
            self.number.write_text('0')
            vm.qmp_error('pcow-flush', id='mem0')
            self.assertNotEqual(0, pmem.flush())
            self.assertEqual(0, pmem.flush())

    def test_snapshot_of_the_vm_fails(self) -> None:
        """If the flush ahead of it does, which alone is told of what was lost."""
        disk = self.pool / 'disk.qcow2'
        with self.start() as vm:
            subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', disk, '1M'], check=True)
            drive = {'driver': 'file', 'filename': str(disk)}
            vm.qmp('blockdev-add', driver='qcow2', node_name='disk', file=drive)
            vm.write(vm.address('nv0'), b'lost')
            self.number.write_text('0')
            said = vm.qmp('human-monitor-command', command_line='savevm s')
            self.assertIn('could not be written', said)
            self.number.unlink()
            self.assertEqual('', vm.qmp('human-monitor-command', command_line='savevm s'))

    def revert(self, call: int) -> tuple[bytes, bool, bool]:
        """What the guest has after a revert in which a flush has failed; whether it was reset, and
        whether there was an error.
        """
        with self.start() as vm:
            address = vm.address('nv0')
            vm.write(address, b'old')
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            vm.write(address, b'new')
            vm.qmp('stop')
            self.number.write_text(str(call))
            vm.begin_qmp('pcow-snapshot-revert', id='mem0', name='s')
            failed = 'error' in vm.end_qmp('pcow-snapshot-revert')
            vm.qmp('query-status')
            found = vm.read(address, 3)
            return found, vm.take_event('RESET') is not None, failed

    def test_revert(self) -> None:
        """A guest whose memory is another one is reset, whether or not that was all that was to be
        done.
        """
        outcomes = set()
        for call in range(CALLS):
            found, reset, failed = self.revert(call)
            with self.subTest(call=call):
                self.assertEqual(found == b'old', reset)
                self.assertIn(found, (b'old', b'new'))
                self.assertTrue(reset or failed)
            outcomes.add((found, failed))
        # before the commit, behind it, and not at all
        self.assertEqual({(b'new', True), (b'old', True), (b'old', False)}, outcomes)
