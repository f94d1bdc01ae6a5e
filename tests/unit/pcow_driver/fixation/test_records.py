# SPDX-License-Identifier: Apache-2.0

import itertools
import os
import threading
import time

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.fixation import records
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.fixation import entered

UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
State = records.State


class RecordsTest(base.TestCase):
    def enter(self, state: State | None) -> None:
        records.forget(UUID)
        if state is not None:
            entered.enter(UUID, records.Record(state))

    def test_each_transition(self) -> None:
        """As the table of the module has them."""
        legal = {
            *((before, State.RUNS) for before in (None, *State)),
            *((before, State.FAILED) for before in State),
            (State.RUNS, State.FIXATING),
            (State.FIXATING, State.FIXATED),
            *((before, State.RECOVERING) for before in State),
        }
        for before, after in itertools.product((None, *State), State):
            self.enter(before)
            if (before, after) in legal:
                records.write(UUID, records.Record(after, durable=7))
                self.assertEqual(records.Record(after, durable=7), records.read(UUID))
                continue
            error = self.assertRaises(
                exception.StateInvalid, records.write, UUID, records.Record(after)
            )
            self.assertIn('does not follow', str(error))
            found = records.read(UUID)
            self.assertEqual(before, None if found is None else found.state)

    def test_of_all(self) -> None:
        self.assertEqual([], records.all_uuids())
        self.enter(State.RUNS)
        self.assertEqual([UUID], records.all_uuids())
        records.forget(UUID)
        records.forget(UUID)
        self.assertEqual([], records.all_uuids())

    def test_somebody_else_holds_a_lock(self) -> None:
        """Who may lock beside services does not keep who decides about VMs waiting."""
        held, end = threading.Event(), threading.Event()
        self.addCleanup(end.set)

        def hold() -> None:
            with locks.lock(f'protected-{UUID}'):
                held.set()
                end.wait()

        def take() -> None:
            with records.alone(UUID):
                taken.set()

        taken = threading.Event()
        for work in (hold, take):
            threading.Thread(target=work, daemon=True).start()
            held.wait(30)
        self.assertTrue(taken.wait(5))

    def test_the_last_fixation(self) -> None:
        self.assertEqual(0.0, records.last_fixation())
        records.note_fixation()
        self.assertLess(time.time() - 60, records.last_fixation())
        self.assertEqual([], records.all_uuids())
        (self.directory / 'state/protected/last-fixation').write_text('x')
        self.assertEqual(0.0, records.last_fixation())

    def test_of_the_version_before(self) -> None:
        """It knew one name of before, and no date."""
        self.enter(State.RUNS)
        path = self.directory / f'state/protected/{UUID}.json'
        good = path.read_text()
        for text, before in (('"c1"', {'c1': ''}), ('""', {})):
            path.write_text(good.replace('"before": {}', f'"before": {text}'))
            found = records.read(UUID)
            assert found is not None
            self.assertEqual(before, found.before)

    def test_what_is_no_record(self) -> None:
        self.enter(State.FIXATED)
        path = self.directory / f'state/protected/{UUID}.json'
        self.assertEqual(0o644, os.stat(path).st_mode & 0o777)  # nova-compute reads it
        good = path.read_text()
        for text in (
            '',
            '[]',
            'x',
            good.replace('fixated', 'gone'),
            good.replace('"durable": 0', '"durable": "0"'),
            good.replace('"reason"', '"why"'),
            good.replace('"before": {}', '"before": {"c": 1}'),
            good.replace('"before": {}', '"before": []'),
        ):
            path.write_text(text)
            error = self.assertRaises(exception.StateInvalid, records.read, UUID)
            self.assertIn(f'{path}', str(error))
            self.assertIn('delete the file', str(error))
