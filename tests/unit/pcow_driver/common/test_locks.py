# SPDX-License-Identifier: Apache-2.0
"""Locks between threads and processes, whose files come and go, in a directory to which others may
write.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from contextlib import AbstractContextManager
import fcntl
import os
from pathlib import Path
import subprocess
import sys
import threading
import time
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.copies import view
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base

HEAD = (
    'import sys, time\n'
    'from pcow_driver.common import conf, locks\n'
    'conf.CONF([], default_config_files=[])\n'
    'conf.CONF.set_override("state_path", sys.argv[1], "pcow")\n'
)
COUNT = HEAD + (
    'for _ in range(30):\n'
    '    with locks.lock("counter"):\n'
    '        number = int(open(sys.argv[2]).read())\n'
    '        time.sleep(0.0005)\n'
    '        open(sys.argv[2], "w").write(str(number + 1))\n'
)
KEEP = HEAD + ('with locks.lock(sys.argv[2]):\n    print("mine", flush=True)\n    time.sleep(60)\n')


class LocksTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.state = self.directory / 'state'
        with locks.lock('first'):
            pass
        self.locks = self.state / 'locks'

    def files(self) -> list[str]:
        return sorted(os.listdir(self.locks))

    def program(self, code: str, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, '-c', code, str(self.state), *args],
            cwd=base.TOP,
            stdout=subprocess.PIPE,
            text=True,
        )

    def keeper(self, name: str) -> subprocess.Popen[str]:
        """Another process that has a lock."""
        program = self.program(KEEP, name)
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        assert program.stdout is not None
        self.addCleanup(program.stdout.close)
        self.assertEqual('mine\n', program.stdout.readline())
        return program

    def test_file_is_there_while_it_is_held(self) -> None:
        self.assertEqual([], self.files())
        with locks.lock('removal-x'):
            self.assertEqual(['pcow-removal-x'], self.files())
            self.assertTrue(locks.is_held('removal-x'))
            self.assertEqual(['x'], locks.held('removal-'))
        self.assertEqual([], self.files())
        self.assertFalse(locks.is_held('removal-x'))

    def test_of_a_process_that_was_killed(self) -> None:
        killed, living = self.keeper('build-a'), self.keeper('build-b')
        self.assertEqual(['a', 'b'], locks.held('build-'))
        killed.kill()
        killed.wait()
        self.assertEqual(['b'], locks.held('build-'))
        self.assertEqual(['pcow-build-a', 'pcow-build-b'], self.files())
        locks.collect()
        self.assertEqual(['pcow-build-b'], self.files())
        self.assertIsNone(living.poll())
        with locks.lock('build-a'):
            self.assertTrue(locks.is_held('build-b'))

    def test_one_at_a_time(self) -> None:
        """Threads and processes count with a file that each of them deletes: nobody has a lock that
        another one has, too.
        """
        counter = self.directory / 'counter'
        counter.write_text('0')
        programs = [self.program(COUNT, str(counter)) for _ in range(3)]

        def count() -> None:
            for _ in range(30):
                with locks.lock('counter'):
                    number = int(counter.read_text())
                    time.sleep(0.0005)
                    counter.write_text(str(number + 1))

        threads = [threading.Thread(target=count) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for program in programs:
            program.communicate()
            self.assertEqual(0, program.returncode)
        self.assertEqual('180', counter.read_text())
        self.assertEqual([], self.files())

    def waits(self, lock: Callable[[], AbstractContextManager[None]], holder: str) -> list[str]:
        """What is said in a wait for a lock that somebody has."""
        done = threading.Event()

        def wait() -> None:
            with lock():
                done.set()

        said = self.useFixture(fixtures.FakeLogger('pcow_driver.common.locks'))
        with mock.patch.multiple(locks, _FIRST_WORD=0.2, _WORD=0.1), self.releasing(holder):
            thread = threading.Thread(target=wait)
            thread.start()
            self.assertFalse(done.wait(0.6))
        thread.join()
        self.assertTrue(done.is_set())
        return said.output.splitlines()

    @contextlib.contextmanager
    def releasing(self, holder: str) -> Iterator[None]:
        if holder == 'another':
            self.other = self.keeper('removal-x')
            yield
            self.other.kill()
        else:
            with (
                locks.lock('removal-x'),
                locks.lock_in(str(self.state), '.lock', 'pool-x', lambda: None),
            ):
                yield

    def test_wait_is_told(self) -> None:
        """And again, and by whom it is held; who need not wait so long says nothing."""
        said = self.waits(lambda: locks.lock('removal-x'), 'another')
        self.assertGreater(len(said), 2)
        self.assertLess(len(said), 6)
        file = self.locks / 'pcow-removal-x'
        for line in said:
            self.assertRegex(line, f'^Waiting for the lock {file} since 0 s, .* process ')
            self.assertIn(f'process {self.other.pid} (', line)

    def test_wait_that_ends(self) -> None:
        """Of who can do without it; it is there for others as before."""
        holder = self.keeper('removal-x')
        error = self.assertRaises(
            exception.LockHeld, locks.lock('removal-x', seconds=0.1).__enter__
        )
        self.assertIn(
            f'{self.locks}/pcow-removal-x is not given up: process {holder.pid}', str(error)
        )
        holder.kill()
        with locks.lock('removal-x', seconds=60):
            self.assertTrue(locks.is_held('removal-x'))
        self.assertEqual([], self.files())

    def test_wait_for_a_lock_in_a_pool(self) -> None:
        """Of a thread of this process."""
        said = self.waits(
            lambda: locks.lock_in(str(self.state), '.lock', 'pool-x', lambda: None), 'this process'
        )
        self.assertIn(f'{self.state}/.lock since', said[0])
        self.assertIn(f'process {os.getpid()} (', said[0])

    def test_wait_for_somebody_who_cannot_be_seen(self) -> None:
        with mock.patch.object(locks, '_has_locked', return_value=False):
            said = self.waits(lambda: locks.lock('removal-x'), 'another')
        self.assertIn('who holds it this user cannot see', said[0])
        self.assertFalse(locks._has_locked('0', os.stat(self.state)))

    def test_children_do_not_keep_it(self) -> None:
        with locks.lock('pool-x'):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
        try:
            with locks.lock('pool-x'):
                pass
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)

    def test_lock_of_an_earlier_version(self) -> None:
        """Those were locks of POSIX records."""
        code = (
            'import fcntl, sys, time\n'
            'file = open(sys.argv[1] + "/locks/pcow-pools", "a")\n'
            'fcntl.lockf(file, fcntl.LOCK_EX)\n'
            'print("mine", flush=True)\n'
            'time.sleep(60)\n'
        )
        program = self.program(code)
        self.addCleanup(program.stdout.close)  # type: ignore[union-attr]
        self.addCleanup(program.wait)
        self.addCleanup(program.kill)
        self.assertEqual('mine\n', program.stdout.readline())  # type: ignore[union-attr]
        self.assertTrue(locks.is_held('pools'))
        locks.collect()
        self.assertEqual(['pcow-pools'], self.files())

    def test_order(self) -> None:
        """Two that take two locks in different orders would wait for each other."""
        with (
            locks.lock('removal-a'),
            locks.lock('removal-b'),
            locks.lock('build-a'),
            locks.lock('pool-x'),
        ):
            for name in ('pools', 'removal-c', 'pool-x', 'pool-a'):
                self.assertRaises(AssertionError, locks.lock(name).__enter__)
            with locks.lock_directory(str(self.directory)):
                self.assertRaises(AssertionError, locks.lock('pool-y').__enter__)
        self.assertEqual([], self.files())

    def test_order_of_locks_in_pools(self) -> None:
        """Each comes behind that of its pool on this host, and before that of the next one."""
        (self.directory / 'pool').mkdir()

        def of(pool: str) -> AbstractContextManager[None]:
            return locks.lock_in(str(self.directory / 'pool'), '.lock', pool, lambda: None)

        with locks.lock('pool-b'), of('pool-b'):
            for earlier in (locks.lock('pool-a'), locks.lock('pool-b'), of('pool-a')):
                self.assertRaises(AssertionError, earlier.__enter__)
            with locks.lock('pool-c'):
                pass
        with locks.lock('scrub-x'):
            self.assertRaises(AssertionError, of('pool-a').__enter__)

    def refused(self, name: str) -> str:
        done = subprocess.run(
            [
                sys.executable,
                '-c',
                HEAD + 'with locks.lock(sys.argv[2]): pass',
                str(self.state),
                name,
            ],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        self.assertIn('StateInvalid', done.stderr)
        return done.stderr

    def test_link_in_place_of_a_lock(self) -> None:
        """S6: root takes locks in a directory that is a service's."""
        victim = self.directory / 'nologin'
        (self.locks / 'pcow-pools').symlink_to(victim)
        self.refused('pools')
        self.assertFalse(os.path.lexists(victim))
        self.assertTrue(locks.is_held('pools'))  # nobody can tell
        victim.write_text('')
        self.refused('pools')
        self.assertEqual(0o644, victim.stat().st_mode & 0o777)

    def test_fifo_in_place_of_a_lock(self) -> None:
        os.mkfifo(self.locks / 'pcow-pools')
        self.refused('pools')
        self.assertTrue(locks.is_held('pools'))
        self.assertEqual([''], locks.held('pools'))
        locks.collect()
        self.assertEqual(['pcow-pools'], self.files())

    def test_link_in_place_of_the_directory(self) -> None:
        elsewhere = self.directory / 'elsewhere'
        elsewhere.mkdir()
        self.locks.rmdir()
        self.locks.symlink_to(elsewhere)
        self.refused('pools')
        self.assertEqual([], os.listdir(elsewhere))

    def test_link_in_place_of_the_lock_of_what_is_frozen(self) -> None:
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        victim, directory = self.directory / 'victim', self.state / 'frozen' / pool.uuid[:8]
        victim.write_text('precious')
        directory.mkdir(parents=True)
        (directory / 'abc.lock').symlink_to(victim)
        view.collect(pool)
        self.assertEqual('precious', victim.read_text())

    def test_root_deletes_no_lock_behind_a_link_of_a_service(self) -> None:
        pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        private, frozen = self.directory / 'private', self.state / 'frozen'
        private.mkdir(0o700)
        (private / '.pwd.lock').write_text('precious')
        frozen.mkdir()
        frozen.chmod(0o2770)
        (frozen / pool.uuid[:8]).symlink_to(private)
        view.collect(pool)
        self.assertEqual('precious', (private / '.pwd.lock').read_text())

    def test_lock_of_a_directory(self) -> None:
        """What waits is this thread alone; the libvirt hook takes the same lock."""
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        done: list[str] = []

        def wait() -> None:
            with locks.lock_directory(str(self.directory)):
                done.append('mine')

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        self.assertEqual([], done)
        os.close(descriptor)
        thread.join(20)
        self.assertEqual(['mine'], done)

    def test_state_invalid_says_where(self) -> None:
        (self.locks / 'pcow-pools').mkdir()
        error = self.assertRaises(exception.StateInvalid, locks.lock('pools').__enter__)
        self.assertIn(str(Path(self.locks, 'pcow-pools')), str(error))
