# SPDX-License-Identifier: Apache-2.0
"""From what a VM goes on, and when it does not; real guests are in
tests/functional/test_virsh_fixation.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.fixation import runs
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from tests.unit.pcow_driver.fixation import entered
from tests.unit.pcow_driver.fixation import test_automatic
from tests.unit.pcow_driver.vm import recorded

State = records.State


class RecoveryTest(recorded.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.recorded.active = False
        older, last = (test_automatic.taken(second) for second in (0, 60))
        self.there = [older, dataclasses.replace(last, current=True)]
        self.last, self.older = last.name, older.name
        self.data_size = 4096
        self.fails = False
        self.reverted = list[tuple[str, bool]]()
        for where, name, new in (
            (checkpoint, 'start_at', self.start_at),
            (type(self.found), 'arrive', lambda _found: None),
            (domain, 'errors', contextlib.nullcontext),
            (runs, 'current', lambda _found: 'this run'),
        ):
            self.begin(mock.patch.object(where, name, new=new))
        self.begin(mock.patch('pcow_driver.vm.tree.checkpoints', new=lambda _found: self.there))

    def begin(self, patched: Any) -> None:
        patched.start()
        self.addCleanup(patched.stop)

    def start_at(self, _found: Any, name: str, *, run: bool) -> model.Reverted:
        if self.fails:
            raise exception.QmpFailed(command='x', error_class='y', description='another CPU')
        self.reverted.append((name, run))
        return model.Reverted(time=1, started=True)

    def recover(self, state: State = State.RUNS, **fields: Any) -> recover.Result:
        records.forget(recorded.UUID)
        record = dataclasses.replace(records.Record(state, checkpoint=self.last), **fields)
        entered.enter(recorded.UUID, record)
        return recover.recover(self.found, record)

    def record(self) -> records.Record:
        found = records.read(recorded.UUID)
        assert found is not None
        return found

    def unsaved(self) -> list[str]:
        """What was done to keep what no checkpoint has."""
        return [line for line in self.logged() if recover.UNSAVED in line]

    def keep_unsaved(self) -> None:
        """pcow-img, which only records, has the snapshot that it was told to make."""

        def create(_path: str, name: str) -> None:
            with self.log.open('a') as log:
                log.write(f'-c {name}\n')
            self.write([], [recorded.snapshot(1, name, **{'data-size': self.data_size})])

        self.begin(mock.patch.object(image, 'snapshot_create', new=create))

    def test_after_a_fixation(self) -> None:
        self.data_size = 0
        self.keep_unsaved()
        done = self.recover(State.FIXATED, paused=True, durable=7)
        self.assertEqual((self.last, ''), (done.checkpoint, done.problem))
        self.assertEqual([(self.last, False)], self.reverted)
        made, gone = self.unsaved()  # it held nothing
        self.assertEqual(made.removeprefix('-c '), gone.split()[3])
        record = self.record()
        self.assertEqual(
            (State.RUNS, 'this run', self.last, 7, True, 0),
            (
                record.state,
                record.run,
                record.checkpoint,
                record.durable,
                record.paused,
                record.tries,
            ),
        )

    def test_after_a_kill(self) -> None:
        self.keep_unsaved()
        self.assertEqual(self.last, self.recover().checkpoint)
        self.assertEqual([(self.last, True)], self.reverted)
        self.assertEqual(1, len(self.unsaved()))
        self.assertEqual(1, self.record().tries)

    def test_it_was_booted_since_its_fixation(self) -> None:
        """Without the loop; what it did is kept."""
        self.keep_unsaved()
        self.recover(State.FIXATED, checkpoint=self.older)
        self.assertEqual([(self.older, True)], self.reverted)
        self.assertEqual(1, len(self.unsaved()))

    def test_no_checkpoint_of_its_last_run(self) -> None:
        """An older one would be of before a shutdown."""
        done = self.recover(checkpoint='', before=self.last)
        self.assertIn('virsh start web1 boots it', done.problem)
        self.assertEqual((State.FAILED, []), (self.record().state, self.reverted))

    def test_somebody_took_one_since(self) -> None:
        self.keep_unsaved()
        self.recover(checkpoint='', before=self.older)
        self.assertEqual([(self.last, True)], self.reverted)

    def test_the_branch_that_it_is_on(self) -> None:
        """Somebody has had it go back to an older one."""
        self.keep_unsaved()
        older, last = self.there
        self.there = [
            dataclasses.replace(older, current=True),
            dataclasses.replace(last, current=False),
        ]
        self.recover(checkpoint=self.older)
        self.assertEqual([(self.older, True)], self.reverted)

    def test_one_that_ends_again_and_again(self) -> None:
        """What it held before that began stays with what it held since."""
        self.keep_unsaved()
        for tries in range(3):
            self.recover(tries=tries)
        made = [line for line in self.unsaved() if line.startswith('-c')]
        self.assertEqual((3, 3), (len(made), len(self.unsaved())))
        done = self.recover(tries=3)
        self.assertIn('3 times', done.problem)
        self.assertEqual((State.FAILED, 3), (self.record().state, len(self.reverted)))
        self.recover(State.FAILED, tries=3)
        self.assertEqual(4, len(self.reverted))

    def test_one_that_is_cut_off(self) -> None:
        """By a signal: the next one knows where it goes on, and that what was unsaved is kept."""
        self.keep_unsaved()
        with mock.patch.object(checkpoint, 'start_at', side_effect=SystemExit):
            self.assertRaises(SystemExit, self.recover)
        record = self.record()
        self.assertEqual(
            (State.RECOVERING, self.last, True), (record.state, record.checkpoint, record.kept)
        )
        self.assertFalse(recover.is_to_stay_off(self.found, record))
        self.there[-1] = dataclasses.replace(self.there[-1], current=False)
        recover.recover(self.found, record)
        self.assertEqual([(self.last, True)], self.reverted)
        self.assertEqual(1, len(self.unsaved()))

    def test_what_libvirt_refuses_may_go_well_later(self) -> None:
        self.keep_unsaved()
        error = exception.LibvirtFailed(uri='x', reason='the daemon is being restarted')
        with mock.patch.object(checkpoint, 'start_at', side_effect=error):
            self.assertIn('restarted', self.recover().problem)
        self.assertEqual(State.RECOVERING, self.record().state)

    def test_a_qemu_that_was_left(self) -> None:
        """By one that was cut off: it is paused, and not there yet."""
        calls = list[str]()
        for where, name in ((checkpoint, 'revert'), (type(self.found), 'resume')):
            self.begin(
                mock.patch.object(where, name, new=lambda *_words, name=name: calls.append(name))
            )
        for running, expected, at in (
            (False, ['revert', 'resume'], self.last),
            (True, [], ''),  # somebody may have booted it
        ):
            record = records.Record(State.RECOVERING, checkpoint=self.last)
            entered.enter(recorded.UUID, record)
            calls.clear()
            with mock.patch.object(
                type(self.found), 'running', new=lambda _found, running=running: running
            ):
                recover.finish(self.found, record)
            found = self.record()
            self.assertEqual((expected, State.RUNS, at), (calls, found.state, found.checkpoint))

    def test_what_cannot_go_on(self) -> None:
        self.keep_unsaved()
        self.fails = True
        self.assertIn('another CPU', self.recover().problem)
        self.assertEqual((State.FAILED, 1), (self.record().state, self.record().tries))
        self.assertIn('another CPU', self.record().reason)

    def test_without_room_for_what_was_unsaved(self) -> None:
        """It is not given up for a start, nor for the next one when there is room."""
        error = exception.ToolFailed(message='No space left on device')
        gone = list[str]()
        self.begin(
            mock.patch.object(checkpoint, 'delete', new=lambda _found, name: gone.append(name))
        )
        with mock.patch.object(image, 'snapshot_create', side_effect=error):
            self.assertIn('No space left', self.recover().problem)
        self.assertEqual(([self.older], []), (gone, self.reverted))
        self.keep_unsaved()
        recover.recover(self.found, self.record())
        self.assertEqual((1, 1), (len(self.unsaved()), len(self.reverted)))

    def test_one_that_fails_keeps_no_other_one(self) -> None:
        for number in range(2):
            records.write(f'gone-{number}', records.Record(State.RUNS))
        self.begin(mock.patch.object(domain, 'connect', new=contextlib.nullcontext))
        self.begin(mock.patch.object(domain, 'names_by_uuid', new=lambda _none: {}))
        first, second = recover.recover_all()
        for one in (first, second):
            self.assertIn(f'{self.directory}/state/protected/{one.name}.json', one.problem)
        self.assertEqual(2, len(records.all_uuids()))

    def test_shut_down_while_the_loop_was_not_there(self) -> None:
        self.begin(mock.patch.object(domain, 'connect', new=lambda: self.connected()))
        self.begin(
            mock.patch.object(domain, 'names_by_uuid', new=lambda _none: {recorded.UUID: 'web1'})
        )
        self.begin(mock.patch.object(policy, 'get', new=lambda _found: policy.Policy()))
        self.begin(
            mock.patch.object(type(self.found), 'stopped_on_purpose', new=lambda _found: True)
        )
        records.write(recorded.UUID, records.Record(State.RUNS))
        self.assertEqual([], recover.recover_all())
        self.assertEqual([], records.all_uuids())
        self.assertEqual([], self.reverted)

    def connected(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(self.recorded)
