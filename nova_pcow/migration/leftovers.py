# SPDX-License-Identifier: Apache-2.0
"""What live migrations to this host have left in whose midst a host, or a nova-compute, has ended.

Only images are deleted that say themselves that not all of them has arrived, and that no QEMU has
open: nobody can go on with those. Where there is a doubt, they stay, and the log says so.
"""

from __future__ import annotations

from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.objects import fields
from oslo_log import log as logging

from nova_pcow.migration import live_migration
from nova_pcow.records import notes
from nova_pcow.servers import storage
from pcow_driver.common import exception

LOG = logging.getLogger(__name__)

# states of a migration
_ENDED = frozenset(('cancelled', 'completed', 'confirmed', 'done', 'error', 'failed', 'reverted'))
_WHILE_IT_RUNS = (fields.MigrationType.LIVE_MIGRATION, fields.MigrationType.EVACUATION)


def delete(uuid: str) -> None:
    """Delete those of a server that has no domain on this host, and that no other process brings
    here meanwhile.

    :raises ServerStorageError: one stays; others may be deleted
    """
    stays = ''
    for item in storage.find(uuid):
        try:
            if live_migration.is_marked(item):
                item.pool.delete_image(item.name)
        except exception.ImageNotFound:
            continue
        except exception.PcowError as e:
            stays = (
                f'{item.path} was left by a live migration to this host that was cut short; delete '
                f'it (pcowctl image delete): '
                f'that failed here, {e}'
            )
    if stays:
        raise storage.ServerStorageError(reason=stays)


def abandoned(uuid: str, host: str) -> Any | None:
    """The server (nova.objects.Instance) if nothing is under way that could bring it to this host:
    it is elsewhere, or deleted.

    :raises NovaException: nobody can say
    """
    context = nova_context.get_admin_context(read_deleted='yes')
    try:
        server = objects.Instance.get_by_uuid(context, uuid, [])
    except (
        nova_exception.InstanceNotFound
    ):  # archived since; or the pool, or this host, has come from another cell
        _warn(uuid, 'Nova does not know the server here')
        return None
    if server.deleted:
        return server
    if server.host == host or server.task_state is not None:
        return None
    for item in objects.MigrationList.get_by_filters(context, {'instance_uuid': uuid}):
        # its state was reset, or a service was killed
        if item.migration_type in _WHILE_IT_RUNS and item.status not in _ENDED:
            _warn(uuid, f'its migration {item.id} to {item.dest_compute} is {item.status}')
            return None
    return server


def _warn(uuid: str, reason: str) -> None:
    images = [item.path for item in storage.find(uuid)]
    if images:
        LOG.warning(
            'What a live migration of the server %s to this host has left stays, because %s: if '
            'nothing goes on there, '
            'delete %s (pcowctl image delete) and %s',
            uuid,
            reason,
            ', '.join(images),
            notes.path(notes.ARRIVING, uuid),
        )


def warn_of_unmarked(uuid: str) -> None:
    for item in storage.find(uuid):
        LOG.warning('%s', unmarked(item))


def unmarked(item: storage.ServerImage) -> str:
    return (
        f'{item.path} was left by a live migration to this host that was cut short, and may hold '
        f'all that the server had: '
        'look, and delete it (pcowctl image delete)'
    )
