# SPDX-License-Identifier: Apache-2.0
"""Moving a volume to another pool: of its backend section, of another section of the same host, or
of another host.

First the copy is complete under its name, then the original goes. A service that dies between
leaves both, or the copy alone while the database still names the old pool; the start of the service
and every look-up settle that. For a pool that is not of the section there is a note
(:mod:`cinder_pcow.notes`) of where the copy goes, from before it begins: wherever the database says
that the volume is here, its copy there is either superfluous (the image is here) or the volume
itself (it is not; migrating again completes that).
"""

from __future__ import annotations

import functools
from typing import Any

from cinder import exception as cinder_exception
from oslo_log import log as logging

from cinder_pcow import errors
from cinder_pcow import local
from cinder_pcow import notes
from cinder_pcow import remote
from cinder_pcow import stats
from cinder_pcow import validation
from cinder_pcow import volumes as volumes_module
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash

LOG = logging.getLogger(__name__)

# migration_status of a volume whose last migration, to where it is, has ended
_ARRIVED = 'success'


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
            if isinstance(target, pool_module.Pool):
                self._migrate_here(volume, target)
            elif target is not None:
                self._migrate_out(volume, target)
        return target is not None

    def _migrate_here(self, volume: Any, target: pool_module.Pool) -> None:
        source = self._backend.locate(volume)
        if source.uuid == target.uuid:
            return
        self._check_movable(source, volume)
        if not trash.delete_image(target, volume.name):  # of a migration that was cut off
            raise _still_needed(volume.name, target.name)
        clone.copy(source.existing_path(volume.name), target, volume.name, volume.size * units.GIB)
        trash.delete_image(source, volume.name)

    def _migrate_out(self, volume: Any, target: notes.Target) -> None:
        noted = self._noted(volume)
        try:
            source = self._backend.locate(volume)
        except exception.ImageNotFound:
            if noted == target and target.has(volume.name):
                LOG.info(
                    '%s is in the pool %s of %s already', volume.name, target.pool, target.address
                )
                return
            raise
        self._check_movable(source, volume)
        if noted is not None and noted != target:  # of a migration that was cut off
            self._discard(noted, volume.name)
        if not target.discard(volume.name):
            raise _still_needed(volume.name, target.pool)
        notes.write(volume.name, target)
        target.send(source.existing_path(volume.name), volume.name, volume.size * units.GIB)
        trash.delete_image(source, volume.name)

    def forget(self, volume: Any) -> None:
        """Delete the copy of a volume, which is to be deleted, in the place to which it was about
        to go.

        :raises VolumeBackendAPIException: that cannot be reached
        """
        with errors.translated():
            noted = self._noted(volume)
            if noted is not None:
                self._discard(noted, volume.name)
                notes.drop(volume.name)

    def release(self, volume: Any) -> None:
        """As :meth:`forget`, for a volume whose image shall stay.

        :raises VolumeBackendAPIException: the image is in that place alone, or that cannot be
            reached
        """
        with errors.translated():
            noted = self._noted(volume)
            if noted is not None and self._backend.find(volume) is None:
                raise exception.PcowError(reason=_cut_off(volume.name, noted))
        self.forget(volume)

    def settle(self, volumes: Any) -> None:
        """Delete second images of volumes, which a migration that was cut off left in other pools
        than theirs. What cannot be deleted now is logged: it is no reason for not serving the
        others.
        """
        pools = self._backend.pools()
        for volume in volumes:
            for step in (
                functools.partial(self._settle_here, volume, pools),
                functools.partial(self._settle_elsewhere, volume),
            ):
                try:
                    step()
                except (exception.PcowError, OSError) as e:
                    LOG.warning(
                        'What a migration of %s that was cut off may have left stays for now: %s',
                        volume.name,
                        e,
                    )

    def _settle_here(self, volume: Any, pools: list[pool_module.Pool]) -> None:
        holding = [pool for pool in pools if self._backend.holds(pool, volume)]
        if len(holding) < 2:
            return
        home = self._backend.pool_of(volume)
        for pool in holding:
            if pool.uuid != home.uuid and self._backend.holds(home, volume):
                LOG.warning(
                    'The image of %s in pool %s is of a migration that was cut off',
                    volume.name,
                    pool.name,
                )
                trash.delete_image(pool, volume.name)

    def _settle_elsewhere(self, volume: Any) -> None:
        noted = self._noted(volume)
        if noted is None:
            return
        if self._backend.find(volume) is None:
            LOG.error('%s', _cut_off(volume.name, noted))
            return
        noted.discard(volume.name)
        notes.drop(volume.name)

    def _target(self, host: dict[str, Any]) -> pool_module.Pool | notes.Target | None:
        capabilities = host.get('capabilities') or {}
        kind, _colon, rest = str(capabilities.get('location_info', '')).partition(':')
        hostname, _colon, rest = rest.partition(':')
        uuid, _colon, name = rest.partition(':')
        if kind != stats.LOCATION:
            return None
        known = {entry.uuid: entry.name for entry in registry.PoolRegistry().list()}
        # also one that another host, or section, has in common with this one
        if uuid in self._backend.pool_uuids():
            return registry.PoolRegistry().get(known[uuid])
        if hostname in self._backend.hostnames:
            return local.LocalPool(known[uuid], uuid) if uuid in known else None
        return remote.RemotePool(
            str(capabilities.get('pcow_migration_address', hostname)), name, uuid
        )

    def _noted(self, volume: Any) -> notes.Target | None:
        """Where a volume was about to go when it was last migrated out of this section.

        A note that has come true, for the section in which the volume is now, or that was before
        the migration with which it came back, says where the volume itself is, or was long ago: it
        goes, and nothing else.
        """
        noted = notes.read(volume.name)
        if noted is not None and (
            noted.uuid in self._backend.pool_uuids() or volume.migration_status == _ARRIVED
        ):
            notes.drop(volume.name)
            return None
        return noted

    @staticmethod
    def _discard(noted: notes.Target, name: str) -> None:
        """Delete the copy of which there is a note."""
        try:
            noted.discard(name)
        except (exception.TransferFailed, exception.PoolNotFound, exception.PoolInvalid) as e:
            raise exception.PcowError(
                reason=f'{e}; if the pool {noted.pool} of {noted.address} is gone for good, '
                f'delete {notes.path(name)}'
            ) from None

    @staticmethod
    def _check_movable(pool: pool_module.Pool, volume: Any) -> None:
        validation.check_size(pool.existing_path(volume.name), volume)
        marks = trash.marks(pool)
        kept = [
            one.name
            for one in image.snapshot_list(pool.existing_path(volume.name))
            if trash.Mark(volume.name, one.name) not in marks
        ]
        if kept:
            raise cinder_exception.InvalidVolume(
                reason=(
                    f'{volume.name} has snapshots, which do not move with it '
                    f'({", ".join(kept[:5])}): delete them first'
                )
            )


def _still_needed(name: str, pool: str) -> exception.PcowError:
    return exception.PcowError(
        reason=(
            f'the pool {pool} still has what clones of {name} need, which was there before: '
            f'migrate or delete them first'
        )
    )


def _cut_off(name: str, noted: notes.Target) -> str:
    return (
        f'{name} is in the pool {noted.pool} of {noted.address}, its migration was cut off: '
        f'migrate it there again, which '
        f'completes that'
    )
