# SPDX-License-Identifier: Apache-2.0
"""Templates cannot be deleted or changed under their children, by root neither; with the real flag
of a real file system.
"""

import dataclasses
import io
import os
from pathlib import Path
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import names
from pcow_driver.copies import transfer
from pcow_driver.health import garbage
from pcow_driver.images import protection
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from pcow_driver.templates import template
from pcow_driver.templates import template_cache
from tests.unit.pcow_driver import base
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

HOOK = base.load_script(base.TOP / 'etc/libvirt/hooks/qemu.d/pcow')


def clear(directory: Path) -> None:
    for path in directory.rglob('*'):
        if path.is_file() and not path.is_symlink() and immutable.is_set(str(path)):
            immutable.set_flag(str(path), False)
    shutil.rmtree(directory)


class ImmutableTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(
            protect_templates=True,
            pcow_img=str(programs / 'pcow-img'),
            pcow_io=str(programs / 'pcow-io'),
        )
        self.place = Path(tempfile.mkdtemp(prefix='pcow-test-immutable-', dir='/var/tmp'))
        self.addCleanup(clear, self.place)
        self.source = self.place / 'source.raw'
        with self.source.open('wb') as f:
            f.truncate(4 << 20)
            f.write(os.urandom(1 << 20))
        (self.place / 'try').touch()
        try:
            immutable.set_flag(str(self.place / 'try'), True)
        except OSError as e:
            self.fail(
                f'the unit tests need root and a file system with the immutable flag in /var/tmp: '
                f'{e}'
            )
        self.pool = registry.PoolRegistry().create('p', str(self.place / 'pool'))

    def build(self) -> Path:
        return Path(template.build(self.pool, 't', str(self.source), 'raw'))

    def test_life_of_a_template(self) -> None:
        path = self.build()
        self.assertTrue(immutable.is_set(str(path)))
        self.pool.create_image('vm', base='t')
        # as rm, mv or a careless tool would
        self.assertRaises(PermissionError, path.unlink)
        self.assertRaises(PermissionError, path.rename, path.with_name('other.pcow'))
        self.assertRaises(PermissionError, path.open, 'r+b')
        self.assertRaises(exception.ImageInUse, self.pool.delete_template, 't')
        self.assertTrue(immutable.is_set(str(path)))
        self.pool.delete_image('vm')
        self.pool.delete_template('t')
        self.assertFalse(path.exists())
        self.assertEqual([], self.pool.entries())

    def test_second_name_that_a_killed_build_left(self) -> None:
        """It was killed between the final name and the end of the first one; the flag came later,
        and belongs to both.
        """
        path = self.build()
        part = path.with_name('.t.pcow.part')
        with protection.lifted(str(path)):
            os.link(path, part)
            os.utime(path, (time.time() - 7200,) * 2)
        self.assertRaises(PermissionError, part.unlink)
        (found,) = (
            one for one in garbage.find(self.pool, None) if one.kind is garbage.Kind.UNFINISHED
        )
        garbage.delete(self.pool, found)
        self.assertEqual(['t.pcow'], self.pool.entries())
        self.assertTrue(immutable.is_set(str(path)))
        # the same, and nothing else has the file
        with protection.lifted(str(path)):
            path.rename(part)
            immutable.set_flag(str(part), True)
        garbage.delete(self.pool, found)
        self.assertEqual([], self.pool.entries())
        protection.unlink(str(part))  # gone already

    def test_deleted_image_that_others_stand_on(self) -> None:
        """It stays for them, as well protected as a template, and goes with the last of them."""
        self.build()
        self.pool.create_image('vm', base='t')
        for name in ('one', 'two'):
            self.pool.create_image(name, base='vm')
        path = Path(self.pool.image_path('vm'))
        # as whoever completes an interrupted deletion
        for _again in range(2):
            self.assertFalse(trash.delete_image(self.pool, 'vm'))
            self.assertTrue(immutable.is_set(str(path)))
            self.assertRaises(PermissionError, path.unlink)
        self.assertTrue(trash.delete_image(self.pool, 'one'))
        self.assertTrue(immutable.is_set(str(path)))
        self.assertTrue(trash.delete_image(self.pool, 'two'))
        self.assertFalse(path.exists())
        self.pool.delete_template('t')
        self.assertEqual([], self.pool.entries())

    def test_not_where_it_is_not_wanted(self) -> None:
        self.configure(protect_templates=False)
        self.assertFalse(immutable.is_set(str(self.build())))

    def test_not_in_dram(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix='pcow-test-immutable-', dir='/dev/shm'))
        self.addCleanup(clear, directory)
        pool = registry.PoolRegistry().create('q', str(directory / 'pool'))
        self.assertFalse(immutable.is_set(template.build(pool, 't', str(self.source), 'raw')))

    def test_cache_of_templates(self) -> None:
        """It notes when a template was used, protects one that is not, and deletes it when nobody
        needs it.
        """
        cache = template_cache.TemplateCache(self.pool)
        source = template_cache.SourceImage('0' * 8, 'a' * 16, 'raw')

        def fetch(path: str) -> None:
            shutil.copy(self.source, path)

        with cache.template(source, fetch) as name:
            path = self.pool.image_path(name)
        self.assertTrue(immutable.is_set(path))
        protection.unprotect(path)  # as if the build had been killed before it did that
        os.utime(path, (1, 1))
        with cache.template(source, fetch):
            self.assertTrue(immutable.is_set(path))
        self.assertGreater(os.stat(path).st_mtime, 1)
        with cache.template(source, fetch):
            self.assertTrue(immutable.is_set(path))
        self.assertEqual([], cache.age_out(1000.0))
        self.assertEqual([name], cache.age_out(0.0))
        self.assertFalse(os.path.lexists(path))

    def test_template_from_another_host(self) -> None:
        stream = io.BytesIO()
        transfer.send(str(self.build()), stream)
        stream.seek(0)
        path = transfer.receive(
            registry.PoolRegistry().create('q', str(self.place / 'q')), 't', stream
        )
        self.assertTrue(immutable.is_set(path))
        self.assertEqual(
            [names.LOCK, names.MARKER, 't.pcow'],
            sorted(item.name for item in (self.place / 'q').iterdir()),
        )

    def test_purge_of_an_all_in_one(self) -> None:
        settings = dataclasses.replace(
            settings_module.Settings.create(self.place / 'state'),
            pool=self.place,
            volume_backends=(settings_module.PCOW_BACKEND,),
        )
        pools.directory(settings).mkdir()
        pool = registry.PoolRegistry().create(
            'cinder', str(pools.directory(settings) / pools.CINDER)
        )
        path = template.build(pool, 't', str(self.source), 'raw')
        self.assertTrue(immutable.is_set(path))
        pools.purge(settings)
        self.assertFalse(pools.directory(settings).exists())
        pools.purge(settings)  # one that was never up

    def test_hook_of_libvirt(self) -> None:
        """An ACL cannot be set on an immutable file: the hook takes the flag off meanwhile."""
        path = self.build()
        path_of_image = self.pool.create_image('vm', base='t')
        protection.unprotect(str(path))
        path.chmod(0o600)
        protection.protect(str(path))
        user = pwd.getpwnam('nobody')
        for _time in range(2):
            HOOK.grant_bases([path_of_image], user)
            self.assertTrue(immutable.is_set(str(path)))
        fd = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        self.assertEqual(HOOK.READ, HOOK.read_acl(fd)[HOOK.USER, user.pw_uid])

    def test_several_at_once(self) -> None:
        """Hooks, the cache, and a clone's snapshot: everybody ends with the flag set and without an
        error.
        """
        path = str(self.build())
        errors: list[Exception] = []

        def change() -> None:
            try:
                for _number in range(200):
                    with protection.lifted(path):
                        os.utime(path)
            except OSError as e:
                errors.append(e)

        def grant() -> None:
            try:
                with HOOK.opened(path, 'the base') as file:
                    for _number in range(200):
                        with HOOK.changeable(file):
                            os.fchmod(file.fd, stat.S_IMODE(os.fstat(file.fd).st_mode))
            except OSError as e:
                errors.append(e)

        threads = [threading.Thread(target=function) for function in (change, grant, change, grant)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], errors)
        self.assertTrue(immutable.is_set(path))

    def test_lock_that_is_not_given_up(self) -> None:
        """A service that has stopped keeps no start of a guest waiting without a word."""
        path = self.build()
        held = (
            'import fcntl, os, sys, time\n'
            'fd = os.open(sys.argv[1], os.O_RDONLY)\n'
            'fcntl.flock(fd, fcntl.LOCK_EX)\n'
            'print("mine", flush=True)\n'
            'time.sleep(60)\n'
        )
        with (
            subprocess.Popen(
                [sys.executable, '-c', held, path.parent], stdout=subprocess.PIPE, text=True
            ) as process,
            HOOK.opened(str(path), 'the base') as file,
            mock.patch.object(HOOK, 'LOCK_WORD', 0.1),
            mock.patch.object(HOOK, 'LOCK_SECONDS', 0.5),
            mock.patch('sys.stderr', io.StringIO()) as said,
        ):
            assert process.stdout is not None
            self.addCleanup(process.kill)
            self.assertEqual('mine\n', process.stdout.readline())
            error = self.assertRaises(HOOK.HookError, HOOK.changeable(file).__enter__)
            process.kill()
            process.wait()
            with HOOK.changeable(file):  # it was given up
                pass
        words = f'process {process.pid} has it'
        self.assertEqual(1, said.getvalue().count(words))
        self.assertIn(f'the lock of {path.parent} was not given up in 0.5 s ({words})', str(error))
        self.assertTrue(immutable.is_set(str(path)))

    def test_only_regular_files(self) -> None:
        (self.place / 'link').symlink_to(self.source)
        for name in ('link', 'pool', 'nothing'):
            self.assertFalse(immutable.is_set(str(self.place / name)))
            self.assertRaises(OSError, immutable.set_flag, str(self.place / name), True)
        self.assertFalse(immutable.is_set(str(self.source)))

    def test_marker_stays_changeable(self) -> None:
        self.build()
        self.assertFalse(immutable.is_set(str(self.place / 'pool' / names.MARKER)))

    def test_what_a_killed_quickstart_left(self) -> None:
        """In a pool of the user's, and in one it made; the next run is not stopped by one that
        cannot be cleared up.
        """
        path = self.build()
        own = self.place / 'own'
        own.mkdir()
        (own / 't.pcow').touch()
        immutable.set_flag(str(own / 't.pcow'), True)
        with mock.patch.object(state, 'ROOT', self.place / 'runs'):
            run = state.Run.create()
            run.owner = [os.getpid(), 1]  # a process that ended: this pid began later
            run.note(path)
            run.note(own)
            stuck = state.Run.create()
            stuck.owner = run.owner
            stuck.note(self.place / 'file/below')  # ENOTDIR, from deleting it
            (self.place / 'file').touch()
            teardown.reap()
            self.assertEqual([stuck.id], [left.id for left in state.all_runs()])
        self.assertFalse(path.exists())
        self.assertFalse(own.exists())
