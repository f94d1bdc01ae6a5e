# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image while nbdkit serves it, by the control socket of its plug-in."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import socket
import stat
import subprocess
import sys

from pcow_driver.common import exception
from pcow_driver.export import control_socket
from pcow_driver.export import nbd
from pcow_driver.images import image
from pcow_driver.snapshots import attached
from tests.functional import test_device_nbd

MIB = test_device_nbd.MIB

# Between the moments in which a killed process gives up its memory, with its arguments, and its
# sockets. This one, whose arguments are the export's directory, the socket and the pid file, stays
# there for a second: its first thread ends before the others.
DYING = """
import ctypes, socket, sys, os, threading, time
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
threading.Thread(target=lambda: (time.sleep(1), os._exit(0))).start()
with open(sys.argv[3], "w") as file:
    file.write(str(os.getpid()))
ctypes.CDLL(None).pthread_exit(None)
"""

# Exchanges its two arguments as soon as both are there.
SWAP = """
import ctypes, os, sys, time
rename = ctypes.CDLL(None).renameat2
arguments = -100, os.fsencode(sys.argv[1]), -100, os.fsencode(sys.argv[2]), 2
end = time.monotonic() + 30
print(flush=True)
while rename(*arguments):
    if time.monotonic() > end:
        sys.exit(1)
"""


class ServedTest(test_device_nbd.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = self.served('vm')

    def served(self, name: str) -> str:
        path = self.pool.create_image(name, size=16 * MIB)
        self.uri = nbd.start(str(self.export(name)), path)
        self.addCleanup(nbd.stop, str(self.export(name)))
        return path

    def export(self, name: str) -> Path:
        return self.directory / f'export-{name}'

    def socket(self, path: str) -> Path:
        return Path(control_socket.socket_path(path))

    def command(self, *commands: str) -> list[str]:
        return [
            'qemu-io',
            '-f',
            'raw',
            *(word for one in commands for word in ('-c', one)),
            self.uri,
        ]

    def client(self, *commands: str) -> None:
        subprocess.run(self.command(*commands), check=True, capture_output=True, timeout=60)

    def names(self, path: str) -> list[str]:
        return [one.name for one in image.snapshot_list(path, force_share=True)]

    def first_byte(self, snapshot: str | None = None) -> int:
        target = self.directory / 'raw'
        select = ('-l', snapshot) if snapshot else ()
        subprocess.run(
            [
                test_device_nbd.BIN / 'pcow-img',
                'convert',
                '-q',
                '-O',
                'raw',
                *select,
                self.path,
                target,
            ],
            check=True,
        )
        with open(target, 'rb') as file:
            return file.read(1)[0]

    def test_snapshots(self) -> None:
        self.client('write -q -P 1 0 64k')
        attached.snapshot_create(self.path, 'first')
        self.client('write -q -P 2 0 64k')
        attached.snapshot_create(self.path, 'second')
        self.client('write -q -P 3 0 64k')
        attached.snapshot_rename(self.path, 'second', 'other')
        self.assertEqual(['first', 'other'], self.names(self.path))
        attached.snapshot_delete(self.path, 'first')
        with self.assertRaises(exception.ToolFailed) as found:
            attached.snapshot_create(self.path, 'other')
        self.assertIn('other', str(found.exception))
        with self.assertRaises(exception.ToolFailed):
            attached.snapshot_delete(self.path, 'first')
        nbd.stop(str(self.export('vm')))
        self.assertEqual((2, 3), (self.first_byte('other'), self.first_byte()))
        self.assertFalse(self.socket(self.path).exists())
        subprocess.run(
            [test_device_nbd.BIN / 'pcow-img', 'check', self.path], check=True, capture_output=True
        )

    def test_image_on_a_snapshot_of_it(self) -> None:
        attached.snapshot_create(self.path, 'base')
        image.create_overlay(
            str(Path(self.pool.path, 'child.pcow')), self.path, base_snapshot='base'
        )
        with self.assertRaises(exception.ToolFailed) as found:
            attached.snapshot_delete(self.path, 'base')
        self.assertIn('child.pcow', str(found.exception))

    def test_pause(self) -> None:
        server = control_socket.find(self.path)
        assert server is not None
        self.addCleanup(server.close)
        with server.paused():
            writer = subprocess.Popen(self.command('write -q -P 5 0 4k'), stdout=subprocess.DEVNULL)
            self.addCleanup(writer.wait)
            self.assertRaises(subprocess.TimeoutExpired, writer.wait, 1)
            attached.snapshot_create(self.path, 'while-paused')  # by a connection of its own
        self.assertEqual(0, writer.wait(60))
        # who is killed while it has paused keeps nobody waiting
        server._command('pause')
        server.close()
        self.client('write -q -P 6 0 4k')
        nbd.stop(str(self.export('vm')))
        self.assertEqual((0, 6), (self.first_byte('while-paused'), self.first_byte()))

    def test_several_of_one_moment(self) -> None:
        other = self.served('other')
        attached.snapshot_create(other, 'taken')
        with self.assertRaises(exception.ToolFailed):
            attached.snapshot_create_all([(self.path, 'taken'), (other, 'taken')])
        self.assertEqual([], self.names(self.path))  # all or none
        attached.snapshot_create_all([(self.path, 'both'), (other, 'both')])
        self.assertEqual((['both'], ['taken', 'both']), (self.names(self.path), self.names(other)))
        self.client('write -q -P 7 0 4k')  # nobody waits any more

    def test_after_a_kill(self) -> None:
        os.kill(int((self.export('vm') / 'nbdkit.pid').read_text()), signal.SIGKILL)
        self.assertTrue(self.socket(self.path).is_socket())
        nbd.stop(str(self.export('vm')))
        self.assertFalse(os.path.lexists(self.socket(self.path)))
        attached.snapshot_create(self.path, 'not-served')
        self.uri = nbd.start(str(self.export('vm')), self.path)
        attached.snapshot_create(self.path, 'served-again')
        self.assertEqual(['not-served', 'served-again'], self.names(self.path))

    def test_while_one_is_dying(self) -> None:
        nbd.stop(str(self.export('vm')))
        export, path = self.export('vm'), str(self.socket(self.path))
        export.mkdir()
        (export / 'control').symlink_to(path)
        pid_file = export / 'nbdkit.pid'
        dying = subprocess.Popen([sys.executable, '-c', DYING, export, path, pid_file])
        self.addCleanup(dying.wait)
        while (
            not pid_file.exists()
            or not (pid := pid_file.read_text())
            or Path(f'/proc/{pid}/cmdline').read_bytes()
        ):
            self.assertIsNone(dying.poll())
        nbd.stop(str(export))
        self.assertFalse(os.path.lexists(path))
        self.assertEqual(0, dying.wait(30))

    def test_who_may(self) -> None:
        nbd.stop(str(self.export('vm')))
        for group, mode, given in (
            (0, 0o600, 0o600),
            (65534, 0o660, 0o660),
            (0, 0o666, 0o666),
            (65534, 0o640, 0o640),
        ):
            os.chown(self.path, -1, group)
            os.chmod(self.path, mode)
            nbd.start(str(self.export('vm')), self.path)
            found = self.socket(self.path).stat()
            self.assertEqual((given, group), (stat.S_IMODE(found.st_mode), found.st_gid))
            nbd.stop(str(self.export('vm')))

    def test_who_may_where_the_directory_gives_the_group(self) -> None:
        """It is another one than the image's, which may not write to that."""
        nbd.stop(str(self.export('vm')))
        os.chown(self.pool.path, -1, 65534)
        os.chmod(self.pool.path, 0o2711)
        for group, given in ((0, 0o600), (65534, 0o666)):
            os.chown(self.path, -1, group)
            os.chmod(self.path, 0o666)
            nbd.start(str(self.export('vm')), self.path)
            found = self.socket(self.path).stat()
            self.assertEqual((given, 65534), (stat.S_IMODE(found.st_mode), found.st_gid))
            nbd.stop(str(self.export('vm')))

    def test_another_file_under_the_name(self) -> None:
        """Whoever has the directory of the image puts something else there as soon as there is a
        socket (S3).
        """
        nbd.stop(str(self.export('vm')))
        os.chmod(self.path, 0o666)
        os.chown(self.path, 65534, 65534)
        victim, link = self.directory / 'victim', Path(self.pool.path, 'link')
        victim.touch(0o600)
        for _ in range(10):
            self.socket(self.path).unlink(missing_ok=True)
            link.unlink(missing_ok=True)
            link.symlink_to(victim)
            swap = subprocess.Popen(
                [sys.executable, '-c', SWAP, link, self.socket(self.path)], stdout=subprocess.PIPE
            )
            assert swap.stdout is not None
            swap.stdout.readline()
            try:
                nbd.start(str(self.export('vm')), self.path)
            finally:
                self.assertEqual(0, swap.wait(), 'it has met no socket')
                swap.stdout.close()
            nbd.stop(str(self.export('vm')))
            self.assertEqual(
                (0o600, 0), (stat.S_IMODE(victim.stat().st_mode), victim.stat().st_gid)
            )
            self.assertTrue(self.socket(self.path).is_symlink())  # not ours to take away

    def test_what_is_no_socket_stays(self) -> None:
        nbd.stop(str(self.export('vm')))
        self.socket(self.path).write_text('precious')
        with self.assertRaisesRegex(exception.ToolFailed, 'old one cannot be removed'):
            nbd.start(str(self.export('vm')), self.path)
        self.assertEqual('precious', self.socket(self.path).read_text())
        self.socket(self.path).unlink()

    def assert_hung_up(self, client: socket.socket) -> None:
        try:
            self.assertEqual(b'', client.recv(4096))
        except ConnectionResetError:
            pass  # it had not read all

    def test_bad_commands(self) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            client.connect(str(self.socket(self.path)))
            for line, words in (
                (b'dance', b'no such command: dance'),
                (b'snapshot-create', b'no such command'),
                (b'a\tb\tc\td', b'too many words'),
                (b'snapshot-delete\tnone', b'none'),
                (b'snapshot-create\t' + b'x' * 200, b'error'),
            ):
                client.sendall(line + b'\n')
                answer = client.recv(4096)
                self.assertTrue(answer.startswith(b'error\t') and words in answer, answer)
            client.sendall(b'x' * 600)
            self.assert_hung_up(client)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(self.socket(self.path)))
            client.sendall(b'snapshot-create\0x\tname\n')
            self.assert_hung_up(client)
        self.assertEqual([], self.names(self.path))
        self.client('write -q -P 7 0 4k')
