# SPDX-License-Identifier: Apache-2.0
"""Rows of the life cycle in which a server is to change its host while it runs."""

from __future__ import annotations

import time

from pcow_driver.common import units
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import whole_life

_NODE1, _NODE2 = settings_module.NODE1.name, settings_module.NODE2.name
_SNAPSHOT = 'life-cycle-live'
# seconds after it has begun to go, which at 1 MiB/s takes longer
_IN_THE_MIDST = 3.0
# for the template, and not for what the guest has written
_LITTLE_ROOM = 5 * units.MIB


class LiveLife(whole_life.WholeLife):
    def live_migrate(self) -> str:
        """To the other host and back; refused where both hosts see the pool."""
        if self.hosts.pools_are_shared:
            raise life_cycle.Refused(reason=self._stays(self.server))
        ways = '; '.join(self._goes(self.server) for _way in range(2))
        return f'{ways}{self._settled()}; {self._reboot("HARD")}'

    def live_migrate_data(self) -> str:
        """With data devices, formatted and not."""
        self.api.create_flavor(*whole_life.DATA_FLAVOR)
        server = self._create(
            'life-cycle-live-data', life_cycle.IMAGE, whole_life.DATA_FLAVOR[0], host=_NODE1
        )
        root = server.wait_root(lambda root: root.boots == 1)
        made = servers.wait(
            'devices',
            lambda: found if len(found := server.devices()) == whole_life.DATA_DEVICES else None,
        )
        words = self._goes(server)
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        if server.wait_root(lambda found: found.boots == 2).sum != root.sum:
            raise servers.ServerFailed(reason='the root has other data')
        for item in made:
            self._intact(server, item)
        server.delete()
        return f'{words}; / and {", ".join(item.name for item in made)} intact after a reboot'

    def live_migrate_snapshot(self) -> str:
        """Raises what Nova says: a snapshot inside would stay behind."""
        self._pcowctl('server', 'snapshot', self.server.id, _SNAPSHOT)
        try:
            words = self._stays(self.server)
        finally:
            self._pcowctl(
                'snapshot',
                'delete',
                '--domain',
                str(self.server.show()['OS-EXT-SRV-ATTR:instance_name']),
                _SNAPSHOT,
            )
        raise life_cycle.Refused(reason=words)

    def live_migrate_full_pool(self) -> str:
        """Raises what Nova says: the file system of the new host's pool is full before all has
        arrived.
        """
        server = self._create('life-cycle-live-full', life_cycle.IMAGE, host=_NODE2)
        root = server.wait_root(lambda root: root.boots == 1)
        with self.hosts.small_pool(_LITTLE_ROOM):
            words = self._stays(server)
            if left := [name for name in self.hosts.images(_NODE1) if server.id in name]:
                raise servers.ServerFailed(
                    reason=f'{", ".join(left)} is left on the host where it did not arrive'
                )
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        if server.wait_root(lambda found: found.boots == 2).sum != root.sum:
            raise servers.ServerFailed(reason='the root has other data')
        server.delete()
        raise life_cycle.Refused(reason=f'{words}; the guest went on, data intact after a reboot')

    def live_migrate_killed(self) -> str:
        """nova-compute of its host is killed in the midst of it: the guest goes on there, and the
        next migration begins anew.
        """
        server = self._create('life-cycle-live-killed', life_cycle.IMAGE, host=_NODE1)
        root = server.wait_root(lambda root: root.boots == 1)
        before = server.wait_alive(lambda _boot, seconds: seconds > 0)
        # MiB/s; the end of the context kills it
        with self.hosts.nova_option('libvirt', 'live_migration_bandwidth', '1'):
            server.act('os-migrateLive', {'host': _NODE2, 'block_migration': 'auto'})
            servers.wait(
                'domain on the new host',
                lambda: True if len(self.hosts.domains(_NODE2)) > 0 else None,
            )
            time.sleep(_IN_THE_MIDST)
        server.wait_status('ACTIVE')
        left = [name for name in self.hosts.images(_NODE2) if server.id in name]
        if server.host() != _NODE1 or not left:
            raise servers.ServerFailed(reason=f'it is on {server.host()}, and {_NODE2} has {left}')
        server.wait_alive(lambda boot, seconds: boot == before[0] and seconds > before[1])
        words = self._goes(server)
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        if server.wait_root(lambda found: found.boots == 2).sum != root.sum:
            raise servers.ServerFailed(reason='the root has other data')
        server.delete()
        return (
            f'the guest went on, {", ".join(left)} stayed; then {words}; data intact after a reboot'
        )

    def _goes(self, server: servers.Server) -> str:
        host, took = self._migrate(server)
        now = server.host()
        if now == host:
            raise servers.ServerFailed(reason=f'it is still on {host}: {server.fault()}')
        if left := [name for name in self.hosts.images(host) if server.id in name]:
            raise servers.ServerFailed(reason=f'{", ".join(left)} is left on {host}')
        return f'{host} to {now} in {took:.1f} s, no boot'

    def _stays(self, server: servers.Server) -> str:
        """Nova's words."""
        host, _took = self._migrate(server)
        if server.host() != host:
            raise servers.ServerFailed(
                reason=f'it is on {server.host()}, and was to stay on {host}'
            )
        return server.fault()

    @staticmethod
    def _migrate(server: servers.Server) -> tuple[str, float]:
        """Where it was, and how many seconds it took; the guest goes on, wherever it is, and with
        it what it writes and reads.
        """
        host, before = server.host(), server.wait_alive(lambda _boot, seconds: seconds > 0)
        begun = time.monotonic()
        server.act(
            'os-migrateLive',
            {'host': _NODE1 if host == _NODE2 else _NODE2, 'block_migration': 'auto'},
        )
        server.wait_status('ACTIVE')
        took = time.monotonic() - begun
        after = server.wait_alive(
            lambda boot, seconds: boot != before[0] or seconds > before[1] + 1
        )
        if after[0] != before[0]:
            raise servers.ServerFailed(reason=f'the guest has booted: {before}, {after}')
        return host, took
