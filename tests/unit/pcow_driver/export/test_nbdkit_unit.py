# SPDX-License-Identifier: Apache-2.0
"""The unit of a disk with the real nbdkit; with a real systemd: tests/vm/disk_unit.py."""

import contextlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.export import nbd
from pcow_driver.export import nbdkit
from pcow_driver.export import nbdkit_unit
from pcow_driver.images import image
from tests.unit.pcow_driver import base

_PROGRAM = 'import sys; from pcow_driver.export import nbdkit_unit; sys.exit(nbdkit_unit.main())'
_SECONDS = 60.0


class Systemd:
    """As far as it is needed: a process for each connection, which is its stdin."""

    def __init__(self, path: str) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _address = self._socket.accept()
            except OSError:
                return
            self.started.append(
                subprocess.Popen(
                    [sys.executable, '-c', _PROGRAM], cwd=base.TOP, stdin=connection.fileno()
                )
            )
            connection.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for process in self.started:
            process.terminate()
            process.wait()


class UnitTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = os.environ.get('PCOW_BIN_DIR') or str(base.TOP / 'build/bin')
        self.useFixture(fixtures.EnvironmentVariable('PATH', f'{programs}:{os.environ["PATH"]}'))
        self.path = str(self.directory / 'volume.pcow')
        image.create(self.path, 8 * units.MIB)
        self.export = str(self.directory / 'disk')
        self.socket = str(self.directory / 'asked')
        self.useFixture(fixtures.MockPatchObject(nbdkit_unit, 'SOCKET', self.socket))
        self.systemd = Systemd(self.socket)
        self.addCleanup(self.systemd.close)

    def start(self, **options: Any) -> int:
        """Returns the process that serves."""
        nbd.start(self.export, self.path, **options)
        self.addCleanup(nbd.stop, self.export)
        return self.pid()

    def pid(self) -> int:
        return int(Path(self.export, 'nbdkit.pid').read_text())

    def io(self, command: str) -> str:
        uri = f'nbd+unix:///?socket={self.export}/socket'
        return tool.run(tool.find_system('qemu-io', 'qemu-utils'), '-f', 'raw', '-c', command, uri)

    def wait(self, condition: Any) -> None:
        limit = time.monotonic() + _SECONDS
        while not condition():
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.05)

    def parent(self, pid: int) -> int:
        return int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])

    def test_it_is_nobody_s_child_here(self) -> None:
        pid = self.start()
        self.io('write -P 7 0 4k')
        self.assertEqual(self.systemd.started[0].pid, self.parent(pid))
        nbd.stop(self.export)
        self.assertEqual(0, self.systemd.started[0].wait(_SECONDS))
        self.assertFalse(os.path.exists(self.export))

    def test_what_it_serves(self) -> None:
        image.snapshot_create(self.path, 's')
        self.start(snapshot='s')
        arguments = Path(f'/proc/{self.pid()}/cmdline').read_bytes().split(b'\0')
        for word in (b'snapshot=s', b'readonly=true', b'-r', os.fsencode(f'file={self.path}')):
            self.assertIn(word, arguments)

    def test_one_that_is_killed_is_started_again(self) -> None:
        pid = self.start()
        self.io('write -P 7 0 4k')
        os.chmod(f'{self.export}/socket', 0o640)
        os.kill(pid, signal.SIGKILL)
        pid_file = Path(self.export, 'nbdkit.pid')

        def is_another() -> bool:
            with contextlib.suppress(FileNotFoundError):  # it is taken away in between
                return pid_file.read_text().strip() not in ('', str(pid))
            return False

        self.wait(is_another)
        self.wait(lambda: os.stat(f'{self.export}/socket').st_mode & 0o777 == 0o640)
        self.assertIn('4096/4096', self.io('read -P 7 0 4k'))

    def test_not_for_ever(self) -> None:
        self.start()
        process = self.systemd.started[0]
        while process.poll() is None:
            try:
                os.kill(self.pid(), signal.SIGKILL)
            except (OSError, ValueError):
                pass
            time.sleep(0.05)
        self.assertEqual(1, process.returncode)

    def test_what_nbdkit_says_is_told(self) -> None:
        os.truncate(self.path, 4096)
        error = self.assertRaises(exception.ToolFailed, nbd.start, self.export, self.path)
        self.assertIn('volume.pcow', str(error))
        self.assertFalse(os.path.exists(self.export))

    def test_nonsense(self) -> None:
        other = self.directory / 'other'
        other.mkdir()
        if os.geteuid() == 0:
            os.chown(other, 65534, 65534)
        link = self.directory / 'link'
        link.symlink_to('/')
        start = {'start': str(self.directory), 'path': self.path}
        requests = [
            {},
            {'stop': 'x'},
            {'stop': str(link)},
            start | {'path': 3},
            start | {'program': '/bin/sh'},
            start | {'window': {'offset': 'x', 'size': 1}},
        ]
        if os.geteuid() == 0:
            requests += [{'stop': str(other)}, start | {'start': str(other)}]
        for request in requests:
            self.assertRaises(exception.ToolFailed, nbdkit_unit._ask, request)
        self.assertEqual([], os.listdir(other))

    def test_no_answer_in_time(self) -> None:
        """What has begun meanwhile is ended by the unit, which alone may see its process."""
        answered = nbdkit_unit._read_line
        seen: list[int] = []

        def late(connection: socket.socket) -> dict[str, Any]:
            answer = answered(connection)
            if not seen:
                seen.append(self.pid())
                raise TimeoutError('timed out')
            return answer

        with mock.patch.object(nbdkit_unit, '_read_line', late):
            error = self.assertRaises(exception.ToolFailed, nbd.start, self.export, self.path)
        self.assertIn('timed out', str(error))
        # it was asked to end what it had begun
        self.assertEqual(2, len(self.systemd.started))
        self.assertFalse(os.path.exists(self.export))
        self.assertEqual(0, self.systemd.started[0].wait(_SECONDS))

    def test_nobody_answers(self) -> None:
        self.systemd.close()
        self.assertRaises(exception.ToolFailed, nbdkit_unit.stop, self.export)


class StopTest(base.TestCase):
    def test_what_does_not_end_costs_no_descriptor(self) -> None:
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)
        fails = exception.ExportFailed(path=str(self.directory), reason='it does not end')
        before = os.listdir('/proc/self/fd')
        with mock.patch.object(nbdkit, 'end', side_effect=fails) as ended:
            self.assertRaises(
                exception.ExportFailed, nbdkit_unit._serve, ours, {'stop': str(self.directory)}
            )
        ended.assert_called_once()
        self.assertEqual(len(before), len(os.listdir('/proc/self/fd')))


class SocketTest(base.TestCase):
    def test_has_the_name_that_systemd_gives_it(self) -> None:
        unit = (base.TOP / 'etc/systemd/system/pcow-nbd.socket').read_text()
        self.assertIn(f'\nListenStream={nbdkit_unit.SOCKET}\n', unit)
