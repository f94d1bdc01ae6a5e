# SPDX-License-Identifier: Apache-2.0
"""From what a VM goes on, and when it does not; real guests are in
tests/functional/test_virsh_fixation.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
import time
from typing import Any
from unittest import mock

from pcow_driver.common import boot_id
from pcow_driver.common import exception
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.fixation import runs
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree
from tests.unit.pcow_driver.fixation import entered
from tests.unit.pcow_driver.fixation import test_automatic
from tests.unit.pcow_driver.vm import recorded

State = records.State
_CHECKPOINTS = tree.checkpoints


class RecoveryCase(recorded.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.recorded.active = False
        older, last = (test_automatic.taken(second) for second in (0, 60))
        self.there = [older, dataclasses.replace(last, current=True)]
        self.last, self.older = last.name, older.name
        self.data_size = 4096
        self.fails = False
        self.wanted = policy.Policy()
        self.reverted = list[tuple[str | None, bool]]()
        self.arrived = list[str]()
        self.told = list[tuple[str, list[tuple[str | None, bool]]]]()  # of QEMU, and when
        self.connection: Any = self.recorded
        for where, name, new in (
            (checkpoint, 'start_at', self.start_at),
            (type(self.found), 'arrive', lambda found: self.arrived.append(found.name)),
            (libvirt_host, 'errors', contextlib.nullcontext),
            (libvirt_host, 'connect', lambda: contextlib.nullcontext(self.connection)),
            (runs, 'current', lambda _found: 'this run'),
            (at_signal, 'tell', lambda _found, word: self.told.append((word, self.reverted[:]))),
        ):
            self.begin(mock.patch.object(where, name, new=new))
        self.begin(mock.patch('pcow_driver.vm.tree.checkpoints', new=lambda _found: self.there))

    def begin(self, patched: Any) -> None:
        patched.start()
        self.addCleanup(patched.stop)

    def start_at(self, _found: Any, name: str | None, *, run: bool) -> str:
        if self.fails:
            raise exception.QmpFailed(command='x', error_class='y', description='another CPU')
        self.reverted.append((name, run))
        return name or 'older'

    def recover(self, state: State = State.RUNS, **fields: Any) -> recover.Result:
        records.forget(recorded.UUID)
        record = dataclasses.replace(records.Record(state, checkpoint=self.last), **fields)
        entered.enter(recorded.UUID, record)
        return recover.recover(self.found, record, self.wanted)

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


class RecoveryTest(RecoveryCase):
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

    def test_its_qemu_keeps_the_last_moment_again(self) -> None:
        self.keep_unsaved()
        self.recover(State.FIXATED)
        self.assertEqual([(policy.FIXATE, [(self.last, True)])], self.told)

    def test_a_qemu_that_keeps_no_last_moment(self) -> None:
        """It runs all the same, whoever has refused that."""
        for error in (
            exception.QmpFailed(command='x', error_class='y', description='older'),
            exception.LibvirtFailed(uri='x', reason='it has no lock'),
        ):
            self.keep_unsaved()
            with mock.patch.object(at_signal, 'tell', side_effect=error):
                done = self.recover(State.FIXATED)
            self.assertEqual((self.last, ''), (done.checkpoint, done.problem))
            self.assertIs(State.RUNS, self.record().state)

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
        done = self.recover(checkpoint='', before=self.dates())
        self.assertIn('virsh start web1 boots it', done.problem)
        self.assertEqual((State.FAILED, []), (self.record().state, self.reverted))

    def test_that_of_before_was_deleted(self) -> None:
        """The one before that is no moment of this run, either."""
        before = self.dates()
        self.there = [dataclasses.replace(self.there[0], current=True)]
        done = self.recover(checkpoint='', before=before)
        self.assertIn('virsh start web1 boots it', done.problem)
        self.assertEqual((State.FAILED, []), (self.record().state, self.reverted))

    def test_the_one_gone_on_from_was_deleted(self) -> None:
        self.keep_unsaved()
        self.recover()
        before = self.record().before
        self.there = [dataclasses.replace(self.there[0], current=True)]
        self.reverted.clear()
        done = self.recover(before=before)
        self.assertIn('virsh start web1 boots it', done.problem)
        self.assertEqual((State.FAILED, []), (self.record().state, self.reverted))

    def test_somebody_took_one_since(self) -> None:
        self.keep_unsaved()
        before = {self.older: self.dates()[self.older]}
        self.recover(checkpoint='', before=before)
        self.assertEqual([(self.last, True)], self.reverted)

    def test_a_name_that_was_given_again(self) -> None:
        """Only its name is one of before."""
        self.keep_unsaved()
        self.recover(checkpoint='', before=self.dates() | {self.last: '2026-11-27T00:00:00+00:00'})
        self.assertEqual([(self.last, True)], self.reverted)

    def dates(self) -> dict[str, str]:
        """Of all that are there."""
        return {one.name: one.date.isoformat() for one in self.there}

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
        recover.recover(self.found, record, self.wanted)
        self.assertEqual([(self.last, True)], self.reverted)

    def test_what_was_stored_since_a_recovery_that_was_cut_off(self) -> None:
        """Its owner has booted it meanwhile."""
        self.keep_unsaved()
        self.recover(State.RECOVERING, kept=True)
        (made,) = self.unsaved()  # and that of before stays
        self.assertTrue(made.startswith('-c '))
        self.assertEqual([(self.last, True)], self.reverted)

    def test_what_libvirt_refuses_may_go_well_later(self) -> None:
        self.keep_unsaved()
        error = exception.LibvirtFailed(uri='x', reason='the daemon is being restarted')
        with mock.patch.object(checkpoint, 'start_at', side_effect=error):
            self.assertIn('restarted', self.recover().problem)
        self.assertEqual(State.RECOVERING, self.record().state)

    def leave_qemu(
        self, *, starts: bool = False, paused: bool = True, has_run: bool = False
    ) -> list[str]:
        """It is there while a recovery was cut off.

        :return: what is done with it
        """
        calls = list[str]()
        for where, name in (
            (checkpoint, 'revert'),
            (type(self.found), 'resume'),
            (type(self.found), 'destroy'),
        ):
            self.begin(
                mock.patch.object(where, name, new=lambda *_words, name=name: calls.append(name))
            )
        for name, value in (
            ('is_starting', starts),
            ('paused_on_purpose', paused),
            ('has_run', has_run),
        ):
            self.begin(
                mock.patch.object(type(self.found), name, new=lambda _found, value=value: value)
            )
        return calls

    def enter(self, **fields: Any) -> records.Record:
        record = records.Record(State.RECOVERING, checkpoint=self.last)
        record = dataclasses.replace(record, **{'kept': True, **fields})
        entered.enter(recorded.UUID, record)
        return record

    def finish(self, **fields: Any) -> None:
        recover.finish(self.found, self.enter(**fields), self.wanted)

    def test_a_qemu_that_was_left(self) -> None:
        """By one that was cut off: it is paused, and not there yet."""
        calls = self.leave_qemu()
        for paused, expected in ((False, ['revert', 'resume']), (True, ['revert'])):
            calls.clear()
            self.assertTrue(recover.is_cut_off(self.found, self.enter()))
            self.finish(paused=paused)
            found = self.record()
            self.assertEqual(
                (expected, State.RUNS, self.last), (calls, found.state, found.checkpoint)
            )
            self.assertEqual(policy.FIXATE, self.told.pop()[0])

    def test_a_qemu_that_was_left_and_names_its_checkpoint(self) -> None:
        self.leave_qemu()
        names = list[str]()
        self.begin(
            mock.patch.object(checkpoint, 'revert', new=lambda _found, name: names.append(name))
        )
        self.finish(checkpoint='')
        self.assertEqual(([self.last], self.last), (names, self.record().checkpoint))

    def test_a_qemu_of_somebody_elses(self) -> None:
        """He has started it: what it stores is not dropped."""
        for state, fields in (
            ({}, {'kept': False}),  # a recovery keeps what is unsaved before it starts one
            ({'paused': False}, {}),  # it runs, or a full pool has stopped it
            ({'has_run': True}, {}),  # and he has paused it then
        ):
            self.leave_qemu(**state)
            self.assertFalse(recover.is_cut_off(self.found, self.enter(**fields)))

    def test_a_qemu_that_was_left_and_cannot(self) -> None:
        """It is given up in the end, and its owner is told why."""
        calls = self.leave_qemu()
        error = exception.QmpFailed(command='x', error_class='y', description='memory went bad')
        self.begin(mock.patch.object(checkpoint, 'revert', side_effect=error))
        self.assertRaises(exception.QmpFailed, self.finish, tries=1)
        self.assertEqual((State.RECOVERING, 2), (self.record().state, self.record().tries))
        self.assertRaises(
            exception.QmpFailed, recover.finish, self.found, self.record(), self.wanted
        )
        self.assertEqual(['destroy'], calls)
        self.assertEqual((State.FAILED, self.last), (self.record().state, self.record().checkpoint))
        self.assertIn('memory went bad', self.record().reason)

    def test_a_qemu_that_ends_at_once(self) -> None:
        """It is tried again, as what libvirt refuses."""
        self.keep_unsaved()
        error = exception.DomainInvalid(domain='web1', reason='no process has its UUID')
        with mock.patch.object(runs, 'current', side_effect=error):
            self.assertIn('no process', self.recover().problem)
        self.assertEqual((State.RECOVERING, 1), (self.record().state, self.record().tries))

    def test_one_that_ended_too_often_goes_on_from_the_same_one_later(self) -> None:
        """That is decided when it is given up."""
        self.keep_unsaved()
        self.recover(checkpoint='gone', tries=3)
        self.assertEqual((State.FAILED, self.last), (self.record().state, self.record().checkpoint))

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
        recover.recover(self.found, self.record(), self.wanted)
        self.assertEqual((1, 1), (len(self.unsaved()), len(self.reverted)))

    def test_one_that_fails_keeps_no_other_one(self) -> None:
        for number in range(2):
            records.write(f'gone-{number}', records.Record(State.RUNS))
        self.begin(mock.patch.object(libvirt_host, 'names_by_uuid', new=lambda _none: {}))
        both = recover.recover_all()
        self.assertEqual(['gone-0', 'gone-1'], sorted(one.name for one in both))
        for one in both:
            self.assertIn(f'{self.directory}/state/protected/{one.name}.json', one.problem)
        self.assertEqual(2, len(records.all_uuids()))

    def test_shut_down_while_the_loop_was_not_there(self) -> None:
        self.domains('web1')
        self.begin(
            mock.patch.object(type(self.found), 'stopped_on_purpose', new=lambda _found: True)
        )
        entered.enter(recorded.UUID, records.Record(State.RUNS))
        self.assertEqual([], recover.recover_all())
        self.assertEqual([], records.all_uuids())
        self.assertEqual([], self.reverted)

    def test_shut_down_as_it_was_not_fixated(self) -> None:
        """With the host, perhaps: it is not forgotten, and does not go back, either."""
        self.domains('web1')
        self.begin(
            mock.patch.object(type(self.found), 'stopped_on_purpose', new=lambda _found: True)
        )
        records.write(recorded.UUID, records.Record(State.RUNS, since=time.time() - 1))
        records.note_fixation()
        self.assertEqual([], recover.recover_all())
        self.assertEqual(State.FAILED, self.record().state)
        for words in ('was not fixated', 'virsh start web1'):
            self.assertIn(words, self.record().reason)
        (done,) = recover.recover_all(failed=True)
        self.assertIn('virsh start web1 boots it', done.problem)
        self.assertEqual([], self.reverted)
        for since, on_shutdown in (
            (time.time() + 1, policy.FIXATE),  # it ran since only
            (time.time() - 60, policy.STOP),
        ):
            self.policy = policy.Policy(on_shutdown=on_shutdown)
            self.check_forgotten(since=since)
        self.policy = policy.Policy()
        before = time.time() - 60
        self.check_forgotten(since=before, outlived=records.last_fixation())
        with mock.patch.object(boot_id, 'current', new=lambda: 'a later one'):
            self.check_forgotten(since=before)

    def test_of_an_owner(self) -> None:
        """After a boot of the host he has it go on; before, who asks for it."""
        self.domains('web1')
        self.keep_unsaved()
        self.policy = policy.Policy(owner='nova-compute')
        here = f'{boot_id.current()}/1-1'
        fixated = records.Record(State.FIXATED, run='otherboot/1-1', checkpoint=self.last)
        entered.enter(recorded.UUID, fixated)
        self.assertEqual([], recover.recover_all(failed=True))
        self.policy = policy.Policy(owner='nova-compute', over=here)
        entered.enter(recorded.UUID, dataclasses.replace(fixated, run=here))
        self.assertEqual([], recover.recover_all())
        self.assertEqual(([], State.FIXATED), (self.reverted, self.record().state))
        self.policy = policy.Policy(owner='nova-compute')
        (done,) = recover.recover_all()
        self.assertEqual(self.last, done.checkpoint)

    def test_of_an_owner_who_has_undefined_it(self) -> None:
        self.begin(mock.patch.object(libvirt_host, 'names_by_uuid', new=lambda _none: {}))
        records.write('gone', records.Record(State.RUNS, owner='nova-compute'))
        self.assertEqual([], recover.recover_all())

    def check_forgotten(self, **fields: Any) -> None:
        """It has run, and was shut down: it is to stay off."""
        records.write(recorded.UUID, records.Record(State.RUNS, **fields))
        self.assertEqual([], recover.recover_all())
        self.assertIsNone(records.read(recorded.UUID))

    def domains(self, *names: str) -> None:
        """They are protected and off; the first one has the UUID of the recorded one."""
        found = {name: copy.copy(self.recorded) for name in names}
        for name in names[1:]:
            found[name].uuid = f'uuid-{name}'
        self.connection = mock.Mock(lookupByName=found.get)
        uuids = {found[name].UUIDString(): name for name in names}
        self.policy = policy.Policy()
        self.begin(mock.patch.object(libvirt_host, 'names_by_uuid', new=lambda _none: uuids))
        self.begin(mock.patch.object(policy, 'get', new=lambda _found: self.policy))
        for uuid in uuids:
            entered.enter(uuid, records.Record(State.FIXATED, checkpoint=self.last))

    def hang(self) -> threading.Event:
        hanging = threading.Event()
        self.addCleanup(self.join)
        self.addCleanup(hanging.set)
        return hanging

    def join(self) -> None:
        for thread in threading.enumerate():
            if thread.daemon:
                thread.join()

    def test_a_guest_whose_agent_never_answers(self) -> None:
        """Nobody waits for it, its own VM included."""
        self.begin(mock.patch.object(recover, 'keep_unsaved'))
        self.domains('web1', 'web2')
        hanging, released = self.hang(), list[str]()

        def arrive(found: domain.Domain) -> None:
            with records.alone(found.uuid):
                released.append(found.name)
            if found.name == 'web1':
                hanging.wait()
            self.arrived.append(found.name)

        self.begin(mock.patch.object(type(self.found), 'arrive', new=arrive))
        self.begin(mock.patch.object(recover, '_ARRIVAL', new=0.5))
        names = {one.name: one.checkpoint for one in recover.recover_all()}
        self.assertEqual({'web1': self.last, 'web2': self.last}, names)
        self.assertEqual((['web1', 'web2'], ['web2']), (sorted(released), self.arrived))

    def test_one_that_hangs(self) -> None:
        self.begin(mock.patch.object(recover, 'keep_unsaved'))
        self.domains('web1', 'web2')
        hanging = self.hang()

        def start_at(found: domain.Domain, name: str, *, run: bool) -> str:
            if found.name == 'web1':
                hanging.wait()
            return name

        self.begin(mock.patch.object(checkpoint, 'start_at', new=start_at))
        done = {one.name: one for one in recover.recover_all(deadline=2.0)}
        self.assertEqual(self.last, done['web2'].checkpoint)
        self.assertIn('not done in time', done['web1'].problem)

    def test_one_of_which_an_answer_makes_no_sense(self) -> None:
        self.begin(mock.patch.object(recover, 'keep_unsaved'))
        self.domains('web1', 'web2')

        def start_at(found: domain.Domain, name: str, *, run: bool) -> str:
            if found.name == 'web1':
                raise AttributeError('an int has no get')
            return name

        self.begin(mock.patch.object(checkpoint, 'start_at', new=start_at))
        done = {one.name: one for one in recover.recover_all()}
        self.assertEqual(self.last, done['web2'].checkpoint)
        self.assertIn('an int has no get', done['web1'].problem)

    def test_who_is_told_that_it_is_there(self) -> None:
        """Nobody of one that is paused."""
        self.keep_unsaved()
        for paused in (True, False):
            self.recover(paused=paused)
            self.join()
        self.leave_qemu()
        for paused in (True, False):
            self.finish(paused=paused)
            self.join()
        self.assertEqual(['web1'] * 2, self.arrived)


class UnfinishedTest(RecoveryCase):
    """A QEMU was killed, or failed, while it took a checkpoint or went back to one: that is good,
    and only the next QEMU knows it by its name. There is an older one, which is not gone on from.
    """

    def setUp(self) -> None:
        super().setUp()
        self.begin(mock.patch.object(tree, 'checkpoints', new=_CHECKPOINTS))
        self.begin(mock.patch.object(recover, 'keep_unsaved'))

    def leave(self, mark: str, *, current: bool = True, state: int = 500) -> None:
        """The image that is the RAM, and who stands on what there."""
        older = recorded.snapshot(1, 'older', **{'vm-state-size': 500}, current=not current)
        unfinished = recorded.snapshot(
            2, mark, **{'vm-state-size': state, 'parent-id': '1'}, current=current
        )
        self.write([older, unfinished], [])

    def test_the_name_is_known(self) -> None:
        for mark in ('.loading-checkpoint-1.2-3', '.checkpoint-1.2-3'):
            for current in (True, False):
                self.leave(mark, current=current)
                for state in (State.FIXATED, State.RECOVERING, State.FAILED):
                    self.reverted.clear()
                    self.recover(state, checkpoint='c')
                    self.assertEqual([('c', True)], self.reverted, f'{mark} {state}')

    def test_the_name_is_not_known(self) -> None:
        """Its QEMU was killed in a revert of somebody's, or before a new one got its name."""
        for mark, current in (
            ('.loading-checkpoint-1.2-3', True),
            ('.loading-checkpoint-1.2-3', False),
            ('.checkpoint-1.2-3', True),
        ):
            self.leave(mark, current=current)
            for state in (State.RUNS, State.FIXATING):
                self.reverted.clear()
                self.recover(state, checkpoint='older')
                self.assertEqual([(None, True)], self.reverted, f'{mark} {state}')
            error = exception.LibvirtFailed(uri='x', reason='the daemon is being restarted')
            with mock.patch.object(checkpoint, 'start_at', side_effect=error):
                self.recover(State.RUNS, checkpoint='older')
            self.assertEqual(
                (State.RECOVERING, ''), (self.record().state, self.record().checkpoint)
            )
            self.write([], [])  # a QEMU that was killed then had finished it
            self.reverted.clear()
            recover.recover(self.found, self.record(), self.wanted)
            self.assertEqual([(None, True)], self.reverted)

    def test_what_does_not_count(self) -> None:
        """It is taken back, or deleted: the VM stands on the older one."""
        for mark, state in (('.checkpoint-1.2-3', 0), ('.deleting-1.2-3', 500)):
            self.leave(mark, state=state)
            self.reverted.clear()
            self.recover(checkpoint='older')
            self.assertEqual([('older', True)], self.reverted, mark)
            self.assertIn('boots it', self.recover(State.FIXATED, checkpoint='c').problem)
        self.leave('.checkpoint-1.2-3', current=False)  # it stands on another branch
        self.reverted.clear()
        self.recover(checkpoint='older')
        self.assertEqual([('older', True)], self.reverted)
