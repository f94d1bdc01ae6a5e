# SPDX-License-Identifier: Apache-2.0

import errno
import os
from unittest import mock

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
_FLAVOR = flavor.PcowFlavor('f', None, (flavor.DataDevice(4 * units.MIB, 'none'),), frozenset())


class DamageTest(base.TestCase):
    """A server whose image stands on a template that a scrub has found damaged."""

    def setUp(self) -> None:
        super().setUp()
        nova_conf.CONF.set_override('pools', ['fast'], 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'pools', 'nova_pcow')
        self.pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        storage.create(_UUID, _FLAVOR, self.pool, None)

    def _find_damage(self, name: str) -> None:
        inode = os.stat(self.pool.existing_path(name)).st_ino
        found = scrubs.Result(inode, 'today', findings=('it is not what it was',))
        scrubs.put(self.pool.uuid, name, found)

    def test_start_warns(self) -> None:
        self.pool.create_image('other', size=4 * units.MIB)
        self._find_damage('other')
        with self.assertNoLogs('nova_pcow.servers.storage'):
            storage.nvdimms(_UUID, _FLAVOR)
        own = storage.find(_UUID)[0]
        os.rename(own.path, self.pool.image_path('template'))
        image.create_overlay(own.path, self.pool.existing_path('template'))
        self._find_damage('template')
        with self.assertLogs('nova_pcow.servers.storage', 'WARNING') as log:
            self.assertEqual(1, len(storage.nvdimms(_UUID, _FLAVOR)))
        self.assertIn(f'{_UUID} starts on damaged data', log.output[0])
        self.assertIn('template.pcow: it is not what it was', log.output[0])
        error = self.assertRaises(
            exception.ImageDamaged, self.pool.create_image, 'c', base=own.name
        )
        self.assertIn('template.pcow', str(error))

    def test_start_of_what_cannot_be_told(self) -> None:
        """A warning keeps no server off."""
        for error in (
            OSError(errno.EIO, 'Input/output error'),
            exception.ImageNotFound(path='/x.pcow'),
        ):
            with (
                mock.patch.object(pool_module.Pool, 'known_damage', side_effect=error),
                self.assertLogs('nova_pcow.servers.storage', 'WARNING') as log,
            ):
                self.assertEqual(1, len(storage.nvdimms(_UUID, _FLAVOR)))
            self.assertIn(f'cannot be told: {error}', log.output[0])
