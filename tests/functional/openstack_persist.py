# SPDX-License-Identifier: Apache-2.0
"""Servers that go on where they were, on a node whose host ends and is started again: all that it
has of processes ends, and it has another boot ID.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
import os
from pathlib import Path
import shutil
import signal
import time
from typing import Any
import uuid

from tests.functional import openstack_bed
from tools.lib.openstack_aio import configuration
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.quickstart import teardown

FLAVOR = 'pcow.persist'
NODE = settings_module.NODE1
_RAM_MB, _ROOT_GB = 192, 1
_BOOT_ID = '/proc/sys/kernel/random/boot_id'
_WATCH = 'pcow-protect'
_BOOTED = 'PCOW-GUEST: root'  # what a guest says of its root then


class Persist:
    """On a bed that is up."""

    def __init__(self, bed: openstack_bed.Bed) -> None:
        self.api, self.hosts, self.settings = bed.api, bed.hosts, bed.settings
        self._machine = bed.machine
        self._node = self._machine.compute_node(NODE)
        self._volume = ''
        self._boot_id = self.settings.state / 'boot_id'  # that of the node, once it has booted
        self.api.create_flavor(
            FLAVOR,
            _RAM_MB,
            _ROOT_GB,
            {
                'pcow:root': 'true',
                'pcow:ram': 'true',
                'pcow:persist': 'true',
                'resources:CUSTOM_PCOW_MB': str((_ROOT_GB << 10) + _RAM_MB),
                'resources:DISK_GB': '0',
            },
        )

    # ---- root's services, and the host -----------------------------------------------------------

    def start_watch(self) -> None:
        """As pcow-protect.service does."""
        program = str(self.settings.venv / 'bin/pcowctl')
        config = str(self.settings.etc / 'pcow.conf')
        self._node.start(_WATCH, (program, '--config-file', config, 'host', 'watch'))

    def stop_watch(self) -> None:
        processes = self._machine.processes
        pid = processes.pid(_WATCH)
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            teardown.end([pid])
            processes.forget(_WATCH)

    def pcowctl(self, *words: str) -> Any:
        return json.loads(self.hosts.pcowctl(NODE.name, *words, '-f', 'json') or '[]')

    def shut_down(self) -> None:
        """The host, as pcow-fixate.service does while all that it needs is there still."""
        done = self.pcowctl('host', 'fixate', '--deadline', '60s')
        problems = [row['problem'] for row in done if row['problem']]
        if problems or not done:
            raise AssertionError(f'host fixate: {done}')
        self._end()

    def shut_down_by_signals(self) -> None:
        """Without that service: the last of all is SIGTERM for what is left."""
        self._end(signal.SIGTERM)

    def cut_power(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, of_guests: signal.Signals | None = None) -> None:
        """Nothing of the node is left."""
        processes, guests = self._machine.processes, self.guests()
        if of_guests is not signal.SIGKILL:
            self.stop_watch()
        processes.kill('nova-compute', 'nova-compute')
        with contextlib.suppress(ProcessLookupError):
            if (pid := processes.pid(_WATCH)) is not None:
                os.kill(pid, signal.SIGKILL)
                processes.forget(_WATCH)
        self.hosts.kill_libvirtd()
        for pid in guests if of_guests is not None else ():
            os.kill(pid, of_guests)
        servers.wait('end of the guests', lambda: True if not self.guests() else None)
        run = Path(self._node.libvirtd.directory) / 'run'  # a tmpfs, on a host
        for path in run.glob('*'):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def boot(self) -> None:
        """The host, with all its services."""
        self._node.start_libvirtd()
        is_first = not self._boot_id.exists()
        self._boot_id.write_text(f'{uuid.uuid4()}\n')
        if is_first:
            self._node.run('mount', '--bind', str(self._boot_id), _BOOT_ID)
        self.start_watch()
        self._machine.start_agent('nova-compute', 'Determined node identity')

    def guests(self) -> list[int]:
        """Processes of QEMU on the node."""
        found = []
        for pid in self._machine.processes.all():
            with contextlib.suppress(OSError):
                words = Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
                if b'-uuid' in words:
                    found.append(pid)
        return found

    # ---- servers ------------------------------------------------------------------------------

    def create(self, name: str, **more: Any) -> servers.Server:
        """One whose guest has gone on for a while, and of which there is a checkpoint."""
        made = servers.Server.create(self.api, name, FLAVOR, life_cycle.IMAGE, **more)
        made.wait_status('ACTIVE')
        made.wait_alive(lambda _boot, seconds: seconds > 1)
        return made

    def name(self, server: servers.Server) -> str:
        """Of its domain."""
        return str(server.show()['OS-EXT-SRV-ATTR:instance_name'])

    def row(self, server: servers.Server) -> dict[str, Any] | None:
        """Of those that are protected."""
        name = self.name(server)
        rows = self.pcowctl('vm', 'protect', '--list')
        return next((dict(row) for row in rows if row['name'] == name), None)

    def wait_checkpoint(self, server: servers.Server, begun: float) -> None:
        """One that was taken since, by :func:`time.time`."""

        def is_there() -> bool | None:
            age = str((self.row(server) or {}).get('age') or '')
            return True if age and time.time() - float(age.split()[0]) > begun + 1 else None

        servers.wait('checkpoint', is_there)

    def check_goes_on(
        self, server: servers.Server, boot: str, fits: Callable[[int], bool]
    ) -> tuple[str, int]:
        """Its guest never booted, and is at a second that fits.

        :raises ServerFailed:
        """
        now = server.wait_alive(lambda _boot, _seconds: True)
        if _BOOTED in server.console() or now[0] != boot or not fits(now[1]):
            raise servers.ServerFailed(reason=f'{server.id} is at {now}; it was in boot {boot}')
        later = server.wait_alive(lambda one, seconds: one == boot and seconds > now[1] + 1)
        server.wait_status('ACTIVE')
        return later

    def event(self, server: servers.Server) -> tuple[str, str]:
        """Result and words of the last time that it went on after a boot of its host."""
        actions = self.api.call('nova', 'GET', f'/servers/{server.id}/os-instance-actions')
        (last, *_older) = (one for one in actions['instanceActions'] if one['action'] == 'go_on')
        found = self.api.call(
            'nova', 'GET', f'/servers/{server.id}/os-instance-actions/{last["request_id"]}'
        )['instanceAction']['events']
        (found,) = (one for one in found if one['event'] == 'compute_pcow_go_on')
        return str(found['result']), str(found.get('details') or '')

    def records(self) -> list[str]:
        """Files of what the node knows of those that are protected."""
        return [path.name for path in (self.settings.pcow_state / 'protected').glob('*.json')]

    def delete_checkpoints(self, server: servers.Server) -> None:
        """All, on a node whose services have ended but for libvirt."""
        self._node.start_libvirtd()
        name = self.name(server)
        for row in self.pcowctl('vm', 'tree', name):
            self.hosts.pcowctl(NODE.name, 'vm', 'delete-checkpoint', name, str(row['name']))

    def attach_volume(self, server: servers.Server) -> None:
        backend = configuration.volume_type(self.settings.volume_backends[0])
        self._volume = self.api.call(
            'cinder',
            'POST',
            '/volumes',
            {'volume': {'size': 1, 'name': 'persists', 'volume_type': backend}},
        )['volume']['id']
        self._wait_volume('available')
        self.api.call(
            'nova',
            'POST',
            f'/servers/{server.id}/os-volume_attachments',
            {'volumeAttachment': {'volumeId': self._volume}},
        )
        self._wait_volume('in-use')

    def volume_status(self) -> str:
        found = self.api.call('cinder', 'GET', f'/volumes/{self._volume}')
        return str(found['volume']['status'])

    def _wait_volume(self, status: str) -> None:
        servers.wait(
            f'volume that is {status}', lambda: True if self.volume_status() == status else None
        )

    def delete_volume(self) -> None:
        self._wait_volume('available')
        self.api.call('cinder', 'DELETE', f'/volumes/{self._volume}')
