# SPDX-License-Identifier: Apache-2.0
"""Servers that were being suspended or resumed when the service, or its host, ended.

Nova leaves them in that task, in which nothing is allowed but a hard reboot, which gives up what
they were suspended at.

=============  ==========================  ======================================
task           domain                      becomes
=============  ==========================  ======================================
resuming       off, paused                 SUSPENDED: it can be resumed again
resuming       runs                        ACTIVE
suspending     off, with what it resumes   SUSPENDED
               from
suspending     off, without                as it was: Nova finds that it is off
suspending     paused by the driver        ACTIVE: it goes on
suspending     runs                        ACTIVE
suspending     anything else               stays: libvirt still works on it
=============  ==========================  ======================================
"""

from __future__ import annotations

from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.compute import task_states
from nova.compute import vm_states
from nova.virt.libvirt import guest as libvirt_guest
from oslo_log import log as logging

from nova_pcow import flavor as flavor_module
from nova_pcow import ram
from nova_pcow import snapshot
from pcow_driver.common import exception
from pcow_driver.virt import domain

LOG = logging.getLogger(__name__)

_OLD_STATE = 'old_vm_state'  # Nova's own, for the resume


def settle(host: Any, service_host: str) -> None:
    """Called before the service takes requests, so nothing else works on these servers.

    :param host: nova.virt.libvirt.host.Host
    """
    context = nova_context.get_admin_context()
    for instance in objects.InstanceList.get_by_host(
        context, service_host, expected_attrs=['flavor', 'system_metadata']
    ):
        task = instance.task_state
        if task not in (
            task_states.RESUMING,
            task_states.SUSPENDING,
        ) or not flavor_module.has_memory(instance):
            continue
        try:
            _settle(instance, host)
        except (
            exception.PcowError,
            nova_exception.NovaException,
            libvirt_guest.libvirt.libvirtError,
        ):
            LOG.exception('It stays %s: reboot it hard', task, instance=instance)


def _settle(instance: Any, host: Any) -> None:
    virtual = host.get_guest(instance)._domain
    found = domain.Domain(host.get_connection(), instance.name)
    task = instance.task_state
    if task == task_states.SUSPENDING and not _settle_suspending(instance, virtual, found):
        return
    if task == task_states.RESUMING and found.active() and found.running():
        _forget(virtual, found)
        instance.vm_state = instance.system_metadata.pop(_OLD_STATE, vm_states.ACTIVE)
    instance.task_state = None
    instance.save(expected_task_state=[task])
    LOG.warning('It was %s when the service ended, and is %s now', task, instance.vm_state)


def _settle_suspending(instance: Any, virtual: Any, found: domain.Domain) -> bool:
    """False: libvirt still works on it."""
    if not found.active():
        if snapshot.suspended(virtual) is not None or ram.may_be_suspended(found):
            instance.system_metadata[_OLD_STATE] = instance.vm_state
            instance.vm_state = vm_states.SUSPENDED
        return True
    if not found.running() and not found.paused_on_purpose():
        return False
    _forget(virtual, found)
    ram.go_on(found)
    return True


def _forget(virtual: Any, found: domain.Domain) -> None:
    snapshot.forget_suspended(virtual)
    ram.forget_suspended(found)
