# SPDX-License-Identifier: Apache-2.0
"""What was chosen for an all-in-one, kept in its state directory, and the places and addresses that
follow from it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
import secrets

from pcow_driver.common import exception

FILE = 'settings.json'
LOOPBACK = '127.0.0.1'
REGION = 'RegionOne'
MAX_STATE_PATH = 70  # characters: the sockets below it must fit into 107
MAX_PORT_OFFSET = 10000

PCOW_COMPUTE_DRIVER = 'nova_pcow.driver.PcowLibvirtDriver'
STOCK_COMPUTE_DRIVER = 'libvirt.LibvirtDriver'
PCOW_BACKEND = 'pcow'

PORTS = {
    'keystone': 5000,
    'placement': 8778,
    'glance': 9292,
    'nova': 8774,
    'cinder': 8776,
    'neutron': 9696,
    'rabbitmq': 5673,
    'rabbitmq-distribution': 25673,
    'epmd': 4370,
    'sshd': 2222,
}
MIGRATION_PORTS = (49152, 64)  # the first one, and how many
# Service types of the catalog, and what follows the port in the URL of their endpoints.
SERVICE_TYPES = {
    'placement': ('placement', ''),
    'glance': ('image', ''),
    'nova': ('compute', '/v2.1'),
    'cinder': ('block-storage', '/v3'),
    'neutron': ('network', ''),
}
_DATABASES = (
    'keystone',
    'placement',
    'glance',
    'nova_api',
    'nova_cell0',
    'nova_cell1',
    'cinder',
    'neutron',
)


@dataclasses.dataclass(frozen=True)
class Node:
    """A compute node: its own host name, libvirt, instances and pools, as far as its processes can
    see.
    """

    name: str
    address: str


NODE1 = Node('node1', LOOPBACK)
NODE2 = Node('node2', '127.0.0.2')


@dataclasses.dataclass(frozen=True)
class Settings:
    """One all-in-one.  Everything of it is below ``state``, the volatile pool excepted."""

    state: Path
    id: str
    password: str
    port_offset: int = 0
    compute_driver: str = STOCK_COMPUTE_DRIVER
    volume_backends: tuple[str, ...] = ()
    pool: Path | None = None  # directory with the pcow pools; None: one on tmpfs
    debug: bool = False
    shared_pools: bool = False  # the second node sees the pools of the first one

    @classmethod
    def create(cls, state: Path) -> Settings:
        """Settings of an all-in-one that is not there yet.

        :raises UsageInvalid: the path of its directory is too long
        """
        if len(str(state)) > MAX_STATE_PATH:
            raise exception.UsageInvalid(
                reason=f'the state directory {state} has too long a path for the sockets in it: '
                f'give --state DIR with at most {MAX_STATE_PATH} characters'
            )
        return cls(state=state, id=secrets.token_hex(4), password=secrets.token_hex(12))

    @classmethod
    def load(cls, state: Path) -> Settings | None:
        """Those of the all-in-one in a directory; None: there is none.

        :raises PcowError: its file is damaged
        """
        path = state / FILE
        try:
            value = json.loads(path.read_text())
            return cls(
                state=state,
                id=str(value['id']),
                password=str(value['password']),
                port_offset=int(value['port_offset']),
                compute_driver=str(value['compute_driver']),
                volume_backends=tuple(map(str, value['volume_backends'])),
                pool=Path(value['pool']) if value['pool'] else None,
                debug=bool(value['debug']),
                shared_pools=bool(value.get('shared_pools')),
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as e:
            raise exception.PcowError(
                reason=f'{path} is damaged ({e}): delete the directory {state}'
            ) from None

    def save(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True, mode=0o755)
        value = dataclasses.asdict(self) | {
            'state': str(self.state),
            'pool': str(self.pool) if self.pool else None,
        }
        part = self.state / f'.{FILE}'
        part.touch(mode=0o600)
        part.write_text(json.dumps(value, indent=1) + '\n')
        part.replace(self.state / FILE)

    # Places

    @property
    def etc(self) -> Path:
        return self.state / 'etc'

    @property
    def logs(self) -> Path:
        return self.state / 'log'

    @property
    def data(self) -> Path:
        """What the services keep."""
        return self.state / 'data'

    @property
    def instances(self) -> Path:
        return self.state / 'instances'

    @property
    def temporary(self) -> Path:
        """TMPDIR of every process of this all-in-one, and thereby what they are known by."""
        return self.state / f'tmp-{self.id}'

    @property
    def venv(self) -> Path:
        """Python environment with the drivers of this checkout on top of OpenStack's."""
        return self.state / 'venv'

    @property
    def pcow_state(self) -> Path:
        """Of pcow_driver: each node sees its own here."""
        return self.data / 'pcow'

    def node(self, node: Node) -> Path:
        """What belongs to one node."""
        return self.state / 'nodes' / node.address

    @property
    def database_socket(self) -> Path:
        return self.state / 'mariadb' / 'socket'

    @property
    def openrc(self) -> Path:
        return self.state / 'openrc'

    # Addresses

    def libvirt_uri(self, node: Node) -> str:
        return f'qemu+unix:///system?socket={self.state}/nodes/{node.address}/libvirt-sock'

    def port(self, service: str) -> int:
        return PORTS[service] + self.port_offset

    def url(self, service: str) -> str:
        """Of an API, as in the catalog."""
        suffix = '/v3' if service == 'keystone' else SERVICE_TYPES[service][1]
        return f'http://{LOOPBACK}:{self.port(service)}{suffix}'

    @property
    def transport_url(self) -> str:
        return f'rabbit://openstack:{self.password}@{LOOPBACK}:{self.port("rabbitmq")}/'

    def database_url(self, name: str) -> str:
        return (
            f'mysql+pymysql://root@localhost/{name}?unix_socket={self.database_socket}&charset=utf8'
        )

    @property
    def databases(self) -> tuple[str, ...]:
        return _DATABASES
