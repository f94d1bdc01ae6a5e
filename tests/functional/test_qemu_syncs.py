# SPDX-License-Identifier: Apache-2.0
"""Class page-cache: who syncs an image, and when. A sync takes as long as the disk likes, so the
guest may not stand for one, nor may the main loop, which keeps the guest from its devices.

Workers may, and so may the thread that works ahead. The main loop itself may while it does
nothing else but let the guest run, without the lock that keeps it from its devices; which is seen
by no test.
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from typing import NamedTuple
from unittest import mock

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_durability as durability
from tests.functional import vm_state

SIZE = 32 * images.MIB
SECONDS = 120
RATE = images.MIB // 2  # bytes in a second
ROUNDS = 4  # from the third on an older snapshot is deleted
THREADS = ('-name', 'debug-threads=on')  # they get the names that are compared
MAIN, MIGRATION = 'main', 'mig/src/main'
# of all that is frozen, and of the word that makes a snapshot of it
LAST_FLUSHES = 2


class Sync(NamedTuple):
    at: float  # seconds since 1970
    thread: str
    call: str


class SyncsTest(durability.DiskTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.noted = self.directory / 'syncs'
        self.environment = qemu.preload(self.directory, 'note_syncs.c') | {'SYNCS': str(self.noted)}
        backend.tool('pcow-img', 'create', '-q', self.image, SIZE)

    def start(self, vm: vm_state.Vm) -> vm_state.Vm:
        with mock.patch.dict(os.environ, self.environment), contextlib.ExitStack() as stack:
            stack.enter_context(vm)
            stack.pop_all()
        self.addCleanup(vm.__exit__, None, None, None)
        return vm

    def start_vm(self, *more: str) -> vm_state.Vm:
        return self.start(
            vm_state.Vm(
                self.directory,
                *durability.image_of(self.image),
                *durability.VIRTIO_PMEM,
                *THREADS,
                *more,
            )
        )

    def syncs(self) -> list[Sync]:
        """Since this was called last."""
        noted = self.noted.read_text().splitlines() if self.noted.exists() else []
        self.noted.write_text('')
        lines = [line.split() for line in noted]
        return [Sync(int(at) / 1e6, thread, call) for at, thread, call in lines]

    def threads(self) -> set[str]:
        return {sync.thread for sync in self.syncs()}

    def assert_by_workers(self, vm: vm_state.Vm, command: str, **arguments: str) -> None:
        self.syncs()
        vm.qmp(command, **arguments)
        threads = self.threads()
        self.assertIn('worker', threads, command)
        self.assertNotIn(MAIN, threads, command)

    def store(self, vm: vm_state.Vm, value: int) -> None:
        vm.ask(f'memset {vm.address("nv0"):#x} {2 * images.MIB:#x} {value:#x}')

    def test_snapshots_of_one_image(self) -> None:
        vm = self.start_vm()
        for value, name in enumerate('ab', 1):
            self.store(vm, value)
            self.assert_by_workers(vm, 'pcow-snapshot-create', id='mem0', name=name)
        self.store(vm, 3)
        self.assert_by_workers(vm, 'pcow-snapshot-rename', id='mem0', name='b', new_name='c')
        self.assert_by_workers(vm, 'pcow-snapshot-delete', id='mem0', name='a')
        self.assertEqual(['c'], vm.names())

    def test_checkpoint(self) -> None:
        ram = self.pool / 'ram.pcow'
        backend.tool('pcow-img', 'create', '-q', ram, checkpoint_case.RAM_SIZE)
        vm = self.start(
            vm_state.Vm(
                self.directory,
                '-object',
                f'memory-backend-file,id=ram0,mem-path={ram},share=on,'
                f'size={checkpoint_case.RAM_SIZE}',
                '-machine',
                'memory-backend=ram0',
                *durability.image_of(self.image),
                *durability.VIRTIO_PMEM,
                *THREADS,
            )
        )
        for value, name in enumerate('ab', 1):
            self.store(vm, value)
            self.assert_by_workers(vm, 'pcow-checkpoint-create', name=name)
        self.store(vm, 3)
        self.assert_by_workers(vm, 'pcow-checkpoint-delete', name='a')
        (left,) = vm.qmp('query-pcow-checkpoints')
        self.assertEqual('b', left['name'])

    def test_vm_snapshot(self) -> None:
        """The guest stands for what it has stored since the flush before, and for the disks."""
        disk = self.pool / 'disk.qcow2'
        subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', disk, '16M'], check=True)
        vm = self.start_vm(*vm_state.carrier_arguments(disk))
        for value, name in enumerate('ab', 1):
            self.store(vm, value)
            self.syncs()
            self.assertEqual('', vm.save(name))
            since, until = vm.wait_time('STOP'), vm.wait_time('RESUME')
            syncs = self.syncs()
            meanwhile = [sync.call for sync in syncs if since <= sync.at <= until]
            self.assertLess(LAST_FLUSHES, len(syncs))
            self.assertEqual(['fdatasync'] * LAST_FLUSHES, meanwhile)
            self.assertIn(name, vm.names())

    def begin_migration(self, source: vm_state.Vm) -> None:
        """Some rounds, none of which syncs in the main thread, and what the next one is for."""
        for capability in ('return-path', 'pause-before-switchover'):
            source.qmp(
                'migrate-set-capabilities', capabilities=[{'capability': capability, 'state': True}]
            )
        # Each round is on its way for two seconds, so that it does not end before the next store
        source.qmp('migrate-set-parameters', **{'downtime-limit': 1, 'max-bandwidth': RATE})
        source.qmp('migrate', uri=f'unix:{self.directory}/migration')
        for number in range(ROUNDS):
            self.syncs()
            self.wait_round(source, f'.migrating-{number}')
            threads = self.threads()
            self.assertIn('worker', threads)
            self.assertNotIn(MAIN, threads)
            # The test's stores are the main thread's, and sync: nobody stores while it looks
            address = source.address('nv0')
            source.write(address, os.urandom(images.MIB))
            self.assertEqual('active', source.qmp('query-migrate')['status'])

    def wait_round(self, source: vm_state.Vm, name: str) -> None:
        end = time.monotonic() + SECONDS
        while name not in source.names():
            self.assertLess(time.monotonic(), end, f'there was no round: {name}')
            time.sleep(0.01)

    def receive(self) -> vm_state.Vm:
        there = self.directory / 'there'
        there.mkdir()
        path = there / 'vm.pcow'
        backend.tool('pcow-img', 'create', '-q', path, SIZE)
        target = vm_state.Vm(
            there,
            *durability.image_of(path),
            *durability.VIRTIO_PMEM,
            '-incoming',
            f'unix:{self.directory}/migration',
        )
        self.enterContext(target)
        return target

    def wait_migration(self, vm: vm_state.Vm, *expected: str) -> None:
        end = time.monotonic() + SECONDS
        while (found := vm.qmp('query-migrate')['status']) not in expected:
            self.assertLess(time.monotonic(), end, f'the migration is {found}')
            time.sleep(0.02)

    def test_migration(self) -> None:
        """Rounds sync in workers, and what is sent when the guest has stopped is not synced."""
        source, target = self.start_vm(), self.receive()
        self.store(source, 1)
        self.begin_migration(source)
        source.qmp('migrate-set-parameters', **{'downtime-limit': 2000, 'max-bandwidth': 1 << 40})
        while source.qmp('query-migrate')['status'] == 'active':
            source.write(source.address('nv0'), b'last')
        self.wait_migration(source, 'pre-switchover')
        source.qmp('migrate-continue', state='pre-switchover')
        self.wait_migration(source, 'completed')
        self.assertNotIn(MIGRATION, self.threads())
        self.assertEqual('running', target.wait_status('running'))
        self.assertEqual([], source.names())
        length = 2 * images.MIB
        expected = source.read(source.address('nv0'), length)
        self.assertEqual(expected, target.read(target.address('nv0'), length))
        self.assertEqual(b'last', expected[:4])

    def test_migration_that_is_cancelled(self) -> None:
        """The guest runs while its snapshots are deleted, and who looks finds none."""
        source = self.start_vm()
        self.receive()
        self.store(source, 1)
        self.begin_migration(source)
        self.syncs()
        source.qmp('migrate_cancel')
        self.wait_migration(source, 'cancelled')
        self.assertEqual([], source.names())
        threads = self.threads()
        self.assertIn('worker', threads)
        self.assertNotIn(MAIN, threads)
        self.assertEqual('running', source.status())
        self.store(source, 5)
        source.qmp('pcow-snapshot-create', id='mem0', name='after')
        source.quit()
        backend.tool('pcow-img', 'check', self.image)

    def test_power_fails_while_a_migration_is_under_way(self) -> None:
        """What was flushed is there, in whatever step of a round."""
        source = self.start_vm()
        self.receive()
        self.store(source, 1)
        self.begin_migration(source)
        address = source.address('nv0')
        flushed = {}
        for number in range(6):
            data = os.urandom(4096)
            source.write(address, data)
            source.qmp('pcow-flush', id='mem0')
            source.write(address + 4096, os.urandom(images.MIB))
            time.sleep(random.random() / 2)
            # To copy the disk takes a while: what is ordered by syncs must not go on meanwhile
            source.process.send_signal(signal.SIGSTOP)
            flushed[self.after_power_failure(f'after{number}')] = data
            source.process.send_signal(signal.SIGCONT)
            # Between the last stores and the next it may come to its end
            if source.qmp('query-migrate')['status'] != 'active':
                break
        for pool, data in flushed.items():
            image, raw = pool / 'vm.pcow', self.directory / 'raw'
            backend.tool('pcow-img', 'check', '-q', '-r', 'leaks', image)
            backend.tool('pcow-img', 'convert', '-O', 'raw', image, raw)
            with raw.open('rb') as file:
                self.assertEqual(data, file.read(4096), str(pool))
