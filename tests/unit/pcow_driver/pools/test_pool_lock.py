# SPDX-License-Identifier: Apache-2.0
"""Hosts that share a pool wait for each other: each has a state directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import stat
import subprocess
import sys
import threading
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import marker
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging
from tests.unit.pcow_driver import base

SERVICE, GROUP = 65534, 65533
SIZE = 4 << 20
_OTHER_HOST = """
import sys
from pcow_driver.common import conf
from pcow_driver.pools import marker
from pcow_driver.pools import pool
conf.CONF([], default_config_files=[])
conf.CONF.set_override('state_path', sys.argv[1], 'pcow')
with pool.open_directory(sys.argv[2]).lock():
    print('mine', flush=True)
    sys.stdin.read()
"""


class PoolLockTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.pool = pool_module.make('p', str(self.directory / 'p'))
        self.file = Path(self.pool.path, names.LOCK)

    @contextlib.contextmanager
    def other_host(self) -> Iterator[subprocess.Popen[str]]:
        """Has the lock."""
        with subprocess.Popen(
            [sys.executable, '-c', _OTHER_HOST, str(self.directory / 'other'), self.pool.path],
            cwd=base.TOP,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program:
            try:
                assert program.stdout is not None
                self.assertEqual('mine\n', program.stdout.readline())
                yield program
            finally:
                program.kill()

    def waiting(self) -> tuple[threading.Thread, list[str]]:
        """Somebody of this host, and what has become of him."""
        done: list[str] = []

        def take() -> None:
            try:
                with self.pool.lock():
                    done.append('mine')
            except exception.PoolInvalid as e:
                done.append(str(e))

        thread = threading.Thread(target=take)
        thread.start()
        return thread, done

    def test_what_the_pool_alone_does_not_tell(self) -> None:
        """What another host makes, and sets aside, is known by its locks, if they are shared."""
        here, other = self.directory / 'state', self.directory / 'other'
        with staging.building(self.pool, 'new'):
            with self.pool.lock():
                staging.reserve(self.pool, 'new', thin=SIZE)
            self.assertEqual(SIZE, self.pool.account().building)
            (other / 'locks').mkdir(parents=True)
            self.configure(state_path=str(other))
            self.assertEqual(0, self.pool.account().building)
            subprocess.run(['mount', '--bind', here / 'locks', other / 'locks'], check=True)
            try:
                self.assertEqual(SIZE, self.pool.account().building)
                self.assertEqual(['new'], staging.in_the_making(self.pool))
            finally:
                subprocess.run(['umount', '-l', other / 'locks'], check=True)
                self.configure(state_path=str(here))

    def test_two_hosts(self) -> None:
        for _again in range(2):  # the file is there the second time
            with self.other_host():
                thread, done = self.waiting()
                thread.join(0.3)
                self.assertEqual([], done)
            thread.join(20)
            self.assertEqual(['mine'], done)
        self.assertEqual([], self.pool.entries())

    def test_pool_that_is_removed_meanwhile(self) -> None:
        with self.other_host():
            thread, done = self.waiting()
            thread.join(0.3)
            marker.remove(self.pool.path)
        thread.join(20)
        self.assertIn('it has no .pcow-pool', done[0])
        self.assertEqual([], os.listdir(self.pool.path))
        self.assertRaises(exception.PoolInvalid, self.pool.lock().__enter__)
        self.assertEqual([], os.listdir(self.pool.path))

    def test_child_that_appears_without_the_lock(self) -> None:
        """An earlier version on another host does not know it."""
        base_path = self.pool.create_image('t', size=SIZE)
        image.seal(base_path)
        alone = image_locks.alone

        @contextlib.contextmanager
        def late(path: str) -> Iterator[None]:
            with alone(path):
                self.assertEqual([], self.pool.children('t'))
            image.create_overlay(self.pool.image_path('child'), base_path)
            with alone(path):
                yield

        with mock.patch.object(image_locks, 'alone', late):
            error = self.assertRaises(exception.ImageHasChildren, self.pool.delete_template, 't')
        self.assertIn('child', str(error))
        self.assertTrue(os.path.exists(base_path))

    def shown(self) -> tuple[int, int, int]:
        status = self.file.stat()
        return status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)

    def give(self, user: int, group: int, mode: int) -> None:
        os.chown(self.pool.path, user, group)
        os.chmod(self.pool.path, mode)

    @contextlib.contextmanager
    def as_user(self, user: int, group: int) -> Iterator[None]:
        """The state directory is everybody's."""
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        state = self.directory / 'state'
        state.mkdir(exist_ok=True)
        for path in (state, *state.rglob('*')):
            path.chmod(0o777)
        os.setegid(group)
        os.seteuid(user)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def test_whose_it_is(self) -> None:
        """Of those who may put something into the pool, and of nobody else."""
        for user, group, mode, expected in (
            (0, 0, 0o700, 0o600),
            (SERVICE, 0, 0o711, 0o600),
            (0, GROUP, 0o2771, 0o660),
            (SERVICE, GROUP, 0o1777, 0o666),
        ):
            self.give(user, group, mode)
            for _again in range(2):
                with self.pool.lock():
                    self.assertEqual((user, group, expected), self.shown())
                self.file.unlink()
        self.give(SERVICE, GROUP, 0o2771)
        for user, group in ((SERVICE, SERVICE), (SERVICE - 7, GROUP)):
            with self.as_user(user, group), self.pool.lock():
                pass
            self.assertEqual((SERVICE, GROUP, 0o660), self.shown())

    def test_pool_that_was_given_away(self) -> None:
        """Root, who comes next, gives the lock after it, and no other file."""
        with self.pool.lock():
            pass
        self.give(SERVICE, GROUP, 0o2771)
        with (
            self.assertLogs('pcow_driver.common.locks', 'WARNING') as logs,
            self.as_user(SERVICE, SERVICE),
            self.pool.lock(),
        ):
            pass
        self.assertIn(f'{self.file} cannot be opened', logs.output[0])
        with self.pool.lock():
            pass
        self.assertEqual((SERVICE, GROUP, 0o660), self.shown())
        with self.as_user(SERVICE, SERVICE), self.assertNoLogs('pcow_driver', 'WARNING'):
            with self.pool.lock():
                pass
        precious = self.directory / 'precious'
        for content in ('', 'precious'):
            self.file.unlink()
            precious.write_text(content)
            if content:
                precious.rename(self.file)
            else:
                os.link(precious, self.file)
            with self.pool.lock():
                pass
            self.assertEqual((0, 0, 0o644), self.shown())

    def test_who_may_not_write(self) -> None:
        """Nothing appears or disappears by him."""
        with self.as_user(SERVICE, SERVICE), self.assertNoLogs('pcow_driver', 'WARNING'):
            for mode in (0o755, 0o711):
                os.seteuid(0)
                os.chmod(self.pool.path, mode)
                os.seteuid(SERVICE)
                with self.pool.lock():
                    self.assertFalse(self.file.exists())

    def test_read_only_and_full_pools(self) -> None:
        place = self.directory / 'mounted'
        place.mkdir()
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'nr_inodes=3,size=1m', 'none', place], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', place], check=True)
        self.pool = pool_module.make('q', str(place))
        (place / 'last').touch()
        with self.pool.lock():
            self.assertEqual([names.MARKER, 'last'], sorted(os.listdir(place)))
        (place / 'last').unlink()
        subprocess.run(['mount', '-o', 'remount,ro', place], check=True)
        with self.pool.lock():
            self.assertEqual([names.MARKER], os.listdir(place))

    def test_what_is_no_lock(self) -> None:
        victim = self.directory / 'victim'
        for make in (
            lambda: self.file.symlink_to(victim),
            lambda: os.mkfifo(self.file),
            self.file.mkdir,
        ):
            make()
            error = self.assertRaises(exception.PoolInvalid, self.pool.lock().__enter__)
            self.assertIn('.pcow-lock', str(error))
            self.file.rmdir() if self.file.is_dir() else self.file.unlink()
        self.assertFalse(victim.exists())

    def test_lock_that_is_replaced_again_and_again(self) -> None:
        """By who has the pool: root does not wait for ever."""
        with mock.patch('pcow_driver.common.locks._has_name', return_value=False):
            # the lock of the host looks at its name as well
            with mock.patch('pcow_driver.common.locks.lock', return_value=contextlib.nullcontext()):
                error = self.assertRaises(exception.PoolInvalid, self.pool.lock().__enter__)
        self.assertIn('again and again', str(error))
