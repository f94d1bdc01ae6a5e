# SPDX-License-Identifier: Apache-2.0
"""What ends an export believes nothing that somebody else may have written, and takes away only
sockets of its own.
"""

import os
from pathlib import Path
import socket
import stat
import threading

from pcow_driver.common import exception
from pcow_driver.common import workspace
from pcow_driver.export import control_socket
from pcow_driver.export import nbd
from tests.unit.pcow_driver import base


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
