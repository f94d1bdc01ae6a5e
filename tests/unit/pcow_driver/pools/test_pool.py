# SPDX-License-Identifier: Apache-2.0
"""What needs no pcow-img; the rest is in tests/functional/test_pcowctl.py."""

import os
from pathlib import Path

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.copies import clone
from pcow_driver.copies import fork
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.pools import staging
from pcow_driver.snapshots import trash
from pcow_driver.templates import template_cache
from tests.unit.pcow_driver import base


class MarkerTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = str(self.directory / 'p')
        self.made = pool.make('fast', self.path)
        self.marker = os.path.join(self.path, names.MARKER)

    def test_round_trip(self) -> None:
        self.assertEqual(self.made, pool.open_directory(self.path))

    def test_hostile_markers(self) -> None:
        for text in (
            '',
            '{',
            'null',
            '[]',
            '{"format": 2}',
            '{"format": 1, "name": "a", "created": "x"}',
            '{"format": 1, "name": "a", "created": "x", "uuid": "../../etc"}',
            '{"format": 1, "name": "../a", "created": "x", "uuid": '
            '"6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27"}',
            '{"format": 1, "name": 3, "created": "x", "uuid": '
            '"6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27"}',
            ' ' * (1 << 20) + '{}',
            '[' * 60000,
        ):
            with open(self.marker, 'w') as f:
                f.write(text)
            self.assertRaises(exception.PoolInvalid, pool.open_directory, self.path)
        with open(self.marker, 'wb') as f:
            f.write(b'\xff\xfe')
        self.assertRaises(exception.PoolInvalid, pool.open_directory, self.path)

    def test_marker_is_no_link_and_no_pipe(self) -> None:
        os.rename(self.marker, self.marker + '.real')
        os.symlink(self.marker + '.real', self.marker)
        self.assertRaises(exception.PoolInvalid, pool.open_directory, self.path)
        os.unlink(self.marker)
        os.mkfifo(self.marker)
        self.assertRaises(exception.PoolInvalid, pool.open_directory, self.path)

    def test_make_needs_a_directory(self) -> None:
        (self.directory / 'file').write_text('')
        self.assertRaises(exception.PoolInvalid, pool.make, 'x', str(self.directory / 'file'))
        self.assertRaises(exception.PoolInvalid, pool.make, 'x', str(self.directory / 'no/such'))


class PoolTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.pool = pool.make('fast', str(self.directory / 'p'))

    def test_paths_stay_inside(self) -> None:
        self.assertEqual(str(self.directory / 'p/vm.pcow'), self.pool.image_path('vm'))
        for name in ('../vm', '/etc/passwd', '.vm', '..'):
            self.assertRaises(exception.InvalidName, self.pool.image_path, name)

    def test_links_are_no_images(self) -> None:
        os.symlink('/etc/passwd', self.pool.image_path('link'))
        os.mkdir(self.pool.image_path('directory'))
        self.assertEqual([], self.pool.images())
        for name in ('link', 'directory', 'missing'):
            self.assertRaises(exception.ImageNotFound, self.pool.existing_path, name)

    def test_long_names(self) -> None:
        """Those that are there are as good as others; no new one is made to which the name of a
        lock would not fit.
        """
        longest, long, old = 'x' * 204, 'x' * 205, 'x' * 240
        Path(self.pool.image_path(old)).touch()
        self.assertEqual(self.pool.image_path(old), self.pool.existing_path(old))
        with staging.building(self.pool, longest):
            self.assertEqual([longest], staging.in_the_making(self.pool))
        with template_cache.TemplateCache(self.pool)._lock(longest), trash.lock(self.pool, longest):
            pass
        for make, arguments in (
            (staging.building(self.pool, long).__enter__, ()),
            (self.pool.create_image, (long,)),
            (clone.rename, (self.pool, old, long)),
            (fork.fork, (self.pool.image_path(old), 's', long)),
        ):
            self.assertIn(
                'more than 204 bytes',
                str(self.assertRaises(exception.InvalidName, make, *arguments)),
            )
        self.assertRaises(exception.InvalidName, self.pool.create_image, long, size=2 << 20)

    def test_capacity(self) -> None:
        capacity = self.pool.capacity()
        self.assertGreater(capacity.total, capacity.free)
        self.assertGreaterEqual(capacity.free, 0)


class RemovedTest(base.TestCase):
    """Who has the object of a pool makes nothing in what is no pool any more, or another one."""

    def setUp(self) -> None:
        super().setUp()
        self.configure(
            pcow_img=self.script('pcow-img', f'#!/bin/sh\necho "$@" >> {self.directory}/log\n')
        )
        self.pools = registry.PoolRegistry()
        self.pool = self.pools.create('p', str(self.directory / 'p'))

    def nothing_is_made(self) -> None:
        self.assertRaises(exception.PoolInvalid, self.pool.create_image, 'vm', size=2 << 20)
        self.assertRaises(exception.PoolInvalid, staging.building(self.pool, 'vm').__enter__)
        # probed it was, when the pool was made
        self.assertNotIn('create', (self.directory / 'log').read_text())

    def test_removed(self) -> None:
        self.pools.remove('p')
        self.nothing_is_made()

    def test_not_mounted(self) -> None:
        os.rename(self.pool.path, f'{self.pool.path}.elsewhere')
        os.mkdir(self.pool.path)
        self.nothing_is_made()

    def test_another_one(self) -> None:
        self.pools.remove('p')
        self.pools.create('p', self.pool.path)
        self.nothing_is_made()

    def test_stays_while_an_image_is_made(self) -> None:
        """A template has nothing in its pool as long as qemu-img writes."""
        with staging.building(self.pool, 'vm'), staging.building(self.pool, 'vm-2'):
            self.assertIn(
                'vm-2', str(self.assertRaises(exception.PoolNotEmpty, self.pools.remove, 'p'))
            )
        self.pools.remove('p')
