# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from collections.abc import Callable
import contextlib
import sys
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova.compute import power_state
from nova.compute import task_states
from nova.compute import vm_states
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_pcow.common import reserved
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from nova_pcow.snapshots import suspension
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.images import image
from pcow_driver.virt import domain
from tests.unit.nova_pcow import checkpoints
from tests.unit.nova_pcow import test_ram
from tests.unit.pcow_driver.vm import recorded

_DOMAIN = 'pcow_driver.virt.domain.Domain'


class _Runs(recorded.Recorded):
    """Whose vCPUs run while it is active, and not suspended."""

    paused, destroys, resumes = False, True, True

    reason = 1  # somebody wants it so
    job = 0

    def jobInfo(self) -> list[int]:  # noqa: N802
        return [self.job]

    def state(self) -> tuple[int, int]:
        return (3, self.reason) if self.paused else (1, 0)

    def suspend(self) -> None:
        self.calls.append('suspend')
        self.paused = True

    def resume(self) -> None:
        if not self.resumes:
            raise RuntimeError('it is stopped for good')
        super().resume()
        self.paused = False

    def destroy(self) -> None:
        if not self.destroys:
            raise RuntimeError('it does not end')
        super().destroy()
        self.active = False

    def createWithFlags(self, flags: int) -> None:  # noqa: N802
        super().createWithFlags(flags)
        self.active = self.paused = True


class _Instance:
    """What Nova keeps of a server."""

    uuid = recorded.UUID

    def __init__(self, vm_state: str = vm_states.ACTIVE, task_state: str | None = None) -> None:
        self.vm_state, self.task_state = vm_state, task_state
        self.power_state = power_state.RUNNING
        self.system_metadata = dict[str, str]()
        self.calls = list[Any]()

    def save(self, expected_task_state: list[str] | None = None) -> None:
        self.calls.append('save' if expected_task_state is None else ('save', expected_task_state))


class RamSuspensionTest(recorded.TestCase):
    """Of a server whose RAM is an image, at a checkpoint."""

    def setUp(self) -> None:
        super().setUp()
        libvirt: Any = sys.modules['libvirt']
        libvirt.VIR_DOMAIN_RUNNING, libvirt.libvirtError = 1, RuntimeError
        libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_USER = 3, 1
        libvirt.VIR_DOMAIN_PAUSED_FROM_SNAPSHOT = 7
        libvirt.VIR_DOMAIN_PAUSED_IOERROR, libvirt.VIR_DOMAIN_PAUSED_WATCHDOG = 5, 6
        libvirt.VIR_DOMAIN_PAUSED_SHUTTING_DOWN, libvirt.VIR_DOMAIN_PAUSED_CRASHED = 8, 10
        libvirt.VIR_DOMAIN_PAUSED_STARTING_UP, libvirt.VIR_DOMAIN_JOB_NONE = 11, 0
        self.recorded = self.runs = _Runs(self.directory)
        self.found = domain.Domain(self.recorded, 'instance-00000001')
        self.instance = _Instance()
        self.instance.calls = self.recorded.calls  # in one order
        self.suspension = suspension.Suspension(
            self.instance, self.recorded, self.found, has_ram=True
        )
        self.recorded.replies['pcow-checkpoint-create'] = {
            'pause': 1,
            'durable': 2,
            'state-size': 3,
        }
        self.recorded.replies['pcow-checkpoint-revert'] = {'time': 1}
        self.recorded.replies['pcow-checkpoint-delete'] = {'freed': 1}

    @staticmethod
    def command(verb: str) -> tuple[str, dict[str, str]]:
        return f'pcow-checkpoint-{verb}', {'name': reserved.SUSPENDED}

    def suspended(self) -> None:
        part = recorded.snapshot(1, reserved.SUSPENDED)
        self.write([part | {'vm-state-size': 500}], [part])

    def test_suspend(self) -> None:
        """Nothing is stored behind it; what there was of an earlier one is not used again."""
        self.instance.system_metadata['pcow_resumed'] = 'True'
        self.suspension.suspend()
        self.assertEqual(
            ['save', 'suspend', self.command('create'), 'destroy'], self.recorded.calls
        )
        self.assertEqual({}, self.instance.system_metadata)

    def test_suspend_that_is_refused(self) -> None:
        self.recorded.replies['pcow-checkpoint-create'] = "disk 'vdb' can be written to"
        self.recorded.replies['query-pcow'] = [{'filename': str(self.ram)}]
        error = self.assertRaises(exception.QmpFailed, self.suspension.suspend)
        self.assertIn('can be written to', str(error))
        self.assertEqual((True, False), (self.recorded.active, self.runs.paused))
        self.assertNotIn('destroy', self.recorded.calls)

    def test_qemu_that_does_not_end(self) -> None:
        """The guest goes on, and the first error is told, also if it cannot."""
        for resumes in (True, False):
            self.runs.paused, self.runs.destroys, self.runs.resumes = False, False, resumes
            self.suspended()
            self.recorded.calls.clear()
            # what is in the file of the RAM does not change by what is recorded
            with mock.patch.object(ram, '_forget_left'):
                error = self.assertRaises(exception.LibvirtFailed, self.suspension.suspend)
            self.assertIn('does not end', str(error))
            self.assertEqual(not resumes, self.runs.paused)
            # it may end after all, and is suspended then
            behind = self.recorded.calls[self.recorded.calls.index(self.command('create')) :]
            self.assertEqual(resumes, self.command('delete') in behind)

    def test_pool_without_room(self) -> None:
        """It could write all of it once more before the checkpoint is deleted. It is not even
        paused, unless it has stored too much meanwhile.
        """
        refused = exception.NoRoom(
            name='p', size='1 GiB', provisioned='1 GiB', limit='1 GiB', overcommit=1.0
        )
        room = mock.MagicMock(side_effect=[refused])
        self.useFixture(fixtures.MockPatch('pcow_driver.pools.room.for_snapshot', room))
        self.assertRaises(exception.NoRoom, self.suspension.suspend)
        room.assert_called_once_with(str(self.ram), str(self.nvdimm), beside=mock.ANY)
        self.assertEqual(([], False), (self.recorded.calls, self.suspension.begun))
        room.side_effect = [contextlib.nullcontext()]
        self.useFixture(
            fixtures.MockPatch('pcow_driver.pools.room.for_long_snapshot', side_effect=[refused])
        )
        self.assertRaises(exception.NoRoom, self.suspension.suspend)
        self.assertEqual(['save', 'suspend', 'resume'], self.recorded.calls)

    def test_qemu_that_does_not_answer(self) -> None:
        """It is not even paused; where it stops answering behind that, it goes on when it does."""
        for answers, calls in (([], []), ([None], ['save', 'suspend'])):
            error = exception.NoAnswer(
                domain=self.found.name, whom='it', call='x', seconds=60, way_out='end it'
            )
            error.call = mock.Mock()
            self.recorded.calls.clear()
            with mock.patch.object(domain.Domain, 'check_answers', side_effect=[*answers, error]):
                self.assertRaises(exception.NoAnswer, self.suspension.suspend)
            self.assertEqual(calls, self.recorded.calls)
            self.assertEqual(len(answers), error.call.add.call_count)
        ((undo,), _options) = error.call.add.call_args
        undo(None)
        self.assertEqual(['save', 'suspend', 'resume'], self.recorded.calls)

    def test_guest_that_does_not_run(self) -> None:
        """Nobody has it go on: after a revert that failed its images are of different moments."""
        self.runs.paused = True
        error = self.assertRaises(ram.RamRefused, self.suspension.suspend)
        self.assertIn('does not run', str(error))
        self.assertEqual([], self.recorded.calls)

    def done(self) -> list[Any]:
        return [call for call in self.recorded.calls if call != ('query-status', {})]

    def state(self, *, paused: bool, has_run: bool, used: bool, is_there: bool) -> None:
        if is_there:
            self.suspended()
        else:
            self.write([], [])
        self.recorded.calls.clear()
        self.recorded.active, self.runs.paused = True, paused
        self.recorded.replies['query-status'] = {'status': 'paused' if has_run else 'prelaunch'}
        self.instance.system_metadata = {'pcow_resumed': 'True'} if used else {}

    def test_resume_that_was_cut_off(self) -> None:
        """By the end of nova-compute, wherever that was."""
        gone = self.command('delete')
        for paused, has_run, used, is_there, expected in (
            (True, False, False, True, [self.command('revert'), 'save', 'resume', gone]),
            (True, False, True, True, ['resume', gone]),
            (True, False, True, False, ['resume']),
            (False, True, True, True, [gone]),
            (False, True, True, False, []),
        ):
            self.state(paused=paused, has_run=has_run, used=used, is_there=is_there)
            self.suspension.resume()
            self.assertEqual(expected, self.done())
            self.assertTrue(self.instance.system_metadata)

    def test_resume_of_one_that_somebody_has_started(self) -> None:
        """It keeps what it was suspended at."""
        for paused, has_run, reason in (
            (False, True, 1),
            (True, True, 1),
            (True, False, 5),  # it crashed
        ):
            self.state(paused=paused, has_run=has_run, used=False, is_there=True)
            self.runs.reason = reason
            error = self.assertRaises(suspension.SuspensionRefused, self.suspension.resume)
            self.assertIn('somebody else has started it', str(error))
            self.assertEqual([], self.done())

    def test_resume_after_a_power_cut_within_one(self) -> None:
        """The name is a mark then, which the next QEMU resolves."""
        self.recorded.active = False
        self.write([recorded.snapshot(1, test_ram.LOADING) | {'vm-state-size': 500}], [])
        self.assertFalse(ram.is_suspended(self.found))
        self.suspension.resume()
        self.assertEqual([('create', 1), self.command('revert'), 'save', 'resume'], self.done())

    def test_nothing_to_resume_from(self) -> None:
        """It would boot, or go back hours, and nobody would be told."""
        for used in (True, False):
            self.state(paused=False, has_run=False, used=used, is_there=used)
            self.recorded.active = False
            error = self.assertRaises(suspension.SuspensionRefused, self.suspension.resume)
            self.assertIn('nothing left that it was suspended at', str(error))
            self.assertEqual([], self.done())

    def test_settled(self) -> None:
        """The states in the table of :meth:`nova_pcow.snapshots.suspension.Suspension.settle`."""
        resuming, suspending = task_states.RESUMING, task_states.SUSPENDING
        suspended, active = vm_states.SUSPENDED, vm_states.ACTIVE
        gone, off = self.command('delete'), None
        for task, paused, used, is_there, becomes, expected in (
            (resuming, off, False, True, suspended, []),
            (resuming, off, True, True, active, []),
            (resuming, off, False, False, active, []),
            (resuming, False, True, True, active, [gone]),
            (resuming, False, False, True, suspended, []),
            (resuming, True, True, True, active, ['resume', gone]),
            (resuming, True, False, True, suspended, []),
            (suspending, off, False, True, suspended, []),
            (suspending, off, False, False, active, []),
            (suspending, False, False, True, active, [gone]),
            (suspending, True, False, True, active, ['resume', gone]),
            (suspending, True, False, False, active, ['resume']),
        ):
            with self.subTest((task, paused, used, is_there)):
                self.state(paused=bool(paused), has_run=True, used=used, is_there=is_there)
                self.recorded.active = paused is not None
                self.instance.task_state = task
                self.instance.vm_state = suspended if task == resuming else active
                self.instance.power_state = power_state.RUNNING
                self.assertTrue(self.suspension.settle())
                self.assertEqual([*expected, ('save', [task])], self.done())
                self.assertEqual(
                    (becomes, None), (self.instance.vm_state, self.instance.task_state)
                )
                # else Nova starts it with the host
                if becomes == suspended and paused is None:
                    self.assertEqual(power_state.SHUTDOWN, self.instance.power_state)

    def test_settled_later(self) -> None:
        """libvirt still works on it."""
        for task in suspension.TASKS:
            self.state(paused=True, has_run=True, used=False, is_there=True)
            self.instance.task_state, self.runs.job = task, 1
            self.assertFalse(self.suspension.settle())
            self.assertEqual(([], task), (self.done(), self.instance.task_state))

    def test_settled_guest_that_has_failed(self) -> None:
        """It has stopped for want of space, say, and goes on when somebody has seen to that."""
        self.state(paused=True, has_run=True, used=False, is_there=True)
        self.instance.task_state, self.runs.reason = task_states.SUSPENDING, 5
        self.assertTrue(self.suspension.settle())
        self.assertEqual(vm_states.ACTIVE, self.instance.vm_state)
        self.assertEqual([self.command('delete'), ('save', [task_states.SUSPENDING])], self.done())

    def test_guest_that_cannot_run(self) -> None:
        """It was not used then, and is resumed later."""
        self.recorded.active = False
        self.suspended()
        self.runs.resumes = False
        self.recorded.replies['query-status'] = {'status': 'prelaunch'}
        self.assertRaises(exception.LibvirtFailed, self.suspension.resume)
        self.assertEqual({}, self.instance.system_metadata)
        self.assertNotIn(self.command('delete'), self.done())
        self.runs.resumes = True
        self.suspension.resume()
        self.assertIn(self.command('delete'), self.done())

    def test_pool_that_is_not_there(self) -> None:
        """Nobody can tell whether there is a state: it stays what it is."""
        self.recorded.active = False
        self.ram.unlink()
        self.instance.task_state = task_states.RESUMING
        with mock.patch('nova_pcow.placement.inventory.all_there', return_value=False):
            for ask in (self.suspension.resume, self.suspension.settle):
                error = self.assertRaises(ram.RamRefused, ask)
                self.assertIn('mount it', str(error))
            self.suspension.give_up()
        self.assertEqual([], self.done())

    def test_ended_after_all(self) -> None:
        """QEMU was slow to end, and libvirt took that for a failure."""
        self.recorded.active = False
        self.assertFalse(self.suspension.is_complete())
        self.suspended()
        self.assertTrue(self.suspension.is_complete())
        self.recorded.active = True
        self.assertFalse(self.suspension.is_complete())

    def test_state_that_cannot_be_deleted(self) -> None:
        """A hard reboot has used it, whether or not it stays."""
        self.recorded.active = False
        self.suspended()
        (self.directory / 'fails').touch()
        self.suspension.give_up()
        self.assertTrue(self.instance.system_metadata)
        self.assertFalse(self.suspension.is_complete())

    def test_what_an_earlier_suspension_has_left(self) -> None:
        """In a volume, which another server has had then."""
        self.write([], [recorded.snapshot(1, reserved.SUSPENDED)])
        self.suspension.suspend()
        self.assertEqual(
            [
                ('pcow-snapshot-delete', {'id': 'memnvdimm0', 'name': reserved.SUSPENDED}),
                'save',
                'suspend',
                self.command('create'),
                'destroy',
            ],
            self.recorded.calls,
        )

    def test_resume(self) -> None:
        """That it is used is on the disk before the guest runs."""
        self.recorded.active = False
        self.assertFalse(self.suspension.exists())
        self.suspended()
        self.assertTrue(self.suspension.exists())
        self.suspension.resume()
        self.assertEqual(
            [('create', 1), self.command('revert'), 'save', 'resume', self.command('delete')],
            self.done(),
        )

    def test_resume_that_is_refused(self) -> None:
        """It is off, and still suspended."""
        self.recorded.active = False
        self.suspended()
        self.recorded.replies['pcow-checkpoint-revert'] = 'no'
        self.recorded.replies['query-pcow'] = [{'filename': str(self.ram)}]
        self.assertRaises(exception.QmpFailed, self.suspension.resume)
        self.assertFalse(self.recorded.active)
        self.assertNotIn(self.command('delete'), self.recorded.calls)
        self.assertEqual(([], {}), (self.logged(), self.instance.system_metadata))

    def test_given_up(self) -> None:
        """By a hard reboot, or with the server."""
        self.recorded.active = False
        ram.forget_suspended(self.found)
        self.assertEqual([], self.logged())
        self.suspended()
        ram.forget_suspended(self.found)
        self.assertEqual(2, len(self.logged()))
        (self.directory / 'fails').touch()
        with self.assertLogs('nova_pcow.servers.ram', 'WARNING') as logs:
            ram.forget_suspended(self.found)
        self.assertIn('keeps the checkpoint nova-suspended', logs.output[0])

    def test_without_image(self) -> None:
        self.recorded.has_ram = False
        self.assertFalse(ram.is_suspended(self.found))
        self.recorded.has_ram = True
        self.ram.unlink()
        self.assertFalse(ram.is_suspended(self.found))


class InterruptedTest(test_ram.RamTestCase):
    """The service ended while a server was suspended or resumed."""

    busy = False  # libvirt, with the domain

    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot(self.make_ram_flavor())
        self.see_ram(self.server)
        # Nova's libvirt for tests lacks it
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.tests.fixtures.libvirt.Domain.state', lambda found: (found._state, 1)
            )
        )
        # and takes a paused one for one that is off
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.tests.fixtures.libvirt.Domain.isActive',
                lambda found: int(found._state != fakelibvirt.VIR_DOMAIN_SHUTOFF),
            )
        )
        self.useFixture(fixtures.MonkeyPatch(f'{_DOMAIN}.has_failed', lambda _found: False))
        self.useFixture(fixtures.MonkeyPatch(f'{_DOMAIN}.is_busy', lambda _found: self.busy))
        self.driver = self.computes['compute1'].driver
        self.virtual = self.driver._host.get_guest(self.instance(self.server))._domain

    def settle(self, vm_state: str, task_state: str) -> str:
        """What becomes of it."""
        found = self.instance(self.server)
        found.vm_state, found.task_state = vm_state, task_state
        found.save()
        self.driver._interrupted = suspension.settle(
            self.driver._host, suspension.interrupted('compute1')
        )
        found.refresh()
        self.assertIsNone(found.task_state)
        return str(found.vm_state)

    def forget(self) -> None:
        for item in storage.find(self.server['id']):
            for one in image.snapshot_list(item.path):
                image.snapshot_delete(item.path, one.name)

    def test_off(self) -> None:
        self.virtual.destroy()
        for name in ('', reserved.SUSPENDED, test_ram.TAKING, test_ram.LOADING):
            with self.subTest(name):
                if name:
                    self.checkpoints.names.add(name)
                    self.take(self.server)
                    tool.run(
                        tool.find('pcow_img'),
                        'snapshot',
                        '--rename',
                        checkpoints.WARM,
                        name,
                        self.path(self.server),
                    )
                for vm_state, task_state in (
                    (vm_states.SUSPENDED, task_states.RESUMING),
                    (vm_states.ACTIVE, task_states.SUSPENDING),
                ):
                    self.assertEqual(
                        vm_states.SUSPENDED if name else vm_states.ACTIVE,
                        self.settle(vm_state, task_state),
                    )
                self.forget()

    def test_host_that_boots(self) -> None:
        """Nova starts what it says to run, not what was suspended just before the host ended."""
        self.flags(resume_guests_state_on_host_boot=True)
        self.virtual.destroy()
        self.take(self.server, reserved.SUSPENDED)
        found = self.instance(self.server)
        found.task_state, found.power_state = task_states.SUSPENDING, power_state.RUNNING
        found.save()
        self.restart_compute_service('compute1')
        found.refresh()
        self.assertEqual((vm_states.SUSPENDED, None), (found.vm_state, found.task_state))
        for names in self.snapshots(self.server).values():
            self.assertEqual([reserved.SUSPENDED], names)

    def test_request_that_has_waited(self) -> None:
        """The service was away, and has settled the server: it is not suspended after all."""
        instance = self.instance(self.server)
        instance.task_state = task_states.SUSPENDING
        instance.save()
        self.settle(vm_states.ACTIVE, task_states.SUSPENDING)
        for refuse in (
            lambda: self.driver.suspend(context.get_admin_context(), instance),
            lambda: self.driver.resume(context.get_admin_context(), instance, []),
        ):
            error = self.assertRaises(nova_exception.InstanceFaultRollback, refuse)
            self.assertIn('ask again', str(error))

    def test_libvirt_is_busy(self) -> None:
        """Looked at once more when it is done."""
        found = self.instance(self.server)
        found.task_state = task_states.SUSPENDING
        found.save()
        self.virtual.suspend()
        self.busy = True
        self.driver._interrupted = suspension.settle(
            self.driver._host, suspension.interrupted('compute1')
        )
        self.busy = False
        found.refresh()
        self.assertEqual(task_states.SUSPENDING, found.task_state)
        self.virtual.destroy()
        self.computes['compute1'].manager.update_available_resource(context.get_admin_context())
        found.refresh()
        self.assertIsNone(found.task_state)
        self.assertEqual(set(), self.driver._interrupted)

    def test_domain_that_is_not_there(self) -> None:
        self.virtual.destroy()
        self.virtual.undefine()
        self.assertEqual(
            vm_states.SUSPENDED, self.settle(vm_states.SUSPENDED, task_states.RESUMING)
        )

    def test_suspension_that_ends_late(self) -> None:
        """The guest has ended, and its state is there: the server is suspended."""
        self.suspend_that_fails(begins=True, leaves=checkpoints.WARM)
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.assertIn('pcow_resumed', self.instance(self.server).system_metadata)
        self.suspend_that_fails(begins=True, leaves=reserved.SUSPENDED)
        self.assertEqual('SUSPENDED', self.api.get_server(self.server['id'])['status'])

    def test_suspension_that_has_not_begun(self) -> None:
        """What is there is not of it: somebody else's checkpoint, or days old."""
        for left in (reserved.SUSPENDED, test_ram.TAKING):
            self.checkpoints.names.add(left)
            self.suspend_that_fails(begins=False, leaves=left)
            self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
            self.assertNotIn('pcow_resumed', self.instance(self.server).system_metadata)
            self.forget()

    def suspend_that_fails(self, *, begins: bool, leaves: str) -> None:
        """The guest has ended, and its images have a snapshot of this name."""

        def end(_found: Any, begin: Callable[[], None]) -> None:
            if begins:
                begin()
            self.virtual.destroy()
            for item in storage.find(self.server['id']):
                image.snapshot_create(item.path, 'taken')
                tool.run(tool.find('pcow_img'), 'snapshot', '--rename', 'taken', leaves, item.path)
            raise exception.LibvirtFailed(uri='x', reason='Failed to terminate process')

        with mock.patch.object(ram, 'suspend', end):
            self.act(self.server, 'suspend')

    def test_libvirt_is_not_there(self) -> None:
        """A resume that is refused for that is one that can be tried again."""
        found = self.instance(self.server)
        found.vm_state = vm_states.SUSPENDED
        found.save()
        error = nova_exception.HypervisorUnavailable()
        with mock.patch.object(self.driver._host, 'get_guest', side_effect=error):
            self.act(self.server, 'resume')
        self.assertEqual('SUSPENDED', self.api.get_server(self.server['id'])['status'])

    def test_refused_resume(self) -> None:
        """It is SUSPENDED as before, and its fault says why."""
        found = self.instance(self.server)
        found.vm_state = vm_states.SUSPENDED
        found.save()
        self.virtual.destroy()
        self.act(self.server, 'resume')
        server = self.api.get_server(self.server['id'])
        self.assertEqual('SUSPENDED', server['status'])
        self.assertIn(
            'nothing left that it was suspended at', self.event_words(self.server, 'resume')
        )

    def test_refused_suspend(self) -> None:
        with mock.patch.object(domain.Domain, 'running', return_value=False):
            self.act(self.server, 'suspend')
        self.assertEqual('ACTIVE', self.api.get_server(self.server['id'])['status'])
        self.assertIn('does not run now', self.event_words(self.server, 'suspend'))
