# SPDX-License-Identifier: Apache-2.0
"""Who gets what to reach a volume by.

A guest of this host maps the image: nova-compute is given its path. Everybody else who works
through os-brick (backup, image copy, migration, Glance's store for Cinder) is given the data of the
volume as a plain file of this host, which os-brick's released connector ``local`` takes; nbdkit and
nbdfuse show it as long as the connection lasts, also over a restart of this service.

A program that died leaves its file, and that keeps others from the image. While a volume is at
rest, and for what Cinder asks only of such a one, nobody needs the file: it is taken away, unless
somebody has it open.
"""

from __future__ import annotations

import os
from typing import Any

from cinder import exception as cinder_exception
from cinder.objects import fields
from oslo_log import log as logging

from cinder_pcow import backend as backend_module
from cinder_pcow import errors
from cinder_pcow import validation
from cinder_pcow import volumes as volumes_module
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.copies import view
from pcow_driver.export import nbd

LOG = logging.getLogger(__name__)

_NOT_MIGRATING = (None, 'success', 'error')  # migration_status


class Connections:
    def __init__(self, backend: backend_module.Backend, volumes: volumes_module.Volumes) -> None:
        self._backend = backend
        self._volumes = volumes

    def begin(self, volume: Any, connector: dict[str, Any]) -> dict[str, Any]:
        """Connection information for a guest (``driver_volume_type`` pcow) or for a program
        (local).

        :raises InvalidVolume: the connector is of another host, or a guest's and the type of the
            volume got QoS specs
        :raises VolumeBackendAPIException: the image is not there, is larger than the volume, or
            somebody has it open
        """
        self._check_host(volume, connector)
        with errors.translated():
            pool = self._backend.locate(volume)
            path = pool.existing_path(volume.name)
            validation.check_size(path, volume)
            data = {
                'volume_id': volume.id,
                'access_mode': 'rw',
                'encrypted': False,
                'discard': False,
            }
            if _is_guest(connector):
                validation.check_qos(volume.volume_type)
                self.stop(volume.name)
                window = validation.look(volume)(path, force_share=True)
                return {
                    'driver_volume_type': 'pcow',
                    'data': {
                        **data,
                        'image_path': path,
                        'device_path': path,
                        'pool': pool.name,
                        'size': window.size,
                    },
                }
            return {
                'driver_volume_type': 'local',
                'data': {
                    **data,
                    'device_path': self._show(volume.name, path, validation.look(volume)),
                },
            }

    def begin_snapshot(self, snapshot: Any, connector: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`begin` for a program that reads a snapshot, also while a guest writes to the
        volume.
        """
        self._check_host(snapshot.volume, connector)
        with errors.translated():
            path = self._volumes.path(snapshot.volume)
            validation.check_snapshot_size(path, snapshot)
            return {
                'driver_volume_type': 'local',
                'data': {
                    'volume_id': snapshot.volume_id,
                    'access_mode': 'ro',
                    'encrypted': False,
                    'discard': False,
                    'device_path': self._show(
                        snapshot.name,
                        path,
                        validation.look_at_snapshot(snapshot),
                        snapshot=snapshot.name,
                    ),
                },
            }

    def end(self, volume_or_snapshot: Any) -> None:
        """Take the file away, if there is one; what was written to it is durable then.

        :raises VolumeBackendAPIException: somebody has the file open
        """
        with errors.translated():
            self.stop(volume_or_snapshot.name)

    @staticmethod
    def stop(name: str) -> None:
        """As :meth:`end`, by the name of the volume or snapshot.

        :raises ExportFailed: somebody has the file open
        """
        with locks.lock(f'export-{name}'):
            nbd.stop(_directory(name))

    def collect(self, volumes: Any, snapshots: Any) -> None:
        """Take away the files of volumes and snapshots that no program works on; what cannot be
        taken away is logged.
        """
        try:
            shown = frozenset(os.listdir(_directory('')))
        except FileNotFoundError:
            return
        at_rest = [
            one.name
            for one in volumes
            if one.name in shown and _settled(one) and one.migration_status in _NOT_MIGRATING
        ]
        # a backup of a volume that is attached reads a snapshot that was made for it, and is
        # available meanwhile
        at_rest += [
            one.name
            for one in snapshots
            if one.name in shown
            and _settled(one)
            and one.volume.status != fields.VolumeStatus.BACKING_UP
        ]
        for name in at_rest:
            try:
                self.stop(name)
            except exception.PcowError as e:
                LOG.warning(
                    'The file of %s is left by a program that died, and stays for now: %s', name, e
                )

    def _show(self, name: str, path: str, look: view.Look, *, snapshot: str | None = None) -> str:
        directory = _directory(name)
        with locks.lock(f'export-{name}'):
            # of a program that died: Cinder lets one at a time have a volume
            nbd.stop(directory)
            os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
            window = look(path, snapshot=snapshot, force_share=snapshot is not None)
            nbd.start(directory, path, window=window, snapshot=snapshot)
            try:
                return nbd.mount(directory)
            except BaseException:
                nbd.stop(directory)
                raise

    def _check_host(self, volume: Any, connector: dict[str, Any]) -> None:
        host = connector.get('host')
        if host not in self._backend.hostnames:
            raise cinder_exception.InvalidVolume(
                reason=(
                    f'{volume.name} is memory of the host '
                    f'{" or ".join(sorted(self._backend.hostnames))} and cannot be attached on '
                    f'{host}: put the server there (InstanceLocalityFilter, or an availability '
                    f'zone per host), or migrate the volume'
                )
            )


def _is_guest(connector: dict[str, Any]) -> bool:
    """Nova names the device of the guest.  Others name none, or, as Glance does, something else."""
    return bool(connector.get('pcow')) or str(connector.get('mountpoint') or '').startswith('/dev/')


def _settled(volume_or_snapshot: Any) -> bool:
    status = str(volume_or_snapshot.status)
    return status == 'available' or status.startswith('error')


def _directory(name: str) -> str:
    return os.path.join(locks.state_path(), 'exports', name)
