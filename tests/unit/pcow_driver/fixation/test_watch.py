# SPDX-License-Identifier: Apache-2.0
"""What the loop does for a domain in each state; a real libvirt is in
tests/functional/test_virsh_fixation.
"""

from __future__ import annotations

import itertools
import time
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.fixation import watch
from pcow_driver.vm import model
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.fixation import entered

UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
State = records.State
TAKEN = model.Taken(pause=1, durable=5 * 10**6, state_size=3)


class _Domain:
    """What is asked of a domain."""

    name, uuid = 'web1', UUID

    def __init__(self) -> None:
        self.is_active, self.is_running, self.on_purpose = True, True, False
        self.is_paused = False
        self.run, self.asked = 1, list[tuple[str, dict[str, str]]]()
        self.policy: policy.Policy | None = policy.Policy(interval=1)

    def active(self) -> bool:
        return self.is_active

    def running(self) -> bool:
        return self.is_running

    def run_id(self) -> int:
        return self.run

    def qmp(self, command: str, **arguments: str) -> None:
        self.asked.append((command, arguments))

    def resume(self) -> None:
        self.asked.append(('resume', {}))
        self.is_running = True

    def autostart(self) -> bool:
        return False

    def paused_on_purpose(self) -> bool:
        return self.is_paused

    def stopped_on_purpose(self) -> bool:
        return self.on_purpose


class WatchTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.found: Any = _Domain()
        self.watch = watch.Watch()
        self.now = 1000.0
        self.done = list[str]()
        self.fails = False
        for target, action in (
            ('automatic.take', self.take),
            ('automatic.thin', lambda _found: None),
            ('recover.recover', lambda _found, _record: self.done.append('recover')),
            ('fixate.finish', lambda _found: self.done.append('destroy')),
            ('policy.get', lambda found: found.policy),
        ):
            patched = mock.patch(f'pcow_driver.fixation.{target}', new=action)
            patched.start()
            self.addCleanup(patched.stop)
        patched = mock.patch.object(time, 'monotonic', new=lambda: self.now)
        patched.start()
        self.addCleanup(patched.stop)

    def take(self, _found: Any, _prefix: str) -> tuple[str, model.Taken]:
        if self.fails:
            raise exception.QmpFailed(command='x', error_class='y', description='no')
        self.done.append('take')
        return f'c{len(self.done)}', TAKEN

    def enter(self, state: State | None, **fields: Any) -> None:
        records.forget(UUID)
        if state is not None:
            entered.enter(UUID, records.Record(state, **fields))

    def state(self) -> State | None:
        found = records.read(UUID)
        return None if found is None else found.state

    def look(self) -> list[str]:
        self.done.clear()
        self.watch.look(self.found)
        return list(self.done)

    def test_off(self) -> None:
        """What is done, and the state then, of each state and how it ended."""
        self.found.is_active = False
        expected = {
            (State.RUNS, False): (['recover'], State.RUNS),
            (State.RUNS, True): ([], None),
            (State.FIXATING, False): (['recover'], State.FIXATING),
            (State.FIXATING, True): (['recover'], State.FIXATING),
        }
        for state, purpose in itertools.product((None, *State), (False, True)):
            self.enter(state)
            self.found.on_purpose = purpose
            self.assertEqual(
                expected.get((state, purpose), ([], state)),
                (self.look(), self.state()),
                f'{state} {purpose}',
            )

    def test_active(self) -> None:
        """A QEMU that nobody has seen is a new run; of a known one only the loop's states count."""
        for state in (None, *State):
            self.enter(state)
            self.now += 100
            self.assertEqual((['take'], State.RUNS), (self.look(), self.state()), str(state))
        run = runs.current(self.found)
        for state, expected in (
            (State.RUNS, (['take'], State.RUNS)),
            (State.FIXATED, (['destroy'], State.FIXATED)),  # it did not end
            (State.FAILED, ([], State.FAILED)),
        ):
            self.enter(state, run=run)
            self.now += 100
            self.assertEqual(expected, (self.look(), self.state()), str(state))

    def test_a_fixation_that_was_killed(self) -> None:
        for paused in (False, True):
            self.enter(State.FIXATING, run=runs.current(self.found), paused=paused)
            self.found.is_running, self.found.asked = False, []
            self.assertEqual(([], State.RUNS), (self.look(), self.state()))
            self.assertEqual([] if paused else [('resume', {})], self.found.asked)

    def test_not_protected_any_more(self) -> None:
        self.found.policy = None
        for active in (True, False):
            self.found.is_active = active
            self.enter(State.RUNS)
            self.assertEqual(([], None), (self.look(), self.state()))
        self.assertEqual([('pcow-checkpoint-at-signal', {})], self.found.asked)

    def test_pause_is_remembered(self) -> None:
        self.look()
        for paused in (True, False):
            self.found.is_paused, self.found.is_running = paused, not paused
            self.look()
            found = records.read(UUID)
            assert found is not None
            self.assertEqual(paused, found.paused)

    def test_it_has_run_for_long(self) -> None:
        for seconds, tries in ((0, 2), (601, 0)):
            self.enter(
                State.RUNS, run=runs.current(self.found), since=time.time() - seconds, tries=2
            )
            self.now += 100
            self.look()
            found = records.read(UUID)
            assert found is not None
            self.assertEqual((tries, 'c1'), (found.tries, found.checkpoint))

    def test_when_one_is_taken(self) -> None:
        self.assertEqual(['take'], self.look())
        found = records.read(UUID)
        assert found is not None
        self.assertEqual(('c1', TAKEN.durable), (found.checkpoint, found.durable))
        self.now += 0.9
        self.assertEqual([], self.look())
        self.now += 0.2
        self.assertEqual(['take'], self.look())
        self.found.policy = policy.Policy(interval=policy.AUTO)
        self.now += 9
        self.assertEqual([], self.look())
        self.now += 1.1
        self.found.is_running = False  # somebody has paused it: it is what it was
        self.assertEqual([], self.look())
        self.found.is_running = True
        self.assertEqual(['take'], self.look())
        self.found.policy = policy.Policy(interval=policy.OFF)
        self.now += 1000
        self.assertEqual([], self.look())

    def test_one_that_fails_is_tried_later(self) -> None:
        self.fails = True
        self.assertRaises(exception.QmpFailed, self.watch.look, self.found)
        self.fails = False
        self.now += 59
        self.assertEqual([], self.look())
        self.now += 2
        self.assertEqual(['take'], self.look())
        self.now += 1.1
        self.assertEqual(['take'], self.look())

    def test_its_qemu_keeps_the_last_moment(self) -> None:
        """Each one is told once, and again when the policy changes."""
        command = 'pcow-checkpoint-at-signal'
        self.look()
        self.look()
        self.assertEqual([(command, {'prefix': 'pcow-fixation-'})], self.found.asked)
        self.found.run = 2
        self.look()
        self.assertEqual(2, len(self.found.asked))
        self.found.is_active = False  # libvirt begins anew with its numbers
        self.look()
        self.found.is_active = True
        self.look()
        self.assertEqual(3, len(self.found.asked))
        self.found.policy = policy.Policy(on_shutdown=policy.STOP)
        self.look()
        self.assertEqual((command, {}), self.found.asked[-1])

    def test_nothing_begins_when_it_ends(self) -> None:
        self.enter(State.RUNS)
        self.found.is_active = False
        self.watch.end()
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))
