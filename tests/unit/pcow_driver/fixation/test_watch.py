# SPDX-License-Identifier: Apache-2.0
"""What the loop does for a domain in each state; a real libvirt is in
tests/functional/test_virsh_fixation.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.fixation import runs
from pcow_driver.fixation import watch
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import model
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.fixation import entered

UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
State = records.State
_MONOTONIC = time.monotonic
TAKEN = model.Taken(pause=1, durable=5 * 10**6, state_size=3)


class _Domain:
    """What is asked of a domain."""

    name, uuid = 'web1', UUID

    def __init__(self) -> None:
        self.is_active, self.is_running, self.on_purpose = True, True, False
        self.is_paused = self.is_saved = False
        self.starts, self.cut_off = False, False
        self.was_run, self.killed = True, True
        self.run, self.asked = 1, list[tuple[str, dict[str, str]]]()
        self.crashed = False
        self.policy: policy.Policy | None = policy.Policy(interval=1)
        self.copied = [0, 7]  # pages of each image; QEMU is asked for them
        self.queries = 0

    def active(self) -> bool:
        return self.is_active

    def running(self) -> bool:
        return self.is_running

    def libvirt_id(self) -> int:
        return self.run

    def process(self) -> str:
        return f'process-{self.run}'

    def is_whole(self) -> bool:
        return not self.crashed

    def saved(self) -> bool:
        return self.is_saved

    def qmp(self, command: str, **arguments: str) -> None:
        self.asked.append((command, arguments))

    def writable(self) -> list[str]:
        return []

    def query(self) -> list[dict[str, Any]]:
        self.queries += 1
        return [{'stats': {'pages-copied': pages}} for pages in self.copied]

    def resume(self) -> None:
        self.asked.append(('resume', {}))
        self.is_running = True

    def autostart(self) -> bool:
        return False

    def paused_on_purpose(self) -> bool:
        return self.is_paused

    def is_starting(self) -> bool:
        return self.starts

    def stopped_on_purpose(self) -> bool:
        return self.on_purpose

    def has_run(self) -> bool:
        return self.was_run

    def was_killed(self) -> bool:
        return self.killed


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
            ('recover.recover', self.recover),
            ('recover.finish', self.finish),
            ('recover.is_cut_off', lambda found, _record: found.cut_off),
            ('runs.tree.checkpoints', lambda _found: []),
            ('fixate.finish', lambda _found: self.done.append('destroy')),
            ('policy.get', lambda found: found.policy),
        ):
            patched = mock.patch(f'pcow_driver.fixation.{target}', new=action)
            patched.start()
            self.addCleanup(patched.stop)
        patched = mock.patch.object(time, 'monotonic', new=lambda: self.now)
        patched.start()
        self.addCleanup(patched.stop)

    def recover(
        self, _found: Any, record: records.Record, _wanted: policy.Policy
    ) -> recover.Result:
        self.done.append('recover')
        return recover.Result(name='web1', checkpoint=record.checkpoint, age=0, time=0)

    def finish(self, _found: Any, _record: records.Record, _wanted: policy.Policy) -> None:
        self.done.append('finish')
        if self.fails:
            raise exception.QmpFailed(command='x', error_class='y', description='no')

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
            (State.FIXATING, True): ([], None),
            # it was off by what was done before
            (State.RECOVERING, False): (['recover'], State.RECOVERING),
            (State.RECOVERING, True): (['recover'], State.RECOVERING),
        }
        for state, purpose in itertools.product((None, *State), (False, True)):
            self.now += 100
            self.enter(state, run=runs.current(self.found))
            self.found.on_purpose = purpose
            self.assertEqual(
                expected.get((state, purpose), ([], state)),
                (self.look(), self.state()),
                f'{state} {purpose}',
            )
        self.found.is_saved = True  # libvirt has it go on
        self.enter(State.RUNS)
        self.assertEqual(([], None), (self.look(), self.state()))

    def test_a_recovery_that_fails_is_tried_later(self) -> None:
        self.found.is_active = False
        for seconds, expected in ((0, ['recover']), (59, []), (2, ['recover'])):
            self.now += seconds
            self.enter(State.RECOVERING)
            self.assertEqual(expected, self.look())
        self.enter(State.RECOVERING, checkpoint='c')
        self.now += 61
        self.assertEqual(['recover'], self.look())
        self.assertEqual(['recover'], self.look())  # that one went well

    def test_a_qemu_that_was_left_is_finished_later(self) -> None:
        self.fails = self.found.cut_off = True
        self.enter(State.RECOVERING)
        self.assertRaises(exception.QmpFailed, self.watch.look, self.found)
        self.now += 59
        self.assertEqual([], self.look())
        self.fails = False
        self.now += 2
        self.assertEqual(['finish'], self.look())
        self.assertEqual(['finish'], self.look())  # the next one, at once

    def test_its_owner_starts_what_could_not_go_on(self) -> None:
        """Within the minute in which that is not tried again: it is not taken back to a checkpoint
        when he ends it.
        """
        self.found.is_active = False
        self.enter(State.RECOVERING, checkpoint='c', kept=True)
        self.assertEqual(['recover'], self.look())
        self.watch._recovered[UUID] = self.now  # that one failed
        self.found.is_active = self.found.starts = True
        self.assertEqual(([], State.RECOVERING), (self.look(), self.state()))
        self.found.starts = False
        self.assertEqual((['take'], State.RUNS), (self.look(), self.state()))
        self.found.is_active, self.found.on_purpose = False, True
        self.assertEqual(([], None), (self.look(), self.state()))

    def test_a_fixation_that_it_has_outlived(self) -> None:
        self.enter(State.RUNS)
        self.look()
        records.note_fixation()
        begun = records.last_fixation()
        for seconds, goes_down, expected in (
            (60, False, 0.0),
            (watch._STAYS_UP + 1, True, 0.0),
            (watch._STAYS_UP + 2, False, begun),
            (watch._STAYS_UP + 3, True, begun),
        ):
            with (
                mock.patch.object(time, 'time', new=lambda seconds=seconds: begun + seconds),
                mock.patch.object(watch, '_host_goes_down', new=lambda goes=goes_down: goes),
            ):
                self.look()
            found = records.read(UUID)
            assert found is not None
            self.assertEqual(expected, found.outlived)

    def test_active(self) -> None:
        """A QEMU that nobody has seen is a new run; of a known one only the loop's states count."""
        for state in (None, *State):
            self.enter(state)
            self.now += 100
            self.assertEqual((['take'], State.RUNS), (self.look(), self.state()), str(state))
        run = runs.current(self.found)
        for state in (State.RUNS, State.FIXATED, State.FAILED):
            self.enter(state, run=run)
            self.now += 100
            self.assertEqual((['take'], State.RUNS), (self.look(), self.state()), str(state))

    def test_a_fixated_qemu_that_did_not_end(self) -> None:
        self.enter(State.FIXATED, run=runs.current(self.found))
        self.found.is_running = False
        self.assertEqual((['destroy'], State.FIXATED), (self.look(), self.state()))
        self.found.run += 1  # its owner has started it, paused
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))

    def test_a_fixation_that_was_killed(self) -> None:
        for paused in (False, True):
            self.enter(State.FIXATING, run=runs.current(self.found), paused=paused)
            self.found.is_running, self.found.asked = False, []
            self.assertEqual(([], State.RUNS), (self.look(), self.state()))
            self.assertEqual([] if paused else [('resume', {})], self.found.asked)

    def test_a_fixation_that_was_killed_of_a_guest_that_has_crashed(self) -> None:
        self.enter(State.FIXATING, run=runs.current(self.found))
        self.found.is_running, self.found.crashed = False, True
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))
        self.assertEqual([], self.found.asked)

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
        self.found.policy = policy.Policy(interval=policy.OFF)
        for seconds, tries in ((0, 2), (601, 0)):
            self.enter(
                State.RUNS, run=runs.current(self.found), since=time.time() - seconds, tries=2
            )
            self.look()
            found = records.read(UUID)
            assert found is not None
            self.assertEqual(tries, found.tries)  # also without a checkpoint

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

    def test_auto_knows_what_the_guest_pays(self) -> None:
        """20 s are 3 % of 85,714 pages; until then QEMU is not asked again for nothing."""
        self.found.policy = policy.Policy(interval=policy.AUTO)
        self.assertEqual((['take'], 1), (self.look(), self.found.queries))
        self.now += 9
        self.assertEqual(([], 1), (self.look(), self.found.queries))
        self.found.copied[0] += 85_715
        self.now += 2
        self.assertEqual(([], 2), (self.look(), self.found.queries))
        self.now += 8
        self.assertEqual(([], 2), (self.look(), self.found.queries))
        self.now += 2
        self.assertEqual((['take'], 3), (self.look(), self.found.queries))
        self.now += 10.1  # none since
        self.assertEqual((['take'], 4), (self.look(), self.found.queries))
        self.found.copied[0] += 10**9
        self.now += 10.1
        self.assertEqual([], self.look())
        self.found.run, self.found.copied = 2, [0, 0]  # it counts anew, whatever the last one paid
        self.now += 10.1
        self.assertEqual(['take'], self.look())

    def test_auto_when_qemu_does_not_tell(self) -> None:
        self.found.policy = policy.Policy(interval=policy.AUTO)
        self.found.copied = ['many']
        self.assertRaises(exception.ToolOutputInvalid, self.watch.look, self.found)
        self.found.copied = [1]
        self.now += 59
        self.assertEqual([], self.look())
        self.now += 2
        self.assertEqual(['take'], self.look())

    def test_one_that_fails_is_tried_later(self) -> None:
        self.fails = True
        self.assertRaises(exception.QmpFailed, self.watch.look, self.found)
        # room for the last one is kept from then on
        self.assertEqual(
            [('pcow-checkpoint-at-signal', {'prefix': 'pcow-fixation-'})], self.found.asked
        )
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
        # it was to end, was told to keep none, and somebody had it run on
        self.enter(State.FIXATED, run=runs.current(self.found))
        self.look()
        self.assertEqual(4, len(self.found.asked))
        self.found.policy = policy.Policy(on_shutdown=policy.STOP)
        self.look()
        self.assertEqual((command, {}), self.found.asked[-1])

    def test_the_host_was_started_again(self) -> None:
        """What was fixated goes on; in one that has not gone down yet it stays off."""
        self.found.is_active = False
        for run, expected in ((runs.current(self.found), []), ('otherboot/7-1', ['recover'])):
            self.enter(State.FIXATED, run=run, checkpoint='c')
            self.assertEqual(expected, self.look())
        self.enter(State.FIXATED, run='otherboot/7-1', checkpoint='c')
        self.watch.end()
        self.assertEqual([], self.look())

    def test_shut_down_as_it_was_not_fixated(self) -> None:
        """The host went down: it is not forgotten."""
        self.enter(State.RUNS, since=time.time() - 1)
        records.note_fixation()
        self.found.is_active, self.found.on_purpose = False, True
        self.watch.end()
        self.assertEqual(([], State.FAILED), (self.look(), self.state()))

    def test_host_that_goes_down(self) -> None:
        program = self.directory / 'systemctl'
        self.begin_path(str(self.directory))
        for said, code, expected in (
            ('running', 0, False),
            ('degraded', 1, False),
            ('stopping', 1, True),
            ('offline', 4, False),
        ):
            program.write_text(f'#!/bin/sh\necho {said}\nexit {code}\n')
            program.chmod(0o755)
            self.assertEqual(expected, watch._host_goes_down(), said)
        program.unlink()
        self.begin_path('/nowhere')
        watch._host_goes_down()  # that of this machine, or none

    def begin_path(self, path: str) -> None:
        patched = mock.patch.dict('os.environ', PATH=path)
        patched.start()
        self.addCleanup(patched.stop)

    def test_those_that_hang(self) -> None:
        """As many as work at once, and more, keep no other one waiting, nor the end."""
        loop, done = self.begin_with_hanging(2 * watch._THREADS, hangs=0.1)
        self.assertTrue(done.wait(30))
        self.watch.end()
        loop.join(30)
        self.assertFalse(loop.is_alive())

    def test_many_that_hang_when_it_ends(self) -> None:
        """It does not wait until they are known to hang."""
        loop, done = self.begin_with_hanging(100, hangs=watch._HANGS)
        self.assertFalse(done.wait(0.5))
        self.watch.end()
        loop.join(10)
        self.assertFalse(loop.is_alive())

    def begin_with_hanging(
        self, number: int, *, hangs: float
    ) -> tuple[threading.Thread, threading.Event]:
        """:return: the loop, and whether it has looked at the one behind those"""
        hanging, done = threading.Event(), threading.Event()
        self.addCleanup(hanging.set)

        def look(_watch: watch.Watch, found: Any) -> None:
            if found != 'last':
                hanging.wait()
            else:
                done.set()

        several = [f'web{number}' for number in range(number)]
        for where, name, new in (
            (time, 'monotonic', _MONOTONIC),
            (watch, '_HANGS', hangs),
            (watch, '_END', 0.1),
            (watch, 'PERIOD', 0.1),
            (watch.Watch, 'look', look),
            (
                libvirt_host,
                'names_by_uuid',
                lambda _none: {name: name for name in (*several, 'last')},
            ),
            (libvirt_host, 'connect', contextlib.nullcontext),
            (domain, 'Domain', lambda _none, name: name),
        ):
            patched = mock.patch.object(where, name, new=new)
            patched.start()
            self.addCleanup(patched.stop)
        loop = threading.Thread(target=self.watch.run, daemon=True)
        loop.start()
        return loop, done

    def owned(self, **fields: Any) -> None:
        """Another program starts it."""
        self.found.policy = policy.Policy(interval=1, owner='nova-compute', **fields)

    def test_of_an_owner_off(self) -> None:
        """Only what was killed goes on without him, before the host is started again."""
        self.owned()
        self.found.is_active = False
        here, before = runs.current(self.found), 'otherboot/7-1'
        for state, run, killed, purpose, expected in (
            (State.RUNS, here, True, False, ['recover']),
            (State.RUNS, here, False, False, []),
            (State.FIXATING, here, True, False, ['recover']),
            (State.RECOVERING, here, False, True, ['recover']),
            (State.FIXATED, here, False, True, []),
            (State.RUNS, before, True, False, []),
            (State.FIXATED, before, False, False, []),
            # his start has failed
            (State.FIXATED, before, False, True, []),
            (State.RUNS, before, False, True, []),
        ):
            self.now += 100
            self.found.killed, self.found.on_purpose = killed, purpose
            self.enter(state, run=run)
            self.assertEqual((expected, state), (self.look(), self.state()), f'{state} {run}')
        self.enter(State.RUNS, run=here)
        self.found.killed, self.found.on_purpose = False, True
        self.assertEqual(([], None), (self.look(), self.state()))
        self.owned(over=here)  # he has started it since, and nobody saw that
        self.enter(State.RUNS, run=here)
        self.found.killed, self.found.on_purpose = True, False
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))

    def test_of_an_owner_who_starts_it(self) -> None:
        """What it goes on with stays known until it runs, and is of another run from then on."""
        self.owned()
        self.enter(State.FIXATED, run='otherboot/7-1', checkpoint='c')
        self.found.is_running = self.found.was_run = False
        self.found.is_paused = True
        self.assertEqual(([], State.FIXATED), (self.look(), self.state()))
        self.found.was_run = True  # it is paused by somebody
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))
        self.found.is_running, self.found.is_paused = True, False
        self.assertEqual(['take'], self.look())
        found = records.read(UUID)
        assert found is not None
        self.assertEqual((runs.current(self.found), 'nova-compute'), (found.run, found.owner))

    def test_of_an_owner_whose_recovery_was_cut_off(self) -> None:
        self.owned()
        self.enter(State.RECOVERING, run=runs.current(self.found), kept=True)
        self.found.is_running = self.found.was_run = False
        self.found.cut_off = True
        self.assertEqual(['finish'], self.look())

    def test_of_an_owner_who_has_undefined_it(self) -> None:
        """Not at once; and what is pcow's own stays until its owner has looked."""
        connect = mock.patch('pcow_driver.virt.libvirt_host.connect', new=contextlib.nullcontext)
        known: dict[str, str] = {}
        names = mock.patch('pcow_driver.virt.libvirt_host.names_by_uuid', new=lambda _none: known)
        with connect, names:
            for owner, there, seconds, expected in (
                ('', {}, 100, State.RUNS),
                ('nova-compute', {}, 9, State.RUNS),
                ('nova-compute', {UUID: 'web1'}, 100, State.RUNS),
                ('nova-compute', {}, 11, None),
            ):
                known.clear()
                known.update(there)
                self.enter(State.RUNS, owner=owner)
                self.watch._gone.clear()
                with mock.patch.object(watch.Watch, 'look'), mock.patch.object(domain, 'Domain'):
                    self.watch._look_at_all()
                    self.now += seconds
                    self.watch._look_at_all()
                    self.watch._until = self.now + 10
                    self.watch._wait()
                self.assertEqual(expected, self.state(), f'{owner} {seconds}')

    def test_nothing_begins_when_it_ends(self) -> None:
        self.enter(State.RUNS)
        self.found.is_active = False
        self.watch.end()
        self.assertEqual(([], State.RUNS), (self.look(), self.state()))

    def test_the_last_look(self) -> None:
        """A guest that was shut down with the host is not to come back."""
        self.enter(State.RUNS)
        self.found.is_active, self.found.on_purpose = False, True
        self.watch.end()
        names = mock.patch(
            'pcow_driver.virt.libvirt_host.names_by_uuid', new=lambda _none: {UUID: 'web1'}
        )
        connect = mock.patch('pcow_driver.virt.libvirt_host.connect', new=contextlib.nullcontext)
        lookup = mock.patch('pcow_driver.virt.domain.Domain', new=lambda *_: self.found)
        with names, connect, lookup:
            self.watch.run()
        self.assertIsNone(self.state())
