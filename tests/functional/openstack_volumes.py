# SPDX-License-Identifier: Apache-2.0
"""Volumes through Cinder's API where it goes wrong: what is refused, hostile images, two operations
at once, deleted data.
"""

from collections.abc import Callable
from concurrent import futures
import contextlib
from pathlib import Path
import subprocess
import tempfile
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import volumes

_NAME = 'openstack-volumes'
_MARKER = 0xD7  # in every byte of what is deleted
_MARKED = 64 * units.MIB
_OFFSET = 2 * units.MIB  # of the data of a volume in its image


class Volumes:
    """On an all-in-one that is up; every method leaves the pool as it was."""

    def __init__(self, settings: settings_module.Settings) -> None:
        self._machine = allinone.AllInOne(settings)
        self.api = self._machine.api
        self.api.log_in()
        self._log = self._machine.processes.log('cinder-volume')
        self.pool = pools.directory(settings) / pools.CINDER

    def entries(self) -> list[str]:
        """What is in the pool, templates excepted."""
        return sorted(
            path.name for path in self.pool.iterdir() if not path.name.startswith('image-')
        )

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return self.api.call('cinder', method, f'/{self.api.project()}/{path}', body)

    def path(self, volume: volumes.Volume) -> Path:
        return self.pool / f'volume-{volume.id}.pcow'

    def io(self, volume: volumes.Volume, command: str) -> str:
        return tool.run(tool.find('pcow_io'), '--no-map', '-c', command, str(self.path(volume)))

    def _failed(self, **wanted: Any) -> str:
        """Ask for a volume that cannot be; what is said of it, by the API or in the log of
        cinder-volume.
        """
        begin = self._log.stat().st_size
        try:
            made = str(
                self._call(
                    'POST',
                    'volumes',
                    {'volume': {'name': _NAME, 'size': 1, 'volume_type': volumes.TYPE, **wanted}},
                )['volume']['id']
            )
        except exception.PcowError as e:
            return str(e)
        volume = volumes.Volume(self.api, made)
        try:
            servers.wait(
                'end of the request',
                lambda: volume.show()['status'] in ('error', 'available') or None,
            )
            if volume.show()['status'] != 'error':
                raise servers.ServerFailed(reason=f'volume {made} of {wanted} can be used')
        finally:
            volume.delete()
        lines = self._log.read_bytes()[begin:].decode(errors='replace').splitlines()
        return '\n'.join(
            line.partition('] ')[2] for line in lines if 'ERROR oslo_messaging.rpc.server [' in line
        )

    # What is refused

    def encrypted(self) -> str:
        """Words of the refusal of a volume whose type is encrypted."""
        with self._type({}) as uuid:
            self._call(
                'POST',
                f'types/{uuid}/encryption',
                {
                    'encryption': {
                        'provider': 'luks',
                        'control_location': 'front-end',
                        'cipher': 'aes-xts-plain64',
                        'key_size': 256,
                    }
                },
            )
            try:
                return self._failed(volume_type=uuid)
            finally:
                self._call('DELETE', f'types/{uuid}/encryption/provider')

    def limited(self) -> str:
        """Words of the refusal of a volume whose type has QoS specs."""
        with self._type({}) as uuid:
            wanted = {'name': _NAME, 'consumer': 'front-end', 'total_iops_sec': '100'}
            specs = str(self._call('POST', 'qos-specs', {'qos_specs': wanted})['qos_specs']['id'])
            try:
                self._call('GET', f'qos-specs/{specs}/associate?vol_type_id={uuid}')
                return self._failed(volume_type=uuid)
            finally:
                self._call('DELETE', f'qos-specs/{specs}?force=True')

    def multiattach(self) -> str:
        """Words of the refusal of a volume that may be attached twice; none if the scheduler found
        no place for it.
        """
        with self._type({'multiattach': '<is> True'}) as uuid:
            return self._failed(volume_type=uuid)

    @contextlib.contextmanager
    def _type(self, specs: dict[str, str]) -> Any:
        wanted = {
            'name': f'{_NAME}-type',
            'extra_specs': {'volume_backend_name': settings_module.PCOW_BACKEND, **specs},
        }
        made = str(self._call('POST', 'types', {'volume_type': wanted})['volume_type']['id'])
        try:
            yield made
        finally:
            self._call('DELETE', f'types/{made}')

    # Hostile images

    def hostile(self) -> dict[str, str]:
        """What is said of each, by Glance or by Cinder."""
        said = {}
        with tempfile.TemporaryDirectory(prefix='pcow-test-hostile-') as directory:
            base = Path(directory)
            secret = base / 'secret.raw'
            secret.write_bytes(b'S' * units.MIB)
            made = {
                'backing file': ('-f', 'qcow2', '-b', str(secret), '-F', 'raw', '{}'),
                'data file': ('-f', 'qcow2', '-o', f'data_file={base / "data"}', '{}', '1M'),
                'vmdk': ('-f', 'vmdk', '{}', '1M'),
                'huge': ('-f', 'qcow2', '-o', 'cluster_size=2M', '{}', '60T'),
            }
            for name, words in made.items():
                path = base / name.replace(' ', '-')
                subprocess.run(
                    [
                        'qemu-img',
                        'create',
                        '-q',
                        *(word.replace('{}', str(path)) for word in words),
                    ],
                    check=True,
                )
                said[name] = self._of_image(path)
            no_image = base / 'text'
            no_image.write_bytes(b'QFI\xfb' + bytes(4096))
            said['damaged'] = self._of_image(no_image)
        return said

    def _of_image(self, path: Path) -> str:
        image = str(
            self.api.call(
                'glance',
                'POST',
                '/v2/images',
                {'name': _NAME, 'disk_format': 'qcow2', 'container_format': 'bare'},
            )['id']
        )
        try:
            self.api.call('glance', 'PUT', f'/v2/images/{image}/file', path)
            return self._failed(imageRef=image)
        except servers.ServerFailed:
            raise
        except exception.PcowError as e:
            return str(e)
        finally:
            self.api.call('glance', 'DELETE', f'/v2/images/{image}')

    # Deleted data

    def deleted_data(self) -> None:
        """What one owner had can be read neither in the volume of the next one nor in the pool.

        :raises ServerFailed: it can
        """
        first = volumes.Volume.create(self.api, _NAME, 1)
        self.io(first, f'write -q -P {_MARKER} {_OFFSET} {_MARKED}')
        snapshot = first.snapshot(_NAME)
        self.io(first, f'write -q -P {_MARKER} {_OFFSET + _MARKED} {_MARKED}')
        first.delete_snapshot(snapshot)
        first.delete()
        if self._pool_has_marker():
            raise servers.ServerFailed(reason='the pool has data of a volume that is deleted')
        second = volumes.Volume.create(self.api, _NAME, 1)
        try:
            if 'Pattern verification failed' in self.io(
                second, f'read -q -P 0 {_OFFSET} {units.GIB}'
            ):
                raise servers.ServerFailed(reason='a new volume holds something')
        finally:
            second.delete()

    def _pool_has_marker(self) -> bool:
        wanted = bytes([_MARKER]) * 4096
        for path in self.pool.rglob('*'):
            if path.is_file() and not path.is_symlink():
                with open(path, 'rb') as file:
                    while chunk := file.read(16 * units.MIB):
                        if wanted in chunk:
                            return True
        return False

    # Two operations at once

    def at_once(self) -> dict[str, str]:
        """Pairs of requests for one volume at one moment: what became of each pair. The volume
        keeps its data.
        """
        pairs: dict[
            str, Callable[[volumes.Volume], tuple[Callable[[], Any], Callable[[], Any]]]
        ] = {
            'two clones': lambda volume: (
                lambda: self._ask(source_volid=volume.id),
                lambda: self._ask(source_volid=volume.id),
            ),
            'two snapshots': lambda volume: (
                lambda: volume.snapshot('a'),
                lambda: volume.snapshot('b'),
            ),
            'snapshot and clone': lambda volume: (
                lambda: volume.snapshot('a'),
                lambda: self._ask(source_volid=volume.id),
            ),
            'extend and snapshot': lambda volume: (
                lambda: volume.act('os-extend', new_size=2),
                lambda: volume.snapshot('a'),
            ),
            'clone and delete': lambda volume: (
                lambda: self._ask(source_volid=volume.id),
                volume.delete,
            ),
        }
        return {name: self._pair(make) for name, make in pairs.items()}

    def _ask(self, **source: str) -> str:
        return volumes.Volume.create(self.api, _NAME, 2, **source).id

    def _pair(
        self, make: Callable[[volumes.Volume], tuple[Callable[[], Any], Callable[[], Any]]]
    ) -> str:
        before = self.entries()
        volume = volumes.Volume.create(self.api, f'{_NAME}-source', 1)
        self.io(volume, f'write -q -P {_MARKER} {_OFFSET} {units.MIB}')
        seen = []
        with futures.ThreadPoolExecutor(2) as workers:
            for future in [workers.submit(one) for one in make(volume)]:
                try:
                    future.result()
                    seen.append('done')
                except exception.PcowError as e:
                    seen.append(f'refused ({str(e)[:120]})')
        self._clean(volume)
        if self.entries() != before:
            raise servers.ServerFailed(
                reason=f'left in the pool: {self.entries()}, before {before}'
            )
        return ', '.join(seen)

    def _clean(self, source: volumes.Volume) -> None:
        """Check what the pair has left, and delete it."""
        mine = [
            item
            for item in self._call('GET', 'volumes/detail')['volumes']
            if item['name'] in (_NAME, f'{_NAME}-source')
        ]
        for item in mine:
            volume = volumes.Volume(self.api, item['id'])
            if self._is_given_up(source, volume):
                volume.act('os-reset_status', status='error')
            servers.wait(
                'end of the request',
                lambda volume=volume: volume.show()['status'] in ('error', 'available') or None,
            )
            if volume.show()['status'] == 'error':  # its source had gone before
                continue
            if 'Pattern verification failed' in self.io(
                volume, f'read -q -P {_MARKER} {_OFFSET} {units.MIB}'
            ):
                raise servers.ServerFailed(reason=f'volume {item["id"]} holds something else')
        for snapshot in self._call('GET', f'snapshots/detail?volume_id={source.id}')['snapshots']:
            source.delete_snapshot(snapshot['id'])
        for item in sorted(mine, key=lambda one: bool(one['id'] != source.id)):
            volumes.Volume(self.api, item['id']).delete()

    def _is_given_up(self, source: volumes.Volume, volume: volumes.Volume) -> bool:
        """Whether Cinder's API refused it when its source had just gone, and never tells anybody
        (VolumeCastTask.revert).
        """

        def ended() -> dict[str, Any] | None:
            shown = volume.show()
            return (
                shown if shown['status'] != 'creating' or shown['os-vol-host-attr:host'] else None
            )

        try:
            servers.wait('service for a volume', ended, 30)
        except servers.ServerFailed:
            return all(
                item['id'] != source.id for item in self._call('GET', 'volumes/detail')['volumes']
            )
        return False

    # A pool that is not there

    def missing_pool(self) -> str:
        """cinder-volume starts while its only pool is not mounted: what its log says. Then all is
        as before.
        """
        marker, away = self.pool / names.MARKER, self.pool / '.away'
        begin = self._log.stat().st_size
        marker.rename(away)
        try:
            self._machine.kill_and_start('cinder-volume', 'Failed to initialize driver')
            said = self._log.read_bytes()[begin:].decode(errors='replace')
            self._machine.processes.check('cinder-volume')  # the service itself is up
            time.sleep(1)
        finally:
            away.rename(marker)
            self._machine.kill_and_start(
                'cinder-volume', 'Driver initialization completed successfully'
            )
        volumes.Volume.create(self.api, _NAME, 1).delete()
        return '\n'.join(line for line in said.splitlines() if ' ERROR cinder_pcow' in line)
