# SPDX-License-Identifier: Apache-2.0

import dataclasses
from unittest import mock

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.servers import storage
from pcow_driver.common import units
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
_ANY = flavor.PcowFlavor('f', None, (flavor.DataDevice(4 * units.MIB, 'none'),), frozenset())
_PMEM = dataclasses.replace(_ANY, required_traits=frozenset({'CUSTOM_PCOW', 'CUSTOM_PCOW_PMEM'}))


class PoolClassTest(base.TestCase):
    """The devices of a server in a pool that is no longer of the class that it was."""

    def setUp(self) -> None:
        super().setUp()
        nova_conf.CONF.set_override('pools', ['fast'], 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'pools', 'nova_pcow')
        storage.create(
            _UUID, _ANY, registry.PoolRegistry().create('fast', str(self.directory / 'fast')), None
        )

    def test_required(self) -> None:
        for persistence in ('page-cache', 'volatile'):
            with mock.patch('pcow_driver.images.image.probe', return_value=persistence):
                error = self.assertRaises(storage.ServerStorageError, storage.nvdimms, _UUID, _PMEM)
            self.assertIn('the pool fast has not CUSTOM_PCOW_PMEM now', str(error))
        self.assertEqual(1, len(storage.find(_UUID)))
        with mock.patch('pcow_driver.images.image.probe', return_value='pmem'):
            self.assertEqual(['nvdimm'], [item.model for item in storage.nvdimms(_UUID, _PMEM)])

    def test_not_required(self) -> None:
        for persistence in ('pmem', 'page-cache', 'volatile'):
            with mock.patch('pcow_driver.images.image.probe', return_value=persistence):
                self.assertEqual(1, len(storage.nvdimms(_UUID, _ANY)))
