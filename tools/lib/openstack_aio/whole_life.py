# SPDX-License-Identifier: Apache-2.0
"""Rows of the life cycle that reach beyond Nova's API: the administrator's commands, hosts that
fail, what is left behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
import tempfile
import time

from pcow_driver.common import exception
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import hosts as hosts_module
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

AT_ONCE = 10
_MANY_SECONDS = 300.0
# a root and two devices; a disk and one device
DATA_FLAVOR = (
    'pcow.tiny-data',
    160,
    1,
    {
        'pcow:data_mb': '64,32',
        'pcow:data_format': 'ext4,none',
        'resources:CUSTOM_PCOW_MB': '1120',
        'pcow:root': 'true',
    },
)
DATA_DEVICES = 2
_DISK_FLAVOR = ('disk.tiny-data', 160, 1, {'pcow:data_mb': '64', 'resources:CUSTOM_PCOW_MB': '64'})
_NODE1, _NODE2 = settings_module.NODE1.name, settings_module.NODE2.name
_SNAPSHOT = 'life-cycle'


@dataclasses.dataclass(frozen=True)
class _Traces:
    """What servers leave on the first node while they exist."""

    images: list[str]
    domains: list[str]
    directories: list[str]
    claims: dict[str, int]


class WholeLife(life_cycle.LifeCycle):
    def __init__(self, api: api_module.Api, two_nodes: bool, hosts: hosts_module.Hosts) -> None:
        super().__init__(api, two_nodes)
        self.hosts = hosts

    # Rows

    def data_devices(self) -> str:
        """Formatted and not, beside a root and beside a disk."""
        self.api.create_flavor(*DATA_FLAVOR)
        self.api.create_flavor(*_DISK_FLAVOR)
        words = (
            self._data(DATA_FLAVOR[0], ('pmem1', 64, 'dax'), ('pmem2', 32, '')),
            self._data(_DISK_FLAVOR[0], ('pmem0', 64, '')),
        )
        return '; '.join(words) + '; intact after a reboot'

    def _data(self, flavor: str, *wanted: tuple[str, int, str]) -> str:
        """:param wanted: name in the guest, MiB, and how its file system is mounted, if
        it has one
        """
        server = self._create('life-cycle-data', life_cycle.IMAGE, flavor)
        root = server.wait_root(lambda root: root.boots == 1)
        made = servers.wait(
            'devices', lambda: found if len(found := server.devices()) == len(wanted) else None
        )
        if [(item.name, item.size, item.formatted, item.state) for item in made] != [
            (*item, 'new') for item in wanted
        ]:
            raise servers.ServerFailed(reason=f'the guest sees {made}')
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        server.wait_root(lambda root: root.boots == 2)
        for item in made:
            self._intact(server, item)
        server.delete()
        return f'/ on {root.device}, ' + ', '.join(
            f'{name} {size} MiB {"ext4, DAX" if kind else "not formatted"}'
            for name, size, kind in wanted
        )

    @staticmethod
    def _intact(server: servers.Server, before: servers.Device) -> None:
        server.wait_device(lambda item: item == dataclasses.replace(before, state='intact'))

    def revert_in_place(self) -> str:
        """An administrator takes the server back to a snapshot inside its images; Nova's state
        stays what it is.
        """
        then, uuid = self.root, self.server.id
        self._pcowctl('server', 'snapshot', uuid, _SNAPSHOT)
        self._reboot('HARD')
        words = self._refused('server', 'revert', uuid, _SNAPSHOT)
        self.server.act('suspend')
        self.server.wait_status('SUSPENDED')
        suspended = self._refused('server', 'revert', uuid, _SNAPSHOT)
        self.server.act('resume')
        self.server.wait_status('ACTIVE')
        # once while it runs ...
        before = self._alive()
        self._pcowctl('server', 'revert', '--reset', uuid, _SNAPSHOT)
        self.server.wait_alive(lambda boot, _seconds: boot != before[0])
        self._back(then)
        # ... and once while it is off
        self._reboot('HARD')
        self.server.act('os-stop')
        self.server.wait_status('SHUTOFF')
        self._pcowctl('server', 'revert', uuid, _SNAPSHOT)
        if self.server.show()['status'] != 'SHUTOFF':
            raise servers.ServerFailed(
                reason=f'for Nova it is {self.server.show()["status"]} after the revert'
            )
        self.server.act('os-start')
        self.server.wait_status('ACTIVE')
        self._back(then)
        self._pcowctl(
            'snapshot',
            'delete',
            '--domain',
            str(self.server.show()['OS-EXT-SRV-ATTR:instance_name']),
            _SNAPSHOT,
        )
        return (
            f'twice at boot {then.boots + 1} again; refused while it runs ("{words}") and '
            f'suspended ("{suspended}")'
        )

    def _back(self, then: servers.Root) -> None:
        self._root = self.server.wait_root(lambda root: root.boots == then.boots + 1)
        if self.root.sum != then.sum or self.server.show()['status'] != 'ACTIVE':
            raise servers.ServerFailed(
                reason=f'the data are others than those of the snapshot: {then}, {self.root}'
            )

    def _pcowctl(self, *words: str) -> str:
        return self.hosts.pcowctl(self.server.host(), *words)

    def _refused(self, *words: str) -> str:
        try:
            self._pcowctl(*words)
        except exception.ToolFailed as e:
            return str(e).rpartition(f'{self.server.id}: ')[2].strip()
        raise servers.ServerFailed(reason=f'pcowctl {" ".join(words)} is not refused')

    def cold_migrate(self) -> str:
        words = super().cold_migrate()
        return f'{words}{self._settled()}'

    def cold_migrate_revert(self) -> str:
        words = super().cold_migrate_revert()
        return f'{words}{self._settled()}'

    def _settled(self) -> str:
        """The server has its images and its claims where it runs, and nowhere else, and no snapshot
        is left in them.

        :raises ServerFailed:
        """
        uuid, host = self.server.id, self.server.host()
        self._claims_only_on(self.server, host)
        # both nodes see the images, whose snapshots stay until the server is started again
        if self.hosts.pools_are_shared:
            return ''
        servers.wait(
            f'images of {uuid} on {host} alone',
            lambda: (
                True
                if [
                    node
                    for node in (_NODE1, _NODE2)
                    if any(uuid in name for name in self.hosts.images(node))
                ]
                == [host]
                else None
            ),
        )
        name = str(self.server.show()['OS-EXT-SRV-ATTR:instance_name'])
        servers.wait(
            f'end of the snapshots of {name}',
            lambda: (
                True
                if not json.loads(self._pcowctl('snapshot', 'list', '--domain', name, '-f', 'json'))
                else None
            ),
        )
        return '; nothing stays on the other node'

    def evacuate(self) -> str:
        """The second node loses its power with a server on it; raises what Nova says if the first
        one cannot see its pool.
        """
        server = self._create('life-cycle-evacuate', life_cycle.IMAGE, host=_NODE2)
        root = server.wait_root(lambda root: root.boots == 1)
        self.hosts.fail()
        try:
            server.act('evacuate', {})
            words = self._after_evacuation(server)
        finally:
            self.hosts.recover()
        found = server.show()
        if words is not None:
            # The host is back with its servers: nothing was lost, and nothing was changed.
            server.wait_status('ACTIVE')
            after = server.wait_root(lambda found: found.boots > root.boots)
            self._check_evacuated(server, _NODE2, root, after)
            server.delete()
            raise life_cycle.Refused(
                reason=f'{words}; status {found["status"]}; data intact when the host was back'
            )
        self._gone_from_node2(server)
        before = server.wait_alive(lambda _boot, seconds: seconds > 0)
        server.wait_alive(lambda boot, seconds: boot == before[0] and seconds > before[1])
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        after = server.wait_root(lambda found: found.boots == root.boots + 2)
        self._check_evacuated(server, _NODE1, root, after)
        server.delete()
        return f'{_NODE2} to {_NODE1} with the data, which stay when {_NODE2} is back'

    def _after_evacuation(self, server: servers.Server) -> str | None:
        """Nova's words if it was refused; None if the server is on the other host."""
        servers.wait(
            'end of the evacuation',
            lambda: True if server.show()['OS-EXT-STS:task_state'] is None else None,
        )
        if server.host() == _NODE1:
            server.wait_status('ACTIVE')
            server.wait_root(lambda found: found.boots == 2)
            return None
        if self.hosts.pools_are_shared:
            raise servers.ServerFailed(
                reason=f'the pool is shared, and the server was not evacuated: {server.fault()}'
            )
        return server.fault()

    @staticmethod
    def _check_evacuated(
        server: servers.Server, host: str, before: servers.Root, after: servers.Root
    ) -> None:
        if server.host() != host or after.sum != before.sum:
            raise servers.ServerFailed(
                reason=f'it is on {server.host()} with other data than before: {before}, {after}'
            )

    def _gone_from_node2(self, server: servers.Server) -> None:
        """The host that is back has given up the server that went on elsewhere."""
        name = str(server.show()['OS-EXT-SRV-ATTR:instance_name'])
        servers.wait(
            f'end of {name} on {_NODE2}',
            lambda: True if name not in self.hosts.domains(_NODE2) else None,
        )
        self._claims_only_on(server, _NODE1)

    def _claims_only_on(self, server: servers.Server, host: str) -> None:
        here = {f'{host}_pcow_{pools.NOVA}'}
        servers.wait(
            f'claims of {server.id} on {host} alone',
            lambda: True if self.hosts.claims_of(server.id) == here else None,
        )

    def crowd(self) -> str:
        """Ten servers at once, and their end; nothing of them is left."""
        # leaves the template
        self._create('life-cycle-first', life_cycle.IMAGE, host=_NODE1).delete()
        before, space = self._traces(), self.hosts.pool_bytes()
        begun = time.monotonic()
        made = [
            servers.Server.create(
                self.api, f'life-cycle-{number}', life_cycle.FLAVOR, life_cycle.IMAGE, host=_NODE1
            )
            for number in range(AT_ONCE)
        ]
        self._made += made
        for server in made:
            server.wait_status('ACTIVE', _MANY_SECONDS)
        active = time.monotonic() - begun
        for server in made:
            server.wait_root(lambda root: root.boots == 1, _MANY_SECONDS)
        taken = self.hosts.pool_bytes() - space
        begun = time.monotonic()
        for server in made:
            self.api.call('nova', 'DELETE', f'/servers/{server.id}')
        for server in made:
            server.wait_gone(_MANY_SECONDS)
        gone = time.monotonic() - begun
        self._check_traces(before)
        left = self.hosts.pool_bytes() - space
        if left > 0:
            raise servers.ServerFailed(reason=f'{left} bytes of the pool are not back')
        return (
            f'{AT_ONCE} active after {active:.1f} s, all booted with {taken >> 10} KiB of the '
            f'pool, gone after {gone:.1f} s; '
            'no image, domain, directory or claim is left'
        )

    def damaged_image(self) -> str:
        """A qcow2 file that is cut off."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, 'cut')
            source = self.hosts.image_file()
            path.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
            original = self.api.call(
                'glance', 'GET', f'/v2/images/{servers.find_image(self.api, life_cycle.IMAGE)}'
            )
            kept = {key: str(original[key]) for key in ('kernel_id', 'ramdisk_id')}
            image = self.api.upload_image('life-cycle-damaged', path, 'qcow2', **kept)
        self._images.append(image)
        return self._no_half_server(image)

    def full_pool(self) -> str:
        """More than the operator lets be provisioned."""
        self.hosts.pcowctl(_NODE1, 'pool', 'set', pools.NOVA, '--overcommit', '0.001')
        try:
            return self._no_half_server(life_cycle.IMAGE)
        finally:
            self.hosts.pcowctl(_NODE1, 'pool', 'set', pools.NOVA, '--overcommit', '0')

    def _no_half_server(self, image: str, flavor: str = life_cycle.FLAVOR) -> str:
        """A server that cannot be: it is said why, and nothing of it is there.  Returns the words.

        What another host could have done is told in the events, as the fault says that there is
        none.
        """
        before = self._traces()
        server = servers.Server.create(self.api, 'life-cycle-failure', flavor, image, host=_NODE1)
        self._made.append(server)
        server.wait_status('ERROR')
        fault = server.fault()
        self._check_traces(before)
        server.delete()
        raise life_cycle.Refused(reason=fault)

    def _traces(self) -> _Traces:
        return _Traces(
            self.hosts.images(_NODE1),
            sorted(self.hosts.domains(_NODE1)),
            sorted(self.hosts.directories()),
            self.hosts.claims(),
        )

    def _check_traces(self, before: _Traces) -> None:
        """:raises ServerFailed: something is left"""
        # directories go a moment after Nova says that the server is gone
        with contextlib.suppress(servers.ServerFailed):
            servers.wait(
                'end of all traces', lambda: True if self._traces() == before else None, 20.0
            )
        if (now := self._traces()) != before:
            raise servers.ServerFailed(reason=f'something is left: {before} before, {now} now')


_LAST = ('rebuild_to_snapshot', 'rebuild', 'delete')
ROWS = (
    *(row for row in life_cycle.ROWS if row not in _LAST),
    'revert_in_place',
    *_LAST,
    'data_devices',
    'damaged_image',
    'full_pool',
    'crowd',
    'evacuate',
)
