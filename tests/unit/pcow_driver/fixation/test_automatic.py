# SPDX-License-Identifier: Apache-2.0

import datetime
import random
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.vm import recorded

NOON = datetime.datetime(2026, 11, 28, 12, tzinfo=datetime.UTC)


def taken(seconds: float, prefix: str = automatic.PERIODIC) -> model.Checkpoint:
    """One of so many seconds after noon."""
    date = NOON + datetime.timedelta(seconds=seconds)
    return model.Checkpoint(
        name=f'{prefix}{date:%Y%m%dT%H%M%S}{date.microsecond // 1000:03}Z',
        date=date,
        parent=None,
        current=False,
        state_size=1,
        data_size=0,
        shared_size=0,
        delete_frees=0,
    )


class ScheduleTest(base.TestCase):
    def kept(self, found: list[model.Checkpoint]) -> list[model.Checkpoint]:
        gone = automatic.surplus(found)
        return [one for one in found if one.name not in gone]

    def test_the_last_of_each_minute_and_each_hour(self) -> None:
        """A day and a half, each 10 s, thinned each time as the loop does it."""
        found = list[model.Checkpoint]()
        for second in range(0, 36 * 3600, 10):
            found = self.kept([*found, taken(second)])
            self.assertEqual(second, (found[-1].date - NOON).total_seconds())
        ages = [(found[-1].date - one.date).total_seconds() for one in reversed(found)]
        self.assertEqual([0, *range(60, 360, 60)], ages[:6])
        self.assertEqual([3600 * hour for hour in range(1, 24)], ages[6:])

    def test_others_stay(self) -> None:
        mine = [taken(second, 'mine-') for second in range(100)]
        self.assertEqual([], automatic.surplus(mine))
        self.assertFalse(automatic.is_own('pcow-auto-mine'))
        self.assertEqual(mine[-1], automatic.newest([taken(50), *mine]))
        self.assertIsNone(automatic.newest([]))

    def test_a_clock_that_was_put_back(self) -> None:
        found = [taken(second) for second in (7200, 7210, 0)]
        self.assertEqual(found[-1], automatic.newest(found))
        self.assertEqual([found[0].name], automatic.surplus(found))

    def test_any_gap(self) -> None:
        source = random.Random(7)
        for step in (1, 30, 3000):
            seconds = sorted(source.uniform(0, 500 * step) for _number in range(500))
            found = [taken(second) for second in seconds]
            kept = self.kept(found)
            self.assertLessEqual(len(kept), automatic.MINUTES + automatic.HOURS)
            self.assertIn(automatic.newest(found), kept)
            self.assertEqual(kept, self.kept(kept))

    def test_interval(self) -> None:
        for interval, durable, copied, seconds in (
            (policy.OFF, 0, 0, None),
            (7, 10**12, 10**9, 7.0),
            (policy.AUTO, 0, 0, 10.0),
            (policy.AUTO, 15 * 10**6, 10**4, 10.0),
            (policy.AUTO, 3 * 10**9, 0, 100.0),
            (policy.AUTO, 3 * 10**9, 300_000, 170.0),
            (policy.AUTO, 3 * 10**9, 10**9, 300.0),
        ):
            found = automatic.seconds_between(policy.Policy(interval=interval), durable, copied)
            self.assertEqual(seconds, found if found is None else round(found, 6))

    def test_names_tell_when(self) -> None:
        name = automatic.new_name(automatic.FIXATION)
        self.assertTrue(automatic.is_own(name))
        self.assertLess(name, automatic.FIXATION + '3')


class RoomTest(recorded.TestCase):
    """Where there is none, what need not be kept goes."""

    def setUp(self) -> None:
        super().setUp()
        self.there = [taken(second) for second in (0, 1, 2, 3000)]
        self.room_after = 0
        self.gone = list[str]()
        self.pinned = ''
        for name, action in (('take', self.take), ('delete', self.delete)):
            patched = mock.patch.object(checkpoint, name, new=action)
            patched.start()
            self.addCleanup(patched.stop)
        patched = mock.patch('pcow_driver.vm.tree.checkpoints', new=lambda _found: self.there)
        patched.start()
        self.addCleanup(patched.stop)

    def take(self, _found: Any, _name: str, *, last: bool) -> model.Taken:
        del last
        if len(self.gone) < self.room_after:
            raise exception.QmpFailed(
                command='pcow-checkpoint-create',
                error_class='GenericError',
                description='cannot store it: No space left on device',
            )
        return model.Taken(pause=1, durable=2, state_size=3)

    def delete(self, _found: Any, name: str) -> int:
        if name == self.pinned:
            raise exception.QmpFailed(command='x', error_class='y', description='a fork stands on')
        self.gone.append(name)
        return 0

    def take_one(self) -> None:
        automatic.take(self.found, automatic.PERIODIC)

    def test_there_is_room(self) -> None:
        self.take_one()
        self.assertEqual([], self.gone)

    def test_the_oldest_go_and_the_last_stays(self) -> None:
        self.room_after = 2
        self.take_one()
        self.assertEqual([self.there[0].name, self.there[1].name], self.gone)
        self.room_after, self.gone = 9, []
        self.assertRaises(exception.QmpFailed, self.take_one)
        self.assertEqual([one.name for one in self.there[:3]], self.gone)

    def test_one_that_a_fork_stands_on_stays(self) -> None:
        self.room_after, self.pinned = 2, self.there[1].name
        self.take_one()
        self.assertEqual([self.there[0].name, self.there[2].name], self.gone)

    def test_what_fails_otherwise_deletes_nothing(self) -> None:
        error = exception.QmpFailed(command='x', error_class='y', description='a disk is slow')
        with mock.patch.object(checkpoint, 'take', side_effect=error):
            self.assertRaises(exception.QmpFailed, self.take_one)
        self.assertEqual([], self.gone)
