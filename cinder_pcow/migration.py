# SPDX-License-Identifier: Apache-2.0
"""Moving a volume to another pool of this host.

First the copy is complete under its name, then the original goes.  A service that dies between leaves both, or the copy alone
while the database still names the old pool; the start of the service and every look-up settle that.
"""

from __future__ import annotations

from typing import Any

from cinder import exception as cinder_exception
from oslo_log import log as logging

from cinder_pcow import errors
from cinder_pcow import stats
from cinder_pcow import volumes as volumes_module
from pcow_driver import derive
from pcow_driver import image
from pcow_driver import pool as pool_module
from pcow_driver import registry
from pcow_driver import removal
from pcow_driver import units

LOG = logging.getLogger(__name__)


class Migration:
    def __init__(self, volumes: volumes_module.Volumes) -> None:
        self._volumes = volumes
        self._backend = volumes.backend

    def migrate(self, volume: Any, host: dict[str, Any]) -> bool:
        """Move a volume that nobody uses.

        :param host: its new place, as the scheduler describes it
        :return: False if that is not a pool of this host
        :raises InvalidVolume: it has snapshots that the copy would not have
        :raises VolumeBackendAPIException:
        """
        with errors.translated():
            target = self._target(host)
            if target is None:
                return False
            source = self._backend.locate(volume)
            if source.uuid == target.uuid:
                return True
            self._check_snapshots(source, volume)
            removal.delete_image(target, volume.name)      # of a migration that was cut off
            derive.copy(source.existing_path(volume.name), target, volume.name, volume.size * units.GIB)
            removal.delete_image(source, volume.name)
        return True

    def settle(self, volumes: Any) -> None:
        """Delete second images of volumes, which a migration that was cut off left in other pools than theirs."""
        pools = self._backend.pools()
        for volume in volumes:
            holding = [pool for pool in pools if self._volumes.is_in(pool, volume)]
            if len(holding) < 2:
                continue
            home = self._backend.pool_of(volume)
            for pool in holding:
                if pool.uuid != home.uuid and self._volumes.is_in(home, volume):
                    LOG.warning('The image of %s in pool %s is of a migration that was cut off', volume.name, pool.name)
                    removal.delete_image(pool, volume.name)

    def _target(self, host: dict[str, Any]) -> pool_module.Pool | None:
        kind, _colon, rest = str((host.get('capabilities') or {}).get('location_info', '')).partition(':')
        hostname, _colon, rest = rest.partition(':')
        uuid, _colon, name = rest.partition(':')
        if kind != stats.LOCATION or hostname not in self._backend.hostnames:
            return None
        found = registry.PoolRegistry().get(name)
        return found if found.uuid == uuid else None

    @staticmethod
    def _check_snapshots(pool: pool_module.Pool, volume: Any) -> None:
        marks = removal.marks(pool)
        kept = [one.name for one in image.snapshot_list(pool.existing_path(volume.name))
                if removal.Mark(volume.name, one.name) not in marks]
        if kept:
            raise cinder_exception.InvalidVolume(reason=(
                f'{volume.name} has snapshots, which do not move with it ({", ".join(kept[:5])}): delete them first'))
