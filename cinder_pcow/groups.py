# SPDX-License-Identifier: Apache-2.0
"""Groups whose snapshots are of one moment: guests that have volumes of it are paused while all
snapshots are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cinder.objects import fields
from oslo_log import log as logging

from cinder_pcow import errors
from cinder_pcow import volumes as volumes_module
from pcow_driver.snapshots import attached

LOG = logging.getLogger(__name__)

Updates = tuple[dict[str, Any], list[dict[str, Any]]]


class Groups:
    """:param delete: how the driver deletes a volume, with all that belongs to it
    :param delete_snapshot: the same for a snapshot
    """

    def __init__(
        self,
        volumes: volumes_module.Volumes,
        delete: Callable[[Any], None],
        delete_snapshot: Callable[[Any], None],
    ) -> None:
        self._volumes = volumes
        self._delete = delete
        self._delete_snapshot = delete_snapshot

    def delete(self, volumes: Any) -> Updates:
        """Delete all volumes that can be; each gets its own status."""
        return _each(
            volumes, self._delete, fields.GroupStatus.DELETED, fields.GroupStatus.ERROR_DELETING
        )

    def create_snapshot(self, snapshots: Any) -> Updates:
        """Snapshot all volumes at one moment, or none.

        :raises VolumeBackendAPIException:
        """
        with errors.translated():
            attached.snapshot_create_all(
                [(self._volumes.path(one.volume), one.name) for one in snapshots]
            )
        status = fields.SnapshotStatus.AVAILABLE
        return {'status': fields.GroupSnapshotStatus.AVAILABLE}, [
            {'id': one.id, 'status': status} for one in snapshots
        ]

    def delete_snapshot(self, snapshots: Any) -> Updates:
        """Delete all snapshots that can be; each gets its own status."""
        return _each(
            snapshots,
            self._delete_snapshot,
            fields.SnapshotStatus.DELETED,
            fields.SnapshotStatus.ERROR_DELETING,
        )

    def create_from(self, volumes: Any, snapshots: Any, source_volumes: Any) -> Updates:
        """Make volumes of the snapshots of a group snapshot, or of the volumes of a group as they
        are at one moment.

        :raises VolumeBackendAPIException: then none is left
        """
        made: list[Any] = []
        try:
            if snapshots:
                sources = {one.id: one for one in snapshots}
                for volume in volumes:
                    made.append(volume)
                    self._volumes.create_from_snapshot(volume, sources[volume.snapshot_id])
            else:
                made.extend(volumes)
                self._volumes.clone_all(list(zip(volumes, source_volumes, strict=True)))
        except BaseException:
            for volume in made:
                self._delete(volume)
            raise
        status = fields.GroupStatus.AVAILABLE
        return {'status': status}, [{'id': volume.id, 'status': status} for volume in volumes]


def _each(items: Any, delete: Any, done: str, failed: str) -> Updates:
    updates = []
    for item in items:
        try:
            delete(item)
            updates.append({'id': item.id, 'status': done})
        except Exception:
            LOG.exception('%s of a group cannot be deleted', item.name)
            updates.append({'id': item.id, 'status': failed})
    return {
        'status': failed if any(update['status'] == failed for update in updates) else done
    }, updates
