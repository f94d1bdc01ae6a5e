# SPDX-License-Identifier: Apache-2.0
"""Who gets what to reach a volume by.

A guest of this host maps the image: nova-compute is given its path.  Everybody else who works through os-brick (backup, image
copy, migration: they name no mount point) is given the data of the volume as a plain file of this host, which os-brick's
released connector ``local`` takes; nbdkit and nbdfuse show it as long as the connection lasts, also over a restart of this
service.
"""

from __future__ import annotations

import os
from typing import Any

from cinder import exception as cinder_exception

from cinder_pcow import backend as backend_module
from cinder_pcow import errors
from cinder_pcow import volumes as volumes_module
from pcow_driver import device
from pcow_driver import locks
from pcow_driver import nbd


class Connections:
    def __init__(self, backend: backend_module.Backend, volumes: volumes_module.Volumes) -> None:
        self._backend = backend
        self._volumes = volumes

    def begin(self, volume: Any, connector: dict[str, Any]) -> dict[str, Any]:
        """Connection information for a guest (``driver_volume_type`` pcow) or for a program (local).

        :raises InvalidVolume: the connector is of another host
        :raises VolumeBackendAPIException: the image is not there, or somebody has it open
        """
        self._check_host(volume, connector)
        with errors.translated():
            pool = self._backend.locate(volume)
            path = pool.existing_path(volume.name)
            data = {'volume_id': volume.id, 'access_mode': 'rw', 'encrypted': False, 'discard': False}
            if connector.get('mountpoint') or connector.get('pcow'):
                window = device.window(path, force_share=True)
                return {'driver_volume_type': 'pcow', 'data': {
                    **data, 'image_path': path, 'device_path': path, 'pool': pool.name, 'size': window.size}}
            return {'driver_volume_type': 'local', 'data': {**data, 'device_path': self._show(volume.name, path)}}

    def begin_snapshot(self, snapshot: Any, connector: dict[str, Any]) -> dict[str, Any]:
        """As :meth:`begin` for a program that reads a snapshot, also while a guest writes to the volume."""
        self._check_host(snapshot.volume, connector)
        with errors.translated():
            path = self._volumes.path(snapshot.volume)
            return {'driver_volume_type': 'local', 'data': {
                'volume_id': snapshot.volume_id, 'access_mode': 'ro', 'encrypted': False, 'discard': False,
                'device_path': self._show(snapshot.name, path, snapshot=snapshot.name)}}

    def end(self, volume_or_snapshot: Any) -> None:
        """Take the file away, if there is one; what was written to it is durable then.

        :raises VolumeBackendAPIException: somebody has the file open
        """
        with errors.translated(), locks.lock(f'export-{volume_or_snapshot.name}'):
            nbd.stop(_directory(volume_or_snapshot.name))

    def _show(self, name: str, path: str, *, snapshot: str | None = None) -> str:
        directory = _directory(name)
        with locks.lock(f'export-{name}'):
            nbd.stop(directory)                # of a program that died: Cinder lets one at a time have a volume
            os.makedirs(os.path.dirname(directory), mode=0o700, exist_ok=True)
            window = device.window(path, snapshot=snapshot, force_share=snapshot is not None)
            nbd.start(directory, path, window=window, snapshot=snapshot)
            try:
                return nbd.mount(directory)
            except BaseException:
                nbd.stop(directory)
                raise

    def _check_host(self, volume: Any, connector: dict[str, Any]) -> None:
        host = connector.get('host')
        if host not in self._backend.hostnames:
            raise cinder_exception.InvalidVolume(reason=(
                f'{volume.name} is memory of the host {" or ".join(sorted(self._backend.hostnames))} and cannot be attached on '
                f'{host}: put the server there (InstanceLocalityFilter, or an availability zone per host), or migrate the volume'))


def _directory(name: str) -> str:
    return os.path.join(locks.state_path(), 'exports', name)
