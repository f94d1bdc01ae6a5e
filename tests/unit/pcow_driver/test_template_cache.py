# SPDX-License-Identifier: Apache-2.0

import errno
import os
import shutil
import threading
import time
from unittest import mock

import fixtures

from pcow_driver import device
from pcow_driver import exception
from pcow_driver import pool as pool_module
from pcow_driver import template_cache
from pcow_driver import units
from tests.unit.pcow_driver import base

_SOURCE = template_cache.SourceImage('11111111-2222-3333-4444-555555555555', '0123456789abcdef' * 4, 'raw')


class TemplateCacheTest(base.TestCase):
    """With pcow-img itself."""

    def setUp(self) -> None:
        super().setUp()
        self.pool = pool_module.make('fast', self.useFixture(fixtures.TempDir()).path)
        self.cache = template_cache.TemplateCache(self.pool)
        self.fetches = 0

    def fetch(self, path: str) -> None:
        self.fetches += 1
        time.sleep(0.1)
        with open(path, 'wb') as f:
            f.write(b'x' * units.MIB)
            f.truncate(8 * units.MIB)

    def use(self, source: template_cache.SourceImage = _SOURCE) -> str:
        with self.cache.template(source, self.fetch) as name:
            return name

    def test_built_once_by_all_who_ask(self) -> None:
        names: list[str] = []
        threads = [threading.Thread(target=lambda: names.append(self.use())) for _number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(['image-11111111-2222-3333-4444-555555555555-0123456789abcdef'] * 4, names)
        self.assertEqual(1, self.fetches)
        self.assertEqual(_SOURCE.id, template_cache.image_id(names[0]))
        self.assertEqual([names[0]], [item.name for item in self.pool.templates()])

    def test_another_checksum_is_another_template(self) -> None:
        other = template_cache.SourceImage(_SOURCE.id, 'fedcba9876543210', 'raw')
        self.assertNotEqual(self.use(), self.use(other))

    def test_failed_fetch_leaves_nothing(self) -> None:
        def fail(path: str) -> None:
            self.fetch(path)
            raise OSError('the service is gone')

        with self.assertRaisesRegex(OSError, 'the service is gone'), self.cache.template(_SOURCE, fail):
            self.fail('entered')
        self.assertEqual([], self.pool.entries())
        self.use()

    def check_conversion_dir(self, words: str) -> None:
        error = self.assertRaises(exception.ConversionDirUnusable, self.use)
        self.assertEqual(f'[pcow] conversion_dir {words}: make room in it, let this user write there, or name another directory',
                         str(error))
        self.assertEqual([], self.pool.entries())

    def test_conversion_dir(self) -> None:
        """In words that reach the fault of a server."""
        self.configure(conversion_dir='/nowhere')
        self.check_conversion_dir('/nowhere: No such file or directory')
        error = self.assertRaises(exception.ConversionDirUnusable, device.create, self.pool, 'x', units.MIB * 4)
        self.assertIn('[pcow] conversion_dir /nowhere: No such', str(error))
        self.assertEqual([], self.pool.entries())

    def test_conversion_dir_that_gets_full(self) -> None:
        def fail(_path: str) -> None:
            raise OSError(errno.ENOSPC, 'No space left on device')

        with mock.patch.object(self, 'fetch', fail):
            self.check_conversion_dir(f'{self.directory}: No space left on device')

    def test_refused(self) -> None:
        for source, words in ((template_cache.SourceImage(_SOURCE.id, '', 'raw'), 'tells no checksum'),
                              (template_cache.SourceImage('../x', '0123456789', 'raw'), 'tells no checksum'),
                              (template_cache.SourceImage(_SOURCE.id, '0123456789', 'vmdk'), 'its format is vmdk')):
            error = self.assertRaises(exception.SourceRejected, self.use, source)
            self.assertIn(words, str(error))
        self.assertEqual(0, self.fetches)

    def test_age(self) -> None:
        name = self.use()
        self.assertEqual([], self.cache.age_out(3600))
        os.utime(self.pool.existing_path(name), (0, 0))
        device.create_on(self.pool, 'child', name)
        self.assertEqual([1], [item.children for item in self.cache.entries()])
        self.assertEqual([], self.cache.age_out(3600))
        self.pool.delete_image('child')
        shutil.copyfile(self.pool.existing_path(name), os.path.join(self.pool.path, 'other.pcow'))
        self.assertEqual([name], self.cache.age_out(3600))
        self.assertEqual(['other.pcow'], self.pool.entries())

    def test_age_of_empty_file_systems(self) -> None:
        """Also of those that came from another host; templates of other names are not the cache's."""
        made = self.pool.existing_path(self.use())
        names = ['format-ext4-64-0', 'format-xfs-2-7-0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11']
        for name in (*names, 'format-ext4', 'format-ext4-64-0-mine'):
            shutil.copyfile(made, self.pool.image_path(name))
            os.utime(self.pool.image_path(name), (0, 0))
        self.assertEqual(names, sorted(self.cache.age_out(3600)))
        self.assertIsNone(template_cache.image_id(names[0]))

    def test_use_keeps_it(self) -> None:
        name = self.use()
        os.utime(self.pool.existing_path(name), (0, 0))
        self.use()
        self.assertEqual([], self.cache.age_out(3600))
        self.assertEqual(1, self.fetches)
