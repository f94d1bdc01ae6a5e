# SPDX-License-Identifier: Apache-2.0
"""A libvirt daemon in a directory: own files, own socket, nothing in common with the one of the
host.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import os
from pathlib import Path
import shlex
import shutil
import socket
import subprocess
import sys
import time

from pcow_driver.common import exception
from pcow_driver.common import tool

_START_SECONDS = 60.0

_QEMU_CONF = """\
user = "root"
group = "root"
security_driver = "none"
dynamic_ownership = 0
remember_owner = 0
stdio_handler = "file"
cgroup_controllers = []
namespaces = []
"""

_LIBVIRTD_CONF = """\
unix_sock_dir = "{directory}"
auth_unix_ro = "none"
auth_unix_rw = "none"
listen_tls = 0
listen_tcp = 0
log_outputs = "3:file:{directory}/libvirtd.log"
"""

# What libvirtd takes for its own places, and what lies there for this one: visible to it and its
# QEMUs only.
_PLACES = {
    '/etc/libvirt': 'etc',
    '/var/lib/libvirt': 'lib',
    '/run/libvirt': 'run',
    '/var/cache/libvirt': 'cache',
    '/var/log/libvirt': 'log',
}


_ETC = Path(__file__).resolve().parents[3] / 'etc' / 'libvirt'
# In place of qemu-img: snapshots of domains that are off include their pcow images.
_BIN = _ETC / 'bin'
_HOOK = Path('hooks', 'qemu.d', 'pcow')


def _environment() -> dict[str, str]:
    directories = (
        str(_BIN),
        os.path.dirname(tool.find('pcow_img')),
        os.path.join(sys.prefix, 'bin'),  # pcowctl, for the hook
        os.environ.get('PATH', os.defpath),
    )
    return dict(os.environ, PATH=os.pathsep.join(directories))


class Libvirtd:
    """Started by :meth:`start`; whoever starts it ends it (:mod:`tools.lib.quickstart.teardown`).

    :param directory: for all that it keeps, and for its socket; the same one may be used again
        after its end
    :param qemu_settings: lines for qemu.conf; they are taken in place of the ones here
    :param settings: lines for libvirtd.conf
    """

    def __init__(self, directory: Path, qemu_settings: str = '', settings: str = '') -> None:
        self.directory = directory
        self.socket = directory / 'libvirt-sock'
        self.uri = f'qemu+unix:///system?socket={self.socket}'
        self.log = directory / 'libvirtd.log'
        self._qemu_settings, self._settings = qemu_settings, settings

    def start(
        self,
        places: Mapping[str, Path] | None = None,
        setup: Sequence[str] = (),
        launcher: Sequence[str] = ('unshare', '--mount'),
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start it, wait until it answers, and return its process, the first one of its session.

        :param places: further directories that it shall see something else in: place to what lies
            there
        :param setup: shell commands to run in its mount namespace first
        :param launcher: what makes that namespace
        :param environment: further variables
        :raises PcowError: it does not; the message has the end of its log
        """
        (self.directory / 'libvirtd.conf').write_text(
            _LIBVIRTD_CONF.format(directory=self.directory) + self._settings
        )
        commands = ['set -e', 'mount --make-rprivate /', *setup]
        own = {place: self.directory / name for place, name in _PLACES.items()}
        for place, directory in {**own, **(places or {})}.items():
            directory.mkdir(exist_ok=True)
            commands += [
                f'mkdir -p {shlex.quote(place)}',
                shlex.join(('mount', '--bind', str(directory), place)),
            ]
        # of two lines for one thing libvirt takes the first
        (self.directory / 'etc' / 'qemu.conf').write_text(self._qemu_settings + _QEMU_CONF)
        arguments = (
            'libvirtd',
            '-f',
            str(self.directory / 'libvirtd.conf'),
            '-p',
            str(self.directory / 'libvirtd.pid'),
        )
        commands.append(f'exec {shlex.join(arguments)}')
        # A session of its own: it may outlive this process.
        with open(self.directory / 'start.log', 'wb') as log:
            process = subprocess.Popen(
                (*launcher, '/bin/sh', '-c', '\n'.join(commands)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_environment() | dict(environment or {}),
            )
        self._wait(process)
        return process

    def install_hook(self) -> None:
        """For domains with disks on images; others need it where QEMU is not root. Before
        :meth:`start`.
        """
        target = self.directory / 'etc' / _HOOK
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ETC / _HOOK, target)

    def answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and process.poll() is None:
            if self.answers():
                return
            time.sleep(0.05)
        lines = [
            line
            for path in (self.directory / 'start.log', self.log)
            if path.exists()
            for line in path.read_text(errors='replace').splitlines()
        ]
        raise exception.PcowError(
            reason=f'libvirtd does not start: {"; ".join(lines[-3:]) or "it said nothing"}'
        )
