# SPDX-License-Identifier: Apache-2.0
"""From what a VM goes on, and when it does not; real guests are in
tests/functional/test_virsh_fixation.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.images import image
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from tests.unit.pcow_driver.fixation import test_automatic
from tests.unit.pcow_driver.vm import recorded

State = records.State


class RecoveryTest(recorded.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.recorded.active = False
        self.there = [test_automatic.taken(second) for second in (0, 60)]
        self.last = self.there[-1].name
        self.fails = False
        self.reverted = list[tuple[str, bool]]()
        for where, name, new in (
            (checkpoint, 'revert', self.revert),
            (type(self.found), 'arrive', lambda _found: None),
        ):
            self.begin(mock.patch.object(where, name, new=new))
        self.begin(mock.patch('pcow_driver.vm.tree.checkpoints', new=lambda _found: self.there))

    def begin(self, patched: Any) -> None:
        patched.start()
        self.addCleanup(patched.stop)

    def revert(self, _found: Any, name: str, *, run: bool) -> model.Reverted:
        if self.fails:
            raise exception.QmpFailed(command='x', error_class='y', description='another CPU')
        self.reverted.append((name, run))
        return model.Reverted(time=1, started=True)

    def recover(self, **fields: Any) -> recover.Result:
        records.forget(recorded.UUID)
        records.write(recorded.UUID, records.Record(State.RUNS))
        record = records.Record(**({'state': State.RUNS} | fields))
        records.write(recorded.UUID, record)
        return recover.recover(self.found, record)

    def record(self) -> records.Record:
        found = records.read(recorded.UUID)
        assert found is not None
        return found

    def unsaved(self) -> int:
        """Snapshots of NVDIMMs that were made to keep what no checkpoint has."""
        return sum(f'-c {recover.UNSAVED}' in line for line in self.logged())

    def test_after_a_fixation(self) -> None:
        done = self.recover(state=State.FIXATED, checkpoint=self.last, paused=True, durable=7)
        self.assertEqual((self.last, ''), (done.checkpoint, done.problem))
        self.assertEqual([(self.last, False)], self.reverted)
        self.assertEqual(0, self.unsaved())
        self.assertEqual(
            records.Record(State.RUNS, checkpoint=self.last, durable=7, tries=1), self.record()
        )

    def test_after_a_kill(self) -> None:
        self.assertEqual(self.last, self.recover(checkpoint=self.last).checkpoint)
        self.assertEqual([(self.last, True)], self.reverted)
        self.assertEqual(1, self.unsaved())

    def test_an_older_fixation_is_not_the_last_moment(self) -> None:
        self.recover(state=State.FIXATED, checkpoint=self.there[0].name)
        self.assertEqual([(self.last, True)], self.reverted)
        self.assertEqual(1, self.unsaved())

    def test_one_that_ends_again_and_again(self) -> None:
        record = records.Record(State.RUNS, checkpoint=self.last)
        for _time in range(3):
            self.recover(checkpoint=record.checkpoint, tries=record.tries)
            record = self.record()
        done = self.recover(checkpoint=record.checkpoint, tries=record.tries)
        self.assertIn('3 times', done.problem)
        self.assertEqual((State.FAILED, 3), (self.record().state, len(self.reverted)))
        self.recover(checkpoint=self.there[0].name, tries=3)  # another one came since
        self.assertEqual(4, len(self.reverted))

    def test_what_cannot_go_on(self) -> None:
        self.fails = True
        self.assertIn('another CPU', self.recover(checkpoint=self.last).problem)
        self.assertEqual(State.FAILED, self.record().state)
        self.assertIn('another CPU', self.record().reason)
        self.there = []
        self.assertIn('boots it', self.recover().problem)

    def test_without_room_for_what_was_unsaved(self) -> None:
        error = exception.ToolFailed(message='No space left on device')
        with mock.patch.object(image, 'snapshot_create', side_effect=error):
            self.assertEqual(self.last, self.recover().checkpoint)

    def test_somebody_was_quicker(self) -> None:
        def start(*_arguments: Any, **_more: Any) -> None:
            self.recorded.active = True
            raise exception.LibvirtFailed(uri='x', reason='domain is already running')

        with mock.patch.object(checkpoint, 'revert', new=start):
            self.recover(checkpoint=self.last)
        self.assertEqual(State.RUNS, self.record().state)

    def test_the_names_are_those_of_the_loop(self) -> None:
        self.assertTrue(automatic.is_own(self.last))
