# SPDX-License-Identifier: Apache-2.0
"""cinder-volume is killed in the middle of each operation that a user asks for through the API, and
started again.

Each operation runs undisturbed once, which tells how long it takes; then it is killed after parts
of that time. Afterwards comes what a user, or an administrator where Cinder keeps a volume locked,
does next, and in the end no volume may be lost or changed and nothing be left in the pools.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from pathlib import Path
import tempfile
import time
from typing import Any
import uuid

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import protection
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import volumes

_NAME = 'volume-kills'
_DATA_OFFSET = 2 * units.MIB  # of a volume in its image
_FILL = 0x5A
_FILLED = 4 * units.MIB
_NEW = 0xA5  # what is written after the snapshot
_BUSY = (
    'creating',
    'deleting',
    'downloading',
    'uploading',
    'extending',
    'reverting',
    'backing-up',
    'restoring-backup',
    'restoring',
    'maintenance',
)
# a status that does not change for so long after the start stays
_SETTLE_SECONDS = 4.0
ROWS: tuple[str, ...] = (
    'create',
    'create_from_image',
    'create_from_snapshot',
    'clone',
    'extend',
    'snapshot',
    'delete_snapshot',
    'revert',
    'delete',
    'upload',
    'backup',
    'restore',
    'migrate',
)


class VolumeKills:
    """The rows are the methods of the operations' names: each prepares, and gives the request and
    what follows.
    """

    def __init__(self, machine: allinone.AllInOne, kills: int) -> None:
        self._machine = machine
        self.api = machine.api
        self._kills = kills
        self._directories = [
            pools.directory(machine.settings) / name
            for name in (pools.CINDER, f'{settings_module.NODE2.name}-{pools.CINDER}')
        ]
        self._image = ''
        self._parent = ''
        self._snapshot = ''
        self._near: servers.Server | None = None
        self._at_rest: list[list[str]] = []

    def run(
        self, rows: tuple[str, ...], say: Callable[[life_cycle.Result], None]
    ) -> list[life_cycle.Result]:
        """The outcome of each row, which ``say`` is told as soon as it is there.

        :raises PcowError: what the rows work on cannot be made
        """
        results = []
        with self._only_first_node(), self._sources():
            for row in rows:
                begun, seen = time.monotonic(), ''
                try:
                    seen = self._row(row)
                    outcome = 'pass'
                except exception.PcowError as e:
                    seen, outcome = str(e), 'FAILED'
                results.append(
                    life_cycle.Result(
                        row.replace('_', ' '), outcome, time.monotonic() - begun, seen
                    )
                )
                say(results[-1])
        return results

    # What the operations work on

    @contextlib.contextmanager
    def _only_first_node(self) -> Iterator[None]:
        """New volumes are where the service is killed: beside a server there.

        Disabling the other node's service would be simpler, but Cinder 29.0.0 answers that it is
        and changes nothing.
        """
        if settings_module.NODE2.name not in self.api.hypervisors():
            yield
            return
        image, flavor, _disk_flavor = self._machine.image(debian=False)
        self._near = servers.Server.create(
            self.api, _NAME, flavor, image, host=settings_module.NODE1.name
        )
        try:
            self._near.wait_status('ACTIVE')
            yield
        finally:
            self._near.delete()

    @contextlib.contextmanager
    def _sources(self) -> Iterator[None]:
        """An image, and a volume of it that has a snapshot and something newer."""
        self._image = self._upload(_NAME)
        parent = volumes.Volume.create(self.api, _NAME, 1, self._near, imageRef=self._image)
        try:
            self._parent = parent.id
            self._snapshot = parent.snapshot(_NAME)
            self._write(parent.id, _NEW)
            self._at_rest = self._entries()
            yield
            self._check(self._parent, _NEW)
            parent.delete_snapshot(self._snapshot)
        finally:
            with contextlib.suppress(exception.PcowError):
                parent.delete()
            self.api.call('glance', 'DELETE', f'/v2/images/{self._image}')

    def _upload(self, name: str) -> str:
        with tempfile.NamedTemporaryFile(prefix='pcow-volume-kills-') as file:
            file.write(bytes([_FILL]) * _FILLED)
            file.flush()
            return self.api.upload_image(name, Path(file.name), 'raw')

    def _entries(self) -> list[list[str]]:
        """What is in the pools, templates excepted: they stay for the next volume."""
        return [
            sorted(path.name for path in directory.iterdir() if not path.name.startswith('image-'))
            for directory in self._directories
            if directory.is_dir()
        ]

    def _path(self, volume: str) -> Path:
        for directory in self._directories:
            path = directory / f'volume-{volume}{names.IMAGE_SUFFIX}'
            if path.exists():
                return path
        raise servers.ServerFailed(reason=f'the image of volume {volume} is in no pool')

    def _write(self, volume: str, fill: int) -> None:
        self._io(volume, f'write -q -P {fill} {_DATA_OFFSET} {_FILLED}')

    def _check(self, volume: str, fill: int) -> None:
        """:raises ServerFailed: the volume holds something else"""
        if 'Pattern verification failed' in self._io(
            volume, f'read -q -P {fill} {_DATA_OFFSET} {_FILLED}'
        ):
            raise servers.ServerFailed(
                reason=f'volume {volume} holds something else than it should'
            )

    def _io(self, volume: str, command: str) -> str:
        return tool.run(tool.find('pcow_io'), '--no-map', '-c', command, str(self._path(volume)))

    # One row

    def _row(self, row: str) -> str:
        operation: Callable[[], Iterator[str]] = getattr(self, row)
        took = self._once(operation, None)[0]
        seen: dict[str, int] = {}
        for number in range(self._kills):
            status = self._once(operation, took * (number + 0.5) / self._kills)[1]
            seen[status] = seen.get(status, 0) + 1
        return f'{self._kills} kills in {took:.1f} s; afterwards: ' + ', '.join(
            f'{status} {count}x' for status, count in sorted(seen.items())
        )

    def _once(
        self, operation: Callable[[], Iterator[str]], delay: float | None
    ) -> tuple[float, str]:
        """Run it, killed after ``delay`` seconds or to its end; how long it took, and the status in
        which it was left.
        """
        steps = operation()
        next(steps)  # prepares
        begun = time.monotonic()
        what = next(steps)  # asks for it
        if delay is None:
            self._settled(what, 0)
        else:
            time.sleep(max(0.0, begun + delay - time.monotonic()))
            self._machine.kill_and_start(
                'cinder-volume', 'Driver initialization completed successfully'
            )
        took = time.monotonic() - begun
        status = self._settled(what, _SETTLE_SECONDS if delay is not None else 0)
        for _rest in steps:  # what follows
            pass
        left = self._entries()
        if left != self._at_rest:
            raise servers.ServerFailed(
                reason=f'killed after {delay} s: the pools hold {left}, before {self._at_rest}'
            )
        self._check(self._parent, _NEW)
        return took, status

    def _settled(self, what: str, patience: float) -> str:
        """The status of KIND/ID that it keeps; a busy one if it has not changed for ``patience``
        seconds (0: not at all).
        """
        limit, since, last = time.monotonic() + servers.SECONDS, time.monotonic(), ''
        while time.monotonic() < limit:
            status = self._status(what)
            if status != last:
                since, last = time.monotonic(), status
            busy = status in _BUSY or status.startswith('migration ')
            if not busy or (patience and time.monotonic() > since + patience):
                return status
            time.sleep(0.1)
        raise servers.ServerFailed(reason=f'{what} is {last} for ever')

    def _status(self, what: str) -> str:
        kind, name = what.split('/')
        found = {
            item['id']: item
            for item in self.api.call('cinder', 'GET', f'/{self.api.project()}/{kind}/detail')[kind]
        }
        if name not in found:
            return 'gone'
        migration = found[name].get('migration_status')
        if migration in ('starting', 'migrating', 'completing'):
            return f'migration {migration}'
        return str(found[name]['status'])

    # Requests

    def _post(self, kind: str, **body: Any) -> str:
        answer = self.api.call('cinder', 'POST', f'/{self.api.project()}/{kind}', body)
        return str(next(iter(answer.values()))['id'])

    def _delete(self, what: str) -> None:
        """Delete it, whatever Cinder believes of it."""
        status = self._status(what)
        if status == 'gone':
            return
        if status in _BUSY or status.startswith('migration '):
            self._unlock(what)
        path = f'/{self.api.project()}/{what}'
        if self._settled(what, 0) != 'gone':
            self.api.call('cinder', 'DELETE', path)
        servers.wait(f'end of {what}', lambda: True if self._status(what) == 'gone' else None)

    def _unlock(self, what: str) -> None:
        """What an administrator does with a status that nobody ends."""
        values = {'status': 'available'} | (
            {'migration_status': 'none'} if what.startswith('volumes/') else {}
        )
        self.api.call(
            'cinder', 'POST', f'/{self.api.project()}/{what}/action', {'os-reset_status': values}
        )

    def _volume(self, **source: str) -> str:
        wanted = {'name': _NAME, 'size': 1, 'volume_type': volumes.TYPE, **source}
        return self._post('volumes', volume=wanted, **volumes.hints(self._near))

    def _made(self, **source: str) -> str:
        """A volume that is there."""
        made = self._volume(**source)
        status = self._settled(f'volumes/{made}', 0)
        if status != 'available':
            raise servers.ServerFailed(reason=f'volume {made}: status {status}')
        return made

    # Operations

    def _creation(self, fill: int, **source: str) -> Iterator[str]:
        """An error is deleted, and asked for again."""
        yield ''
        what = f'volumes/{(made := self._volume(**source))}'
        yield what
        if self._status(what) == 'available':
            self._check(made, fill)
        self._delete(what)
        again = self._made(**source)
        self._check(again, fill)
        self._delete(f'volumes/{again}')

    def create(self) -> Iterator[str]:
        return self._creation(0)

    def create_from_image(self) -> Iterator[str]:
        """The first volume of an image: its template is made."""
        image = self._upload(f'{_NAME}-{uuid.uuid4()}')
        yield from self._creation(_FILL, imageRef=image)
        self.api.call('glance', 'DELETE', f'/v2/images/{image}')
        for directory in self._directories:
            for path in directory.glob(f'image-{image}-*'):
                protection.unprotect(str(path))
                path.unlink()

    def create_from_snapshot(self) -> Iterator[str]:
        return self._creation(_FILL, snapshot_id=self._snapshot)

    def clone(self) -> Iterator[str]:
        return self._creation(_NEW, source_volid=self._parent)

    def _on_copy(self) -> str:
        """A volume with the content of the snapshot."""
        return self._made(snapshot_id=self._snapshot)

    def extend(self) -> Iterator[str]:
        made = self._on_copy()
        what, path = f'volumes/{made}', f'/{self.api.project()}/volumes/{made}'
        yield what
        self.api.call('cinder', 'POST', f'{path}/action', {'os-extend': {'new_size': 2}})
        yield what
        if self._status(what) != 'available':
            self._unlock(what)
        if self.api.call('cinder', 'GET', path)['volume']['size'] == 1:
            self.api.call('cinder', 'POST', f'{path}/action', {'os-extend': {'new_size': 2}})
            self._settled(what, 0)
        self._check(made, _FILL)
        if self.api.call('cinder', 'GET', path)['volume']['size'] != 2:
            raise servers.ServerFailed(reason=f'{what} is not larger after all')
        self._delete(what)

    def snapshot(self) -> Iterator[str]:
        yield ''
        what = 'snapshots/' + self._post(
            'snapshots', snapshot={'volume_id': self._parent, 'name': _NAME}
        )
        yield what
        self._delete(what)

    def delete_snapshot(self) -> Iterator[str]:
        what = 'snapshots/' + self._post(
            'snapshots', snapshot={'volume_id': self._parent, 'name': _NAME}
        )
        self._settled(what, 0)
        yield ''
        self.api.call('cinder', 'DELETE', f'/{self.api.project()}/{what}')
        yield what
        self._delete(what)

    def revert(self) -> Iterator[str]:
        made = self._on_copy()
        what = f'volumes/{made}'
        snapshot = 'snapshots/' + self._post(
            'snapshots', snapshot={'volume_id': made, 'name': _NAME}
        )
        self._settled(snapshot, 0)
        self._write(made, _NEW)
        wanted = {'revert': {'snapshot_id': snapshot.partition('/')[2]}}
        yield ''
        self.api.call('cinder', 'POST', f'/{self.api.project()}/{what}/action', wanted)
        yield what
        for one in (snapshot, what):
            if self._status(one) != 'available':
                self._unlock(one)
        self.api.call('cinder', 'POST', f'/{self.api.project()}/{what}/action', wanted)
        self._settled(what, 0)
        self._settled(snapshot, 0)
        self._check(made, _FILL)
        self._delete(snapshot)
        self._delete(what)

    def delete(self) -> Iterator[str]:
        what = f'volumes/{self._on_copy()}'
        yield ''
        self.api.call('cinder', 'DELETE', f'/{self.api.project()}/{what}')
        yield what
        self._delete(what)

    def upload(self) -> Iterator[str]:
        yield ''
        what = f'volumes/{self._parent}'
        image = self.api.call(
            'cinder',
            'POST',
            f'/{self.api.project()}/{what}/action',
            {
                'os-volume_upload_image': {
                    'image_name': f'{_NAME}-upload',
                    'disk_format': 'qcow2',
                    'container_format': 'bare',
                }
            },
        )
        yield what
        if self._status(what) != 'available':
            self._unlock(what)
        self.api.call(
            'glance', 'DELETE', f'/v2/images/{image["os-volume_upload_image"]["image_id"]}'
        )

    def backup(self) -> Iterator[str]:
        """cinder-backup waits for cinder-volume, which is the one that is killed."""
        yield ''
        what = 'backups/' + self._post('backups', backup={'volume_id': self._parent, 'name': _NAME})
        yield what
        self._settled(what, servers.SECONDS)
        if self._status(f'volumes/{self._parent}') != 'available':
            self._unlock(f'volumes/{self._parent}')
        self._delete(what)

    def restore(self) -> Iterator[str]:
        backup = 'backups/' + self._post(
            'backups', backup={'volume_id': self._parent, 'name': _NAME}
        )
        self._settled(backup, 0)
        made = self._made()
        what, request = f'volumes/{made}', {'restore': {'volume_id': made}}
        yield ''
        self.api.call('cinder', 'POST', f'/{self.api.project()}/{backup}/restore', request)
        yield what
        self._settled(backup, servers.SECONDS)
        for one in (backup, what):
            if self._status(one) != 'available':
                self._unlock(one)
        self.api.call('cinder', 'POST', f'/{self.api.project()}/{backup}/restore', request)
        self._settled(what, servers.SECONDS)
        self._check(made, _NEW)
        self._delete(backup)
        self._delete(what)

    def migrate(self) -> Iterator[str]:
        """To the pool of the second node."""
        made = self._on_copy()
        what, path = f'volumes/{made}', f'/{self.api.project()}/volumes/{made}'
        host = f'{settings_module.NODE2.name}@{volumes.TYPE}#{pools.CINDER}'
        yield ''
        self.api.call('cinder', 'POST', f'{path}/action', {'os-migrate_volume': {'host': host}})
        yield what
        if self._status(what) != 'available':
            self._unlock(what)
        if self.api.call('cinder', 'GET', path)['volume']['os-vol-host-attr:host'] != host:
            self.api.call('cinder', 'POST', f'{path}/action', {'os-migrate_volume': {'host': host}})
            self._settled(what, 0)
        if self.api.call('cinder', 'GET', path)['volume']['os-vol-host-attr:host'] != host:
            raise servers.ServerFailed(reason=f'{what} is not on {host} after all')
        self._check(made, _FILL)
        self._delete(what)
