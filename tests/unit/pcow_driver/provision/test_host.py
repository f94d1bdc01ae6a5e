# SPDX-License-Identifier: Apache-2.0
"""pcowctl host setup: what the services share is theirs, what root works in is root's."""

from collections.abc import Iterator
import contextlib
import grp
import os
from pathlib import Path
import pwd
import shutil
import stat
import subprocess
import sys
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.fixation import records
from pcow_driver.provision import host
from tests.unit.pcow_driver import base

_GROUP = 'nogroup'


class HostTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        self.state = self.directory / 'lib' / 'state'
        self.configure(state_path=str(self.state), pools_path=str(self.state / 'pools'))

    def set_up(self, group: str | None = _GROUP) -> dict[str, str]:
        return {Path(item.path).name: item.done for item in host.set_up(group)}

    def check(self) -> None:
        gid = grp.getgrnam(_GROUP).gr_gid
        for name, expected in {
            '.': (0, 0, 0o755),
            'pools': (0, 0, 0o755),
            'locks': (0, gid, 0o2770),
            'frozen': (0, gid, 0o2770),
            'exports': (0, gid, 0o2770),
            'migrations': (0, gid, 0o2770),
            'live-migrations': (0, gid, 0o2770),
            'scrubs': (0, gid, 0o2770),
            'own-locks': (0, 0, 0o700),
            'protected': (0, 0, 0o755),
            'lists': (0, gid, 0o2770),
            'disks': (0, gid, 0o2771),
        }.items():
            found = (self.state / name).stat()
            self.assertEqual(
                expected, (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)), name
            )

    @contextlib.contextmanager
    def in_service(self) -> Iterator[None]:
        """This process has the rights of one meanwhile."""
        groups = os.getgroups()
        os.setgroups([])
        os.setegid(grp.getgrnam(_GROUP).gr_gid)
        os.seteuid(pwd.getpwnam('nobody').pw_uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
            os.setgroups(groups)

    def as_service(self, *command: object) -> int:
        return subprocess.run(
            [
                'setpriv',
                '--reuid=nobody',
                f'--regid={_GROUP}',
                '--clear-groups',
                *map(str, command),
            ],
            check=False,
            capture_output=True,
        ).returncode

    def test_made_and_put_right(self) -> None:
        self.assertEqual({'made'}, set(self.set_up().values()))
        self.check()
        self.assertEqual({'as it was'}, set(self.set_up().values()))
        os.chown(self.state, 0, grp.getgrnam(_GROUP).gr_gid)
        # as of a host that was set up for an earlier version
        self.state.chmod(0o2775)
        (self.state / 'exports').chmod(0o700)
        for name in locks.OWN_MODES:
            (self.state / name).chmod(0o2777)
            for owner in ('root', 'nobody'):
                (self.state / name / owner).touch()
                shutil.chown(self.state / name / owner, owner)
            self.assertTrue(any(f'{name}:' in words for words in host.differences()), name)
        self.assertEqual(
            {'state', 'exports', *locks.OWN_MODES},
            {name for name, done in self.set_up().items() if done == 'changed'},
        )
        self.check()
        self.assertEqual([], host.differences())
        # of root's own a service may have the lock
        self.assertEqual([], os.listdir(self.state / 'own-locks'))
        self.assertEqual(['root'], os.listdir(self.state / 'protected'))

    def test_a_record_of_another_user(self) -> None:
        self.set_up()
        record = self.state / 'protected' / '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6.json'
        record.write_text('{"state": "fixated", "checkpoint": "old"}')
        self.assertIsNotNone(records.read(record.stem))
        shutil.chown(record, 'nobody')
        with self.assertRaisesRegex(exception.StateInvalid, 'another user'):
            records.read(record.stem)
        self.assertTrue(any(str(record) in words for words in host.differences()))

    def test_who_cannot_keep_a_record(self) -> None:
        """He neither takes a protected domain back, nor ends its protection."""
        self.set_up()
        records.write('x', records.Record(records.State.RUNS))
        records.check_mine('x')
        with self.in_service():
            records.check_mine('y')
            with self.assertRaisesRegex(exception.StateInvalid, 'become root'):
                records.check_mine('x')

    def test_what_root_needs_first(self) -> None:
        """Before the host is set up anew, on one that was set up for an earlier version."""
        self.state.mkdir(parents=True)
        os.chown(self.state, 0, grp.getgrnam(_GROUP).gr_gid)
        self.state.chmod(0o2775)
        with locks.lock('protected-x', own=True):
            self.assertNotEqual(0, self.as_service('ls', self.state / 'own-locks'))
        records.note_fixation()
        self.assertNotEqual(0, self.as_service('touch', self.state / 'protected' / 'x'))
        with self.in_service(), locks.lock('vm-x', own=True):
            self.assertEqual(['pcow-vm-x'], os.listdir(self.state / 'locks'))

    def test_what_is_there_is_left_alone(self) -> None:
        """A service can move a file of root's into its directories, from any that it may
        write to.
        """
        self.set_up()
        secret = self.state / 'exports' / 'secret'
        secret.touch(mode=0o600)
        secret.chmod(0o4700)
        self.set_up()
        self.assertEqual((0, 0o4700), (secret.stat().st_uid, stat.S_IMODE(secret.stat().st_mode)))
        self.assertNotEqual(0, self.as_service('cat', secret))

    def test_services_pass(self) -> None:
        self.set_up()
        for name in (
            'locks',
            'lists',
            'frozen',
            'exports',
            'migrations',
            'live-migrations',
            'scrubs',
            'disks',
        ):
            self.assertEqual(0, self.as_service('touch', self.state / name / 'x'), name)
        self.assertNotEqual(0, self.as_service('mv', self.state / 'pools', self.state / 'mine'))
        self.assertNotEqual(0, self.as_service('mv', self.state / 'locks', self.state / 'mine'))

    def test_without_services(self) -> None:
        expected = {'pools', *locks.OWN_MODES}
        self.assertEqual({'state', *expected}, set(self.set_up(None)))
        self.assertEqual(expected, set(os.listdir(self.state)))

    def test_refused(self) -> None:
        with self.assertRaisesRegex(exception.UsageInvalid, 'groupadd --system no-such-group'):
            self.set_up('no-such-group')
        self.assertFalse(self.state.exists())
        self.set_up()
        (self.state / 'exports').rmdir()
        (self.state / 'exports').symlink_to('/etc')
        with self.assertRaisesRegex(exception.PathRefused, 'exports'):
            self.set_up()
        (self.directory / 'lib').chmod(0o777)
        with self.assertRaisesRegex(exception.PathRefused, 'chmod go-w'):
            self.set_up()
        with (
            mock.patch.object(os, 'geteuid', return_value=1000),
            self.assertRaisesRegex(exception.RootNeeded, 'sudo pcowctl'),
        ):
            self.set_up()

    def test_command(self) -> None:
        config = self.directory / 'pcow.conf'
        config.write_text(f'[pcow]\nstate_path = {self.state}\npools_path = {self.state}/pools\n')
        command = [
            sys.executable,
            '-m',
            'pcow_driver.cli.app',
            '--config-file',
            str(config),
            'host',
            'setup',
            '--group',
            _GROUP,
        ]
        done = subprocess.run(
            [*command, '-f', 'value'], cwd=base.TOP, capture_output=True, text=True, check=True
        )
        self.assertIn(f'{self.state}/locks {_GROUP} 2770 made\n', done.stdout)
