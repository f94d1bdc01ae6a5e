# SPDX-License-Identifier: Apache-2.0
"""What root does as a user leaves that user nothing of root's."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import users
from tests.unit.pcow_driver import base

DAEMON = pwd.getpwnam('daemon')


class RunAsTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        if os.geteuid():
            self.skipTest('root alone becomes another user')
        for directory in (self.directory, self.directory.parent):
            directory.chmod(0o755)
        self.out = self.directory / 'out'
        self.out.touch()
        os.chown(self.out, DAEMON.pw_uid, DAEMON.pw_gid)

    def test_session(self) -> None:
        """Who has no controlling terminal types nothing into root's (TIOCSTI)."""
        users.run_as(DAEMON.pw_uid, lambda: void(self.out.write_text(str(os.getsid(0)))))
        self.assertNotEqual(str(os.getsid(0)), self.out.read_text())

    def test_environment(self) -> None:
        given = {
            'PATH': os.environ['PATH'],
            'LANG': 'C.UTF-8',
            'PCOW_X': 'x',
            'OS_PCOW__STATE_PATH': '/x',
            'HOME': '/root',
            'XDG_RUNTIME_DIR': '/run/user/0',
            'SSH_AUTH_SOCK': '/root/agent',
        }

        def run() -> None:
            of_programs = subprocess.run(['env', '-0'], capture_output=True, check=True, text=True)
            self.out.write_text(json.dumps([dict(os.environ), of_programs.stdout]))

        with mock.patch.dict(os.environ, given, clear=True):
            users.run_as(DAEMON.pw_uid, run)
            self.assertEqual(given, dict(os.environ))
        found, of_programs = json.loads(self.out.read_text())
        wanted = {name: given[name] for name in ('PATH', 'LANG', 'PCOW_X', 'OS_PCOW__STATE_PATH')}
        wanted['HOME'] = DAEMON.pw_dir
        self.assertEqual(wanted, found)
        self.assertEqual(
            sorted(f'{name}={value}' for name, value in wanted.items()),
            sorted(of_programs.split('\0')[:-1]),
        )

    def test_umask(self) -> None:
        self.addCleanup(os.umask, os.umask(0))
        users.run_as(
            DAEMON.pw_uid, lambda: void(self.out.write_text(f'{os.umask(0):o} {os.getcwd()}'))
        )
        self.assertEqual('77 /', self.out.read_text())

    def test_this_user(self) -> None:
        """Nothing changes for who is that user already."""
        before = os.getsid(0), dict(os.environ)
        users.run_as(0, lambda: self.assertEqual(before, (os.getsid(0), dict(os.environ))))

    def test_interrupted(self) -> None:
        """No terminal tells it any more, so who waits for it does, and lets it clear up."""
        code = (
            'import pathlib, time\n'
            'from pcow_driver.common import interrupt, users\n'
            f'out = pathlib.Path({str(self.out)!r})\n'
            'def wait():\n'
            '    try:\n'
            '        out.write_text("waits")\n'
            '        time.sleep(60)\n'
            '    finally:\n'
            '        out.write_text("cleared up")\n'
            'interrupt.install()\n'
            f'users.run_as({DAEMON.pw_uid}, wait)\n'
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            self.out.write_text('')
            with subprocess.Popen(
                [sys.executable, '-c', code], cwd=base.TOP, stderr=subprocess.DEVNULL
            ) as process:
                while self.out.read_text() != 'waits':
                    time.sleep(0.01)
                process.send_signal(number)
                self.assertNotEqual(0, process.wait(20))
            self.assertEqual('cleared up', self.out.read_text())

    def test_what_it_raises_is_told(self) -> None:
        def fail() -> None:
            raise exception.PcowError(reason=f'said by {os.getuid()}')

        error = self.assertRaises(exception.ToolFailed, users.run_as, DAEMON.pw_uid, fail)
        self.assertEqual(f'said by {DAEMON.pw_uid}', str(error))


def void(_value: object) -> None:
    pass
