# SPDX-License-Identifier: Apache-2.0
"""Servers whose root is an ordinary disk, with pcow:bus=virtio."""

from __future__ import annotations

import contextlib
import os
import types
from typing import Any
from unittest import mock

from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver
from nova.virt.libvirt import utils as libvirt_utils
from oslotest import base as oslotest_base

from nova_pcow.common import flavor
from nova_pcow.migration import live_migration
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_xml
from tests.unit.nova_pcow import base


def parse(metadata: dict[str, str] | None = None, **specs: str) -> flavor.PcowFlavor:
    extra_specs = {f'pcow:{name}': value for name, value in specs.items()}
    extra_specs['resources:CUSTOM_PCOW_MB'] = '4096'
    found = types.SimpleNamespace(name='f', root_gb=2, extra_specs=extra_specs)
    return flavor.parse(found, metadata)


class ParseTest(oslotest_base.BaseTestCase):
    def test_memory_is_the_default(self) -> None:
        for found in (parse(root='true'), parse(root='true', bus='pmem')):
            self.assertEqual(
                (True, False, True), (found.root_is_memory, found.root_is_disk, found.has_memory)
            )

    def test_the_image_wins(self) -> None:
        for of_flavor, of_image, is_disk in (
            ('pmem', 'virtio', True),
            ('virtio', 'pmem', False),
            ('virtio', None, True),
        ):
            metadata = {} if of_image is None else {'image_pcow:bus': of_image}
            found = parse(metadata, root='true', bus=of_flavor)
            self.assertEqual(is_disk, found.root_is_disk)
            self.assertEqual(not is_disk, found.has_memory)

    def test_an_image_says_nothing_of_a_server_without_root(self) -> None:
        self.assertTrue(parse({'image_pcow:bus': 'virtio'}, data_mb='64').has_memory)
        self.assertFalse(parse({'image_pcow:bus': 'nonsense'}).uses_pcow)

    def test_invalid(self) -> None:
        for specs, words in (
            ({'root': 'true', 'bus': 'scsi'}, 'pcow:bus is one of pmem, virtio'),
            ({'bus': 'virtio'}, 'pcow:bus without pcow:root'),
            ({'root': 'true', 'bus': 'virtio', 'data_mb': '64'}, 'take a flavor without them'),
        ):
            error = self.assertRaises(flavor.FlavorInvalid, parse, None, **specs)
            self.assertIn(words, str(error))
        for value in ('', 'VIRTIO', '../x'):
            refused = self.assertRaises(
                flavor.ImagePropertyInvalid, parse, {'image_pcow:bus': value}, root='true'
            )
            self.assertIn('openstack image unset --property pcow:bus', str(refused))

    def test_resize_from_one_to_the_other(self) -> None:
        flavor.check_resize(parse(root='true'), parse(root='true', bus='virtio'))
        flavor.check_resize(parse(root='true', bus='virtio'), parse(root='true'))

    def test_live_migration(self) -> None:
        live_migration.check_carried(parse(root='true'))
        error = self.assertRaises(
            live_migration.LiveMigrationRefused,
            live_migration.check_carried,
            parse(root='true', bus='virtio'),
        )
        self.assertIn('openstack server migrate', str(error))


class ServerTest(base.ServersTestCase):
    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        self.start_compute()
        self.set_image(kernel_id='nokernel', ramdisk_id='nokernel')

    def root(self, server: Any) -> str:
        return str(self.pool.existing_path(f'server-{server["id"]}-root'))

    def instance(self, server: Any) -> Any:
        return objects.Instance.get_by_uuid(context.get_admin_context(), server['id'])

    def check_is_disk(self, server: Any, target: str = 'vda') -> None:
        xml = self.xml(server)
        self.assertEqual([], libvirt_xml.nvdimms(xml))
        (found,) = disk_xml.disks(xml)
        self.assertEqual(
            (self.root(server), image.info(self.root(server)).virtual_size, target),
            (found.path, found.size, found.target),
        )
        root = libvirt_xml.parse(xml)
        (disk,) = [
            item
            for item in root.findall("devices/disk[@type='network']")
            if item.findall('target')[0].get('dev') == target
        ]
        host, driver = disk.findall("source[@protocol='nbd']/host")[0], disk.findall('driver')[0]
        self.assertEqual(disk_xml.socket_path(server['id'], target), host.get('socket'))
        self.assertEqual(
            {'name': 'qemu', 'type': 'raw', 'cache': 'writeback', 'discard': 'unmap'}
            | disk_xml.ERROR_POLICY,
            driver.attrib,
        )
        for name in ('os/kernel', 'maxMemory', 'devices/memory'):
            self.assertIsNone(root.find(name), name)
        self.assertIn(f'<emulator>{self.directory}/qemu</emulator>', xml)
        self.assertNotIn(self.carrier(server) + '"', xml)

    def check_is_memory(self, server: Any) -> None:
        (nvdimm,) = libvirt_xml.nvdimms(self.xml(server))
        self.assertEqual(self.root(server), nvdimm.path)
        self.assertEqual([], disk_xml.disks(self.xml(server)))
        self.assertIn(f'<source file="{self.carrier(server)}"/>', self.xml(server))

    def carrier(self, server: Any) -> str:
        return os.path.join(libvirt_utils.get_instance_path(self.instance(server)), 'disk')

    def test_by_the_flavor(self) -> None:
        self.shim.joinpath('kernel').unlink()  # firmware needs none
        server = self.boot(self.make_flavor(root='true', bus='virtio'))
        self.check_is_disk(server)
        self.assertEqual(units.GIB, device.window(self.root(server)).size)
        before = image.info(self.root(server)).uuid
        self._reboot_server(server, hard=True)
        self.check_is_disk(server)
        self.assertEqual(before, image.info(self.root(server)).uuid)
        self._delete_server(server)
        self.assertEqual([], self.images())

    def test_by_the_image_with_its_firmware(self) -> None:
        self.set_image(**{'pcow:bus': 'virtio', 'hw_firmware_type': 'uefi'})
        server = self.boot(self.make_flavor(root='true', bus='pmem'))
        self.check_is_disk(server)
        self.assertIn('<loader', self.xml(server))

    def test_property_that_is_none(self) -> None:
        self.set_image(**{'pcow:bus': 'scsi'})
        server = self.boot(self.make_flavor(root='true'), 'ERROR')
        self.assertIn('pcow:bus=scsi, which is none of pmem, virtio', self.fault(server))
        self.assertEqual([], self.images())

    def test_data_devices(self) -> None:
        self.set_image(**{'pcow:bus': 'virtio'})
        server = self.boot(self.make_flavor(1088, root='true', data_mb='64'), 'ERROR')
        self.assertIn('take a flavor without them', self.fault(server))
        self.assertEqual([], self.images())

    def resize(self, server: Any, flavor_id: str) -> None:
        """Nova's own part, of disks that this server has not, is left out."""
        with (
            contextlib.suppress(client.OpenStackApiException),
            mock.patch.object(
                libvirt_driver.LibvirtDriver,
                'migrate_disk_and_power_off',
                new=mock.Mock(return_value='[]'),
            ),
        ):
            self.api.post_server_action(server['id'], {'resize': {'flavorRef': flavor_id}})
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:task_state': None, 'status': 'VERIFY_RESIZE'}
        )

    def test_resize_to_a_disk_and_back(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        self.check_is_memory(server)
        before = image.info(self.root(server)).uuid
        self.resize(server, self.make_flavor(root='true', bus='virtio'))
        self.check_is_disk(server)
        self.api.post_server_action(server['id'], {'revertResize': None})
        self._wait_for_state_change(server, 'ACTIVE')
        self.check_is_memory(server)
        self.assertEqual(before, image.info(self.root(server)).uuid)

    def test_live_migration_is_refused_on_both_hosts(self) -> None:
        server = self.boot(self.make_flavor(root='true', bus='virtio'))
        admin, instance = context.get_admin_context(), self.instance(server)
        (compute,) = self.computes.values()
        driver = compute.driver
        for check in (
            driver.check_can_live_migrate_source,
            driver.check_can_live_migrate_destination,
        ):
            error = self.assertRaises(
                nova_exception.MigrationPreCheckError, check, admin, instance, None
            )
            self.assertIn('openstack server migrate', str(error))

    def test_resize_to_memory(self) -> None:
        server = self.boot(self.make_flavor(root='true', bus='virtio'))
        self.resize(server, self.make_flavor(root='true'))
        self.check_is_memory(server)

    def test_rescue(self) -> None:
        server = self.boot(self.make_flavor(root='true', bus='virtio'))
        os.makedirs(libvirt_utils.get_instance_path(self.instance(server)), exist_ok=True)
        self.api.post_server_action(server['id'], {'rescue': {'rescue_image_ref': base.IMAGE}})
        self._wait_for_state_change(server, 'RESCUE')
        self.check_is_disk(server, 'vdb')
        self.api.post_server_action(server['id'], {'unrescue': None})
        self._wait_for_state_change(server, 'ACTIVE')

    def test_rebuild_with_an_image_that_says_otherwise(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        self.set_image(**{'pcow:bus': 'virtio'})
        self.api.post_server_action(server['id'], {'rebuild': {'imageRef': base.IMAGE}})
        self._wait_for_state_change(server, 'ACTIVE')
        self.check_is_disk(server)

    def test_volumes_are_disks_as_well(self) -> None:
        for bus, expected in (('virtio', False), ('pmem', True)):
            server = self.boot(self.make_flavor(root='true', bus=bus))
            self.assertEqual(expected, flavor.has_memory(self.instance(server)))
