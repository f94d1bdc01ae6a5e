# SPDX-License-Identifier: Apache-2.0
"""A Cinder volume as a further NVDIMM of a server, and a disk of another, step by step; the guests
check what it holds.
"""

from __future__ import annotations

import dataclasses

from pcow_driver.common import exception
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import volumes

_NAME = 'volume-cycle'
_TYPE = 'volume-cycle'
_FLAVOR = 'pcow.tiny-volumes'
_DISK_FLAVOR = 'disk.tiny-volumes'
# MiB; the guest's kernel takes 16 of them for each GiB of persistent memory
_MEMORY = 320
_MIB_OF_ONE_GIB = 1024


class VolumeCycle(life_cycle.LifeCycle):
    """One server and its volume.  The rows are methods, as those of the server's own life are."""

    def __init__(self, api: api_module.Api, two_nodes: bool) -> None:
        super().__init__(api, two_nodes, _FLAVOR)
        self._volume: volumes.Volume | None = None
        self._other: volumes.Volume | None = None  # made of the snapshot
        self._fresh: volumes.Volume | None = None  # written to as a disk
        self._restored: volumes.Volume | None = None  # of the backup
        self._backup: str | None = None
        self._snapshot: str | None = None
        self._device: servers.Device | None = None

    @property
    def volume(self) -> volumes.Volume:
        if self._volume is None:
            raise servers.ServerFailed(reason='there is no volume: its creation failed')
        return self._volume

    @property
    def device(self) -> servers.Device:
        if self._device is None:
            raise servers.ServerFailed(reason='the guest has not seen the volume')
        return self._device

    def _intact(self) -> str:
        """After a boot the guest finds the volume in the same place with the same content."""
        wanted = self.device
        found = self.server.wait_device(
            lambda item: item.sum == wanted.sum and item.state == 'intact'
        )
        if found.name != wanted.name or self.root.device != '/dev/pmem0':
            raise servers.ServerFailed(
                reason=f'the devices have other names than before: root {self.root.device}, '
                f'{found.name}'
            )
        return f'volume intact on {found.name}'

    def create(self) -> str:
        self.api.create_flavor(
            _FLAVOR, _MEMORY, 0, {'pcow:root': 'true', 'resources:CUSTOM_PCOW_MB': '130'}
        )
        return super().create()

    def create_volume(self) -> str:
        self._volume = self._new_volume(_NAME)
        return '1 GiB'

    def attach(self) -> str:
        """While the server runs."""
        before = self._alive()
        self.volume.attach(self.server)
        self._device = found = self.server.wait_device(lambda item: item.state == 'new')
        if found.name != 'pmem1' or found.size != _MIB_OF_ONE_GIB:
            raise servers.ServerFailed(reason=f'the guest sees {found}')
        return f'{found.name} in the running guest, {found.size} MiB; {self._went_on(before)}'

    def snapshot_attached(self) -> str:
        before = self._alive()
        self._snapshot = self.volume.snapshot(_NAME)
        return self._went_on(before)

    def manage_snapshot_attached(self) -> str:
        """Cinder forgets the snapshot, and is given it again, under another ID and thereby name."""
        before = self._alive()
        if self._snapshot is None:
            raise servers.ServerFailed(reason='there is no snapshot')
        self._snapshot = self.volume.manage_snapshot(self._snapshot)
        return self._went_on(before)

    def detach_running(self) -> str:
        """Raises what Nova says: this row is refused."""
        before = self._alive()
        try:
            self.volume.detach(self.server)
            servers.wait('end of the request', lambda: self.server.fault() or None)
        except servers.ServerFailed:
            raise
        except exception.PcowError as e:
            words = str(e)
        else:
            words = self.server.fault()
        self.volume.wait_status('in-use')
        self._went_on(before)
        raise life_cycle.Refused(reason=words)

    def extend_attached(self) -> str:
        """Raises what Cinder says: this row is refused, by the scheduler, after the API has taken
        the request.
        """
        before = self._alive()
        size = self.volume.show()['size']
        self.volume.act('os-extend', new_size=size + 1)
        self.volume.wait_status('in-use')
        self._went_on(before)
        if self.volume.show()['size'] != size:
            raise servers.ServerFailed(reason='an attached volume is extended')
        raise life_cycle.Refused(
            reason=servers.wait('message', lambda: self.volume.messages() or None)[-1]
        )

    def _new_volume(self, name: str) -> volumes.Volume:
        """One on the server's host: memory does not reach another."""
        made = volumes.Volume.create(self.api, name, 1, near=self.server)
        if made.host() != self.server.host():
            raise servers.ServerFailed(
                reason=f'the volume is on {made.host()}, and its server on {self.server.host()}'
            )
        return made

    def backup_attached(self) -> str:
        """Of what the volume holds at that moment, while the guest has it; into a new volume."""
        before = self._alive()
        self._backup = self.volume.backup(_NAME)
        self._restored = self._new_volume(f'{_NAME}-3')
        self._restored.restore(self._backup)
        self.volume.wait_status('in-use')
        return self._went_on(before)

    def retype_attached(self) -> str:
        before = self._alive()
        self.api.create_volume_type(_TYPE, settings_module.PCOW_BACKEND)
        self.volume.act('os-retype', new_type=_TYPE, migration_policy='never')
        servers.wait(
            'other type', lambda: True if self.volume.show()['volume_type'] == _TYPE else None
        )
        self.volume.wait_status('in-use')
        return self._went_on(before)

    def cold_migrate_attached(self) -> str:
        """Raises what Nova says: this row is refused, before the server is stopped."""
        before, host = self._alive(), self.server.host()
        self.server.act('migrate')
        self.server.wait_status('ACTIVE')
        if self.server.host() != host:
            raise servers.ServerFailed(
                reason=f'it is on {self.server.host()}, and its volume on {host}'
            )
        self._went_on(before)
        raise life_cycle.Refused(reason=self.server.fault())

    def reboot(self) -> str:
        words = self._reboot('HARD')
        return f'{words}; {self._intact()}'

    def detach_stopped(self) -> str:
        self.server.act('os-stop')
        self.server.wait_status('SHUTOFF')
        self.volume.detach(self.server)
        self.volume.wait_status('available')
        self.server.act('os-start')
        self.server.wait_status('ACTIVE')
        return self._booted()

    def extend(self) -> str:
        self.volume.act('os-extend', new_size=2)
        servers.wait('larger volume', lambda: True if self.volume.show()['size'] == 2 else None)
        self.volume.wait_status('available')
        return '2 GiB'

    def as_disk(self) -> str:
        """The volume, and a new one, as disks of a server without persistent memory; taken out
        while that runs.
        """
        self.api.create_flavor(_DISK_FLAVOR, _MEMORY, 1, {})
        server = self._create(
            f'{_NAME}-disk', life_cycle.IMAGE, _DISK_FLAVOR, host=self.server.host()
        )
        server.wait_root(lambda root: root.boots == 1)
        self._fresh = self._new_volume(f'{_NAME}-4')
        for volume in (self.volume, self._fresh):
            volume.attach(server)
        known = server.wait_device(lambda item: item.sum == self.device.sum)
        new = server.wait_device(lambda item: item.state == 'new')
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        server.wait_root(lambda root: root.boots == 2)
        wanted = {dataclasses.replace(one, state='intact') for one in (known, new)}
        servers.wait('devices as before', lambda: True if wanted <= set(server.devices()) else None)
        if (known.name[:2], known.state, known.size) != ('vd', 'intact', 2 * _MIB_OF_ONE_GIB):
            raise servers.ServerFailed(reason=f'the guest sees {known}')
        self._snapshot_of_disk(server, self._fresh, new)
        for volume in (self.volume, self._fresh):
            volume.detach(server)
            volume.wait_status('available')
        before = server.wait_alive(lambda _boot, _seconds: True)
        server.wait_alive(lambda boot, seconds: boot == before[0] and seconds > before[1] + 1)
        server.delete()
        return (
            f'{known.name} and {new.name} intact, also after a hard reboot; a snapshot of '
            f'{new.name} and a volume of that, '
            'deleted before it; detached from the running guest, which went on'
        )

    def _snapshot_of_disk(
        self, server: servers.Server, volume: volumes.Volume, device: servers.Device
    ) -> None:
        """One is made and deleted while the guest runs, and a volume of it holds what the disk
        does.
        """
        snapshot = volume.snapshot(f'{_NAME}-disk')
        copy = volumes.Volume.create(self.api, f'{_NAME}-5', 1, snapshot_id=snapshot)
        copy.attach(server)
        server.wait_device(
            lambda item: (
                item.name != device.name and (item.sum, item.state) == (device.sum, 'intact')
            )
        )
        copy.detach(server)
        copy.wait_status('available')
        copy.delete()
        volume.delete_snapshot(snapshot)

    def attach_again(self) -> str:
        wanted = self.device
        self.volume.attach(self.server)
        found = self.server.wait_device(
            lambda item: item.state == 'intact' and item.sum == wanted.sum
        )
        if found.size != 2 * _MIB_OF_ONE_GIB:
            raise servers.ServerFailed(reason=f'the guest sees {found}')
        return f'{found.name}, {found.size} MiB, intact'

    def volume_of_snapshot(self) -> str:
        """A volume of the snapshot that was taken while the first one was attached, beside that
        one.
        """
        if self._snapshot is None:
            raise servers.ServerFailed(reason='there is no snapshot')
        self._other = volumes.Volume.create(self.api, f'{_NAME}-2', 1, snapshot_id=self._snapshot)
        self._other.attach(self.server)
        found = self.server.wait_device(lambda item: item.name == 'pmem2')
        if found.state != 'intact' or found.sum != self.device.sum:
            raise servers.ServerFailed(
                reason=f'the snapshot holds something else: {found}, the volume {self.device}'
            )
        return f'{found.name} has what the volume had'

    def volume_of_backup(self) -> str:
        if self._restored is None:
            raise servers.ServerFailed(reason='there is no volume of the backup')
        self._restored.attach(self.server)
        found = self.server.wait_device(lambda item: item.name == 'pmem3')
        if found.state != 'intact' or found.sum != self.device.sum:
            raise servers.ServerFailed(
                reason=f'the backup holds something else: {found}, the volume {self.device}'
            )
        return f'{found.name} has what the volume had'

    def delete_all(self) -> str:
        """The server with its volumes attached, then snapshot and volumes, the one that another
        stands on first.
        """
        self.server.delete()
        self._delete_volumes()
        return 'gone'

    def _delete_volumes(self) -> None:
        mine = [
            volume
            for volume in (self._volume, self._other, self._fresh, self._restored)
            if volume is not None
        ]
        for volume in mine:
            volume.wait_status('available')
        if self._snapshot is not None:
            self.volume.delete_snapshot(self._snapshot)
        self._snapshot = None
        for volume in mine:
            volume.delete()
        self._volume, self._other, self._fresh, self._restored = None, None, None, None
        if self._backup is not None:
            volumes.delete_backup(self.api, self._backup)
        self._backup = None
        if _TYPE in self.api.volume_types():
            volumes.delete_type(self.api, _TYPE)

    def clean(self) -> None:
        super().clean()
        self._delete_volumes()


ROWS = (
    'create',
    'create_volume',
    'attach',
    'snapshot_attached',
    'manage_snapshot_attached',
    'detach_running',
    'extend_attached',
    'backup_attached',
    'retype_attached',
    'cold_migrate_attached',
    'reboot',
    'detach_stopped',
    'extend',
    'as_disk',
    'attach_again',
    'volume_of_snapshot',
    'volume_of_backup',
    'delete_all',
)
REFUSED = ('detach_running', 'extend_attached', 'cold_migrate_attached')
