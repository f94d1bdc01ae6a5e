# SPDX-License-Identifier: Apache-2.0
"""The pool of volumes is full while each operation is asked for through Cinder's API: what becomes
of it, and what is left.

Some minutes, because Cinder's scheduler notices once a minute only that there is room again, so it
is not run with the other tests: ``python -m unittest tests.functional.openstack_full_pool``.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import subprocess
import tempfile
import time
from typing import Any
import unittest

from pcow_driver.common import units
from tests.functional import openstack_bed
from tests.functional import openstack_volumes
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import volumes

_NAME = 'full-pool'
_MARKER = 0xB4
_DATA = 32 * units.MIB  # of the volume, the image and the backup
_OFFSET = 2 * units.MIB  # of the data of a volume in its image
# Bytes that are free when these begin, which write as much as there is.
_FREE = {
    'create from image': {'gets full': _DATA // 2, 'full': 0},
    'restore': {'gets full': _DATA // 2},
}
_NO_ROOM = 'any available weighted backend'  # the scheduler's words
_REPORT_SECONDS = 90
# until the scheduler knows what a deletion before has left
_DELETED_SECONDS = 3
_ENDS = ('available', 'error', 'error_extending', 'error_restoring', 'error_deleting')


class FullPool(openstack_volumes.Volumes):
    """The pools are on a tmpfs of the caller's."""

    def __init__(self, settings: settings_module.Settings) -> None:
        super().__init__(settings)
        if settings.pool is None or not settings.pool.is_mount():
            raise servers.ServerFailed(
                reason=f'{settings.pool} is no tmpfs of the test, which nobody should fill'
            )
        self._mount = settings.pool

    @contextlib.contextmanager
    def _full(self, left: int) -> Iterator[None]:
        """Meanwhile the file system has ``left`` bytes free."""
        status = os.statvfs(self._mount)
        self._resize((status.f_blocks - status.f_bfree) * status.f_frsize + left)
        try:
            yield
        finally:
            self._resize(status.f_blocks * status.f_frsize)

    def _resize(self, size: int) -> None:
        subprocess.run(('mount', '-o', f'remount,size={size}', self._mount), check=True)

    def run(self) -> dict[str, str]:
        """What became of each operation, in a pool without a free page and in one that gets full
        meanwhile.

        :raises ServerFailed: a volume is lost or changed, or something is left in the pool
        """
        with tempfile.NamedTemporaryFile(prefix='pcow-full-pool-') as file:
            file.write(bytes([_MARKER]) * _DATA)
            file.flush()
            image = self.api.upload_image(_NAME, Path(file.name), 'raw')
        volume = volumes.Volume.create(self.api, _NAME, 1)
        self.io(volume, f'write -q -P {_MARKER} {_OFFSET} {_DATA}')
        snapshot = volume.snapshot(_NAME)
        backup = volume.backup(_NAME)
        spare = volumes.Volume.create(self.api, _NAME, 1)
        seen = {}
        try:
            for row, operation in {
                'create': self._made,
                'create from image': lambda: self._made(imageRef=image),
                'create from snapshot': lambda: self._made(snapshot_id=snapshot),
                'clone': lambda: self._made(source_volid=volume.id),
                'snapshot': lambda: self._snapshot(volume),
                'revert': lambda: self._revert(volume, snapshot),
                'upload': lambda: self._upload(volume),
                'restore': lambda: self._restore(backup, spare),
                'extend': lambda: self._extend(volume),
            }.items():
                for what, left in _FREE.get(row, {'full': 0}).items():
                    seen[f'{row}, {what}'] = self._tried(operation, left, volume)
            with self._full(0):
                volume.delete_snapshot(snapshot)
                volume.delete()
                seen['delete, full'] = 'done'
        finally:
            volumes.delete_backup(self.api, backup)
            spare.delete()
            self.api.call('glance', 'DELETE', f'/v2/images/{image}')
        return seen

    def _tried(self, operation: Callable[[], str], left: int, volume: volumes.Volume) -> str:
        before = self.entries()
        time.sleep(_DELETED_SECONDS)  # told that the pool is full, it would ask no driver
        with self._full(left):
            said = operation()
        self._check(volume)
        if self.entries() != before:
            raise servers.ServerFailed(
                reason=f'left in the pool: {self.entries()}, before {before}'
            )
        # with space again: nothing stands in its way
        again, limit = operation(), time.monotonic() + _REPORT_SECONDS
        while _NO_ROOM in again and time.monotonic() < limit:
            time.sleep(2)
            again = operation()
        if not again.startswith('available'):
            raise servers.ServerFailed(reason=f'with space again: {again}; before {said}')
        self._check(volume)
        return said

    def _check(self, volume: volumes.Volume) -> None:
        if 'Pattern verification failed' in self.io(
            volume, f'read -q -P {_MARKER} {_OFFSET} {_DATA}'
        ):
            raise servers.ServerFailed(
                reason=f'volume {volume.id} holds something else than before'
            )

    def _outcome(self, what: str, kind: str = 'volumes') -> str:
        """The status in which something ends, and what Cinder tells the user of it."""
        one = kind.removesuffix('s')

        def look() -> str | None:
            status = str(self._call('GET', f'{kind}/{what}')[one]['status'])
            return status if status in _ENDS else None

        status = servers.wait(f'end of the request for {kind} {what}', look)
        told = [
            item['user_message']
            for item in self._call('GET', f'messages?resource_uuid={what}')['messages']
        ]
        return f'{status} ({told[0]})' if told and status != 'available' else status

    def _made(self, **source: str) -> str:
        wanted = {'name': _NAME, 'size': 1, 'volume_type': volumes.TYPE, **source}
        made = volumes.Volume(
            self.api, str(self._call('POST', 'volumes', {'volume': wanted})['volume']['id'])
        )
        try:
            return self._outcome(made.id)
        finally:
            made.delete()

    def _snapshot(self, volume: volumes.Volume) -> str:
        made = str(
            self._call('POST', 'snapshots', {'snapshot': {'volume_id': volume.id, 'name': _NAME}})[
                'snapshot'
            ]['id']
        )
        try:
            return self._outcome(made, 'snapshots')
        finally:
            volume.delete_snapshot(made)

    def _again(self, volume: volumes.Volume, action: str, **values: Any) -> str:
        """Do something to a volume, and what an administrator does if that fails."""
        volume.act(action, **values)
        said = self._outcome(volume.id)
        if said != 'available':
            volume.act('os-reset_status', status='available')
        return said

    def _revert(self, volume: volumes.Volume, snapshot: str) -> str:
        said = self._again(volume, 'revert', snapshot_id=snapshot)
        status = self._call('GET', f'snapshots/{snapshot}')['snapshot']['status']
        if status != 'available':
            self._call(
                'POST', f'snapshots/{snapshot}/action', {'os-reset_status': {'status': 'available'}}
            )
        return said

    def _extend(self, volume: volumes.Volume) -> str:
        return self._again(volume, 'os-extend', new_size=volume.show()['size'] + 1)

    def _upload(self, volume: volumes.Volume) -> str:
        image = str(
            volume.act(
                'os-volume_upload_image',
                image_name=_NAME,
                disk_format='qcow2',
                container_format='bare',
            )['os-volume_upload_image']['image_id']
        )
        try:
            return (
                f'{self._outcome(volume.id)}, image '
                f'{self.api.call("glance", "GET", f"/v2/images/{image}")["status"]}'
            )
        finally:
            self.api.call('glance', 'DELETE', f'/v2/images/{image}')

    def _restore(self, backup: str, spare: volumes.Volume) -> str:
        self._call('POST', f'backups/{backup}/restore', {'restore': {'volume_id': spare.id}})
        self._outcome(backup, 'backups')
        said = self._outcome(spare.id)
        if said != 'available':
            spare.act('os-reset_status', status='available')
        return said


class FullPoolTest(unittest.TestCase):
    def test_every_operation(self) -> None:
        bed = openstack_bed.Bed()
        self.addCleanup(bed.close)
        seen = FullPool(bed.settings).run()
        openstack_bed.report(
            'openstack-full-pool.txt', ''.join(f'{row:32} {said}\n' for row, said in seen.items())
        )
        for row in ('create', 'create from image', 'create from snapshot', 'clone'):
            self.assertIn('error', seen[f'{row}, full'])
