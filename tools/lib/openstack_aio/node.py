# SPDX-License-Identifier: Apache-2.0
"""A compute node: host name and mounts of its own, a libvirt daemon in them, and the services that
need both.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import os
from pathlib import Path
import shlex
import signal
import sys
import uuid

from pcow_driver.common import tool
from tools.lib.openstack_aio import processes as processes_module
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import ssh
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import teardown

_BESIDE = ('nova-compute', 'cinder-volume')  # what runs in its namespaces, too
_REAPER = Path(__file__).with_name('reaper.py')


class ComputeNode:
    def __init__(
        self,
        settings: settings_module.Settings,
        processes: processes_module.Processes,
        node: settings_module.Node,
        pools: Mapping[str, Path],
    ) -> None:
        self.node = node
        self._pools = pools
        self._settings = settings
        self._processes = processes
        self._directory = settings.state / 'nodes' / node.address
        self.ssh = ssh.Ssh(settings)
        first, count = settings_module.MIGRATION_PORTS
        first += settings.port_offset
        # libvirt takes no migration_address that it knows as loopback, and does without one
        address = (
            ''
            if node.address == settings_module.LOOPBACK
            else f'migration_address = "{node.address}"\n'
        )
        self.libvirtd = libvirtd.Libvirtd(
            self._directory,
            f'{address}migration_port_min = {first}\nmigration_port_max = {first + count - 1}\n',
            # libvirt migrates to no host that has the identity of its own
            f'host_uuid = "{uuid.uuid5(uuid.NAMESPACE_DNS, f"{node.name}.{settings.id}")}"\n',
        )

    def service(self, name: str) -> str:
        """Name of one of its services among all of the machine."""
        return name if self.node == settings_module.NODE1 else f'{name}-{self.node.name}'

    def start_libvirtd(self) -> None:
        """:raises PcowError: it does not start"""
        name = self.service('libvirtd')
        if self._processes.pid(name) is not None:
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._settings.instances.mkdir(exist_ok=True)
        self.ssh.prepare()
        # After a crash it comes back to the node that is there.
        others = (self._processes.pid(self.service(one)) for one in _BESIDE)
        beside = next((pid for pid in others if pid is not None), None)
        launcher = _namespaces(beside) if beside is not None else ('unshare', '--mount', '--uts')
        self.libvirtd.install_hook()
        process = self.libvirtd.start(
            self._places(),
            ('hostname ' + shlex.quote(self.node.name),),
            (*launcher, sys.executable, str(_REAPER)),
            {'TMPDIR': str(self._settings.temporary)},
        )
        self._processes.note(name, process.pid)

    def kill_libvirtd(self) -> None:
        """SIGKILL, as a crash would end it; its virtual machines go on.

        :raises PcowError: it does not run
        """
        name = self.service('libvirtd')
        self._processes.check(name)
        pid = int((self._directory / 'libvirtd.pid').read_text())
        os.kill(pid, signal.SIGKILL)
        teardown.end([pid])  # waits for it
        self._processes.forget(name)  # what waits for its virtual machines may go on

    def _places(self) -> dict[str, Path]:
        """Where the nodes see something else than the machine, and the second one something else
        than the first.
        """
        both = {ssh.PLACE: self.ssh.client}
        if self.node == settings_module.NODE1:
            return both
        own = {self._settings.instances: 'instances'}
        # else one list of pools, and locks that exclude the other node's processes
        if not self._settings.shared_pools:
            own[self._settings.pcow_state] = 'pcow'
        return (
            both
            | {str(place): self._directory / name for place, name in own.items()}
            | dict(self._pools)
        )

    def start_sshd(self) -> None:
        """Let the other node come in, if that is not so already."""
        if self._processes.pid(self.service(ssh.SERVICE)) is None:
            self.start(ssh.SERVICE, self.ssh.command(self.node))

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a service on this node.

        :raises PcowError:
        """
        self._processes.start(self.service(name), (*self._enter(), *command))

    def run(self, *command: str) -> str:
        """Run a program on this node and return what it prints.

        :raises ToolFailed:
        """
        return tool.run(
            '/usr/bin/env', f'TMPDIR={self._settings.temporary}', *self._enter(), *command
        )

    def _enter(self) -> tuple[str, ...]:
        """:raises PcowError: the node is not there"""
        self._processes.check(self.service('libvirtd'))
        return _namespaces(self._processes.pid(self.service('libvirtd')))


def _namespaces(pid: int | None) -> tuple[str, ...]:
    """What runs a program in those of a process."""
    return 'nsenter', f'--mount=/proc/{pid}/ns/mnt', f'--uts=/proc/{pid}/ns/uts'
