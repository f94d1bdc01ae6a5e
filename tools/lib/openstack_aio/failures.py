# SPDX-License-Identifier: Apache-2.0
"""Rows of the life cycle in which something of the host fails: no server is left half made, and
none that runs is lost.
"""

from __future__ import annotations

from pcow_driver.common import units
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import live_life
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import whole_life

_NODE1, _NODE2 = settings_module.NODE1.name, settings_module.NODE2.name
_CLAIMS_TOO_LITTLE = 'pcow.life-claims-too-little'
_NO_ROOM = units.MIB  # the template alone takes more
# for the template, and not for what one guest writes when it boots
_SOME_ROOM = 5 * units.MIB
_ENOUGH = 512 * units.MIB


class Failures(live_life.LiveLife):
    def snapshot_raw(self) -> str:
        """As the row snapshot, on a host that uploads raw images."""
        with self.hosts.nova_option('libvirt', 'snapshot_image_format', 'raw'):
            words = self.snapshot()
        kind = self.api.call('glance', 'GET', f'/v2/images/{self._images[-1]}')['disk_format']
        if kind != 'raw':
            raise servers.ServerFailed(reason=f'the image is {kind}')
        return f'raw: {words}'

    def host_reboot(self) -> str:
        """The second node ends with a server on it, and starts again; Nova starts the server with
        it.
        """
        server = self._create('life-cycle-reboot', life_cycle.IMAGE, host=_NODE2)
        before = server.wait_root(lambda root: root.boots == 1)
        self.hosts.reboot()
        server.wait_status('ACTIVE')
        after = server.wait_root(lambda root: root.boots == 2)
        if after.sum != before.sum:
            raise servers.ServerFailed(reason=f'the data are others than before: {before}, {after}')
        server.delete()
        return f'{_NODE2} ended and started; boot 2 on {after.device}, data intact'

    def wrong_flavor(self) -> str:
        """The devices of a server are larger than what its flavor claims of a pool."""
        specs = {'pcow:root': 'true', 'resources:CUSTOM_PCOW_MB': '1024', 'resources:DISK_GB': '0'}
        self.api.create_flavor(_CLAIMS_TOO_LITTLE, 160, 2, specs)
        return self._no_half_server(life_cycle.IMAGE, _CLAIMS_TOO_LITTLE)

    def rebuild_secure_boot(self) -> str:
        """Raises what Nova says: the server goes on, with its data and its claims, and boots with
        its own kernel.
        """
        image = self.api.upload_image(
            'life-cycle-secure-boot', self.hosts.image_file(), 'qcow2', os_secure_boot='required'
        )
        self._images.append(image)
        before, claims = self._alive(), self.hosts.claims()
        self.server.act('rebuild', {'imageRef': image})
        self.server.wait_status('ACTIVE')
        words = self.server.fault('rebuild')
        self._went_on(before)
        servers.wait('claims as before', lambda: True if self.hosts.claims() == claims else None)
        raise life_cycle.Refused(reason=f'{words}; then {self._reboot("HARD")}')

    def no_backend(self) -> str:
        """The emulator is another program than our QEMU."""
        with self.hosts.other_emulator():
            return self._no_half_server(life_cycle.IMAGE)

    def full_disk(self) -> str:
        """The file system of the pool is full before the template is made."""
        with self.hosts.small_pool(_NO_ROOM):
            return self._no_half_server(life_cycle.IMAGE)

    def full_disk_under_servers(self) -> str:
        """The file system of the pool is full while guests boot: they wait; one is deleted, one
        goes on when there is room.
        """
        with self.hosts.small_pool(_SOME_ROOM):
            before = self._traces()
            made = [
                self._create(f'life-cycle-{number}', life_cycle.IMAGE, host=_NODE1)
                for number in (1, 2)
            ]
            servers.wait('full pool', lambda: True if self.hosts.free_bytes() < units.MIB else None)
            if any('root ' in server.console() for server in made):
                raise servers.ServerFailed(reason='a guest has booted without room for its data')
            states = [server.show()['status'] for server in made]
            made[0].delete()
            self.hosts.resize_small_pool(_ENOUGH)
            made[1].wait_root(lambda root: root.boots == 1)
            made[1].act('reboot', {'type': 'HARD'})
            made[1].wait_status('ACTIVE')
            made[1].wait_root(lambda root: root.boots == 2)
            made[1].delete()
            self._check_traces(before)
        return (
            f'both {", ".join(sorted(set(states)))} and waiting for room; one was deleted, one '
            f'went on when the pool had '
            'grown, data intact; nothing is left'
        )

    def libvirt_down(self) -> str:
        """The libvirt daemon of the host is killed: a new server cannot be, the one that runs goes
        on.
        """
        before = self._traces()
        running = self._create('life-cycle-runs', life_cycle.IMAGE, host=_NODE1)
        root = running.wait_root(lambda root: root.boots == 1)
        with_it = self._traces()
        self.hosts.kill_libvirtd()
        try:
            server = servers.Server.create(
                self.api, 'life-cycle-failure', life_cycle.FLAVOR, life_cycle.IMAGE, host=_NODE1
            )
            self._made.append(server)
            server.wait_status('ERROR')
            words = str(server.show()['fault']['message'])
        finally:
            self.hosts.start_libvirtd()
        server.delete()
        self._check_traces(with_it)
        servers.wait(
            'nova-compute that takes servers',
            lambda: True if self.hosts.takes_servers(_NODE1) else None,
        )
        seen = running.wait_alive(lambda _boot, seconds: seconds > 0)
        running.wait_alive(lambda boot, seconds: boot == seen[0] and seconds > seen[1])
        running.act('reboot', {'type': 'HARD'})
        running.wait_status('ACTIVE')
        if running.wait_root(lambda found: found.boots == root.boots + 1).sum != root.sum:
            raise servers.ServerFailed(reason='the data of the server that ran are others')
        running.delete()
        self._create('life-cycle-after', life_cycle.IMAGE, host=_NODE1).delete()
        self._check_traces(before)
        raise life_cycle.Refused(
            reason=f'{words}; the server that ran went on, and new ones can be made when libvirt '
            f'is back'
        )


_AFTER = {
    'snapshot': ('snapshot_raw',),
    'cold_migrate_revert': ('live_migrate', 'live_migrate_snapshot'),
    'revert_in_place': ('rebuild_secure_boot',),
    'data_devices': ('live_migrate_data',),
    'full_pool': (
        'wrong_flavor',
        'no_backend',
        'full_disk',
        'full_disk_under_servers',
        'live_migrate_full_pool',
        'live_migrate_killed',
        'libvirt_down',
    ),
    'crowd': ('host_reboot',),
}
ROWS = tuple(name for row in whole_life.ROWS for name in (row, *_AFTER.get(row, ())))
