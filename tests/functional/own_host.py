# SPDX-License-Identifier: Apache-2.0
"""A host of its own, as far as its files go: a mount namespace in which /etc is a copy, and where
administrators put things there is nothing yet. Lines of the documentation are typed there with the
paths that they have. No systemd runs in it, whatever the machine has.
"""

from collections.abc import Mapping
import contextlib
import os
from pathlib import Path
import shlex
import shutil
import subprocess
import sys
import tempfile

from pcow_driver.common import tool
from tests.functional import images
from tests.functional import pages

# what is empty, and this host's own
_PLACES = (
    '/srv',
    '/mnt',
    '/opt',
    '/usr/local/bin',
    '/usr/local/lib',
    '/usr/local/share',
    '/var/lib/libvirt',
    '/var/lib/node_exporter',
    '/var/lib/pcow',
    '/run/systemd',
)
_TREES = {'/etc'}  # what is a copy
_SECONDS = 30


class OwnHost:
    """Root's. :meth:`close` leaves nothing; so does the end of this process.

    :param directory: for what it writes: the class of its pools is that of this file system
    :param copies: further trees that are copies of the machine's
    """

    def __init__(self, directory: Path | None = None, copies: tuple[str, ...] = ()) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix='pcow-test-host-', dir=directory or '/dev/shm')
        )
        self.directory.chmod(0o755)
        self.home = self.directory / 'home'  # where lines are typed
        self.home.mkdir()
        self._made: list[Path] = []  # mount points that the machine did not have
        try:
            self._process = self._begin((*_TREES, *copies))
        except BaseException:
            self._delete()
            raise
        self.launcher = ('nsenter', f'--mount=/proc/{self._process.pid}/ns/mnt', '--')
        self.own('/var/lib/pcow/pools').mkdir()  # as host setup makes it
        self.write_settings()

    def _begin(self, trees: tuple[str, ...]) -> 'subprocess.Popen[str]':
        commands = ['set -e']
        for place in (*trees, *_PLACES):
            own = self.directory / 'files' / place.lstrip('/')
            if place in trees:
                own.parent.mkdir(parents=True, exist_ok=True)
                commands.append(shlex.join(('cp', '-a', f'{place}/.', str(own))))
                own.mkdir()
            else:
                own.mkdir(parents=True)
                self._make_point(Path(place))
            own.chmod(0o755)
            commands.append(shlex.join(('mount', '--bind', str(own), place)))
        # it ends with who holds the other end of its stdin
        process = subprocess.Popen(
            ('unshare', '--mount', '/bin/sh', '-c', '\n'.join([*commands, 'echo there', 'read x'])),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        said = process.stdout.readline()
        if said != 'there\n':
            process.kill()
            raise AssertionError(f'no mount namespace: {said}{process.communicate()[0]}')
        return process

    def _make_point(self, place: Path) -> None:
        while not place.parent.exists():
            self._make_point(place.parent)
        with contextlib.suppress(FileExistsError):
            place.mkdir()
            self._made.append(place)

    def own(self, path: str) -> Path:
        """A file of this host, for who is outside; gone when it is closed."""
        return Path(f'/proc/{self._process.pid}/root{path}')

    def behind(self, path: str) -> Path:
        """The same, for who is in another such host; not what is mounted there later."""
        return self.directory / 'files' / path.lstrip('/')

    def write_settings(self, more: str = '') -> None:
        """/etc/pcow/pcow.conf"""
        path = self.own('/etc/pcow/pcow.conf')
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f'[pcow]\nemulator = {images.program("qemu-system-x86_64")}\n'
            f'nbdkit_plugin = {images.program("pcow-img").rpartition("/")[0]}'
            f'/nbdkit-pcow-plugin.so\n{more}'
        )

    def shell(
        self,
        places: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> pages.Shell:
        """With the programs of this checkout."""
        path = (
            str(self.directory / 'bin'),
            str(Path(sys.prefix) / 'bin'),
            str(Path(images.program('pcow-img')).parent),
            '/usr/local/bin',
            os.environ['PATH'],
        )
        return pages.Shell(
            directory or self.home,
            {'PATH': os.pathsep.join(path), 'PYTHONPATH': str(pages.TOP)} | dict(environment or {}),
            places,
            self.launcher,
        )

    def close(self) -> None:
        """What still runs in it, and what is mounted there, goes as well. May be called twice."""
        if self._process.poll() is None:
            self._process.communicate('\n', timeout=_SECONDS)
        self._delete()

    def _delete(self) -> None:
        if self.directory.exists():
            # templates are immutable
            subprocess.run(
                (tool.find_system('chattr', 'e2fsprogs'), '-R', '-f', '-i', str(self.directory)),
                stderr=subprocess.DEVNULL,
                check=False,
            )
            shutil.rmtree(self.directory, ignore_errors=True)
        while self._made:
            with contextlib.suppress(OSError):  # somebody else's things are there now
                self._made[-1].rmdir()
            self._made.pop()
