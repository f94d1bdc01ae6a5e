# SPDX-License-Identifier: Apache-2.0
"""Servers that go on from an image of their root and leave the rest on their host, to be deleted:
what is on data devices, and checkpoints.
"""

from __future__ import annotations

from typing import Any

from nova import context as nova_context
from nova import objects
from nova.compute import task_states

from nova_pcow import conf
from nova_pcow.common import flavor as flavor_module
from nova_pcow.placement import inventory
from nova_pcow.records import warm_records
from nova_pcow.servers import ram
from nova_pcow.servers import storage


def check(instance: Any) -> None:
    """Called when Nova is about to stop a server, whatever for, and has changed nothing yet.

    :raises ServerStorageError: something would be lost, or could not be deleted
    :raises RamRefused: the same
    """
    if instance.task_state == task_states.RESCUING:
        ram.check_not_reverting(instance.uuid)
    if instance.task_state == task_states.SHELVING_OFFLOADING:
        storage.check_deletable(instance.uuid)
    if instance.task_state in (task_states.SHELVING, task_states.SHELVING_OFFLOADING):
        check_no_warm_images(instance.uuid)
        if not conf.CONF.nova_pcow.shelve_drops_data:
            _check_no_data(instance, 'set [nova_pcow] shelve_drops_data to shelve it without')
    elif instance.task_state == task_states.RESIZE_MIGRATING and _goes_to_another_cell(instance):
        _check_no_data(instance, 'resize it in its own cell')
        ram.check_no_checkpoints(instance.uuid)


def check_no_warm_images(uuid: str) -> None:
    """Make sure that no image of Glance's stands for a checkpoint in the images of a server.

    :raises ServerStorageError:
    """
    found = [record.image for record in warm_records.of_server(uuid)]
    if found:
        raise storage.ServerStorageError(
            reason=(
                f'the server is the parent of warm images ({", ".join(found)}), whose checkpoints '
                f'would be lost with what it has: delete those images, then have the host give the '
                f'checkpoints up (pcowctl server delete-warm)'
            )
        )


def _check_no_data(instance: Any, way_out: str) -> None:
    devices = ', '.join(
        item.role for item in storage.devices(instance.uuid) if item.role != storage.ROOT
    )
    if (
        not devices
        and flavor_module.DATA_SPEC in instance.flavor.extra_specs
        and not inventory.all_there()
    ):
        devices = 'a pool of this host is not there'
    if devices:
        raise storage.ServerStorageError(
            reason=(
                f'what is on its data devices ({devices}) would be lost, because only its root '
                f'becomes an image: copy that to a '
                f'volume (openstack server unshelve gives it back to a server that is shelved '
                f'already), or {way_out}'
            )
        )


def _goes_to_another_cell(instance: Any) -> bool:
    if not {flavor_module.DATA_SPEC, flavor_module.RAM_SPEC} & {*instance.flavor.extra_specs}:
        return False
    found = objects.Migration.get_by_instance_and_status(
        nova_context.get_admin_context(), instance.uuid, 'migrating'
    )
    return bool(found.cross_cell_move)
