# SPDX-License-Identifier: Apache-2.0
"""Volumes, snapshots and clones on real pools."""

import os
import socket
from typing import Any
from unittest import mock

from cinder import exception
from cinder.tests.unit import fake_constants
from oslo_config import cfg

from cinder_pcow import driver
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import list_cache
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tests.unit.cinder_pcow import base

GIB = units.GIB


class VolumesTest(base.PcowTestCase):
    def test_a_volume_is_a_device_of_exactly_its_size(self) -> None:
        volume = self.volume(size=3)
        self.assertEqual(device.Window(2 << 20, 3 * GIB), device.window(self.path(volume)))
        self.check_content(volume, {0: 0, 3 * GIB - 65536: 0})
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())

    def test_delete_of_what_is_not_there(self) -> None:
        self.driver.delete_volume(self.record())

    def test_create_twice_is_refused_and_the_first_stays(self) -> None:
        volume = self.volume()
        self.write(volume, 0)
        error = self.assertRaises(
            exception.VolumeBackendAPIException, self.driver.create_volume, volume
        )
        self.assertIn('exists already', str(error))
        self.check_content(volume, {0: base.FILL})

    def test_extend_keeps_the_data(self) -> None:
        volume = self.volume(size=1)
        self.write(volume, GIB - 65536)
        self.driver.extend_volume(volume, 5)
        self.assertEqual(5 * GIB, device.window(self.path(volume)).size)
        self.check_content(volume, {GIB - 65536: base.FILL, GIB: 0, 5 * GIB - 65536: 0})

    def test_size_is_not_the_guests_to_choose(self) -> None:
        """The block says that nearly all of the volume lies in front of its data."""
        volume = self.volume(size=1)
        path, size = self.path(volume), GIB + (2 << 20)
        device.write_info_block(path, size, GIB)
        clone = self.record(size=2)
        for call in (
            (self.driver.extend_volume, volume, 2),
            (self.driver.create_cloned_volume, clone, volume),
        ):
            error = self.assertRaises(exception.VolumeBackendAPIException, *call)
            self.assertIn('where pcow puts none', str(error))
        self.assertEqual(size, image.info(path).virtual_size)

    def test_size_that_the_image_says(self) -> None:
        """Who has broken out of the QEMU of its guest could write that."""
        volume = self.volume(size=1)
        path, own = self.path(volume), {'host': socket.gethostname()}
        snapshot = self.snapshot(volume)
        image.resize(path, 8 * GIB + (2 << 20))
        larger = self.snapshot(volume)
        pools = {item['pool_name']: item for item in self.driver.get_volume_stats(True)['pools']}
        there = {'host': f'{base.HOST}#two', 'capabilities': pools['two']}
        calls: list[tuple[Any, ...]] = [
            (self.driver.initialize_connection, volume, {**own, 'mountpoint': '/dev/pmem1'}),
            (self.driver.initialize_connection, volume, own),
            (self.driver.initialize_connection_snapshot, larger, own),
            (self.driver.extend_volume, volume, 2),
            (self.driver.migrate_volume, self.context, volume, there),
            (self.driver.retype, self.context, volume, volume.volume_type, {}, there),
            (
                self.driver.copy_volume_to_image,
                self.context,
                volume,
                None,
                {'id': fake_constants.IMAGE_ID, 'disk_format': 'raw', 'container_format': 'bare'},
            ),
        ]
        for call in calls:
            error = self.assertRaises(exception.VolumeBackendAPIException, *call)
            self.assertIn(f'{path} says that it holds 8 GiB of data', str(error))
            self.assertIn(f'the volume {volume.id} gives {2 if 2 in call else 1} GiB', str(error))
        # what its QEMU has written since somebody looked
        with (
            mock.patch('cinder_pcow.validation.check_size'),
            mock.patch('cinder_pcow.validation.check_snapshot_size'),
        ):
            for call in [*calls[:3], calls[-1]]:
                error = self.assertRaises(exception.VolumeBackendAPIException, *call)
                self.assertIn(f'{path} says that it holds 8 GiB of data', str(error))
        self.assertEqual([], self.files('two'))
        self.addCleanup(self.driver.connections.end, snapshot)
        self.driver.initialize_connection_snapshot(snapshot, own)
        self.driver.extend_volume(volume, 8)  # what the message tells to do
        volume.size = 8
        connection = self.driver.initialize_connection(volume, {**own, 'mountpoint': '/dev/pmem1'})
        self.assertEqual(8 * GIB, connection['data']['size'])

    def test_names_that_are_not_the_default(self) -> None:
        """pcow knows them for those of volumes, as Cinder does; a mismatch is told."""
        default = cfg.CONF.volume_name_template
        cfg.CONF.set_override('volume_name_template', 'ours_%s')
        self.addCleanup(cfg.CONF.clear_override, 'volume_name_template')
        self.addCleanup(cfg.CONF.set_default, 'volume_name_template', default, 'pcow')
        self.driver = self.make_driver()
        volume = self.volume()
        self.assertEqual([f'ours_{volume.id}.pcow'], self.files())
        image.seal(self.path(volume))  # as its QEMU can write
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())
        for template, calls in (('ours_%s', 0), ('theirs_%s', 1)):
            cfg.CONF.set_override('volume_name_template', template, 'pcow')
            self.addCleanup(cfg.CONF.clear_override, 'volume_name_template', 'pcow')
            with mock.patch.object(driver.LOG, 'warning') as warning:
                self.make_driver()
            told = [call for call in warning.mock_calls if 'volume_name_template' in str(call)]
            self.assertEqual(calls, len(told))

    def test_extend_within_the_limits_of_the_pool(self) -> None:
        volume = self.volume(size=1)
        pools = registry.PoolRegistry()
        total = self.pools['one'].capacity().total
        pools.set('one', overcommit=2.5 * GIB / total)
        error = self.assertRaises(
            exception.VolumeBackendAPIException, self.driver.extend_volume, volume, 3
        )
        self.assertIn('cannot be provisioned in the pool one', str(error))
        self.assertEqual(GIB, device.window(self.path(volume)).size)
        self.driver.extend_volume(volume, 2)
        self.driver.extend_volume(volume, 2)  # again, as after a crash
        self.assertEqual(2 * GIB, device.window(self.path(volume)).size)
        pools.set('one', overcommit=0.0, draining=True)
        error = self.assertRaises(
            exception.VolumeBackendAPIException, self.driver.extend_volume, volume, 3
        )
        self.assertIn('takes nothing new', str(error))
        self.driver.extend_volume(volume, 2)

    def test_snapshot_and_revert(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        snapshot = self.snapshot(volume)
        self.write(volume, 0, 2)
        self.write(volume, 4 << 20, 2)
        self.driver.revert_to_snapshot(self.context, volume, snapshot)
        self.check_content(volume, {0: 1, 4 << 20: 0})
        self.assertFalse(self.driver.snapshot_revert_use_temp_snapshot())
        self.driver.delete_snapshot(snapshot)
        self.check_content(volume, {0: 1})
        self.assertEqual((), self.info(volume).snapshots)

    def test_revert_of_a_volume_that_was_extended_keeps_its_size(self) -> None:
        volume = self.volume(size=1)
        self.write(volume, 0, 1)
        snapshot = self.snapshot(volume)
        self.driver.extend_volume(volume, 2)
        volume.size = 2
        self.write(volume, GIB, 2)
        self.driver.revert_to_snapshot(self.context, volume, snapshot)
        self.assertEqual(device.Window(2 << 20, 2 * GIB), device.window(self.path(volume)))
        self.check_content(volume, {0: 1, GIB: 0})

    def test_delete_of_a_snapshot_that_is_not_there(self) -> None:
        volume = self.volume()
        self.driver.delete_snapshot(self.snapshot_record(volume))
        self.driver.delete_snapshot(self.snapshot_record(self.record()))

    def test_volume_from_a_snapshot_is_thin_and_independent(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        snapshot = self.snapshot(volume)
        self.write(volume, 0, 2)
        child = self.record(size=2)
        self.driver.create_volume_from_snapshot(child, snapshot)
        self.assertEqual(2, self.info(child).chain_depth)
        self.assertEqual(2 * GIB, device.window(self.path(child)).size)
        self.check_content(child, {0: 1, GIB: 0})
        self.write(child, 0, 3)
        self.check_content(volume, {0: 2})

    def test_clone(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        clone = self.record()
        self.driver.create_cloned_volume(clone, volume)
        self.write(volume, 0, 2)
        self.check_content(clone, {0: 1})
        self.assertLess(self.info(clone).actual_size, 1 << 20)
        self.driver.delete_volume(clone)
        self.assertEqual((), self.info(volume).snapshots)  # that of the clone went with it
        self.assertEqual([f'{volume.name}.pcow'], self.files())

    def test_clone_in_another_pool_is_a_copy(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        clone = self.record(pool='two', size=2)
        self.driver.create_cloned_volume(clone, volume)
        self.assertEqual((), self.info(volume).snapshots)
        self.driver.delete_volume(volume)
        self.check_content(clone, {0: 1, GIB: 0}, pool='two')
        self.assertEqual(1, self.info(clone, 'two').chain_depth)

    def test_chains_do_not_grow_without_end(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        depths = []
        with_limit = self.make_driver(pcow_max_chain=3)
        for _ in range(5):
            clone = self.record()
            with_limit.create_cloned_volume(clone, volume)
            with_limit.delete_volume(volume)
            volume = clone
            depths.append(self.info(volume).chain_depth)
        self.assertEqual([2, 3, 1, 2, 3], depths)
        self.check_content(volume, {0: 1})
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())


class DependentsTest(base.PcowTestCase):
    """Deleting what others stand on succeeds, and leaves nothing in the end."""

    def setUp(self) -> None:
        super().setUp()
        self.parent = self.volume()
        self.write(self.parent, 0, 1)
        self.parent_snapshot = self.snapshot(self.parent)
        self.write(self.parent, 8 << 20, 2, 4 << 20)
        self.child = self.record()
        self.driver.create_volume_from_snapshot(self.child, self.parent_snapshot)

    def test_snapshot_under_a_volume(self) -> None:
        self.driver.delete_snapshot(self.parent_snapshot)
        self.check_content(self.child, {0: 1, 8 << 20: 0})
        self.driver.delete_snapshot(self.parent_snapshot)  # again, as after a crash
        self.driver.delete_volume(self.child)
        self.assertEqual((), self.info(self.parent).snapshots)
        self.check_content(self.parent, {0: 1, 8 << 20: 2})
        self.check_pools()

    def test_volume_under_a_volume(self) -> None:
        self.driver.delete_snapshot(self.parent_snapshot)
        before = self.info(self.parent).actual_size
        self.driver.delete_volume(self.parent)
        # what only the deleted volume saw is gone
        self.assertLess(self.info(self.parent).actual_size, before)
        self.assertTrue(self.info(self.parent).sealed)
        self.check_content(self.child, {0: 1, 8 << 20: 0})
        self.driver.delete_volume(self.parent)  # again, as after a crash
        self.write(self.child, 0, 3)
        self.check_content(self.child, {0: 3})
        self.driver.delete_volume(self.child)
        self.assertEqual([], self.files())

    def test_a_line_of_descent_goes_from_either_end(self) -> None:
        grandchild = self.record()
        self.driver.create_cloned_volume(grandchild, self.child)
        self.driver.delete_snapshot(self.parent_snapshot)
        self.driver.delete_volume(self.child)
        self.driver.delete_volume(self.parent)
        self.check_content(grandchild, {0: 1, 8 << 20: 0})
        self.assertEqual(3, self.info(grandchild).chain_depth)
        self.driver.delete_volume(grandchild)
        self.assertEqual([], self.files())

    def test_one_of_two_children_goes(self) -> None:
        second = self.record()
        self.driver.create_cloned_volume(second, self.parent)
        self.driver.delete_snapshot(self.parent_snapshot)
        self.driver.delete_volume(self.parent)
        self.driver.delete_volume(self.child)
        self.check_content(second, {0: 1, 8 << 20: 2})
        self.assertEqual(1, len(self.info(self.parent).snapshots))
        self.driver.delete_volume(second)
        self.assertEqual([], self.files())

    def test_a_deleted_parent_is_no_promise(self) -> None:
        self.driver.delete_snapshot(self.parent_snapshot)
        self.assertEqual(2, self.pools['one'].account().provisioned // GIB)
        self.driver.delete_volume(self.parent)
        self.assertEqual(1, self.pools['one'].account().provisioned // GIB)

    def test_the_start_completes_what_was_cut_off(self) -> None:
        self.driver.delete_snapshot(self.parent_snapshot)
        self.driver.delete_volume(self.parent)
        # as if the service died right after that
        os.unlink(self.path(self.child))
        self.make_driver()
        self.assertEqual([], self.files())

    def damage(self, volume: Any) -> None:
        with open(self.path(volume), 'r+b') as f:
            f.write(bytes(4096))

    def test_damaged_neighbour_that_is_known(self) -> None:
        """It stood on nothing when it was last seen whole."""
        neighbour = self.volume()
        self.damage(neighbour)
        self.driver.delete_volume(self.child)
        self.assertNotIn(f'{self.child.name}.pcow', self.files())

    def test_damaged_neighbour_keeps_what_may_be_needed(self) -> None:
        neighbour = self.volume()
        self.damage(neighbour)
        list_cache.forget(self.pools['one'].uuid)
        self.driver.delete_volume(self.child)
        self.assertIn(self.child.name, trash.deleted_images(self.pools['one']))
        self.assertTrue(self.info(self.child).sealed)
        self.driver.delete_volume(neighbour)
        self.make_driver()
        self.assertEqual([f'{self.parent.name}.pcow'], self.files())
