# SPDX-License-Identifier: Apache-2.0
"""Servers that go on where they were (``pcow:persist``): pcow's services take their checkpoints and
fixate them, and have those go on whose QEMU was killed. After a boot of the host Nova does that
(:mod:`pcow_driver.fixation.owned`), with their network and volumes.

What a server is to be is in the definition of its domain from when it starts until it is stopped:
one that has no policy there has not to go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import vm_states
import nova.conf
from nova.network import model as network_model
from nova.virt import configdrive
from nova.virt import driver as virt_driver
from nova.virt import hardware
from oslo_log import log as logging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.servers import volume
from pcow_driver.common import exception
from pcow_driver.fixation import owned
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF

OWNER = 'nova-compute'
RUN = (vm_states.ACTIVE, vm_states.RESIZED)  # of servers that may go on
# of a flavor: devices whose state is not in QEMU, or that it cannot keep
_DEVICES = ('pci_passthrough:alias', 'accel:device_profile', 'resources:VGPU')


class PersistenceRefused(exception.PcowError):
    is_of_host = False
    msg_fmt = '%(reason)s'


def persists(instance: Any) -> bool:
    """Whether a server (nova.objects.Instance) has a flavor with ``pcow:persist``; False: also of
    one that has become invalid.
    """
    try:
        return flavor_module.is_pcow(instance) and flavor_module.of(instance).persists
    except exception.PcowError:
        return False


# ---- what cannot be fixated ------------------------------------------------------------------


def check(instance: Any, flavor: Any, block_device_info: Any) -> None:
    """What a server that persists cannot have, found out before anything is made.

    :param flavor: nova.objects.Flavor, that it has or is to get
    :raises PersistenceRefused:
    """
    found, image_meta = [key for key in _DEVICES if key in flavor.extra_specs], instance.image_meta
    if configdrive.required_by(instance) and CONF.config_drive_format == 'vfat':
        found.append('a config drive that its guest can write to ([DEFAULT] config_drive_format)')
    if instance.pci_requests and instance.pci_requests.requests and _DEVICES[0] not in found:
        found.append('a port that is a device of the host (its vnic_type)')
    try:
        if hardware.get_vtpm_constraint(flavor, image_meta):
            found.append('a vTPM (hw:tpm_version)')
    except nova_exception.NovaException as e:  # flavor and image want different things
        raise PersistenceRefused(reason=str(e)) from e
    if found:
        raise PersistenceRefused(
            reason=(
                f'it is to have {", ".join(found)}, of which no last moment can be kept: '
                f'leave it out, or take a flavor without {flavor_module.PERSIST_SPEC}'
            )
        )
    check_volumes(
        item['connection_info']
        for item in virt_driver.block_device_info_get_mapping(block_device_info)
    )


def check_volumes(connections: Iterable[Any]) -> None:
    """:raises PersistenceRefused: one of them would be no part of a checkpoint"""
    for one in connections:
        if not volume.is_pcow(one):
            name = (one or {}).get('serial') or 'a volume'
            raise PersistenceRefused(
                reason=(
                    f'{name} is no volume in persistent memory, so it would not be what it was '
                    f'when the server goes on: attach one of type pcow, or take a flavor without '
                    f'{flavor_module.PERSIST_SPEC}'
                )
            )


def check_ports(network_info: Iterable[Any]) -> None:
    """:raises PersistenceRefused: one of them is a device of the host"""
    for one in network_info:
        kind = one.get('vnic_type', network_model.VNIC_TYPE_NORMAL)
        if kind != network_model.VNIC_TYPE_NORMAL:
            raise PersistenceRefused(
                reason=(
                    f'the port {one.get("id")} is of type {kind}, a device of the host of which no '
                    f'last moment can be kept: take one of type normal, or a flavor without '
                    f'{flavor_module.PERSIST_SPEC}'
                )
            )


# ---- its policy ------------------------------------------------------------------------------


def protected(xml: str, instance: Any) -> str:
    """The definition by which a server starts: with its policy if its RAM is an image, as that of
    one that is rescued is not.

    :raises StateInvalid: nobody knows what it ran at last
    :raises XmlInvalid:
    """
    if libvirt_xml.ram(xml) is None:
        return xml
    record = records.read(instance.uuid)
    wanted = policy.Policy(owner=OWNER, over='' if record is None else record.run)
    return policy.in_definition(xml, wanted)


def let_go(found: domain.Domain | None) -> None:
    """It is about to be stopped, and has not to go on."""
    if found is None:
        return
    try:
        with libvirt_host.errors():
            if policy.get(found) is not None:
                policy.write(found, None)
    except exception.PcowError as e:  # its next definition says what is true then
        LOG.warning('%s stays protected until it is started: %s', found.name, e)


# ---- what is known of it ---------------------------------------------------------------------


def kept_at(found: domain.Domain | None) -> str | None:
    """Words for the moment that a domain which is off could go on from, and will not; None: there
    is none, or nobody knows.
    """
    try:
        with libvirt_host.errors():
            record = None if found is None or found.active() else owned.record_of(found)
    except exception.PcowError as e:
        LOG.warning('Whether it could go on cannot be told: %s', e)
        return None
    if found is None or record is None:
        return None
    if record.state is records.State.FAILED:
        return f'it could not go on: {record.reason}'
    if not (owned.is_of_earlier_boot(record) or record.state is records.State.FIXATED):
        return None
    name = record.checkpoint or 'the last one of its run'
    return (
        f'its next start is a boot, and does not go on where it was when its host ended: that '
        f'stays as checkpoint {name} for a while (pcowctl vm revert {found.name})'
    )


def expect(service_host: str, found_of: Any) -> None:
    """Of each server that ran when the host ended: have Nova know that, whatever it has seen of the
    end. It resumes those that it thinks ran.

    :param found_of: gives the domain of an instance, or None
    """
    instances = objects.InstanceList.get_by_host(
        nova_context.get_admin_context(), service_host, ['flavor', 'system_metadata']
    )
    for instance in instances:
        if (
            not persists(instance)
            or instance.vm_state not in RUN
            or instance.task_state is not None
            or instance.power_state == power_state.RUNNING
        ):
            continue
        try:
            with libvirt_host.errors():
                found = found_of(instance)
                record = None if found is None else owned.pending(found)
            if record is not None and not record.paused:
                instance.power_state = power_state.RUNNING
                instance.save(expected_task_state=[None])
        except Exception:  # of the database, libvirt, a record: the others are looked at
            LOG.exception('Whether it is to go on cannot be told', instance=instance)
