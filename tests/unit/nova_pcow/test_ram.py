# SPDX-License-Identifier: Apache-2.0
"""Servers whose RAM is an image, with pcow:ram."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import types
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import task_states
from nova.tests.functional.api import client
from nova.virt.libvirt import config as vconfig
from nova.virt.libvirt import driver as libvirt_driver
from nova.virt.libvirt import guest as libvirt_guest
from nova.virt.libvirt import utils as libvirt_utils
from oslotest import base as oslotest_base

from nova_pcow.common import flavor
from nova_pcow.common import reserved
from nova_pcow.migration import cold_migration
from nova_pcow.migration import leaving
from nova_pcow.migration import live_migration
from nova_pcow.placement import inventory
from nova_pcow.placement import resize_claims
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import protection
from pcow_driver.virt import libvirt_xml
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import checkpoints

RAM_MB = 256
# as QEMU marks them (migration/pcow/checkpoint.h)
_ID = '20261128T120000.000000000-6ba7b810-9dad-11d1-80b4-00c04fd430c8'
TAKING, LOADING = f'.checkpoint-{_ID}', f'.loading-checkpoint-{_ID}'
DELETING = f'.deleting-{_ID}'


def parse(
    root_gb: int = 2,
    memory_mb: int = RAM_MB,
    claimed: str = '4096',
    metadata: dict[str, str] | None = None,
    swap: Any = 0,
    ephemeral_gb: int = 0,
    **specs: str,
) -> flavor.PcowFlavor:
    extra_specs = {f'pcow:{name}': value for name, value in specs.items()}
    found = types.SimpleNamespace(
        name='f',
        root_gb=root_gb,
        memory_mb=memory_mb,
        swap=swap,
        ephemeral_gb=ephemeral_gb,
        extra_specs=extra_specs | {'resources:CUSTOM_PCOW_MB': claimed},
    )
    return flavor.parse(found, metadata)


class ParseTest(oslotest_base.BaseTestCase):
    def test_size(self) -> None:
        self.assertIsNone(parse(root='true').ram_size)
        self.assertIsNone(parse(root='true', ram='false').ram_size)
        for swap in (0, ''):
            found = parse(root='true', ram='true', swap=swap)
            self.assertEqual(RAM_MB * units.MIB, found.ram_size)
            self.assertTrue(found.has_ram)
            self.assertFalse(found.has_carrier)
        self.assertTrue(parse(root='true').has_carrier)

    def test_root_is_what_is_left(self) -> None:
        found = parse(0, claimed='1000', root='true', ram='true', data_mb='64')
        self.assertEqual((1000 - RAM_MB - 64) * units.MIB, found.root_size)

    def test_invalid(self) -> None:
        for values, words in (
            ({'root': 'true', 'ram': 'perhaps'}, 'pcow:ram is true or false'),
            ({'ram': 'true'}, 'pcow:ram without pcow:root'),
            ({'ram': 'true', 'data_mb': '64'}, 'pcow:ram without pcow:root'),
            ({'root': 'true', 'ram': 'true', 'bus': 'virtio'}, 'take a flavor without pcow:ram'),
            ({'root': 'true', 'ram': 'true', 'memory_mb': 255}, 'sizes are multiples of 2 MiB'),
            ({'root': 'true', 'ram': 'true', 'swap': 64}, 'it has ephemeral disks or swap'),
            ({'root': 'true', 'ram': 'true', 'ephemeral_gb': 1}, 'take pcow:data_mb in their'),
            (
                {'root': 'true', 'ram': 'true', 'claimed': '2048'},
                'it takes 2304 MiB of pools and claims 2048: set its property '
                'resources:CUSTOM_PCOW_MB to what its root, RAM and data devices need',
            ),
        ):
            arguments: dict[str, Any] = values
            with self.subTest(values=values):
                error = self.assertRaises(flavor.FlavorInvalid, parse, **arguments)
                self.assertIn(words, str(error))

    def test_an_image_that_has_its_root_as_a_disk(self) -> None:
        error = self.assertRaises(
            flavor.FlavorInvalid, parse, metadata={'image_pcow:bus': 'virtio'}, root='true', ram='1'
        )
        self.assertIn('of the flavor or of the image', str(error))

    def test_live_migration(self) -> None:
        error = self.assertRaises(
            live_migration.LiveMigrationRefused,
            live_migration.check_carried,
            parse(root='true', ram='true'),
        )
        self.assertIn('openstack server migrate', str(error))

    def test_memory_that_is_backed_otherwise(self) -> None:
        guest = vconfig.LibvirtConfigGuest()
        guest.membacking = vconfig.LibvirtConfigGuestMemoryBacking()
        error = self.assertRaises(ram.RamRefused, ram.RamGuest, guest, '/p/x.pcow')
        self.assertIn('file_backed_memory', str(error))


class RamTestCase(base.ServersTestCase):
    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        self.checkpoints = self.useFixture(checkpoints.Checkpoints())
        self.start_compute()

    def make_ram_flavor(self, memory_mb: int = RAM_MB, specs: dict[str, str] | None = None) -> str:
        """As :meth:`make_flavor`, which has ephemeral disks."""
        extra = {
            'pcow:root': 'true',
            'pcow:ram': 'true',
            'resources:CUSTOM_PCOW_MB': '2048',
            'resources:DISK_GB': '0',
        }
        return str(
            self._create_flavor(
                memory_mb=memory_mb, disk=1, ephemeral=0, extra_spec=extra | (specs or {})
            )
        )

    def path(self, server: Any, role: str = 'ram') -> str:
        return str(self.pool.image_path(f'server-{server["id"]}-{role}'))

    def instance(self, server: Any) -> Any:
        return objects.Instance.get_by_uuid(
            context.get_admin_context(),
            server['id'],
            expected_attrs=['flavor', 'system_metadata', 'migration_context'],
        )

    def take(self, server: Any, name: str = checkpoints.WARM) -> None:
        """A checkpoint, as far as the images have it."""
        for item in storage.find(server['id']):
            image.snapshot_create(item.path, name)

    def see_ram(self, server: Any) -> None:
        """In the domain's XML, of which Nova's libvirt for tests drops the metadata."""
        path = self.path(server)
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.virt.domain.Domain.ram', lambda _found: path)
        )

    def damage(self, server: Any) -> None:
        """Its RAM is no pcow image any more."""
        with open(self.path(server), 'r+b') as file:
            file.write(bytes(4 * units.MIB))

    def snapshots(self, server: Any) -> dict[str, list[str]]:
        return {
            item.role: [one.name for one in image.snapshot_list(item.path)]
            for item in storage.find(server['id'])
        }

    def check_kept(self, server: Any) -> None:
        """The checkpoint, with all its parts."""
        kept = [checkpoints.WARM]
        self.assertEqual({'root': kept, 'ram': kept}, self.snapshots(server))

    def act(self, server: Any, action: str, values: Any = None) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(server['id'], {action: values})
        return self._wait_for_server_parameter(server, {'OS-EXT-STS:task_state': None})

    def resize(self, server: Any, flavor_id: str) -> Any:
        """Nova's own part, of disks that this server has not, is left out."""
        with mock.patch.object(
            libvirt_driver.LibvirtDriver,
            'migrate_disk_and_power_off',
            new=mock.Mock(return_value='[]'),
        ):
            return self.act(server, 'resize', {'flavorRef': flavor_id})

    def check_ram(self, server: Any, size_mb: int = RAM_MB) -> None:
        """The domain has an image of this size as its RAM, and nothing that the guest could write
        to beside images.
        """
        xml, path = self.xml(server), self.path(server)
        self.assertEqual(path, libvirt_xml.ram(xml))
        self.assertEqual(size_mb * units.MIB, image.info(path).virtual_size)
        root = libvirt_xml.parse(xml)
        self.assertEqual(
            [('source', {'type': 'file'}), ('access', {'mode': 'shared'})],
            [(item.tag, item.attrib) for item in root.findall('memoryBacking/*')],
        )
        self.assertEqual(size_mb * units.MIB, libvirt_xml.read_size(root.find('memory'), 'RAM'))
        self.assertEqual(1, len(root.findall('cpu/numa/cell')))
        self.assertIsNotNone(root.find('genid'))
        self.assertEqual([], root.findall("devices/disk[@device='disk']"))
        self.assertNotIn(path, [item.path for item in libvirt_xml.nvdimms(xml)])


class ServerTest(RamTestCase):
    def test_create_and_delete(self) -> None:
        server = self.boot(self.make_ram_flavor(specs={'pcow:data_mb': '64'}))
        self.check_ram(server)
        self.assertEqual(
            [self.path(server, role) for role in ('root', 'data0')],
            [item.path for item in libvirt_xml.nvdimms(self.xml(server))],
        )
        self.assertEqual(
            ['root', 'data0', 'ram'], [item.role for item in storage.find(server['id'])]
        )
        self._delete_server(server)
        self.assertEqual([], self.images())

    def test_what_it_claims(self) -> None:
        """All of the image, which has no info block."""
        server = self.boot(self.make_ram_flavor())
        claimed = {item.name: inventory._claimed(self.pool, item) for item in self.pool.listed()}
        self.assertEqual(RAM_MB * units.MIB, claimed[f'server-{server["id"]}-ram'])
        self.assertEqual(units.GIB, claimed[f'server-{server["id"]}-root'])

    def test_spawn_that_fails(self) -> None:
        error = nova_exception.HypervisorUnavailable()
        with mock.patch.object(libvirt_guest.Guest, 'create', new=mock.Mock(side_effect=error)):
            self.boot(self.make_ram_flavor(), 'ERROR')
        self.assertEqual([], self.images())

    def test_pool_of_page_cache(self) -> None:
        with mock.patch('pcow_driver.images.image.probe', return_value='page-cache'):
            self._run_periodics()
            server = self.boot(self.make_ram_flavor(), 'ERROR')
        # There it is made immutable, what a volatile pool does not get.
        for path in Path(self.pool.path).glob('image-*.pcow'):
            self.addCleanup(protection.unprotect, str(path))
        self.assertIn(
            'guest RAM is not possible on class page-cache', self.event_words(server, 'create')
        )
        self.assertEqual([], self.images())

    def test_what_nova_backs_otherwise(self) -> None:
        instance = self.instance(self.boot(self.make_ram_flavor()))
        for key, value in (
            ('hw:numa_nodes', '1'),
            ('hw:mem_page_size', 'large'),
            ('hw:cpu_policy', 'dedicated'),
        ):
            other = instance.flavor.obj_clone()
            other.extra_specs = instance.flavor.extra_specs | {key: value}
            error = self.assertRaises(ram.RamImpossible, ram.check, other, instance.image_meta)
            self.assertIn('take a flavor without pcow:ram', str(error))
            self.assertFalse(error.is_of_host)
        ram.check(instance.flavor, instance.image_meta)
        self.flags(file_backed_memory=1024, group='libvirt')
        refused = self.assertRaises(ram.RamRefused, ram.check, instance.flavor, instance.image_meta)
        self.assertIn('file_backed_memory', str(refused))
        self.assertTrue(refused.is_of_host)

    def test_numa_nodes_are_refused_before_anything_is_made(self) -> None:
        server = self.boot(self.make_ram_flavor(specs={'hw:mem_page_size': '4'}), 'ERROR')
        self.assertIn('its RAM is one image (pcow:ram)', self.fault(server))
        self.assertEqual([], self.images())

    def test_hard_reboot_keeps_checkpoints(self) -> None:
        server = self.boot(self.make_ram_flavor())
        before = image.info(self.path(server)).uuid
        self.take(server)
        self._reboot_server(server, hard=True)
        self.check_ram(server)
        self.assertEqual(before, image.info(self.path(server)).uuid)
        self.check_kept(server)

    def test_image_that_was_deleted(self) -> None:
        """It holds nothing of a guest that is off."""
        server = self.boot(self.make_ram_flavor())
        self._stop_server(server)
        self.pool.delete_image(f'server-{server["id"]}-ram')
        self._start_server(server)
        self.check_ram(server)

    def test_rescue(self) -> None:
        server = self.boot(self.make_ram_flavor())
        self.take(server)
        os.makedirs(libvirt_utils.get_instance_path(self.instance(server)), exist_ok=True)
        self.act(server, 'rescue', {'rescue_image_ref': base.IMAGE})
        self.assertIsNone(libvirt_xml.ram(self.xml(server)))
        self.assertNotIn('memoryBacking', self.xml(server))
        self.assertEqual(
            [self.path(server, 'root')],
            [item.path for item in libvirt_xml.nvdimms(self.xml(server))],
        )
        self.act(server, 'unrescue')
        self.check_kept(server)

    def test_rebuild_begins_anew(self) -> None:
        server = self.boot(self.make_ram_flavor())
        before = image.info(self.path(server)).uuid
        self.take(server)
        self.assertEqual('ACTIVE', self.act(server, 'rebuild', {'imageRef': base.IMAGE})['status'])
        self.check_ram(server)
        self.assertNotEqual(before, image.info(self.path(server)).uuid)
        self.assertEqual({'root': [], 'ram': []}, self.snapshots(server))

    def test_shelve(self) -> None:
        """The RAM is no data device that would be lost."""
        self.flags(shelved_offload_time=0)
        server = self.boot(self.make_ram_flavor())
        with mock.patch('nova_pcow.driver.PcowLibvirtDriver.snapshot'):
            self.assertEqual('SHELVED_OFFLOADED', self.act(server, 'shelve')['status'])
        self.assertEqual([], self.images())

    def test_live_migration_is_refused_on_both_hosts(self) -> None:
        server = self.boot(self.make_ram_flavor())
        admin, instance = context.get_admin_context(), self.instance(server)
        (compute,) = self.computes.values()
        for check in (
            compute.driver.check_can_live_migrate_source,
            compute.driver.check_can_live_migrate_destination,
        ):
            error = self.assertRaises(
                nova_exception.MigrationPreCheckError, check, admin, instance, None
            )
            self.assertIn('the RAM of the server is an image (pcow:ram)', str(error))

    def test_evacuation(self) -> None:
        """The checkpoints stay, too: their images are in the pool that both hosts see."""
        server = self.boot(self.make_ram_flavor(), host='compute1')
        self.take(server)
        self.start_compute(hostname='compute2')
        self.computes['compute1'].stop()
        self.api.put_service_force_down(self.computes['compute1'].service_ref.uuid, True)
        self.act(server, 'evacuate', {})
        self._wait_for_migration_status(server, ['done'])
        self.check_ram(server)
        self.check_kept(server)

    def test_host_that_comes_back(self) -> None:
        """The server was evacuated, and is suspended on the other host, with images that both see:
        it resumes there.
        """
        server = self.boot(self.make_ram_flavor(), host='compute1')
        self.start_compute(hostname='compute2')
        self.computes['compute1'].stop()
        self.api.put_service_force_down(self.computes['compute1'].service_ref.uuid, True)
        self.act(server, 'evacuate', {})
        self._wait_for_migration_status(server, ['done'])
        self.take(server, reserved.SUSPENDED)
        self.see_ram(server)
        self.computes['compute1'].driver.destroy(
            context.get_admin_context(), self.instance(server), [], None, destroy_disks=False
        )
        self.assertEqual(
            {'root': [reserved.SUSPENDED], 'ram': [reserved.SUSPENDED]}, self.snapshots(server)
        )

    def test_damaged_image(self) -> None:
        """What the server does not need of it keeps nobody; its start says what to do."""
        server = self.boot(self.make_ram_flavor())
        self._stop_server(server)
        self.see_ram(server)
        self.damage(server)
        driver, instance = self.computes['compute1'].driver, self.instance(server)
        driver._forget_suspended(instance)
        storage.check_not_sent(server['id'])
        driver.destroy(context.get_admin_context(), instance, [], None, destroy_disks=False)
        error = self.assertRaises(ram.RamRefused, ram.provide, server['id'], RAM_MB * units.MIB)
        self.assertIn(
            f'image delete --force {self.pool.name}/server-{server["id"]}-ram', str(error)
        )
        self.pool.delete_image(f'server-{server["id"]}-ram', force=True)
        ram.provide(server['id'], RAM_MB * units.MIB)

    def test_resize_to_another_cell(self) -> None:
        """It takes an image of the root, and no checkpoint."""
        server = self.boot(self.make_ram_flavor())
        instance = self.instance(server)
        instance.task_state = task_states.RESIZE_MIGRATING
        move = mock.Mock(cross_cell_move=True)
        with mock.patch.object(objects.Migration, 'get_by_instance_and_status', return_value=move):
            leaving.check(instance)
            self.take(server)
            error = self.assertRaises(ram.RamRefused, leaving.check, instance)
        self.assertIn('the server has checkpoints (warm)', str(error))

    def test_extra_specs(self) -> None:
        for value in ('perhaps', ''):
            self.assertRaises(
                client.OpenStackApiException, self.make_ram_flavor, specs={'pcow:ram': value}
            )


class ResizeTest(RamTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.server = self.boot(self.make_ram_flavor())

    def test_larger_and_back(self) -> None:
        """The RAM is another image each time. Checkpoints of the time since go with it."""
        found = self.resize(self.server, self.make_ram_flavor(2 * RAM_MB))
        self.assertEqual('VERIFY_RESIZE', found['status'])
        self.check_ram(self.server, 2 * RAM_MB)
        self.take(self.server)
        self.act(self.server, 'revertResize')
        self.check_ram(self.server)
        self.assertEqual({'root': [], 'ram': []}, self.snapshots(self.server))

    def test_smaller_and_confirmed(self) -> None:
        self.resize(self.server, self.make_ram_flavor(RAM_MB // 2))
        self.act(self.server, 'confirmResize')
        self.check_ram(self.server, RAM_MB // 2)

    def test_to_ram_of_the_host_and_back(self) -> None:
        without = self._create_flavor(
            memory_mb=RAM_MB,
            disk=1,
            ephemeral=0,
            extra_spec={'pcow:root': 'true', 'resources:CUSTOM_PCOW_MB': '2048'},
        )
        self.resize(self.server, str(without))
        self.assertIsNone(libvirt_xml.ram(self.xml(self.server)))
        self.assertEqual(['root'], [item.role for item in storage.find(self.server['id'])])
        (carrier,) = libvirt_xml.parse(self.xml(self.server)).findall('devices/disk/source')
        self.assertEqual('disk', os.path.basename(carrier.get('file', '')))
        self.act(self.server, 'revertResize')
        self.check_ram(self.server)

    def test_checkpoints(self) -> None:
        """Nothing goes that somebody has taken: found out while the server runs."""
        self.take(self.server)
        self.assertEqual(
            'ERROR', self.resize(self.server, self.make_ram_flavor(2 * RAM_MB))['status']
        )  # of the conductor, which hears it too
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertIn('the server has checkpoints (warm)', self.event_words(self.server, 'resize'))
        self.check_kept(self.server)

    def test_checkpoint_that_is_taken_meanwhile(self) -> None:
        driver, instance = self.computes['compute1'].driver, self.instance(self.server)
        self.take(self.server)
        self.assertRaises(ram.RamRefused, driver._mark_or_send, instance, None, '[]')
        self.check_kept(self.server)

    def test_checkpoints_by_names_of_the_drivers(self) -> None:
        """Nobody has refused them."""
        name = f'{reserved.PREFIX}7.1-upgraded'
        self.checkpoints.names.add(name)
        self.take(self.server, name)
        self.take(self.server, reserved.SUSPENDED)
        error = self.assertRaises(ram.RamRefused, ram.give_up, self.server['id'])
        self.assertIn(f'({name})', str(error))

    def test_checkpoint_that_was_cut_off(self) -> None:
        """The next QEMU finishes it: it is one already."""
        self._stop_server(self.server)
        self.take(self.server)
        for name in (TAKING, LOADING):
            self.checkpoints.names.add(name)
            self.rename(checkpoints.WARM, name)
            error = self.assertRaises(ram.RamRefused, ram.give_up, self.server['id'])
            self.assertIn('start it, and stop it again', str(error))
            self.rename(name, checkpoints.WARM)

    def test_checkpoint_that_is_half_deleted(self) -> None:
        """It is none any more, and leaves nothing."""
        self._stop_server(self.server)
        for deleted in ('ram', 'root'):
            with self.subTest(deleted):
                self.take(self.server)
                self.checkpoints.names.add(DELETING)
                self.rename(checkpoints.WARM, DELETING, deleted)
                if deleted == 'ram':
                    ram.give_up(self.server['id'])
                else:
                    ram.drop(self.server['id'])
                self.assertEqual({'root': []}, self.snapshots(self.server))
                ram.provide(self.server['id'], RAM_MB * units.MIB)

    def test_checkpoint_that_was_cut_off_goes_with_the_ram(self) -> None:
        self._stop_server(self.server)
        for name in (TAKING, LOADING):
            self.take(self.server)
            self.checkpoints.names.add(name)
            self.rename(checkpoints.WARM, name)
            ram.drop(self.server['id'])
            self.assertEqual({'root': []}, self.snapshots(self.server))
            ram.provide(self.server['id'], RAM_MB * units.MIB)

    def test_damaged_image(self) -> None:
        """It has no mark of a resize, so it keeps none from its end."""
        self._stop_server(self.server)
        old = flavor.of(self.instance(self.server))
        cold_migration.mark(self.server['id'], 7)
        self.damage(self.server)
        cold_migration.check_evacuation(self.server['id'], old)
        cold_migration.confirm(self.server['id'], None, is_here=True)
        self.assertEqual([], image.snapshot_list(self.path(self.server, 'root')))
        cold_migration.mark(self.server['id'], 8)
        with self.assertLogs('nova_pcow.servers.ram', 'WARNING') as logs:
            cold_migration.revert(self.server['id'], old, 8)
        self.assertIn('What checkpoints of the server have', logs.output[0])
        self.assertEqual({'root': []}, self.snapshots(self.server))

    def test_rescue_while_it_is_reverted(self) -> None:
        """What is mended would be gone with the next start."""
        self.take(self.server)
        self._stop_server(self.server)
        self.checkpoints.names.add(LOADING)
        self.rename(checkpoints.WARM, LOADING)
        instance = self.instance(self.server)
        instance.task_state = task_states.RESCUING
        error = self.assertRaises(ram.RamRefused, leaving.check, instance)
        self.assertIn('was being reverted', str(error))
        self.rename(LOADING, checkpoints.WARM)
        leaving.check(instance)

    def rename(self, name: str, new: str, role: str = 'ram') -> None:
        """As QEMU does."""
        program = tool.find('pcow_img')
        tool.run(program, 'snapshot', '--rename', name, new, self.path(self.server, role))

    def test_revert_of_one_that_did_not_begin(self) -> None:
        """nova-compute ended before it looked: nothing goes."""
        self.take(self.server)
        self._stop_server(self.server)
        driver, migration = self.computes['compute1'].driver, mock.Mock(id=77)
        with mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_revert_migration'):
            driver.finish_revert_migration(
                context.get_admin_context(), self.instance(self.server), [], migration
            )
        self.check_kept(self.server)

    def test_class_that_ram_cannot_be_on(self) -> None:
        """Found out while the server runs, and before anything arrives."""
        instance = self.instance(self.server)
        wanted = flavor.of(instance)
        with mock.patch('pcow_driver.images.image.probe', return_value='page-cache'):
            self.assertRaises(
                exception.PoolInvalid, cold_migration.check_stays, self.server['id'], wanted
            )
        cold_migration.check_stays(self.server['id'], wanted)

    def test_pool_of_another_host(self) -> None:
        """Placement has chosen it, and knows its class."""
        admin, uuid = context.get_admin_context(), self.server['id']
        self.assertTrue(resize_claims.is_on_class(admin, uuid, self.pool.persistence()))
        ram.check_new_host(admin, uuid)
        with mock.patch('pcow_driver.images.image.probe', return_value='page-cache'):
            self.computes['compute1'].manager.update_available_resource(admin)
        error = self.assertRaises(ram.RamRefused, ram.check_new_host, admin, uuid)
        self.assertIn('CUSTOM_PCOW_PAGE_CACHE=forbidden', str(error))

    def test_what_is_sent_to_another_host(self) -> None:
        """Not the RAM, of which nothing stays, either."""
        driver, instance = self.computes['compute1'].driver, self.instance(self.server)
        self._stop_server(self.server)
        with mock.patch.object(libvirt_utils, 'copy_image') as copy:
            driver._mark_or_send(instance, '192.0.2.1', '[]')
        self.assertEqual(
            [self.path(self.server, 'root')], [call.args[0] for call in copy.call_args_list]
        )
        self.assertEqual({'root': [reserved.SENT]}, self.snapshots(self.server))

    def test_pool_without_room(self) -> None:
        instance = self.instance(self.server)
        instance.flavor.memory_mb = 2 * RAM_MB
        self.assertEqual(RAM_MB * units.MIB, ram.growth(self.server['id'], flavor.of(instance)))
