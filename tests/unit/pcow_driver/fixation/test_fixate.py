# SPDX-License-Identifier: Apache-2.0
"""In which order, and until when; real guests are in tests/functional/test_virsh_fixation."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.fixation import fixate
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.fixation import entered

TAKEN = model.Taken(pause=1, durable=5 * 10**9, state_size=3)


class _Domain:
    """What is asked of a domain, by name."""

    policies: dict[str, policy.Policy | None] = {}
    calls: list[tuple[str, str]] = []
    off: set[str] = set()
    crashed: set[str] = set()
    paused: set[str] = set()

    def __init__(self, _connection: Any, name: str) -> None:
        if name not in self.policies:
            raise exception.LibvirtFailed(uri='x', reason='no domain with matching name')
        self.name, self.uuid = name, f'uuid-{name}'

    def active(self) -> bool:
        return self.name not in self.off

    def running(self) -> bool:
        return ('suspend', self.name) not in self.calls and self.name not in self.paused

    def process(self) -> str:
        return '7'

    def is_whole(self) -> bool:
        return self.name not in self.crashed

    def paused_on_purpose(self) -> bool:
        return self.name in self.paused

    def qmp(self, command: str, **_arguments: str) -> None:
        self.calls.append((command, self.name))

    def suspend(self) -> None:
        self.calls.append(('suspend', self.name))

    def resume(self) -> None:
        self.calls.append(('resume', self.name))

    def destroy(self) -> None:
        self.calls.append(('destroy', self.name))


class FixationTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        _Domain.policies = {
            'low': policy.Policy(priority=-1),
            'b': policy.Policy(),
            'plain': None,
            'stop': policy.Policy(on_shutdown=policy.STOP),
            'a': policy.Policy(),
            'high': policy.Policy(priority=9),
            'off': policy.Policy(),
        }
        _Domain.calls, _Domain.off = [], {'off'}
        self.hanging = threading.Event()
        self.addCleanup(self.hanging.set)
        for target, new in (
            ('virt.domain.Domain', _Domain),
            ('virt.libvirt_host.connect', contextlib.nullcontext),
            ('virt.libvirt_host.errors', contextlib.nullcontext),
            ('vm.tree.checkpoints', lambda _found: []),
            ('virt.libvirt_host.names_of_all', lambda _none: [*_Domain.policies, 'gone']),
            ('fixation.policy.get', lambda found: _Domain.policies[found.name]),
        ):
            self.patch_module(target, new)

    def patch_module(self, target: str, new: Any) -> None:
        patched = mock.patch(f'pcow_driver.{target}', new=new)
        patched.start()
        self.addCleanup(patched.stop)

    def take(self, found: Any, name: str, *, last: bool) -> model.Taken:
        self.assertTrue(last)
        if found.name == 'b':
            self.hanging.wait()
        if found.name == 'low':
            raise exception.QmpFailed(command='x', error_class='y', description='a disk is slow')
        _Domain.calls.append(('take', found.name))
        return TAKEN

    def test_which_and_in_which_order(self) -> None:
        """One that goes meanwhile, or is off, is none."""
        self.assertEqual(['high', 'a', 'b', 'low'], fixate.wanted())

    def test_nothing_runs_behind_its_last_checkpoint(self) -> None:
        with mock.patch.object(checkpoint, 'take', new=self.take):
            done = fixate.fixate(_Domain(None, 'a'))  # type: ignore[arg-type]
        self.assertEqual(
            ['suspend', 'take', 'pcow-checkpoint-at-signal', 'destroy'],
            [call for call, name in _Domain.calls if name == 'a'],
        )
        record = records.read('uuid-a')
        assert record is not None
        self.assertEqual(
            (records.State.FIXATED, done.checkpoint, TAKEN.durable, False),
            (record.state, record.checkpoint, record.durable, record.paused),
        )

    def test_what_cannot_be_kept_runs_on(self) -> None:
        with mock.patch.object(checkpoint, 'take', new=self.take):
            (done,) = fixate.fixate_all(['low'])
        self.assertIn('a disk is slow', done.problem)
        self.assertEqual([('suspend', 'low'), ('resume', 'low')], _Domain.calls)
        record = records.read('uuid-low')
        assert record is not None
        self.assertEqual(records.State.RUNS, record.state)

    def test_a_qemu_that_cannot_be_asked(self) -> None:
        """It ends all the same, and may keep one moment more."""
        error = exception.LibvirtFailed(uri='x', reason='cannot acquire state change lock')
        with (
            mock.patch.object(checkpoint, 'take', new=self.take),
            mock.patch.object(_Domain, 'qmp', side_effect=error),
        ):
            (done,) = fixate.fixate_all(['a'])
        self.assertEqual(('', ('destroy', 'a')), (done.problem, _Domain.calls[-1]))

    def test_no_moment_to_go_on_from(self) -> None:
        """It has crashed: before, or so lately that libvirt does not know; it does not run on."""
        _Domain.crashed = {'a'}
        self.addCleanup(_Domain.crashed.clear)
        self.addCleanup(setattr, _Domain, 'paused', set())
        for known in (True, False):
            _Domain.paused = {'a'} if known else set()
            (done,) = fixate.fixate_all(['a'])
            self.assertIn('it has crashed', done.problem)
            self.assertEqual([] if known else [('suspend', 'a')], _Domain.calls)
        record = records.read('uuid-a')
        assert record is not None
        self.assertEqual(records.State.RUNS, record.state)

    def paused_of(self, name: str) -> bool:
        found = records.read(f'uuid-{name}')
        assert found is not None
        return found.paused

    def test_one_that_was_cut_off_is_repeated(self) -> None:
        """It was that which has stopped the guest, and nobody else."""
        _Domain.paused = {'a'}
        self.addCleanup(_Domain.paused.clear)
        run = runs.current(_Domain(None, 'a'))  # type: ignore[arg-type]
        for state in (records.State.FIXATING, records.State.FIXATED):
            for paused in (False, True):
                entered.enter('uuid-a', records.Record(state, run=run, paused=paused))
                with mock.patch.object(checkpoint, 'take', new=self.take):
                    (done,) = fixate.fixate_all(['a'])
                self.assertEqual(('', paused), (done.problem, self.paused_of('a')))
        # that of another run says nothing, nor does one that came to its end
        for record in (
            records.Record(records.State.FIXATED, run='another'),
            records.Record(records.State.RUNS, run=run),
        ):
            entered.enter('uuid-a', record)
            with mock.patch.object(checkpoint, 'take', new=self.take):
                (done,) = fixate.fixate_all(['a'])
            self.assertEqual(('', True), (done.problem, self.paused_of('a')))

    def test_one_that_is_about_to_go_on(self) -> None:
        """Its QEMU is not at the checkpoint yet; one that runs was booted by somebody."""
        self.addCleanup(setattr, _Domain, 'paused', set())
        record = records.Record(records.State.RECOVERING, checkpoint='c')
        for paused, problem in ((True, 'about to go on'), (False, '')):
            _Domain.paused = {'a'} if paused else set()
            entered.enter('uuid-a', record)
            with mock.patch.object(checkpoint, 'take', new=self.take):
                (done,) = fixate.fixate_all(['a'])
            self.assertIn(problem, done.problem)
            if paused:
                self.assertEqual(([], record), (_Domain.calls, records.read('uuid-a')))

    def test_a_qemu_that_does_not_end(self) -> None:
        """Nothing runs behind the checkpoint."""

        def destroy(_found: _Domain) -> None:
            raise exception.LibvirtFailed(uri='x', reason='Device or resource busy')

        with (
            mock.patch.object(checkpoint, 'take', new=self.take),
            mock.patch.object(_Domain, 'destroy', new=destroy),
        ):
            (done,) = fixate.fixate_all(['a'])
        self.assertIn('busy', done.problem)
        self.assertNotIn(('resume', 'a'), _Domain.calls)
        record = records.read('uuid-a')
        assert record is not None
        self.assertEqual(records.State.FIXATED, record.state)

    def test_one_of_which_an_answer_makes_no_sense(self) -> None:
        """It does not keep the others from being done."""

        def take(found: Any, name: str, *, last: bool) -> model.Taken:
            if found.name == 'high':
                raise AttributeError('an int has no get')
            return self.take(found, name, last=last)

        names = ['high', 'a']
        with mock.patch.object(checkpoint, 'take', new=take):
            done = {one.name: one for one in fixate.fixate_all(names)}
        self.assertIn('an int has no get', done['high'].problem)
        self.assertEqual('', done['a'].problem)

    def test_that_there_was_one_is_known(self) -> None:
        """By who sees what becomes of those that were not done."""
        begun = time.time()
        self.assertEqual([], [*fixate.fixate_all([])])
        self.assertEqual(0.0, records.last_fixation())
        with mock.patch.object(checkpoint, 'take', new=self.take):
            (_done,) = fixate.fixate_all(['low'])
        self.assertLessEqual(begun, records.last_fixation())

    def test_one_that_hangs_keeps_nobody_waiting(self) -> None:
        records.write('uuid-high', records.Record(records.State.RUNS, durable=10**12))
        begun = time.monotonic()
        with mock.patch.object(checkpoint, 'take', new=self.take):
            done = {one.name: one for one in fixate.fixate_all(['high', 'b', 'a'], 2.0)}
        self.assertLess(time.monotonic() - begun, 60)
        self.assertEqual('', done['a'].problem)
        self.assertIn('not done in time', done['b'].problem)
        self.assertIn('no time for it', done['high'].problem)
        self.hanging.set()
        for thread in threading.enumerate():
            if thread.daemon:
                thread.join()
