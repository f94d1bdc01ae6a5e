# SPDX-License-Identifier: Apache-2.0
"""Pools with which something is wrong: what placement is told of them, and of the others."""

import os
from pathlib import Path
import random
import subprocess
from typing import Any
import unittest
from unittest import mock

import fixtures
from nova.compute import provider_tree
from oslo_utils import uuidutils

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.migration import arrival
from nova_pcow.placement import inventory
from pcow_driver.common import conf
from pcow_driver.common import units
from pcow_driver.pools import device
from pcow_driver.pools import registry
from tests.unit import sick_pool
from tests.unit.nova_pcow import base


class InventoryTest(fixtures.TestWithFixtures, unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(self.useFixture(fixtures.TempDir()).path)
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        for options, group, values in (
            (
                conf.CONF,
                'pcow',
                {'state_path': str(self.directory), 'pcow_img': str(programs / 'pcow-img')},
            ),
            (nova_conf.CONF, 'nova_pcow', {'pools': ['sick', 'well']}),
        ):
            for name, value in values.items():
                options.set_override(name, value, group)
                self.addCleanup(options.clear_override, name, group)
        for name in ('sick', 'well'):
            path = self.directory / name
            path.mkdir()
            self.run_program('mount', '-t', 'tmpfs', '-o', 'size=64m', 'none', path)
            self.addCleanup(self.run_program, 'umount', '-l', path)
            registry.PoolRegistry().create(name, str(path))

    @staticmethod
    def run_program(*command: str | Path) -> None:
        subprocess.run(command, check=True)

    def told(
        self, tree: provider_tree.ProviderTree | None = None, quiet: inventory.Quiet | None = None
    ) -> dict[str, dict[str, Any]]:
        """What placement knows of each pool; ``tree`` has what it was told before."""
        if tree is None:
            tree = provider_tree.ProviderTree()
            tree.new_root('node', uuidutils.generate_uuid())
        inventory.update_provider_tree(tree, 'node', takes_servers=True, quiet=quiet)
        found = (tree.data(uuid) for uuid in tree.get_provider_uuids())
        return {one.name: one.inventory['CUSTOM_PCOW_MB'] for one in found if one.name != 'node'}

    def test_before_placement_was_told(self) -> None:
        """nova-compute has just started: Nova makes the tree with its first report."""
        with self.assertRaisesRegex(inventory.PlacementMismatch, 'has not told placement yet'):
            inventory.choose(None, 'node', {}, flavor.PcowFlavor('f', 0, (), frozenset()))

    def test_arrival_is_durable(self) -> None:
        with mock.patch('os.fsync', wraps=os.fsync) as synced:
            arrival.note(str(self.directory), arrival.Arrival('there', []))
            self.assertEqual(2, synced.call_count)  # the file, and its directory
            self.assertEqual(arrival.Arrival('there', []), arrival.noted(str(self.directory)))
            arrival.forget(str(self.directory))
            self.assertEqual(3, synced.call_count)

    def test_read_only(self) -> None:
        """As ext4 is after an error."""
        self.run_program('mount', '-o', 'remount,ro', self.directory / 'sick')
        told = self.told()
        self.assertEqual(
            (64, 64), tuple(told['node_pcow_sick'][key] for key in ('total', 'reserved'))
        )
        self.assertEqual(
            (64, 1), tuple(told['node_pcow_well'][key] for key in ('total', 'reserved'))
        )

    def test_it_cannot_be_looked_at(self) -> None:
        with sick_pool.sick('sick'):
            self.assertEqual(['node_pcow_well'], list(self.told()))

    def test_small_files_change_nothing(self) -> None:
        """What is told of a pool of 1 GiB stays while its files come and go by some MiB, and is
        never less than what is reserved.
        """
        self.run_program('mount', '-o', 'remount,size=1g', self.directory / 'well')
        pool, chance = registry.PoolRegistry().get('well'), random.Random(1)
        tree, file = provider_tree.ProviderTree(), self.directory / 'well' / 'file'
        tree.new_root('node', uuidutils.generate_uuid())
        seen = set()
        for size in [0, *(chance.randrange(5) for _number in range(20)), 0, 100, 98, 103, 0]:
            file.write_bytes(bytes(size * units.MIB))
            told = self.told(tree)['node_pcow_well']
            exact = pool.account().reserved_beside(0) / units.MIB
            self.assertTrue(exact <= told['reserved'] <= exact + 11, (size, exact, told))
            self.assertEqual(
                int((told['total'] - told['reserved']) * 20), told['max_unit'], 'to be claimed'
            )
            seen.add(told['reserved'])
        self.assertEqual({6, 106}, seen)

    def test_after_a_quiet_minute_it_is_exact(self) -> None:
        self.run_program('mount', '-o', 'remount,size=1g', self.directory / 'well')
        tree, quiet = provider_tree.ProviderTree(), inventory.Quiet()
        tree.new_root('node', uuidutils.generate_uuid())
        file, clock = self.directory / 'well' / 'file', 0.0
        with mock.patch('time.monotonic', lambda: clock):
            for size, minutes, reserved in (
                (0, 0.0, 6),
                (0, 0.5, 6),
                (2, 0.6, 6),
                (2, 1.5, 6),
                (2, 1.7, 3),
                (3, 1.8, 9),
                (3, 2.7, 9),
                (3, 2.9, 4),
            ):
                file.write_bytes(bytes(size * units.MIB))
                clock = 60 * minutes
                self.assertEqual(reserved, self.told(tree, quiet)['node_pcow_well']['reserved'])

    def test_image_that_cannot_be_read(self) -> None:
        """Its server claims it still: it is not what others take beside the claims."""
        self.run_program('mount', '-o', 'remount,size=1g', self.directory / 'well')
        pool = registry.PoolRegistry().set('well', overcommit=1.0)
        server = f'server-{uuidutils.generate_uuid()}'
        for path in (
            device.create(pool, f'{server}-data0', 256 * units.MIB),
            pool.create_image(f'{server}-ram', size=256 * units.MIB),
        ):
            before = self.told()['node_pcow_well']['reserved']
            self.assertLess(before, 40)  # metadata, info block, and half a percent
            with open(path, 'r+b') as file:
                file.write(bytes(4096))
            self.assertLess(abs(self.told()['node_pcow_well']['reserved'] - before), 10)

    def test_of_a_full_pool_no_more_is_reserved_than_it_has(self) -> None:
        registry.PoolRegistry().set('well', critical=0, low=0)
        self.run_program('mount', '-o', 'remount,size=1g', self.directory / 'well')
        (self.directory / 'well' / 'file').write_bytes(bytes(1022 * units.MIB))
        told = self.told()['node_pcow_well']
        self.assertEqual((1024, 1024), (told['total'], told['reserved']))
