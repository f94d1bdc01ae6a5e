# SPDX-License-Identifier: Apache-2.0
"""What ends an export believes nothing that somebody else may have written, and takes away only
sockets of its own.
"""

import functools
import os
from pathlib import Path
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import users
from pcow_driver.common import workspace
from pcow_driver.export import control_socket
from pcow_driver.export import nbd
from pcow_driver.export import nbdkit_unit
from tests.unit.pcow_driver import base

_NAMES = (
    'socket',
    'mount',
    'control',
    'unit',
    'nbdkit.pid',
    'nbdkit.log',
    'nbdfuse.pid',
    'nbdfuse.log',
)
_SLEEPS = 'import time; time.sleep(60)'


class StopTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.victim = self.directory / '.victim.control'
        self.victim.write_text('precious')
        self.export = self.directory / 'export'
        self.export.mkdir(0o700)
        self.control = self.export / 'control'

    def socket(self, name: str, *, listening: bool = False) -> tuple[Path, socket.socket]:
        path, made = self.directory / name, socket.socket(socket.AF_UNIX)
        made.bind(str(path))
        if listening:
            made.listen(0)
            self.addCleanup(made.close)
        else:
            made.close()
        return path, made

    def test_directory_of_another_user(self) -> None:
        self.control.symlink_to(self.socket('.vm.pcow.control')[0])
        for owner, mode in ((65534, 0o700), (0, 0o770), (0, 0o702)):
            os.chown(self.export, owner, 0)
            self.export.chmod(mode)
            error = self.assertRaises(exception.ExportFailed, nbd.stop, str(self.export))
            self.assertIn('others may write', str(error))
        self.assertTrue(
            self.control.is_symlink() and (self.directory / '.vm.pcow.control').is_socket()
        )

    def test_what_is_no_socket_stays(self) -> None:
        """As in S2: a file refuses connections, too."""
        for target in (
            self.victim,
            self.directory / 'none/.x.control',
            '/dev/null',
            self.socket('other')[0],
        ):
            self.control.symlink_to(target)
            nbd.stop(str(self.export))
            self.assertFalse(self.export.exists())
            self.export.mkdir(0o700)
        self.assertEqual('precious', self.victim.read_text())
        self.assertTrue(
            (self.directory / 'other').is_socket() and stat.S_ISCHR(os.stat('/dev/null').st_mode)
        )

    def test_links_on_the_way(self) -> None:
        path, _made = self.socket('.vm.pcow.control')
        (self.directory / 'link').symlink_to(self.directory)
        (self.directory / '.link.control').symlink_to(path)
        for target in (self.directory / 'link/.vm.pcow.control', self.directory / '.link.control'):
            control_socket.remove_dead(str(target))
        self.assertTrue(path.is_socket())
        os.chown(path, 65534, 65534)
        control_socket.remove_dead(str(path))
        self.assertTrue(path.is_socket())  # somebody else's
        os.chown(path, os.geteuid(), 0)
        control_socket.remove_dead(str(path))
        self.assertFalse(path.exists())

    def test_somebody_who_never_accepts(self) -> None:
        """The queue is full: it lives, and nobody waits for it."""
        path, _made = self.socket('.vm.pcow.control', listening=True)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for one in waiting:
            self.addCleanup(one.close)
            one.setblocking(False)
            try:
                one.connect(str(path))
            except BlockingIOError:
                break
        done = threading.Thread(target=control_socket.remove_dead, args=(str(path),), daemon=True)
        done.start()
        done.join(5)
        self.assertFalse(done.is_alive())
        self.assertTrue(path.is_socket())

    def test_only_what_an_export_has(self) -> None:
        """A file of that name is somebody's work, whoever made the directory."""
        for name in (*_NAMES, 'other'):
            path = self.export / name
            if name in ('socket', 'control', 'mount'):
                path.write_text('precious')
            else:
                path.mkdir()
            error = self.assertRaises(exception.ExportFailed, nbd.stop, str(self.export))
            self.assertIn('no directory of an export', str(error))
            self.assertEqual([name], os.listdir(self.export))
            path.rename(self.directory / f'was-{name}')
        for name in ('nbdkit.pid', 'nbdfuse.pid', 'nbdkit.log', 'unit'):
            (self.export / name).symlink_to(self.victim)
            self.assertRaises(exception.ExportFailed, nbd.stop, str(self.export))
            (self.export / name).unlink()
        self.assertEqual('precious', self.victim.read_text())
        nbd.stop(str(self.export))

    def test_pid_files_that_name_no_process(self) -> None:
        for text in ('', '0', '-1', '1', 'x', '9' * 10, '9' * 40):
            (self.export / 'nbdkit.pid').write_text(text)
            nbd.stop(str(self.export))
            self.export.mkdir(0o700)

    def _stop_beside(self, place: str) -> int | None:
        """End the export while the process of its pid file has these paths among its arguments.

        :returns: its exit code; None: it still runs
        """
        self.export.mkdir(0o700, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, '-c', _SLEEPS, '-U', f'{place}/socket', '-P', f'{place}/nbdkit.pid'],
            stdin=subprocess.DEVNULL,
        )
        try:
            while not Path(f'/proc/{process.pid}/cmdline').read_bytes():
                time.sleep(0.01)  # it has no arguments yet
            (self.export / 'nbdkit.pid').write_text(str(process.pid))
            nbd.stop(str(self.export))
            self.assertFalse(self.export.exists())
            return process.poll()
        finally:
            process.kill()
            process.wait()

    def test_process_that_an_earlier_version_has_started(self) -> None:
        """With the path as it was given; nbdkit in the background is in / whatever that was."""
        parent, export = self.directory.name, str(self.export)
        for place in (
            export,
            f'{export}/',
            f'{self.directory}//./export/.',
            f'{export}/../export',
            'export',
            f'./{parent}/export/',
            f'../../{parent}/export',
        ):
            self.assertEqual(-signal.SIGTERM, self._stop_beside(place), place)

    def test_process_of_another_export(self) -> None:
        """It has the number of the one that has ended."""
        for place in (f'{self.export}2', f'{self.export}/x', '/x/export', 'port', 'x/export', '.'):
            self.assertIsNone(self._stop_beside(place), place)

    def test_root_goes_through_no_link_of_a_service(self) -> None:
        """Behind it is a directory of root's, which has the names of an export."""
        service, private = self.directory / 'service', self.directory / 'private'
        (private / 'run/x').mkdir(parents=True, mode=0o700)
        self.directory.chmod(0o755)
        (private / 'run/x/unit').write_text('precious')
        service.mkdir()
        os.chown(service, 65534, 65534)
        (service / 'exports').symlink_to(private / 'run')
        self.configure(nbdkit_plugin=self.script('plugin.so', ''), nbdkit='/bin/false')
        image = self.directory / 'vm.pcow'
        image.touch()
        for place in ('exports/x', 'exports/new', 'exports/new/er', 'own', 'own/new'):
            export = str(service / place)
            self.assertRaises(exception.PathRefused, nbd.stop, export)
            self.assertRaises(exception.PathRefused, nbd.start, export, str(image))
            self.assertRaises(exception.PathRefused, nbdkit_unit._checked_directory, export)
        self.assertEqual('precious', (private / 'run/x/unit').read_text())
        self.assertEqual(['x'], os.listdir(private / 'run'))
        self.assertEqual(['exports'], os.listdir(service))
        for path in ('/', '//', 'link/x'):
            (self.directory / 'link').unlink(missing_ok=True)
            (self.directory / 'link').symlink_to(private / 'run')
            self.assertRaises(exception.PathRefused, nbd.stop, str(self.directory / path))

    def test_who_is_not_root_goes_as_he_likes(self) -> None:
        """His directories may be his group's, and reached by a link."""
        place = self.directory / 'place'
        place.mkdir()
        place.chmod(0o2770)
        (self.directory / 'link').symlink_to(place)
        for path in (self.directory, place):
            os.chown(path, 65534, 65534)
        self.directory.parent.chmod(0o755)  # tempfile's
        export = place / 'x'
        export.mkdir(0o700)
        os.chown(export, 65534, 65534)
        users.run_as(65534, functools.partial(nbd.stop, str(self.directory / 'link/x')))
        self.assertFalse(export.exists())

    def test_path_that_is_too_long(self) -> None:
        """No socket can have it, and nbdkit would say so in its log alone."""
        self.configure(nbdkit_plugin=self.script('plugin.so', ''))
        (self.directory / 'vm.pcow').touch()
        deep = self.directory / ('x' * 100)
        error = self.assertRaises(
            exception.ExportFailed, nbd.start, str(deep), str(self.directory / 'vm.pcow')
        )
        self.assertIn('longer than the 107 bytes', str(error))
        self.assertFalse(deep.exists())

    def test_root_works_where_nobody_else_writes(self) -> None:
        """Another directory under the name of the export, or of a conversion, would have root write
        through links of its owner.
        """
        place = self.directory / 'open'
        place.mkdir()
        place.chmod(0o777)
        (self.directory / 'vm.pcow').touch()
        self.configure(
            conversion_dir=str(place),
            nbdkit_plugin=self.script('plugin.so', ''),
            nbdkit='/bin/false',
        )
        error = self.assertRaises(
            exception.PathRefused, nbd.start, str(place / 'export'), str(self.directory / 'vm.pcow')
        )
        self.assertIn('chmod go-w', str(error))
        with self.assertRaisesRegex(exception.ConversionDirUnusable, 'chmod go-w'):
            with workspace.directory('nbd'):
                pass
        self.assertEqual([], os.listdir(place))
        place.chmod(0o1777)
        with workspace.directory('nbd') as made:
            self.assertEqual(str(place), os.path.dirname(made))
        # what others make there, where everybody may, keeps nobody out
        for name in ('pcow-nbd-', 'pcow-nbd', 'pcow-template-12345678'):
            (place / name).mkdir()
            os.chown(place / name, 65534, 65534)
        with workspace.directory('nbd') as made:
            self.assertEqual('nbd', workspace.purpose(made))
            self.assertEqual(0o700, stat.S_IMODE(os.stat(made).st_mode))
        # nor does one with the name that was drawn
        (place / 'pcow-nbd-00000000').mkdir()
        drawn = ('00000000', '11111111')
        with mock.patch.object(secrets, 'token_hex', side_effect=drawn):
            with workspace.directory('nbd') as made:
                self.assertEqual('pcow-nbd-11111111', os.path.basename(made))
        place.chmod(0o777)
        left = place / 'pcow-template-abcdefgh'
        left.mkdir()
        os.utime(left, (0, 0))
        self.assertEqual([], list(workspace.left_over('template')))
        self.assertRaises(exception.ImageInUse, workspace.discard, str(left))
        place.chmod(0o1777)
        self.assertEqual([str(left)], list(workspace.left_over('template')))
