# SPDX-License-Identifier: Apache-2.0
"""What somebody has open is not deleted, by force or not; all of it is real."""

import os
from pathlib import Path
import threading
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tests.unit.pcow_driver import base


class ImageLocksTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.io = programs / 'pcow-io'
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(self.io))
        self.useFixture(fixtures.MockPatchObject(image_locks, '_WAIT', 0.1))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.path = self.pool.create_image('vm', size=2 << 20)

    def check_stays(self, *, force: bool) -> None:
        error = self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'vm', force=force)
        self.assertIn('open', str(error))
        self.assertTrue(os.path.exists(self.path))

    def test_writer(self) -> None:
        with base.opened(self.path, self.io):
            self.check_stays(force=False)
            self.check_stays(force=True)
        self.pool.delete_image('vm', force=True)
        self.assertFalse(os.path.exists(self.path))

    def test_writer_of_a_damaged_image(self) -> None:
        with base.opened(self.path, self.io):
            with open(self.path, 'r+b') as f:
                f.write(bytes(4096))
            self.check_stays(force=True)
            self.assertRaises(exception.ImageInUse, trash.delete_image, self.pool, 'vm')
            self.assertTrue(os.path.exists(self.path))
        self.pool.delete_image('vm', force=True)

    def test_reader_of_a_snapshot(self) -> None:
        image.snapshot_create(self.path, 's')
        (snapshot,) = image.snapshot_list(self.path)
        with image_locks.reading_snapshot(self.path, int(snapshot.id)):
            self.check_stays(force=True)

    def test_writer_who_comes_after_the_look(self) -> None:
        """The lock is held when the name goes, not only before."""
        look, writers = self.pool.children, []

        def children(*arguments: object, **options: object) -> list[str]:
            writers.append(base.opened(self.path, self.io))
            writers[-1].__enter__()
            return look('vm')

        with mock.patch('pcow_driver.pools.pool.Pool.children', side_effect=children):
            self.check_stays(force=False)
        writers[0].__exit__(None, None, None)

    def test_short_look(self) -> None:
        """Of a tool that describes the image: that is waited for."""
        self.useFixture(fixtures.MockPatchObject(image_locks, '_WAIT', 10))
        descriptor = os.open(self.path, os.O_RDONLY)
        image_locks.read_active(descriptor, self.path)
        timer = threading.Timer(0.2, os.close, (descriptor,))
        timer.start()
        self.pool.delete_image('vm')
        timer.join()

    def test_owner_of_the_pool_alone(self) -> None:
        """Of a file that he may not write to he may delete the name; readers are seen
        all the same.
        """
        image.snapshot_create(self.path, 's')
        (snapshot,) = image.snapshot_list(self.path)
        plain = os.open

        def as_another(path: str, flags: int, *arguments: int, **options: int) -> int:
            if flags & os.O_RDWR and path == self.path:
                raise PermissionError(13, 'Permission denied')
            return plain(path, flags, *arguments, **options)

        with mock.patch('os.open', side_effect=as_another):
            with image_locks.reading_snapshot(self.path, int(snapshot.id)):
                self.check_stays(force=True)
            with base.opened(self.path, self.io):
                self.check_stays(force=True)
            self.pool.delete_image('vm', force=True)
        self.assertFalse(os.path.exists(self.path))

    def test_replaced_meanwhile(self) -> None:
        other = f'{self.path}.other'
        os.link(self.path, other)
        with (
            mock.patch('os.lstat', return_value=os.lstat(self.pool.path)),
            self.assertRaisesRegex(exception.ImageInUse, 'replaces it'),
            image_locks.alone(other),
        ):
            self.fail('it was held')

    def test_gone(self) -> None:
        with self.assertRaises(exception.ImageNotFound), image_locks.alone(f'{self.path}.gone'):
            self.fail('it was held')
