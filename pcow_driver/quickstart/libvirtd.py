# SPDX-License-Identifier: Apache-2.0
"""A libvirt daemon for one run: own directories, own socket, nothing in common with the one of the host."""

from __future__ import annotations

import os
from pathlib import Path
import shlex
import socket
import subprocess
import time

from pcow_driver import exception
from pcow_driver import tool
from pcow_driver.quickstart import state

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

# What libvirtd takes for its own places, and what lies there for this one: visible to it and its QEMUs only.
_PLACES = {'/etc/libvirt': 'etc', '/var/lib/libvirt': 'lib', '/run/libvirt': 'run', '/var/cache/libvirt': 'cache',
           '/var/log/libvirt': 'log'}


# In place of qemu-img: snapshots of domains that are off include their pcow images.
_BIN = Path(__file__).resolve().parents[2] / 'etc' / 'libvirt' / 'bin'


def _environment() -> dict[str, str]:
    directories = (str(_BIN), os.path.dirname(tool.find('pcow_img')), os.environ.get('PATH', os.defpath))
    return dict(os.environ, PATH=os.pathsep.join(directories))


class Libvirtd:
    """Started by :meth:`start`; it ends with the run (:mod:`pcow_driver.quickstart.teardown`)."""

    def __init__(self, run: state.Run) -> None:
        self.directory = run.directory
        self._socket = run.directory / 'libvirt-sock'
        self.uri = f'qemu+unix:///system?socket={self._socket}'

    def start(self) -> None:
        """Start it and wait until it answers.

        :raises PcowError: it does not; the message has the end of its log
        """
        (self.directory / 'libvirtd.conf').write_text(_LIBVIRTD_CONF.format(directory=self.directory))
        commands = ['set -e', 'mount --make-rprivate /']
        for place, name in _PLACES.items():
            (self.directory / name).mkdir()
            commands += [f'mkdir -p {place}', f'mount --bind {shlex.quote(str(self.directory / name))} {place}']
        (self.directory / 'etc' / 'qemu.conf').write_text(_QEMU_CONF)
        arguments = ('libvirtd', '-f', str(self.directory / 'libvirtd.conf'), '-p', str(self.directory / 'libvirtd.pid'))
        commands.append(f'exec {shlex.join(arguments)}')
        # A session of its own: with --keep it outlives this process.
        with open(self.directory / 'start.log', 'wb') as log:
            process = subprocess.Popen(('unshare', '--mount', '/bin/sh', '-c', '\n'.join(commands)), stdin=subprocess.DEVNULL,
                                       stdout=log, stderr=log, start_new_session=True, env=_environment())
        self._wait(process)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        limit = time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self._socket))
                    return
                except OSError:
                    time.sleep(0.05)
        lines = [line for name in ('start.log', 'libvirtd.log') if (self.directory / name).exists()
                 for line in (self.directory / name).read_text(errors='replace').splitlines()]
        raise exception.PcowError(reason=f'libvirtd does not start: {"; ".join(lines[-3:]) or "it said nothing"}')
