# SPDX-License-Identifier: Apache-2.0

import os

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.servers import storage
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.templates import template_cache
from tests.unit.pcow_driver import base

_SERVERS = ('0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11', '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c12')
_WANTED = flavor.PcowFlavor('f', None, (flavor.DataDevice(16 * units.MIB, 'ext4'),), frozenset())


class FormattedTest(base.TestCase):
    """The empty file system that formatted data devices stand on."""

    def setUp(self) -> None:
        super().setUp()
        nova_conf.CONF.set_override('pools', ['fast'], 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'pools', 'nova_pcow')
        self.pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        self.cache = template_cache.TemplateCache(self.pool)

    def make(self, server: str) -> str:
        storage.create(server, _WANTED, self.pool, None)
        (made,) = storage.find(server)
        return str(image.info(made.path).base_filename)

    def test_goes_when_it_was_not_used_for_long(self) -> None:
        name = self.make(_SERVERS[0])
        path = os.path.join(self.pool.path, name)
        before = os.stat(path).st_ino
        os.utime(path, (0, 0))
        self.assertEqual([], self.cache.age_out(3600))  # something stands on it
        self.assertEqual(name, self.make(_SERVERS[1]))  # and this is a use
        self.assertEqual(before, os.stat(path).st_ino)
        for server in _SERVERS:
            storage.delete(server)
        self.assertEqual([], self.cache.age_out(3600))
        os.utime(path, (0, 0))
        self.assertEqual(['format-ext4-16-0'], self.cache.age_out(3600))
        self.assertEqual([], self.pool.entries())
        self.assertEqual(name, self.make(_SERVERS[0]))
