# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import grp
import json
import os
import shutil
import subprocess
import sys

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base


class RegistryTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.pools = registry.PoolRegistry()
        self.path = str(self.directory / 'p')

    def test_create_get_remove(self) -> None:
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.images.image.probe', lambda _directory: 'pmem')
        )
        made = self.pools.create('fast', self.path)
        self.assertEqual(made, registry.PoolRegistry().get('fast'))
        status = os.stat(self.path)
        self.assertEqual(
            (0o710, 'kvm'), (status.st_mode & 0o777, grp.getgrgid(status.st_gid).gr_name)
        )
        marker = json.loads((self.directory / 'p/.pcow-pool').read_text())
        self.assertEqual(
            {
                'format': 1,
                'uuid': made.uuid,
                'name': 'fast',
                'created': made.created,
                'class': 'pmem',
            },
            marker,
        )
        self.pools.remove('fast')
        self.assertEqual([], self.pools.list())
        self.assertEqual([], os.listdir(self.path))
        self.assertRaises(exception.PoolNotFound, self.pools.get, 'fast')
        self.assertRaises(exception.PoolNotFound, self.pools.remove, 'fast')

    def test_class_that_nobody_noted(self) -> None:
        """As in pools of earlier versions, or where there is no pcow-img."""
        self.configure(pcow_img='/no/such/pcow-img')
        self.assertIsNone(self.pools.create('fast', self.path).made_as)
        self.assertNotIn('class', json.loads((self.directory / 'p/.pcow-pool').read_text()))
        self.assertIsNone(self.pools.get('fast').made_as)

    def test_files_of_an_existing_directory_stay(self) -> None:
        os.mkdir(self.path)
        (self.directory / 'p/notes').write_text('x')
        self.pools.create('fast', self.path)
        self.assertRaises(exception.PoolNotEmpty, self.pools.remove, 'fast')
        self.assertTrue(os.path.exists(self.path + '/.pcow-pool'))
        self.pools.remove('fast', forget=True)
        self.assertEqual({'notes', '.pcow-pool', '.pcow-lock'}, set(os.listdir(self.path)))

    def test_names_and_directories_are_taken_once(self) -> None:
        self.pools.create('fast', self.path)
        self.assertRaises(
            exception.PoolExists, self.pools.create, 'fast', str(self.directory / 'other')
        )
        self.assertFalse((self.directory / 'other').exists())
        error = self.assertRaises(exception.PoolInvalid, self.pools.create, 'slow', self.path)
        self.assertIn('import', str(error))
        self.assertEqual(['fast'], [entry.name for entry in self.pools.list()])
        self.assertRaises(
            exception.InvalidName, self.pools.create, 'a/b', str(self.directory / 'other')
        )

    def test_import(self) -> None:
        made = self.pools.create('fast', self.path)
        self.assertRaises(exception.PoolInvalid, self.pools.import_, self.path)
        error = self.assertRaises(exception.PoolInvalid, self.pools.import_, self.path, 'again')
        self.assertIn('as pool fast', str(error))
        self.pools.remove('fast', forget=True)
        self.assertEqual('new', self.pools.import_(self.path, 'new').name)
        found = self.pools.get('new')
        self.assertEqual(('new', made.uuid), (found.name, found.uuid))
        self.assertEqual(found, self.pools.find(self.path))

    def test_a_pool_in_another_place(self) -> None:
        """It keeps name and settings; a copy is not taken for it."""
        self.pools.create('fast', self.path)
        before = self.pools.set('fast', overcommit=2.0, draining=True)
        other = str(self.directory / 'other')
        shutil.copytree(self.path, other)
        error = self.assertRaises(exception.PoolInvalid, self.pools.import_, other)
        self.assertIn(f'is in {self.path} as well', str(error))
        shutil.rmtree(self.path)
        self.assertIn(
            'pcowctl pool import',
            str(self.assertRaises(exception.PoolInvalid, self.pools.get, 'fast')),
        )
        self.assertIn(
            'as pool fast',
            str(self.assertRaises(exception.PoolInvalid, self.pools.import_, other, 'new')),
        )
        self.assertEqual(dataclasses.replace(before, path=other), self.pools.import_(other))
        self.assertEqual([other], [entry.path for entry in self.pools.list()])

    def test_an_end_that_was_begun(self) -> None:
        made, ending = (
            self.pools.create('fast', self.path),
            registry.Ending('/dev/pmem7', 'u', None),
        )
        (self.directory / 'p/vm.pcow').touch()
        self.assertRaises(exception.PoolNotEmpty, self.pools.begin_end, 'fast', ending)
        self.assertEqual((made, None), (self.pools.get('fast'), self.pools.entry('fast').ending))
        (self.directory / 'p/vm.pcow').unlink()
        self.pools.begin_end('fast', ending)
        self.assertIn(
            '--destroy fast', str(self.assertRaises(exception.PoolInvalid, self.pools.get, 'fast'))
        )
        self.assertEqual(dataclasses.asdict(ending), self.pools.entry('fast').ending)
        self.pools.restore(made)
        self.assertEqual((made, None), (self.pools.get('fast'), self.pools.entry('fast').ending))

    def test_a_pool_that_went_away(self) -> None:
        self.pools.create('fast', self.path)
        os.unlink(self.path + '/.pcow-pool')
        error = self.assertRaises(exception.PoolInvalid, self.pools.get, 'fast')
        self.assertIn('mount', str(error))
        self.pools.remove('fast')
        self.assertEqual([], self.pools.list())

    def test_another_pool_in_its_place(self) -> None:
        self.pools.create('fast', self.path)
        os.unlink(self.path + '/.pcow-pool')
        pool.make('other', self.path)
        self.assertIn(
            '--forget', str(self.assertRaises(exception.PoolInvalid, self.pools.get, 'fast'))
        )
        self.assertRaises(exception.PoolInvalid, self.pools.remove, 'fast')
        self.pools.remove('fast', forget=True)
        self.assertTrue(os.path.exists(self.path + '/.pcow-pool'))

    def test_damaged_state_is_refused_and_kept(self) -> None:
        self.pools.create('fast', self.path)
        for text in (
            '',
            '{',
            '[]',
            '{"format": 2, "pools": {}}',
            '{"format": 1, "pools": {"x": {"path": 3}}}',
            '{"format": 1, "pools": {"x": {"path": "/x", "uuid": "u", "ending": {"source": 3}}}}',
            '{"format": 1}',
        ):
            with open(self.pools.path, 'w') as f:
                f.write(text)
            self.assertRaises(exception.StateInvalid, self.pools.list)
            self.assertRaises(
                exception.StateInvalid, self.pools.create, 'more', str(self.directory / 'more')
            )
            with open(self.pools.path) as f:
                self.assertEqual(text, f.read())

    def test_state_directory_that_cannot_be_used(self) -> None:
        (self.directory / 'file').write_text('')
        self.configure(state_path=str(self.directory / 'file'))
        error = self.assertRaises(
            exception.StateInvalid, registry.PoolRegistry().create, 'fast', self.path
        )
        self.assertIn('state_path', str(error))
        self.assertFalse(os.path.exists(self.path))

    def as_nobody(self, *lock_names: str) -> subprocess.CompletedProcess[str]:
        """Take locks as a service that is not root; its environment is not that of whoever started
        this.
        """
        code = (
            'import os, sys\n'
            'from pcow_driver.common import conf, locks\n'
            'conf.CONF([], default_config_files=[])\n'
            'conf.CONF.set_override("state_path", sys.argv[1], "pcow")\n'
            'os.setgroups([])\n'
            'os.setgid(65534)\n'
            'os.setuid(65534)\n'
            'for name in sys.argv[2:]:\n'
            '    with locks.lock(name):\n'
            '        pass\n'
        )
        return subprocess.run(
            [sys.executable, '-c', code, str(self.directory / 'state'), *lock_names],
            cwd=base.TOP,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def test_locks_that_root_took_first(self) -> None:
        """A service that the state directory was given to takes each of them later, and root those
        of the service.
        """
        for directory in (self.directory, self.directory.parent):
            directory.chmod(0o755)
        for owner, group, mode in ((65534, 65534, 0o755), (0, 65534, 0o2775)):
            state = self.directory / 'state'
            state.mkdir()
            os.chown(state, owner, group)
            state.chmod(mode)
            self.addCleanup(os.umask, os.umask(0o077))
            self.pools.create('fast', self.path)
            with self.pools.get('fast').lock():
                self.assertEqual(
                    {(owner, group, 0o660)},
                    {
                        (status.st_uid, status.st_gid, status.st_mode & 0o777)
                        for status in map(os.stat, (state / 'locks').iterdir())
                    },
                )
            done = self.as_nobody('pools', f'pool-{self.pools.get("fast").uuid}', 'of-the-service')
            self.assertEqual(0, done.returncode, done.stderr)
            with locks.lock('of-the-service'):
                pass
            self.pools.remove('fast')
            shutil.rmtree(state)

    def test_locks_of_root(self) -> None:
        """Of a directory that nobody gave to the service: what to do is said, and it is not another
        directory.
        """
        for directory in (self.directory, self.directory.parent):
            directory.chmod(0o755)
        self.pools.create('fast', self.path)
        done = self.as_nobody('pools')
        self.assertIn('pcowctl host setup --group GROUP', done.stderr)

    def test_lock_of_a_long_name(self) -> None:
        """Nobody is sent to change owners for that."""
        with contextlib.ExitStack() as stack:
            error = self.assertRaises(
                exception.InvalidName, stack.enter_context, locks.lock('removal-' + 'x' * 247)
            )
        self.assertIn('too long', str(error))
        self.assertNotIn('chown', str(error))
        self.assertFalse(locks.is_held('removal-' + 'x' * 247))

    def test_many_processes_at_once(self) -> None:
        code = (
            'import sys\n'
            'from pcow_driver.common import conf, exception\n'
            'from pcow_driver.pools import registry\n'
            'state, directory, number = sys.argv[1:]\n'
            'conf.CONF([], default_config_files=[])\n'
            'conf.CONF.set_override("state_path", state, "pcow")\n'
            'pools = registry.PoolRegistry()\n'
            'for i in range(10):\n'
            '    pools.create(f"{number}-{i}", f"{directory}/{number}-{i}")\n'
            'pools.remove(f"{number}-0")\n'
            'try:\n'
            '    pools.create("shared", f"{directory}/shared-{number}")\n'
            'except exception.PoolExists:\n'
            '    sys.exit(1)\n'
        )
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    '-c',
                    code,
                    str(self.directory / 'state'),
                    str(self.directory),
                    str(number),
                ],
                cwd=base.TOP,
            )
            for number in range(6)
        ]
        results = [process.wait(120) for process in running]
        self.assertEqual([0, 1, 1, 1, 1, 1], sorted(results))
        wanted = {f'{number}-{i}' for number in range(6) for i in range(1, 10)} | {'shared'}
        self.assertEqual(wanted, {entry.name for entry in self.pools.list()})
        self.assertEqual(1, len(list(self.directory.glob('shared-*'))))
