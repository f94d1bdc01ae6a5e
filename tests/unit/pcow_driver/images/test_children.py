# SPDX-License-Identifier: Apache-2.0
"""What stands on an image protects it, also when images of the pool are damaged; pool and images
are real.
"""

import os
from pathlib import Path

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tests.unit.pcow_driver import base


class ChildrenTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(programs / 'pcow-io'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.pool.create_image('parent', size=2 << 20)
        self.pool.create_image('fork', base='parent')

    def damage(self, name: str) -> None:
        with open(self.pool.existing_path(name), 'r+b') as f:
            f.write(bytes(4096))
        self.assertRaises(exception.ToolFailed, image.info, self.pool.existing_path(name))

    def test_name_that_is_not_printable(self) -> None:
        """It is found by its inode, and counts under the name that it has."""
        os.rename(self.pool.image_path('fork'), Path(self.pool.path, 'a\x1bb\n\udcff.pcow'))
        self.assertEqual(['a\x1bb\n\udcff'], self.pool.children('parent'))
        self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'parent')

    def test_force_beside_a_damaged_image(self) -> None:
        self.pool.create_image('another', size=2 << 20)
        self.damage('another')
        error = self.assertRaises(
            exception.ImageInUse, self.pool.delete_image, 'parent', force=True
        )
        self.assertIn('1 image(s) stand on it: fork', str(error))
        # the damaged one may stand on it
        self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'fork')
        self.pool.delete_image('fork', force=True)
        self.pool.delete_image('parent', force=True)
        self.assertEqual(['another.pcow'], self.pool.entries())

    def test_force_on_a_damaged_parent(self) -> None:
        self.damage('parent')
        self.assertEqual(['fork'], self.pool.children('parent'))
        self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'parent', force=True)
        self.pool.delete_image('fork')
        self.pool.delete_image('parent', force=True)
        self.assertEqual([], self.pool.entries())

    def test_damaged_parent_goes_with_the_last_child(self) -> None:
        self.pool.create_image('grandchild', base='fork')
        self.damage('parent')
        self.assertFalse(trash.delete_image(self.pool, 'parent'))
        self.assertFalse(trash.delete_image(self.pool, 'parent'))  # again, as after a crash
        self.assertEqual({'parent'}, trash.deleted_images(self.pool))
        self.assertFalse(trash.delete_image(self.pool, 'fork'))
        self.assertTrue(trash.delete_image(self.pool, 'grandchild'))
        self.assertEqual([], self.pool.entries())

    def test_two_damaged_images_do_not_keep_each_other(self) -> None:
        self.pool.delete_image('fork')
        self.pool.create_image('another', size=2 << 20)
        self.damage('parent')
        self.damage('another')
        self.assertTrue(trash.delete_image(self.pool, 'parent'))
        self.assertTrue(trash.delete_image(self.pool, 'another'))
        self.assertEqual([], self.pool.entries())
