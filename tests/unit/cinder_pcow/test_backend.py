# SPDX-License-Identifier: Apache-2.0
"""Pools of a backend: what the scheduler is told, what happens when one is missing or full, and
what is refused.
"""

import os
from pathlib import Path
import subprocess
from typing import Any
from unittest import mock

from cinder import exception
from cinder.volume import qos_specs
from cinder.volume import volume_types

from cinder_pcow import backend
from cinder_pcow import driver
from pcow_driver.common import units
from pcow_driver.export import nbd
from pcow_driver.pools import registry
from tests.unit import sick_pool
from tests.unit.cinder_pcow import base


class StatsTest(base.PcowTestCase):
    def test_capacity_per_pool(self) -> None:
        self.volume(size=7, pool='two')
        registry.PoolRegistry().set('one', overcommit=3.0, reserve=10)
        stats = self.driver.get_volume_stats(True)
        self.assertEqual('pcow', stats['storage_protocol'])
        self.assertEqual('pcow', stats['volume_backend_name'])
        one, two = stats['pools']
        status = os.statvfs(self.pools['one'].path)
        self.assertAlmostEqual(
            status.f_blocks * status.f_frsize / units.GIB, one['total_capacity_gb'], 1
        )
        self.assertEqual(
            ('one', 3.0, 10),
            (one['pool_name'], one['max_over_subscription_ratio'], one['reserved_percentage']),
        )
        self.assertEqual(
            ('two', 20.0, 0),
            (two['pool_name'], two['max_over_subscription_ratio'], two['reserved_percentage']),
        )
        # with what others have in the same file system, as often as the rest is provisioned
        self.assertAlmostEqual(
            self.pools['one'].account().fixed * 3 / units.GIB,
            one['provisioned_capacity_gb'],
            delta=2,
        )
        self.assertLessEqual(7, two['provisioned_capacity_gb'])
        for pool in (one, two):
            self.assertTrue(pool['thin_provisioning_support'])
            self.assertFalse(
                pool['QoS_support'] or pool['multiattach'] or pool['online_extend_support']
            )
            self.assertEqual('volatile', pool['pcow_persistence'])

    def test_a_draining_pool_offers_nothing(self) -> None:
        registry.PoolRegistry().set('one', draining=True)
        self.assertEqual(0, self.driver.get_volume_stats(True)['pools'][0]['free_capacity_gb'])
        error = self.assertRaises(
            exception.VolumeBackendAPIException, self.driver.create_volume, self.record()
        )
        self.assertIn('takes nothing new', str(error))

    def test_only_the_pools_that_are_configured(self) -> None:
        made = self.make_driver(pcow_pools=['two'])
        self.assertEqual(
            ['two'], [pool['pool_name'] for pool in made.get_volume_stats(True)['pools']]
        )
        error = self.assertRaises(
            exception.VolumeBackendAPIException, made.create_volume, self.record()
        )
        self.assertIn('pcow_pools', str(error))

    def test_a_pool_that_cinder_cannot_name(self) -> None:
        """Its names of places are HOST@BACKEND#POOL."""
        registry.PoolRegistry().create('a#b', os.path.join(self.directory, 'a#b'))
        with mock.patch.object(backend.LOG, 'error') as error:
            self.assertEqual(
                ['one', 'two'],
                [pool['pool_name'] for pool in self.driver.get_volume_stats(True)['pools']],
            )
        self.assertIn('a#b', str(error.call_args))
        made = self.assertRaises(
            exception.VolumeBackendAPIException, self.make_driver, pcow_pools=['a#b']
        )
        self.assertIn("a '#'", str(made))

    def test_pool_of_a_volume_is_found(self) -> None:
        volume = self.volume(pool='two')
        volume.host = base.HOST
        self.assertEqual('two', self.driver.get_pool(volume))
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files('two'))


class WarningsTest(base.PcowTestCase):
    """What will not work as the services are set up is said when the service starts."""

    def warnings(self) -> str:
        with mock.patch.object(driver.LOG, 'warning') as warning:
            self.make_driver()
        return ' '.join(str(call.args[0]) for call in warning.call_args_list)

    def test_backups_on_other_hosts(self) -> None:
        """Cinder asks any cinder-backup, which cannot attach what is memory of another host, unless
        it is told not to.
        """
        self.assertIn('backup_use_same_host', self.warnings())
        self.flags(backup_use_same_host=True)
        self.assertEqual('', self.warnings())

    def test_a_service_that_is_not_root(self) -> None:
        self.flags(backup_use_same_host=True)
        conf = os.path.join(self.directory, 'fuse.conf')
        with (
            mock.patch.object(os, 'geteuid', return_value=64055),
            mock.patch.object(nbd, 'FUSE_CONF', conf),
        ):
            self.assertIn('user_allow_other', self.warnings())
            Path(conf).write_text('user_allow_other\n')
            self.assertEqual('', self.warnings())


class MissingPoolTest(base.PcowTestCase):
    def test_no_pool_at_start_up(self) -> None:
        with self.away(self.pools['one']), self.away(self.pools['two']):
            error = self.assertRaises(exception.VolumeBackendAPIException, self.make_driver)
            self.assertIn(self.pools['one'].path, str(error))
            self.assertIn('is not mounted', str(error))
        self.make_driver()

    def test_one_of_two_is_missing(self) -> None:
        volume = self.volume()
        with self.away(self.pools['one']):
            late = self.make_driver()
            self.assertEqual(
                ['two'], [pool['pool_name'] for pool in late.get_volume_stats(True)['pools']]
            )
            error = self.assertRaises(
                exception.VolumeBackendAPIException, late.delete_volume, volume
            )
            self.assertIn(self.pools['one'].path, str(error))
        self.assertEqual(
            ['one', 'two'], [pool['pool_name'] for pool in late.get_volume_stats(True)['pools']]
        )
        late.delete_volume(volume)
        self.assertEqual([], self.files())

    def test_the_service_stays_up_and_says_that_the_backend_is_down(self) -> None:
        self.manager.driver = mock.Mock(wraps=self.driver)
        with self.away(self.pools['one']), self.away(self.pools['two']):
            self.manager.driver._initialized = False
            self.manager.driver.initialized = False
            self.manager.init_host(service_id=1)
            self.assertFalse(self.manager.is_working())


class OwnFileSystemCase(base.PcowTestCase):
    """With the pool ``small`` on a file system of its own."""

    def setUp(self) -> None:
        super().setUp()
        self.mount = os.path.join(self.directory, 'small')
        os.mkdir(self.mount)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', self.mount], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', self.mount], check=True)
        pools = registry.PoolRegistry()
        self.pools['small'] = pools.create('small', os.path.join(self.mount, 'pool'))
        pools.set('small', overcommit=0.0)  # volumes are of 1 GiB at least


class ReadOnlyPoolTest(OwnFileSystemCase):
    """As ext4 is after an error."""

    def read_only(self) -> None:
        subprocess.run(['mount', '-o', 'remount,ro', self.mount], check=True)

    def pools_of(self, made: driver.PcowDriver) -> dict[str, dict[str, Any]]:
        return {pool['pool_name']: pool for pool in made.get_volume_stats(True)['pools']}

    def test_it_offers_nothing_and_the_others_go_on(self) -> None:
        volume = self.volume(pool='small')
        self.read_only()
        for pools in (self.pools_of(self.driver), self.pools_of(self.make_driver())):
            self.assertEqual(['one', 'small', 'two'], sorted(pools))
            self.assertEqual(
                (0, 1.01, 'volatile'),
                tuple(
                    pools['small'][key]
                    for key in ('free_capacity_gb', 'provisioned_capacity_gb', 'pcow_persistence')
                ),
            )
            self.assertLess(0, pools['one']['free_capacity_gb'])
        self.assertEqual('small', self.driver.get_pool(volume))

    def test_the_service_starts_with_deletions_to_complete_in_it(self) -> None:
        volume, clone = self.volume(pool='small'), self.record(pool='small')
        self.driver.create_cloned_volume(clone, volume)
        self.driver.delete_volume(volume)
        os.unlink(self.path(clone, 'small'))
        os.unlink(self.path(volume, 'small'))
        self.read_only()
        self.assertEqual(['one', 'small', 'two'], sorted(self.pools_of(self.make_driver())))
        subprocess.run(['mount', '-o', 'remount,rw', self.mount], check=True)
        self.make_driver()
        self.assertEqual([], self.files('small'))

    def test_one_that_cannot_be_looked_at_is_left_out(self) -> None:
        with sick_pool.sick('small'):
            self.assertEqual(['one', 'two'], sorted(self.pools_of(self.make_driver())))


class FullPoolTest(OwnFileSystemCase):
    """Filled to the last block before each operation."""

    def fill(self) -> None:
        with open(os.path.join(self.mount, 'filler'), 'wb', buffering=0) as f:
            while True:
                try:
                    f.write(bytes(4096))
                except OSError:
                    return

    def test_every_operation(self) -> None:
        volume = self.volume(pool='small')
        self.write(volume, 0, 1, pool='small')
        snapshot = self.snapshot(volume)
        before = self.files('small')
        self.fill()
        for operation in (
            lambda: self.driver.create_volume(self.record(pool='small')),
            lambda: self.driver.create_volume_from_snapshot(self.record(pool='small'), snapshot),
            lambda: self.driver.create_cloned_volume(self.record(pool='small', size=2), volume),
        ):
            error = self.assertRaises(exception.VolumeBackendAPIException, operation)
            self.assertIn('pool', str(error))
            self.assertEqual(before, self.files('small'))
        self.check_content(volume, {0: 1}, pool='small')
        self.assertEqual(
            [snapshot.name], [one.name for one in self.info(volume, 'small').snapshots]
        )
        self.driver.delete_snapshot(snapshot)
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files('small'))


class RefusalsTest(base.PcowTestCase):
    def refused(self, word: str, **values: Any) -> None:
        volume = self.record(**values)
        error = self.assertRaises(exception.InvalidVolume, self.driver.create_volume, volume)
        self.assertIn(word, str(error))
        self.assertEqual([], self.files())

    def test_encryption(self) -> None:
        self.refused(
            'encrypt in the guest', encryption_key_id='0c3ad7bf-4a4b-4a35-9ee3-9c7e3dc7a5b2'
        )

    def test_multi_attach(self) -> None:
        made = volume_types.create(self.context, 'shared', {'multiattach': '<is> True'})
        self.refused('multi-attach', volume_type_id=made['id'])

    def test_quality_of_service(self) -> None:
        made = volume_types.create(self.context, 'limited', {})
        qos = qos_specs.create(
            self.context, 'slow', {'consumer': 'back-end', 'total_iops_sec': '5'}
        )
        qos_specs.associate_qos_with_type(self.context, qos['id'], made['id'])
        self.refused('QoS', volume_type_id=made['id'])
