# SPDX-License-Identifier: Apache-2.0
"""The image that is a guest's RAM; pool and images are real."""

import os
from pathlib import Path

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.vm import ram
from tests.unit.pcow_driver import base

SIZE = 16 * units.MIB


class RamTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self._be('volatile')

    def _be(self, persistence: str) -> None:
        self.useFixture(
            fixtures.MockPatchObject(pool_module.Pool, 'persistence', lambda _pool: persistence)
        )

    def test_is_made_once(self) -> None:
        path = ram.provide(self.pool, ram.name_of('web1'), SIZE)
        self.assertEqual(self.pool.image_path('web1-ram'), path)
        self.assertEqual(SIZE, image.info(path).virtual_size)
        uuid = image.info(path).uuid
        self.assertEqual(path, ram.provide(self.pool, 'web1-ram', SIZE))
        self.assertEqual(uuid, image.info(path).uuid)

    def test_is_provisioned(self) -> None:
        before = self.pool.account().provisioned
        ram.provide(self.pool, 'web1-ram', SIZE)
        self.assertGreaterEqual(self.pool.account().provisioned - before, SIZE)

    def test_what_cannot_be_it(self) -> None:
        path = self.pool.create_image('other', size=2 * SIZE)
        error = self.assertRaises(exception.RamInvalid, ram.provide, self.pool, 'other', SIZE)
        self.assertIn('32 MiB', str(error))
        self.assertIn(path, str(error))
        self.assertRaises(exception.InvalidSize, ram.provide, self.pool, 'x', SIZE + 1)
        self.assertRaises(exception.InvalidName, ram.provide, self.pool, '.x', SIZE)
        self.assertEqual(['other'], [one.name for one in self.pool.images()])

    def test_not_on_page_cache(self) -> None:
        self._be('page-cache')
        self.assertRaises(exception.PoolInvalid, ram.provide, self.pool, 'x', SIZE)
        self.assertEqual([], self.pool.images())
