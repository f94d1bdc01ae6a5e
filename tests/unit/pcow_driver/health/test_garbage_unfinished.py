# SPDX-License-Identifier: Apache-2.0
"""Work in progress is no garbage, however old it looks; and looking keeps nobody out."""

import fcntl
import os
from pathlib import Path
import struct
import time

from pcow_driver.common import exception
from pcow_driver.health import garbage
from pcow_driver.images import image_locks
from pcow_driver.pools import registry
from pcow_driver.pools import staging
from pcow_driver.snapshots import trash
from tests.unit.pcow_driver import base


class _PoolTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(self.programs / 'pcow-img'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    def find(self) -> list[str]:
        return [os.path.basename(one.path) for one in garbage.find(self.pool, None)]


class UnfinishedTest(_PoolTest):
    def make(self, name: str, age: float = 2 * 3600) -> Path:
        path = Path(self.pool.path, name)
        path.write_bytes(bytes(4096))
        os.utime(path, (time.time() - age,) * 2)
        return path

    def test_found_and_deleted(self) -> None:
        for name in ('.vm.pcow.part', '.x.raw.0123456789abcdef.partial'):
            self.make(name)
        self.make('.young.pcow.part', age=60)
        found = garbage.find(self.pool, None)
        self.assertEqual(
            ['.vm.pcow.part', '.x.raw.0123456789abcdef.partial'],
            [os.path.basename(one.path) for one in found],
        )
        for one in found:
            garbage.delete(self.pool, one)
        self.assertEqual(['.young.pcow.part'], self.pool.entries())

    def test_a_build_that_pauses(self) -> None:
        """As when the stream of an image stalls, or the clock was set."""
        with staging.building(self.pool, 'vm'):
            self.make('.vm.pcow.part')
            self.make('..vm.pcow.part.0123456789abcdef.partial')
            self.make('.other.pcow.part')
            self.assertEqual(['.other.pcow.part'], self.find())

    def test_a_build_that_began_meanwhile(self) -> None:
        self.make('.vm.pcow.part')
        (found,) = garbage.find(self.pool, None)
        with staging.building(self.pool, 'vm') as part:
            path = self.make(os.path.basename(part))
            self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
            self.assertTrue(path.exists())

    def test_a_conversion_that_pauses(self) -> None:
        path = self.make('.x.pcow.0123456789abcdef.partial')
        with open(path, 'r+b') as file:
            fcntl.fcntl(
                file,
                fcntl.F_OFD_SETLK,
                struct.pack('hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 12288, 1, 0),
            )
            self.assertEqual([], self.find())
        self.assertEqual([path.name], self.find())


class LookTest(_PoolTest):
    def test_nothing_is_locked(self) -> None:
        """A guest that starts meanwhile can open its image for writing."""
        log = self.directory / 'log'
        self.pool.create_image('vm', size=2 << 20)
        self.configure(
            pcow_img=self.script(
                'pcow-img', f'#!/bin/sh\necho "$@" >> {log}\nexec {self.programs}/pcow-img "$@"\n'
            )
        )
        self.assertEqual([], self.find())
        commands = log.read_text().splitlines()
        self.assertEqual({'list', 'check'}, {command.split()[0] for command in commands})
        self.assertEqual(
            [], [command for command in commands if not {'-U', 'list'} & set(command.split())]
        )

    def test_an_image_that_cannot_be_looked_at_hides_no_other(self) -> None:
        for name in ('first', 'second'):
            self.pool.create_image(name, size=2 << 20)
            with trash.lock(self.pool, name):
                trash.mark_snapshot(self.pool, name, 'gone')
        self.configure(
            pcow_img=self.script(
                'pcow-img',
                (
                    '#!/bin/sh\ncase "$*" in info*/first.pcow) echo damaged >&2; exit 1;; esac\n'
                    f'exec {self.programs}/pcow-img "$@"\n'
                ),
            )
        )
        self.assertEqual(['second.pcow'], self.find())

    def test_in_use(self) -> None:
        path = self.pool.create_image('vm', size=2 << 20)
        self.assertFalse(image_locks.is_in_use(path))
        with base.opened(path, self.programs / 'pcow-io'):
            self.assertTrue(image_locks.is_in_use(path))
        self.assertFalse(image_locks.is_in_use(path, writers_only=False))

    def test_deleted_meanwhile(self) -> None:
        """Between the list of images and the check of one."""
        self.pool.create_image('vm', size=2 << 20)
        self.configure(
            pcow_img=self.script(
                'pcow-img',
                f'#!/bin/sh\n{self.programs}/pcow-img "$@"\nrm {self.pool.path}/vm.pcow\n',
            )
        )
        self.assertEqual([], self.find())
