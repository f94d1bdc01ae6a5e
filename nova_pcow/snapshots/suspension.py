# SPDX-License-Identifier: Apache-2.0
"""Suspended servers: what they resume from, and what becomes of those whose suspension or
resumption is cut off.

The state is a checkpoint, if the RAM of the server is an image, else a snapshot of libvirt's. It is
used once. A mark among what Nova keeps of the server says that, and is on its disk before the guest
runs: nobody can take the guest back there later, whenever the service or its host ends.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any
from typing import Self

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import task_states
from nova.compute import vm_states
from nova.virt.libvirt import guest as libvirt_guest
from oslo_log import log as logging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.servers import ram
from nova_pcow.snapshots import snapshot
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

TASKS = (task_states.SUSPENDING, task_states.RESUMING)
# in the system metadata of an instance
_USED = 'pcow_resumed'
_OLD_STATE = 'old_vm_state'  # Nova's own, for the resume


class SuspensionRefused(exception.PcowError):
    msg_fmt = '%(reason)s'


class Suspension:
    """Of one server, whether it is suspended or not."""

    def __init__(self, instance: Any, virtual: Any, found: domain.Domain, *, has_ram: bool) -> None:
        """
        :param instance: nova.objects.Instance
        :param virtual: virDomain
        :param found: the same
        """
        self._instance, self._virtual, self._domain = instance, virtual, found
        self._has_ram = has_ram
        self.begun = False  # a suspension, so that what is there is of it

    @classmethod
    def of(cls, instance: Any, host: Any) -> Self:
        """
        :param host: nova.virt.libvirt.host.Host
        :raises NovaException: libvirt does not answer, or has no such domain
        """
        return cls(
            instance,
            libvirt_call.Proxy(host.get_guest(instance)._domain, instance.name),
            domain.Domain(host.get_connection(), instance.name),
            has_ram=flavor_module.of(instance).has_ram,
        )

    def suspend(self) -> None:
        """Keep RAM, devices and what lies in the images, and end the guest.

        :raises PcowError: it is refused, and the guest goes on
        :raises libvirtError: the same
        """
        if self._has_ram:
            ram.suspend(self._domain, self._begin)
        else:
            snapshot.suspend(self._virtual, self._domain, self._begin)

    def _begin(self) -> None:
        """What there was of an earlier suspension is gone."""
        self._note_used(used=False)
        self.begun = True

    def resume(self) -> None:
        """Go on from where :meth:`suspend` ended the guest. What was cut off of that is taken to
        its end.

        :raises PcowError: it is refused: it is still suspended, or there is nothing to go on from
        :raises libvirtError: the same
        """
        with libvirt_host.errors():
            if self._domain.active():
                if self._is_used() and self._domain.running():
                    self.forget()
                    return
                self._check_not_started()
            if not (self._is_used() and self._domain.active()):
                self._go_back()
            self._run()

    def _check_not_started(self) -> None:
        found = self._domain
        if found.paused_on_purpose() and (self._is_used() or not found.has_run()):
            return
        way_out = (
            'reboot it hard'
            if self._is_used()
            else (
                'an administrator of its host ends that (virsh destroy), and it can be resumed, or '
                'it is rebooted hard, which gives up what it was suspended at'
            )
        )
        raise SuspensionRefused(
            reason=(
                f'somebody else has started it meanwhile, or it has stopped for an error (virsh '
                f'domstate --reason): {way_out}'
            )
        )

    def _go_back(self) -> None:
        if self._is_used() or not self.exists():
            raise SuspensionRefused(
                reason=(
                    'there is nothing left that it was suspended at, so it cannot go on: reboot it '
                    'hard, and it boots'
                )
            )
        if self._has_ram:
            ram.go_back(self._domain)
        else:
            snapshot.go_back(self._virtual)
        self._note_used(used=True)

    def _run(self) -> None:
        try:
            self._domain.resume()
        except BaseException:
            with interrupt.clearing_up(), contextlib.suppress(Exception):
                if not (self._domain.running() or self._domain.has_run()):
                    self._note_used(used=False)
            raise
        self.forget()

    def set_clock(self) -> None:
        """Of one that was resumed; whatever comes of it."""
        self._domain.set_clock()

    def exists(self) -> bool:
        """Whether there is a state of it, used or not.

        :raises PcowError: the pool that may have it is not there
        """
        if self._has_ram:
            ram.check_there(self._domain)
            return ram.may_be_suspended(self._domain)
        return snapshot.suspended(self._virtual) is not None

    def is_complete(self) -> bool:
        """Whether the guest has ended, and can be resumed."""
        with libvirt_host.errors():
            return not self._domain.active() and not self._is_used() and self.exists()

    def forget(self) -> None:
        """Delete what a suspended server would resume from; what it has written stays. Errors are
        only logged.
        """
        try:
            snapshot.forget_suspended(self._virtual)
        except (libvirt_guest.libvirt.libvirtError, exception.PcowError) as e:
            LOG.warning('libvirt keeps a state of no use any more: %s', e, instance=self._instance)
        ram.forget_suspended(self._domain)

    def disown(self) -> None:
        """The server is said to go on, so what there may be of its state is not used: not by who
        looks later, when the guest has gone on.
        """
        with contextlib.suppress(Exception):  # why it is not suspended is what its owner is told
            self._note_used(used=True)

    def give_up(self) -> None:
        """Have it boot at its next start; what cannot be deleted of the state is used by that."""
        self.forget()
        try:
            with libvirt_host.errors():
                if not self._is_used() and self.exists():
                    self._note_used(used=True)
        except exception.PcowError as e:
            LOG.warning('%s', e, instance=self._instance)

    def _is_used(self) -> bool:
        return _USED in self._instance.system_metadata

    def _note_used(self, *, used: bool) -> None:
        if used:
            self._instance.system_metadata[_USED] = 'True'
        else:
            self._instance.system_metadata.pop(_USED, None)
        self._instance.save()

    # ---- what was cut off --------------------------------------------------------------------

    def settle(self) -> bool:
        """Take a server whose suspension or resumption was cut off to where its next one begins.

        ==========  ======================  ====================================================
        task        domain                  the server is
        ==========  ======================  ====================================================
        either      libvirt works on it     left for now
        either      off, state not used     SUSPENDED
        either      off, used, or none      what it was before, and found to be off
        resuming    runs, state used        ACTIVE
        resuming    runs, not used          SUSPENDED: somebody else has started it
        resuming    paused, used            ACTIVE: it goes on
        resuming    paused, not used        SUSPENDED
        suspending  runs, or paused         ACTIVE: it goes on
        suspending  stopped for an error    ACTIVE, and found to be paused
        ==========  ======================  ====================================================

        :return: False: it is left for now
        :raises PcowError: the same, and it has to be asked again
        :raises libvirtError: the same
        """
        task, found = self._instance.task_state, self._domain
        with libvirt_host.errors():
            active = found.active()
            if active and found.is_busy():
                return False
            if active:
                suspended = task == task_states.RESUMING and not self._is_used()
            else:
                suspended = not self._is_used() and self.exists()
            if active and not suspended:
                if not found.running() and not found.has_failed():
                    found.resume()
                self.forget()
        self._note_state(task, suspended=suspended, active=active)
        return True

    def _note_state(self, task: str, *, suspended: bool, active: bool) -> None:
        instance = self._instance
        if suspended and instance.vm_state != vm_states.SUSPENDED:
            instance.system_metadata[_OLD_STATE] = instance.vm_state
            instance.vm_state = vm_states.SUSPENDED
        elif not suspended and instance.vm_state == vm_states.SUSPENDED:
            instance.vm_state = instance.system_metadata.pop(_OLD_STATE, vm_states.ACTIVE)
        if suspended and not active:
            # of one that is said to run Nova starts what the host's boot has ended
            instance.power_state = power_state.SHUTDOWN
        instance.task_state = None
        instance.save(expected_task_state=[task])
        LOG.warning(
            'It was %s when the service ended, and is %s now',
            task,
            instance.vm_state,
            instance=instance,
        )


def suspend(instance: Any, host: Any) -> None:
    """As :meth:`Suspension.suspend`. It is no failure if the guest has ended, and its state is
    there: QEMU may end late, and libvirt finish what its connection was lost for.
    """
    found = Suspension.of(instance, host)
    try:
        found.suspend()
    except Exception:
        if found.begun:
            with contextlib.suppress(Exception):  # by a connection that is there
                if Suspension.of(instance, host).is_complete():
                    return
            found.disown()
        raise


def check_task(context: Any, instance: Any, task: str) -> None:
    """Make sure that it is still to be done: a request that has waited for the service was settled
    when that began.

    :raises SuspensionRefused:
    """
    if objects.Instance.get_by_uuid(context, instance.uuid).task_state != task:
        raise SuspensionRefused(
            reason='the service was away meanwhile, and it is not to be done any more: ask again'
        )


def interrupted(service_host: str) -> set[str]:
    """The servers of a service that begins which were being suspended or resumed when it ended."""
    return {
        str(instance.uuid)
        for instance in objects.InstanceList.get_by_host(
            nova_context.get_admin_context(),
            service_host,
            expected_attrs=['flavor', 'system_metadata'],
        )
        if instance.task_state in TASKS and flavor_module.has_memory(instance)
    }


def settle(host: Any, uuids: set[str]) -> set[str]:
    """Settle these servers, if they are still in such a task; those that are left for now.

    :param host: nova.virt.libvirt.host.Host
    """
    left = set()
    for uuid in uuids:
        try:
            if not _settle(host, uuid):
                left.add(uuid)
        except Exception:  # libvirt, the database, a pool that is not there: tried again later
            LOG.exception('The server %s stays what it is for now', uuid)
            left.add(uuid)
    return left


def _settle(host: Any, uuid: str) -> bool:
    """:return: False: it is left for now"""
    try:
        instance = objects.Instance.get_by_uuid(
            nova_context.get_admin_context(), uuid, expected_attrs=['flavor', 'system_metadata']
        )
    except nova_exception.InstanceNotFound:
        return True
    task = instance.task_state
    if task not in TASKS:
        return True
    try:
        found = Suspension.of(instance, host)
    except nova_exception.InstanceNotFound:  # it has no domain, as its next request will find
        instance.task_state = None
        instance.save(expected_task_state=[task])
        return True
    if found.settle():
        return True
    LOG.warning(
        'It was %s when the service ended, and libvirt still works on it', task, instance=instance
    )
    return False


@contextlib.contextmanager
def suspend_errors() -> Iterator[None]:
    """Nova tells the reason, and the server is ACTIVE as before.

    :raises InstanceFaultRollback: it was refused; the server goes on
    """
    with _roll_back(nova_exception.InstanceSuspendFailure):
        yield


@contextlib.contextmanager
def resume_errors() -> Iterator[None]:
    """Nova tells the reason, and the server is SUSPENDED as before: in ERROR nothing but a hard
    reboot would be allowed, which gives up what it was suspended at.

    :raises InstanceFaultRollback: it was refused
    """
    with _roll_back(nova_exception.InstanceResumeFailure):
        yield


@contextlib.contextmanager
def _roll_back(kind: type[nova_exception.NovaException]) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # of libvirt, the database, messaging, ...: each would set ERROR
        raise nova_exception.InstanceFaultRollback(kind(reason=str(e))) from e
