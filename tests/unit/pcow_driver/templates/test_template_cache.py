# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
import dataclasses
import errno
import os
import shutil
import threading
import time
from unittest import mock

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.images import protection
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import scrubs
from pcow_driver.pools import settings as settings_module
from pcow_driver.templates import template
from pcow_driver.templates import template_cache
from pcow_driver.virt import notices
from tests.unit.pcow_driver import base

_SOURCE = template_cache.SourceImage(
    '11111111-2222-3333-4444-555555555555', '0123456789abcdef' * 4, 'raw'
)


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
        threads = [
            threading.Thread(target=lambda: names.append(self.use())) for _number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(['image-11111111-2222-3333-4444-555555555555-0123456789abcdef'] * 4, names)
        self.assertEqual(1, self.fetches)
        self.assertEqual(_SOURCE.id, template_cache.image_id(names[0]))
        self.assertEqual([names[0]], [item.name for item in self.pool.templates()])

    def damage(self, name: str) -> None:
        path = self.pool.existing_path(name)
        with protection.lifted(path), open(path, 'r+b') as f:
            data = f.read().rindex(b'xxxx')
            f.seek(data)
            f.write(b'y')

    def test_damaged_one_is_made_anew(self) -> None:
        name = self.use()
        self.use()
        self.damage(name)
        self.use()  # it was compared just now
        self.assertEqual(1, self.fetches)
        # as if it were a day later
        with mock.patch.object(template_cache, '_COMPARED', template_cache._Compared()):
            self.configure(compare_templates_after=0)
            self.use()
            self.assertEqual(1, self.fetches)
            self.configure(compare_templates_after=86400)
            self.use()
            self.assertEqual(2, self.fetches)
            self.use()
        self.assertEqual(2, self.fetches)
        self.assertIsNone(image.check_data(self.pool.existing_path(name)).damage)

    def test_damaged_one_that_images_stand_on(self) -> None:
        name = self.use()
        self.pool.create_image('server', base=name)
        self.damage(name)
        with (
            mock.patch.object(template_cache, '_COMPARED', template_cache._Compared()),
            mock.patch.object(notices, 'tell') as tell,
            self.assertRaisesRegex(exception.ImageDamaged, 'so nothing new may stand on it'),
        ):
            self.use()
        tell.assert_called_once_with(self.pool)  # a server may run on it
        self.assertEqual(1, self.fetches)
        # and then again, until somebody accepts it
        for _run in range(2):
            with self.assertRaisesRegex(exception.ImageDamaged, 'it cannot be made anew'):
                self.use()
        scrub.accept(self.pool, name)
        self.use()
        self.assertEqual(1, self.fetches)

    def test_what_a_scrub_has_found_is_compared_at_once(self) -> None:
        name = self.use()
        self.use()
        self.damage(name)
        scrub.scrub(self.pool, tell=lambda _name, _result: None)
        self.assertEqual([name], scrubs.read(self.pool.uuid).damaged())
        self.use()
        self.assertEqual(2, self.fetches)
        self.pool.create_image('server', base=name)

    def test_another_checksum_is_another_template(self) -> None:
        other = template_cache.SourceImage(_SOURCE.id, 'fedcba9876543210', 'raw')
        self.assertNotEqual(self.use(), self.use(other))

    def test_failed_fetch_leaves_nothing(self) -> None:
        def fail(path: str) -> None:
            self.fetch(path)
            raise OSError('the service is gone')

        with (
            self.assertRaisesRegex(OSError, 'the service is gone'),
            self.cache.template(_SOURCE, fail),
        ):
            self.fail('entered')
        self.assertEqual([], self.pool.entries())
        self.use()

    def bomb(self, path: str) -> None:
        """32 MiB of data in a file of some KiB."""
        with open(f'{path}.raw', 'wb') as f:
            f.write(b'A' * (32 * units.MIB))
        tool.run(
            tool.find('qemu_img'), 'convert', '-c', '-f', 'raw', '-O', 'qcow2', f'{path}.raw', path
        )
        os.unlink(f'{path}.raw')
        self.assertLess(os.path.getsize(path), units.MIB)

    def check_refused_bomb(
        self,
        error: type[Exception],
        words: str,
        pool: pool_module.Pool,
        accept: Callable[[int], None] | None = None,
    ) -> None:
        """Nothing is converted, not even to the directory for that."""
        cache = template_cache.TemplateCache(pool)
        source = template_cache.SourceImage(_SOURCE.id, _SOURCE.checksum, 'qcow2')
        write = template.write_namespace
        with (
            mock.patch.object(template, 'write_namespace', wraps=write) as written,
            self.assertRaisesRegex(error, words),
            cache.template(source, self.bomb, accept),
        ):
            self.fail('entered')
        written.assert_not_called()
        self.assertEqual([], pool.entries())

    def test_image_that_the_caller_does_not_take(self) -> None:
        sizes = []

        def accept(size: int) -> None:
            sizes.append(size)
            raise exception.InvalidSize(size=size, reason='too large for the flavor')

        self.check_refused_bomb(exception.InvalidSize, 'too large for', self.pool, accept)
        self.use()  # the same, when the template is there
        with (
            self.assertRaises(exception.InvalidSize),
            self.cache.template(_SOURCE, self.fetch, accept),
        ):
            self.fail('entered')
        self.assertEqual([32 * units.MIB, 8 * units.MIB], sizes)

    def test_image_that_the_pool_cannot_take(self) -> None:
        kept = dataclasses.replace(
            self.pool, settings=settings_module.Settings(low=100, critical=100)
        )
        self.check_refused_bomb(exception.NoSpace, 'in the pool fast: 0 B are free', kept)
        source = self.directory / 'source'
        self.fetch(str(source))  # not compressed: looked at when its zeros are known
        self.assertRaises(exception.NoSpace, template.build, kept, 't', str(source), 'raw')
        self.assertEqual([], kept.entries())

    def test_measure(self) -> None:
        """What is stored, whatever metadata its size would need."""
        path = self.directory / 'sparse'
        for number in (0, 3, 5):
            with open(path, 'r+b' if path.exists() else 'xb') as f:
                f.seek(number << 30)
                f.write(b'x' * units.MIB)
                f.truncate(1 << 40)
        self.assertEqual(3 * units.MIB, template.measure(str(path), 'raw', 1 << 40))

    def test_image_that_the_conversion_dir_cannot_take(self) -> None:
        free = workspace.check_free
        with mock.patch.object(workspace, 'check_free', lambda size: free(size + (1 << 60))):
            self.check_refused_bomb(exception.ConversionDirUnusable, 'may be needed', self.pool)

    def check_conversion_dir(self, words: str) -> None:
        error = self.assertRaises(exception.ConversionDirUnusable, self.use)
        self.assertEqual(
            f'[pcow] conversion_dir {words}: make room in it, let this user write there, or name '
            f'another directory',
            str(error),
        )
        self.assertEqual([], self.pool.entries())

    def test_conversion_dir(self) -> None:
        """In words that reach the fault of a server."""
        self.configure(conversion_dir='/nowhere')
        self.check_conversion_dir('/nowhere: No such file or directory')
        error = self.assertRaises(
            exception.ConversionDirUnusable, device.create, self.pool, 'x', units.MIB * 4
        )
        self.assertIn('[pcow] conversion_dir /nowhere: No such', str(error))
        self.assertEqual([], self.pool.entries())

    def test_conversion_dir_that_gets_full(self) -> None:
        def fail(_path: str) -> None:
            raise OSError(errno.ENOSPC, 'No space left on device')

        with mock.patch.object(self, 'fetch', fail):
            self.check_conversion_dir(f'{self.directory}: No space left on device')

    def test_refused(self) -> None:
        for source, words in (
            (template_cache.SourceImage(_SOURCE.id, '', 'raw'), 'tells no checksum'),
            (template_cache.SourceImage('../x', '0123456789', 'raw'), 'tells no checksum'),
            (template_cache.SourceImage(_SOURCE.id, '0123456789', 'vmdk'), 'its format is vmdk'),
        ):
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
        """Also of those that came from another host; templates of other names are not
        the cache's.
        """
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
