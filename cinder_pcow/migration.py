# SPDX-License-Identifier: Apache-2.0
"""Moving a volume to another pool, of this host or of another one.

First the copy is complete under its name, then the original goes.  A service that dies between leaves both, or the copy alone
while the database still names the old pool; the start of the service and every look-up settle that.  For a pool of another
host there is a note of where the copy goes, from before it begins: wherever the database says that the volume is here, its
copy there is either superfluous (the image is here) or the volume itself (it is not; migrating again completes that).
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from cinder import exception as cinder_exception
from oslo_log import log as logging

from cinder_pcow import errors
from cinder_pcow import remote
from cinder_pcow import stats
from cinder_pcow import volumes as volumes_module
from pcow_driver import derive
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import locks
from pcow_driver import pool as pool_module
from pcow_driver import registry
from pcow_driver import removal
from pcow_driver import units

LOG = logging.getLogger(__name__)


class Migration:
    def __init__(self, volumes: volumes_module.Volumes) -> None:
        self._backend = volumes.backend

    def migrate(self, volume: Any, host: dict[str, Any]) -> bool:
        """Move a volume that nobody uses.

        :param host: its new place, as the scheduler describes it
        :return: False if that is no pool of a driver of this kind
        :raises InvalidVolume: it has snapshots that the copy would not have
        :raises VolumeBackendAPIException:
        """
        with errors.translated():
            target = self._target(host)
            if isinstance(target, remote.RemotePool):
                self._migrate_away(volume, target)
            elif target is not None:
                self._migrate_here(volume, target)
        return target is not None

    def _migrate_here(self, volume: Any, target: pool_module.Pool) -> None:
        source = self._backend.locate(volume)
        if source.uuid == target.uuid:
            return
        self._check_snapshots(source, volume)
        if not removal.delete_image(target, volume.name):      # of a migration that was cut off
            raise exception.PcowError(reason=(
                f'{target.path} still has what clones of {volume.name} need, which was there before: migrate or delete them first'))
        derive.copy(source.existing_path(volume.name), target, volume.name, volume.size * units.GIB)
        removal.delete_image(source, volume.name)

    def _migrate_away(self, volume: Any, target: remote.RemotePool) -> None:
        noted = self._noted(volume.name)
        try:
            source = self._backend.locate(volume)
        except exception.ImageNotFound:
            if noted == target and target.has(volume.name):
                LOG.info('%s is in the pool %s of %s already', volume.name, target.pool, target.address)
                return
            raise
        self._check_snapshots(source, volume)
        for stale in {noted or target, target}:        # of a migration that was cut off
            stale.discard(volume.name)
        self._note(volume.name, target)
        path = source.existing_path(volume.name)
        target.send(path, volume.name)
        removal.delete_image(source, volume.name)

    def forget(self, volume: Any) -> None:
        """Delete the copy of a volume, which is to be deleted, on the host to which it was about to go.

        :raises VolumeBackendAPIException: that host does not answer
        """
        with errors.translated():
            noted = self._noted(volume.name)
            if noted is not None:
                try:
                    noted.discard(volume.name)
                except exception.TransferFailed as e:
                    raise exception.PcowError(reason=f'{e}; if that host is gone for good, delete '
                                                     f'{self._note_path(volume.name)}') from None
                self._note(volume.name, None)

    def settle(self, volumes: Any) -> None:
        """Delete second images of volumes, which a migration that was cut off left in other pools than theirs."""
        self._settle_remote(volumes)
        pools = self._backend.pools()
        for volume in volumes:
            holding = [pool for pool in pools if self._backend.holds(pool, volume)]
            if len(holding) < 2:
                continue
            home = self._backend.pool_of(volume)
            for pool in holding:
                if pool.uuid != home.uuid and self._backend.holds(home, volume):
                    LOG.warning('The image of %s in pool %s is of a migration that was cut off', volume.name, pool.name)
                    removal.delete_image(pool, volume.name)

    def _settle_remote(self, volumes: Any) -> None:
        for volume in volumes:
            noted = self._noted(volume.name)
            if noted is None:
                continue
            if self._backend.find(volume) is None:
                LOG.error('%s is in the pool %s of %s, its migration was cut off: migrate it there again, which completes that',
                          volume.name, noted.pool, noted.address)
                continue
            try:
                noted.discard(volume.name)
                self._note(volume.name, None)
            except exception.PcowError as e:
                LOG.warning('What a migration of %s that was cut off left on %s stays for now: %s', volume.name, noted.address, e)

    def _target(self, host: dict[str, Any]) -> pool_module.Pool | remote.RemotePool | None:
        capabilities = host.get('capabilities') or {}
        kind, _colon, rest = str(capabilities.get('location_info', '')).partition(':')
        hostname, _colon, rest = rest.partition(':')
        uuid, _colon, name = rest.partition(':')
        if kind != stats.LOCATION:
            return None
        if hostname in self._backend.hostnames:
            found = registry.PoolRegistry().get(name)
            return found if found.uuid == uuid else None
        return remote.RemotePool(str(capabilities.get('pcow_migration_address', hostname)), name, uuid)

    @staticmethod
    def _note_path(name: str) -> Path:
        return Path(locks.state_path(), 'migrations', name)

    def _noted(self, name: str) -> remote.RemotePool | None:
        """Where a volume was about to go when it was last migrated to another host."""
        try:
            return remote.RemotePool(**json.loads(self._note_path(name).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as e:
            raise exception.StateInvalid(path=str(self._note_path(name)), reason=str(e)) from None

    def _note(self, name: str, target: remote.RemotePool | None) -> None:
        """Durable on return."""
        path = self._note_path(name)
        if target is None:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f'.{name}.part')
        with open(part, 'w', encoding='utf-8') as file:
            json.dump(dataclasses.asdict(target), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @staticmethod
    def _check_snapshots(pool: pool_module.Pool, volume: Any) -> None:
        marks = removal.marks(pool)
        kept = [one.name for one in image.snapshot_list(pool.existing_path(volume.name))
                if removal.Mark(volume.name, one.name) not in marks]
        if kept:
            raise cinder_exception.InvalidVolume(reason=(
                f'{volume.name} has snapshots, which do not move with it ({", ".join(kept[:5])}): delete them first'))
