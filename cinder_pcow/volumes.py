# SPDX-License-Identifier: Apache-2.0
"""Volumes and snapshots as images: volume V is ``V.name`` in its pool, its snapshot S is the
snapshot ``S.name`` in that file.

A clone, and a volume from a snapshot, is a thin image on a snapshot of the other. What others stand
on goes with the last of them (:mod:`pcow_driver.snapshots.trash`). Sizes of volumes are GiB,
everywhere else bytes.
"""

from __future__ import annotations

from typing import Any

from oslo_log import log as logging

from cinder_pcow import backend as backend_module
from cinder_pcow import errors
from cinder_pcow import validation
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.copies import view
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import room
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash

LOG = logging.getLogger(__name__)


class Volumes:
    """All methods raise VolumeBackendAPIException with what went wrong, unless they say otherwise.

    :param max_chain: longest chain of files that a new volume may have
    """

    def __init__(self, backend: backend_module.Backend, max_chain: int) -> None:
        self.backend = backend
        self.max_chain = max_chain

    def create(self, volume: Any) -> None:
        """:raises InvalidVolume: it shall be what a volume in memory cannot be"""
        validation.check_volume(volume)
        with errors.translated():
            device.create(self.backend.pool_of(volume), volume.name, volume.size * units.GIB)

    def create_from_snapshot(self, volume: Any, snapshot: Any) -> None:
        """:raises InvalidVolume: it shall be what a volume in memory cannot be"""
        validation.check_volume(volume)
        with errors.translated():
            source = snapshot.volume
            clone.on_base(
                self.backend.locate(source),
                source.name,
                self.backend.pool_of(volume),
                volume.name,
                volume.size * units.GIB,
                max_chain=self.max_chain,
                snapshot=snapshot.name,
            )

    def clone(self, volume: Any, source: Any) -> None:
        """:raises InvalidVolume: it shall be what a volume in memory cannot be"""
        self.clone_all([(volume, source)])

    def clone_all(self, pairs: list[tuple[Any, Any]]) -> None:
        """Clone sources, given behind their clones, as they are at one moment.

        :raises InvalidVolume: one shall be what a volume in memory cannot be
        """
        for volume, _source in pairs:
            validation.check_volume(volume)
        with errors.translated():
            clone.clone(
                [
                    clone.Clone(
                        self.backend.locate(source),
                        source.name,
                        self.backend.pool_of(volume),
                        volume.name,
                        volume.size * units.GIB,
                    )
                    for volume, source in pairs
                ],
                max_chain=self.max_chain,
            )

    def delete(self, volume: Any) -> None:
        """Done also if there is no such image.

        :raises VolumeIsBusy: somebody has it open
        """
        with errors.volume_busy(volume.name):
            pools = {
                pool.uuid: pool for pool in (self.backend.pool_of(volume), *self.backend.pools())
            }
            for pool in pools.values():  # a migration that was cut off may have left two
                trash.delete_image(pool, volume.name)

    def extend(self, volume: Any, size: int) -> None:
        with errors.translated():
            pool = self.backend.locate(volume)
            validation.check_size(pool.existing_path(volume.name), volume, size)
            device.extend(pool, volume.name, size * units.GIB)

    def path(self, volume: Any) -> str:
        """Of the image.

        :raises PcowError: it is not there, or its pool is not
        """
        return self.backend.locate(volume).existing_path(volume.name)

    def create_snapshot(self, snapshot: Any) -> None:
        with errors.translated():
            attached.snapshot_create(self.path(snapshot.volume), snapshot.name)

    def delete_snapshot(self, snapshot: Any) -> None:
        """Done also if there is no such snapshot.

        :raises SnapshotIsBusy: it cannot be deleted now
        """
        with errors.snapshot_busy(snapshot.name):
            try:
                pool = self.backend.locate(snapshot.volume)
            except exception.ImageNotFound:
                pool = self.backend.pool_of(snapshot.volume)
            trash.delete_snapshot(pool, snapshot.volume.name, snapshot.name)

    def revert(self, volume: Any, snapshot: Any) -> None:
        with errors.translated():
            path = self.path(volume)
            with room.kept(path):
                image.snapshot_revert(path, snapshot.name)
                device.grow(path, volume.size * units.GIB)  # it may have been extended since

    def collect(self) -> None:
        """Complete what a service that died left: deletions, and what was being read. What cannot
        be completed now is logged: it is no reason for not serving the other pools.
        """
        for pool in self.backend.pools():
            try:
                view.collect(pool)
                trash.collect(pool)
            except (exception.PcowError, OSError) as e:
                LOG.warning(
                    'What a service that died left in pool %s stays for now: %s', pool.name, e
                )
