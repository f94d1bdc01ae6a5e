# SPDX-License-Identifier: Apache-2.0
"""A QEMU that is told to end keeps the last moment of its VM as a checkpoint, if asked to."""

import re
import signal
import threading
import time

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import vm_state

PREFIX = 'pcow-fixation-'
NAME = re.compile(rf'{PREFIX}\d{{8}}T\d{{9}}Z')
SECONDS = 60


class AtSignalTest(checkpoint_case.CheckpointTestCase):
    def end(self, vm: vm_state.Vm, number: int) -> str:
        """What QEMU says; it ends in an orderly way."""
        vm.process.send_signal(number)
        self.assertEqual(0, vm.process.wait(SECONDS))
        return str(vm.process.stderr and vm.process.stderr.read())

    def kept(self) -> list[str]:
        found = vm_state.image_names(self.ram)
        self.assertEqual(found, vm_state.image_names(self.image))
        return found

    def test_each_signal(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPWR):
            with self.start() as vm:
                vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
                self.write(vm, number.name.encode())
                said = self.end(vm, number)
            (name,) = self.kept()
            self.assertRegex(name, NAME)
            self.assertIn(f"the last moment of the VM is checkpoint '{name}'", said)
            with self.start('-S') as vm:
                self.write(vm, b'x' * 16)
                self.assertEqual('', vm.load(name))
                self.assert_reads(vm, number.name.encode())
                self.assertEqual('', vm.delete(name))
                vm.quit()
        self.assert_files_clean()

    def test_only_if_it_was_asked_to(self) -> None:
        with self.start() as vm:
            self.end(vm, signal.SIGTERM)
        with self.start() as vm:
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            vm.qmp('pcow-checkpoint-at-signal')
            self.end(vm, signal.SIGTERM)
        with self.start() as vm:  # another end than by a signal
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            vm.quit()
        self.assertEqual([], self.kept())

    def test_paused(self) -> None:
        with self.start() as vm:
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            vm.qmp('stop')
            self.write(vm, b'paused')
            self.end(vm, signal.SIGTERM)
        self.assertEqual(1, len(self.kept()))

    def test_beside_one_that_is_being_taken(self) -> None:
        """Both are there, or the first one was not begun."""
        for delay in (0.0, 0.002, 0.005, 0.01):
            with self.start() as vm:
                vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
                vm.write(vm_state.RAM, b'\x5a' * 8 * images.MIB)
                self.write(vm, b'both')
                killer = threading.Timer(delay, vm.process.send_signal, (signal.SIGTERM,))
                killer.start()
                vm.begin_qmp('pcow-checkpoint-create', name='mine')
                killer.join()
                self.assertEqual(0, vm.process.wait(SECONDS))
            found = self.kept()
            (last,) = (name for name in found if NAME.fullmatch(name))
            self.assertLessEqual({*found}, {last, 'mine'})
            with self.start('-S') as vm:
                self.assertEqual('', vm.load(last))
                self.assert_reads(vm, b'both')
                for name in found:
                    self.assertEqual('', vm.delete(name))
                vm.quit()
        self.assert_files_clean()

    def test_one_that_cannot_be_taken(self) -> None:
        with self.start() as vm:
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            vm.qmp(
                'migrate-set-capabilities', capabilities=[{'capability': 'multifd', 'state': True}]
            )
            said = self.end(vm, signal.SIGTERM)
        self.assertIn("no checkpoint 'pcow-fixation-", said)
        self.assertIn('multifd', said)
        self.assertEqual([], self.kept())

    def test_a_guest_that_has_panicked(self) -> None:
        """That is no moment to go on from."""
        with self.start('-device', 'pvpanic', '-action', 'panic=pause') as vm:
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            vm.ask('outb 0x505 0x1')
            vm.wait_event('GUEST_PANICKED')
            said = self.end(vm, signal.SIGTERM)
        self.assertIn('state guest-panicked', said)
        self.assertEqual([], self.kept())

    def test_one_that_was_migrated_away(self) -> None:
        """It runs there."""
        there = self.directory / 'there'
        there.mkdir()
        image, ram = there / self.image.name, there / self.ram.name
        vm_state.run('pcow-img', 'create', '-q', image, checkpoint_case.SIZE)
        vm_state.run('pcow-img', 'create', '-q', ram, checkpoint_case.RAM_SIZE)
        uri = f'unix:{there}/migration'
        with (
            checkpoint_case.start(there, ram, image, '-incoming', uri) as destination,
            self.start() as vm,
        ):
            vm.qmp('pcow-checkpoint-at-signal', prefix=PREFIX)
            self.write(vm, b'away')
            vm.qmp('migrate', uri=uri)
            end = time.monotonic() + SECONDS
            while vm.qmp('query-migrate').get('status') != 'completed':
                self.assertLess(time.monotonic(), end, vm.qmp('query-migrate'))
                time.sleep(0.02)
            said = self.end(vm, signal.SIGTERM)
            self.assert_reads(destination, b'away')
            destination.quit()
        self.assertIn('state postmigrate', said)
        self.assertEqual([], self.kept())

    def test_refused(self) -> None:
        with self.start() as vm:
            for prefix in ('x' * 120, '.checkpoint-'):
                self.assertIn(
                    'cannot be the name', vm.qmp_error('pcow-checkpoint-at-signal', prefix=prefix)
                )
            self.end(vm, signal.SIGTERM)
        self.assertEqual([], self.kept())
