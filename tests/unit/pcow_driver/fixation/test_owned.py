# SPDX-License-Identifier: Apache-2.0
"""VMs that another program starts; a real one is in tests/functional/test_openstack_persist."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

from pcow_driver.common import boot_id
from pcow_driver.common import exception
from pcow_driver.fixation import overview
from pcow_driver.fixation import owned
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.images import image
from pcow_driver.vm import checkpoint
from tests.unit.pcow_driver.fixation import entered
from tests.unit.pcow_driver.fixation import test_recover
from tests.unit.pcow_driver.vm import recorded

State = records.State
BEFORE = 'otherboot/7-1'  # a run of before the host was started


class OwnedTest(test_recover.RecoveryCase):
    def setUp(self) -> None:
        super().setUp()
        self.here = f'{boot_id.current()}/7-1'
        self.policy: policy.Policy | None = policy.Policy(owner='nova-compute')
        self.killed = self.has_run = self.paused = self.saved = False
        self.order = list[str]()
        kind = type(self.found)
        for where, name, new in (
            (policy, 'get', lambda _found: self.policy),
            (policy, 'write', self.write_policy),
            (kind, 'was_killed', lambda _found: self.killed),
            (kind, 'saved', lambda _found: self.saved),
            (kind, 'has_run', lambda _found: self.has_run),
            (kind, 'paused_on_purpose', lambda _found: self.paused),
            (kind, 'resume', lambda _found: self.order.append('run')),
            (checkpoint, 'revert', lambda _found, name: self.order.append(f'revert {name}')),
        ):
            self.begin(mock.patch.object(where, name, new=new))

    def write_policy(self, _found: Any, wanted: policy.Policy | None) -> None:
        self.policy = wanted
        self.order.append('policy')

    def enter(self, state: State = State.FIXATED, run: str = BEFORE, **fields: Any) -> None:
        entered.enter(recorded.UUID, records.Record(state, run=run, **fields))

    def test_pending(self) -> None:
        """After a boot of the host, whatever it was then, but what was given up."""
        for state in State:
            for run in (BEFORE, self.here):
                self.enter(state, run)
                self.assertEqual(
                    run == BEFORE and state is not State.FAILED,
                    owned.pending(self.found) is not None,
                    f'{state} {run}',
                )
        self.enter()
        self.recorded.active = True
        self.assertIsNone(owned.pending(self.found))
        self.paused = True  # a start that was cut off
        self.assertIsNotNone(owned.pending(self.found))
        self.has_run = True
        self.assertIsNone(owned.pending(self.found))
        self.recorded.active, self.saved = False, True
        self.assertIsNone(owned.pending(self.found))

    def test_left_by_its_owner(self) -> None:
        """And not by the loop, which may still be at it."""
        self.recorded.active = self.paused = True
        self.assertTrue(owned.is_left(self.found))
        for run, expected in ((BEFORE, True), (self.here, False)):
            self.enter(State.RECOVERING, run)
            self.assertEqual(expected, owned.is_left(self.found))

    def test_nothing_is_pending(self) -> None:
        self.assertIsNone(owned.pending(self.found))
        self.enter()
        self.policy = policy.Policy(owner='nova-compute', over=BEFORE)
        self.assertIsNone(owned.pending(self.found))
        self.policy = None
        self.assertIsNone(owned.pending(self.found))

    def test_go_on(self) -> None:
        """It is used up before its guest runs."""
        self.data_size = 0
        self.keep_unsaved()
        self.enter(checkpoint=self.last)
        record = owned.pending(self.found)
        assert record is not None
        self.assertEqual(self.last, owned.start(self.found, record))
        self.assertEqual([(self.last, False)], self.reverted)
        self.assertIsNotNone(owned.pending(self.found))
        owned.run(self.found, record)
        self.assertEqual(['policy', 'run'], self.order)
        self.assertIsNone(owned.pending(self.found))

    def test_go_on_paused(self) -> None:
        self.enter(paused=True)
        record = owned.pending(self.found)
        assert record is not None
        owned.run(self.found, record)
        self.assertEqual(['policy'], self.order)

    def test_a_start_that_was_cut_off(self) -> None:
        """What was unsaved is kept: its images are where it goes on."""
        self.enter(checkpoint=self.last)
        self.recorded.active = self.paused = True
        record = owned.pending(self.found)
        assert record is not None
        self.assertEqual(self.last, owned.start(self.found, record))
        self.assertEqual([f'revert {self.last}'], self.order)
        self.assertEqual([], self.unsaved())

    def test_what_was_unsaved(self) -> None:
        """Of a start that failed it stays, and that of an earlier run goes."""
        old, name = recorded.SECOND, f'{recover.UNSAVED}20261128T015513221Z'
        for since, gone in ((old + 100, 1), (old - 100, 0)):
            self.log.unlink(missing_ok=True)
            self.write([], [recorded.snapshot(1, name)])
            self.enter(State.RUNS, since=float(since))
            record = owned.pending(self.found)
            assert record is not None
            with mock.patch.object(image, 'snapshot_create', new=self.add):
                owned.start(self.found, record)
            self.assertEqual(gone, sum(name in line for line in self.logged()), str(since))

    def add(self, _path: str, name: str) -> None:
        (old,) = image.snapshot_list(str(self.nvdimm))
        self.write([], [recorded.snapshot(1, old.name), recorded.snapshot(2, name)])

    def test_note_over(self) -> None:
        owned.note_over(self.found)
        self.assertEqual([], self.order)
        self.enter(run=self.here)
        owned.note_over(self.found)
        self.assertEqual(policy.Policy(owner='nova-compute', over=self.here), self.policy)

    def test_held(self) -> None:
        """Its owner waits while somebody else has it go on, or the host goes down."""
        for state, run, active, killed, expected in (
            (State.FIXATED, self.here, False, False, True),
            (State.FIXATED, self.here, True, False, True),
            (State.FIXATING, self.here, True, False, True),
            (State.RECOVERING, self.here, False, False, True),
            (State.RUNS, self.here, False, True, True),
            (State.RUNS, self.here, False, False, False),  # somebody has ended it
            (State.RUNS, self.here, True, False, False),
            (State.FAILED, self.here, False, True, False),
            (State.FIXATED, BEFORE, False, False, False),
            (State.RUNS, BEFORE, False, True, False),
        ):
            self.enter(state, run)
            self.recorded.active, self.killed = active, killed
            self.assertEqual(expected, owned.is_held(self.found), f'{state} {run} {active}')
        self.enter(State.FIXATED, self.here, paused=True)
        self.assertFalse(owned.is_held(self.found))
        self.enter(State.FIXATED, self.here)
        self.policy = None  # it was stopped since
        self.assertFalse(owned.is_held(self.found))

    def test_what_people_are_shown(self) -> None:
        wanted = policy.Policy(owner='nova-compute')
        for run, over, expected in (
            (BEFORE, '', 'ended, nova-compute has it go on'),
            (BEFORE, BEFORE, 'off'),
            (self.here, '', 'fixated'),
        ):
            record = records.Record(State.FIXATED, run=run)
            has = dataclasses.replace(wanted, over=over)
            self.assertEqual(expected, overview._state(self.found, record, has))

    def test_last_moment_of_a_killed_one(self) -> None:
        """As of any other VM: none of before its run."""
        self.enter(State.RUNS, before={one.name: one.date.isoformat() for one in self.there})
        record = owned.pending(self.found)
        assert record is not None
        error = self.assertRaises(exception.DomainInvalid, owned.start, self.found, record)
        self.assertIn('no checkpoint of its last run', str(error))
        self.assertEqual([], self.reverted)
