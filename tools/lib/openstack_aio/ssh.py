# SPDX-License-Identifier: Apache-2.0
"""SSH between the two compute nodes, by which Nova moves the files of a server that is off: keys
and daemons of their own.

The clients find their configuration in ``/etc/ssh`` as the nodes see it; that of the machine is
neither read nor changed.
"""

from __future__ import annotations

from pathlib import Path

from pcow_driver.common import tool
from tools.lib.openstack_aio import settings as settings_module

PLACE = '/etc/ssh'  # where ssh looks for its configuration
SERVICE = 'sshd'
NODES = (settings_module.NODE1, settings_module.NODE2)
_PRIVILEGE_SEPARATION = Path('/run/sshd')  # built into sshd


class Ssh:
    def __init__(self, settings: settings_module.Settings) -> None:
        self._settings = settings
        self._port = settings.port('sshd')
        self._directory = settings.state / 'ssh'
        self.client = self._directory / 'client'  # what the nodes see in PLACE

    def prepare(self) -> None:
        """Make key and configuration, if they are not there.

        :raises ToolFailed:
        """
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self.client.mkdir(exist_ok=True)
        key, known = self._directory / 'key', self._directory / 'known_hosts'
        if not key.exists():
            tool.run(
                '/usr/bin/ssh-keygen',
                '-q',
                '-t',
                'ed25519',
                '-N',
                '',
                '-C',
                'openstack-aio',
                '-f',
                str(key),
            )
        public = ' '.join(key.with_suffix('.pub').read_text().split()[:2])
        (self._directory / 'authorized_keys').write_text(public + '\n')
        known.write_text(''.join(f'[{node.address}]:{self._port} {public}\n' for node in NODES))
        # Nova sends to an address, and fetches what a node lacks by the other's name, which nothing
        # else here knows.
        names = ''.join(f'Host {node.name}\n  HostName {node.address}\n' for node in NODES)
        hosts = ' '.join(word for node in NODES for word in (node.name, node.address))
        (self.client / 'ssh_config').write_text(
            f'{names}Host {hosts}\n  Port {self._port}\n  IdentityFile {key}\n  IdentitiesOnly '
            f'yes\n'
            f'  UserKnownHostsFile {known}\n  StrictHostKeyChecking yes\n'
        )
        for node in NODES:
            # One key for all: of the hosts and of root on them, who is the same on both.
            self._server(node).write_text(
                f'Port {self._port}\nListenAddress {node.address}\nHostKey {key}\n'
                f'AuthorizedKeysFile {self._directory / "authorized_keys"}\nStrictModes no\nUsePAM '
                f'no\nPidFile none\n'
                # pcowctl of the node
                f'SetEnv PATH={self._settings.node(node) / "bin"}:/usr/sbin:/usr/bin:/sbin:/bin\n'
                'PermitRootLogin prohibit-password\nPasswordAuthentication no\nAllowUsers '
                'root\nSubsystem sftp internal-sftp\n'
            )

    def _server(self, node: settings_module.Node) -> Path:
        return self._directory / f'sshd-{node.name}.conf'

    def command(self, node: settings_module.Node) -> tuple[str, ...]:
        """Of the daemon of a node, which stays in the foreground."""
        _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        return ('/usr/sbin/sshd', '-D', '-e', '-f', str(self._server(node)))
