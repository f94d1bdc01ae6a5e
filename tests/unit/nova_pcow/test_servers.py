# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
from pathlib import Path
import subprocess
from typing import Any
from unittest import mock

from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.tests.fixtures.libvirt import libvirtError
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver
from nova.virt.libvirt import guest
from oslo_utils import uuidutils

from nova_pcow import conf as nova_conf
from nova_pcow.placement import inventory
from pcow_driver.common import conf
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import marker
from pcow_driver.pools import registry
from pcow_driver.virt import boot
from pcow_driver.virt import libvirt_xml
from tests.unit.nova_pcow import base


class CreateTest(base.ServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.start_compute()

    def root(self, server: Any) -> str:
        return str(self.pool.existing_path(f'server-{server["id"]}-root'))

    def test_root(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        self.assertEqual(units.GIB, device.window(self.root(server)).size)
        self.assertEqual(
            f'image-{base.IMAGE}-0123456789abcdef.pcow', image.info(self.root(server)).base_filename
        )
        (nvdimm,) = libvirt_xml.nvdimms(self.xml(server))
        self.assertEqual(
            (self.root(server), 'ua-pcow-root', True), (nvdimm.path, nvdimm.alias, nvdimm.shared)
        )
        xml = self.xml(server)
        self.assertRegex(
            xml, '>root=/dev/pmem0 rootflags=dax=always rw console=[^<]* swiotlb=noforce</cmdline>'
        )
        self.assertIn(f'<emulator>{self.directory}/qemu</emulator>', xml)
        self.assertIn('slots="9"', xml)

    def test_root_whose_image_brings_no_kernel(self) -> None:
        """Also if it was made for EFI: the boot shim reads what that would."""
        self.set_image(kernel_id='nokernel', ramdisk_id='nokernel', hw_firmware_type='uefi')
        xml = self.xml(self.boot(self.make_flavor(root='true')))
        for name in ('kernel', 'initrd'):
            self.assertIn(f'<{name}>{self.shim}/{name}</{name}>', xml)
        self.assertIn(f'<cmdline>{boot.SHIM_CMDLINE} -- swiotlb=noforce</cmdline>', xml)
        for name in ('<boot ', '<loader', '<nvram', 'firmware='):
            self.assertNotIn(name, xml)

    def test_device_that_does_not_reach_all_memory(self) -> None:
        """Its data are copied below 4 GiB, in what Linux has set aside."""
        self.set_image(hw_disk_bus='ide')
        self.assertNotIn('swiotlb', self.xml(self.boot(self.make_flavor(root='true'))))

    def test_data_device_of_a_server_that_boots_by_firmware(self) -> None:
        self.set_image(kernel_id='nokernel', ramdisk_id='nokernel')
        xml = self.xml(self.boot(self.make_flavor(data_mb='16')))
        self.assertNotIn(str(self.shim), xml)
        self.assertIn('<boot ', xml)

    def test_allocation(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        allocations = self.placement.get(f'/allocations/{server["id"]}').body['allocations']
        provider = self.provider('compute1_pcow_fast')
        self.assertEqual({'CUSTOM_PCOW_MB': 1024}, allocations[provider['uuid']]['resources'])

    def test_template_is_made_once(self) -> None:
        flavor = self.make_flavor(root='true')
        servers = [
            self._build_server(image_uuid=base.IMAGE, flavor_id=flavor, networks='none')
            for _number in range(4)
        ]
        for server in [self.api.post_server({'server': server}) for server in servers]:
            self._wait_for_state_change(server, 'ACTIVE')
        self.assertEqual([base.IMAGE], self.fetched)
        self.assertEqual(4, len(self.images()))

    def test_data_devices(self) -> None:
        server = self.boot(
            self.make_flavor(1200, root='true', data_mb='64,32', data_format='ext4,none')
        )
        devices = libvirt_xml.nvdimms(self.xml(server))
        self.assertEqual(
            ['ua-pcow-root', 'ua-pcow-data0', 'ua-pcow-data1'], [item.alias for item in devices]
        )
        self.assertEqual(
            [64 * units.MIB, 32 * units.MIB],
            [device.window(item.path).size for item in devices[1:]],
        )
        self.assertEqual('format-ext4-64-0.pcow', image.info(devices[1].path).base_filename)

    def test_delete(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        self._delete_server(server)
        self.assertEqual([], self.images())
        self.assertEqual(1, len(self.pool.templates()))

    def test_hard_reboot_keeps_the_root(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        before = image.info(self.root(server)).uuid
        server = self._reboot_server(server, hard=True)
        self.assertEqual('ACTIVE', server['status'])
        self.assertEqual(before, image.info(self.root(server)).uuid)

    def test_start_forgets_the_resize_that_was_confirmed_elsewhere(self) -> None:
        server = self.boot(self.make_flavor(root='true'))
        self._stop_server(server)
        image.snapshot_create(self.root(server), 'nova-resize-7')
        image.snapshot_create(self.root(server), 'before-upgrade')
        self._start_server(server)
        self.assertEqual(
            ['before-upgrade'], [one.name for one in image.snapshot_list(self.root(server))]
        )

    def test_root_that_was_copied_to_another_host(self) -> None:
        """Where the server may have gone on: neither a start nor a confirmation that fails leads to
        a server with the old one.
        """
        server = self.boot(self.make_flavor(root='true'))
        root = self.root(server)
        self._stop_server(server)
        image.snapshot_create(root, 'nova-sent')
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(server['id'], {'os-start': None})
        found = self._wait_for_server_parameter(server, {'OS-EXT-STS:task_state': None})
        self.assertNotEqual('ACTIVE', found['status'])
        image.snapshot_create(root, 's')
        device.create_on(self.pool, 'fork', Path(root).stem, base_snapshot='s')
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), server['id'])
        instance.old_flavor = instance.new_flavor = instance.flavor
        instance.host = 'another'
        driver = self.computes['compute1'].driver
        error = self.assertRaises(
            nova_exception.InternalError,
            driver._cleanup_resize,
            context.get_admin_context(),
            instance,
            [],
        )
        self.assertIn(f'{root} was copied to the new host', str(error))
        self.assertRaises(nova_exception.InstanceNotFound, driver._host.get_guest, instance)

    def test_pool_that_has_lost_its_class(self) -> None:
        """A server that was promised persistent memory is not started without."""
        conf.CONF.set_override('protect_templates', False, 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'protect_templates', 'pcow')
        required = str(
            self._create_flavor(
                disk=1,
                extra_spec={
                    'pcow:root': 'true',
                    'resources:CUSTOM_PCOW_MB': '1024',
                    'trait:CUSTOM_PCOW_PMEM': 'required',
                },
            )
        )
        with mock.patch('pcow_driver.images.image.probe', return_value='pmem'):
            self._run_periodics()
            server = self.boot(required)
        driver, admin = self.computes['compute1'].driver, context.get_admin_context()
        instance = objects.Instance.get_by_uuid(
            admin, server['id'], expected_attrs=['flavor', 'system_metadata']
        )
        with mock.patch.object(libvirt_driver.LibvirtDriver, '_hard_reboot') as hard_reboot:
            error = self.assertRaises(
                nova_exception.InternalError, driver._hard_reboot, admin, instance, [], []
            )
        self.assertIn(
            'the pool fast has not CUSTOM_PCOW_PMEM now, which the flavor of the server requires',
            str(error),
        )
        hard_reboot.assert_not_called()

    def test_delete_while_the_pool_is_not_there(self) -> None:
        """The server goes; what it had in the pool goes when the pool is back."""
        server, other = (self.boot(self.make_flavor(root='true')) for _number in range(2))
        away = Path(f'{self.pool.path}.away')
        os.rename(self.pool.path, away)
        self._delete_server(server)
        os.rename(away, self.pool.path)
        self.assertEqual(2, len(self.images()))
        self.flags(instance_delete_interval=1)
        self.computes['compute1'].manager._run_pending_deletes(context.get_admin_context())
        self.assertEqual([f'server-{other["id"]}-root.pcow'], self.images())

    def test_ordinary_flavor(self) -> None:
        server = self.boot(self._create_flavor())
        self.assertEqual([], libvirt_xml.nvdimms(self.xml(server)))
        self.assertNotIn('emulator', self.xml(server))
        self.assertEqual([], self.images())

    def test_server_that_has_a_misspelt_extra_spec(self) -> None:
        """Since the API was not asked to check: it goes on with what it has."""
        with mock.patch('nova_pcow.common.flavor.check_known'):
            server = self.boot(self.make_misspelt_flavor())
        self.assertEqual('ACTIVE', self._rebuild_server(server, base.IMAGE)['status'])


class RefusedTest(base.ServersTestCase):
    """Servers that cannot be: the fault says why, and nothing of them stays."""

    def setUp(self) -> None:
        super().setUp()
        self.start_compute()

    def check(self, flavor: str, words: str, *, is_of_host: bool = False) -> None:
        """
        :param is_of_host: another host might have done it, and there is none
        """
        server = self.boot(flavor, 'ERROR')
        if is_of_host:
            self.assertIn('Exhausted all hosts', self.fault(server))
            self.assertIn(words, self.event_words(server, 'create'))
        else:
            self.assertIn(words, self.fault(server))
        self.assertEqual([], self.images())
        self.assertEqual([], [item for item in self.pool.entries() if item.endswith('.part')])

    def test_no_boot_shim(self) -> None:
        """Another host may have one."""
        self.set_image(kernel_id='nokernel', ramdisk_id='nokernel')
        (self.shim / 'initrd').unlink()
        self.check(
            self.make_flavor(root='true'),
            f'the boot shim {self.shim} was not found',
            is_of_host=True,
        )

    def test_secure_boot(self) -> None:
        self.set_image(
            kernel_id='nokernel',
            ramdisk_id='nokernel',
            hw_firmware_type='uefi',
            os_secure_boot='required',
        )
        self.check(
            self.make_flavor(root='true'),
            'require secure boot, which a guest on persistent memory has not',
        )

    def test_format(self) -> None:
        self.set_image(disk_format='vmdk')
        self.check(
            self.make_flavor(root='true'), 'its format is vmdk; a guest on pcow takes qcow2 or raw'
        )
        self.assertEqual([], self.fetched)

    def test_hostile_image(self) -> None:
        self.source.write_bytes(b'QFI\xfb' + b'\xff' * 70000)
        self.check(self.make_flavor(root='true'), 'cannot become a template')
        self.assertEqual([], self.pool.templates())

    def test_format_that_is_not_what_it_says(self) -> None:
        self.set_image(disk_format='raw')
        self.check(self.make_flavor(root='true'), 'it was given as raw and holds qcow2')

    def test_image_larger_than_the_root(self) -> None:
        tool.run(tool.find('qemu_img'), 'resize', '-f', 'qcow2', str(self.source), '2G')
        self.check(self.make_flavor(root='true'), 'has 2 GiB and the root only 1 GiB')
        self.assertEqual([], self.pool.templates())  # it was looked at before it was converted

    def test_claim_too_small(self) -> None:
        self.check(
            self.make_flavor(root='true', data_mb='64'), 'takes 1088 MiB of pools and claims 1024'
        )

    def test_emulator_without_backend(self) -> None:
        (self.directory / 'qemu').write_text('#!/bin/sh\necho "  mem-path=<string>"\n')
        self.check(self.make_flavor(root='true'), 'has no pcow backend', is_of_host=True)

    def test_pool_that_is_provisioned_in_full(self) -> None:
        """More than placement knows of was provisioned meanwhile."""
        registry.PoolRegistry().set('fast', overcommit=0.0001)
        self.check(
            self.make_flavor(root='true'),
            'more cannot be provisioned in the pool fast',
            is_of_host=True,
        )

    def test_libvirt_fails(self) -> None:
        """When the images are made already."""
        for error, words in (
            (nova_exception.HypervisorUnavailable(), 'Connection to the hypervisor is broken'),
            (libvirtError('the monitor is gone'), 'the monitor is gone'),
        ):
            with mock.patch.object(guest.Guest, 'create', new=mock.Mock(side_effect=error)):
                self.check(self.make_flavor(root='true'), words, is_of_host=True)

    def test_extra_specs(self) -> None:
        for specs in ({'pcow:root': 'perhaps'}, {'pcow:data_mb': '7'}, {'pcow:unknown': '1'}):
            self.assertRaises(client.OpenStackApiException, self._create_flavor, extra_spec=specs)

    def test_misspelt_extra_spec(self) -> None:
        """That the API was not asked to check: not an ordinary disk without a word."""
        self.check(
            self.make_misspelt_flavor(),
            'has the property pcow:rooot, which does not exist (pcow:root is near)',
        )


class InventoryTest(base.ServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        # a file system of its own: what others hold in it is reserved
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=4g', 'none', self.pool.path], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', self.pool.path], check=True)
        marker.write(self.pool.path, self.pool.marker)

    def start(self) -> None:
        self.start_compute()
        self.node = 'compute1'

    def inventory(self, pool: str) -> Any:
        provider = self.provider(f'compute1_pcow_{pool}')
        return self.placement.get(f'/resource_providers/{provider["uuid"]}/inventories').body[
            'inventories'
        ]['CUSTOM_PCOW_MB']

    def traits(self, pool: str) -> set[str]:
        provider = self.provider(f'compute1_pcow_{pool}')
        return set(
            self.placement.get(
                f'/resource_providers/{provider["uuid"]}/traits', version='1.6'
            ).body['traits']
        )

    def test_pool(self) -> None:
        registry.PoolRegistry().set('fast', overcommit=3, reserve=10)
        self.start()
        total = self.pool.capacity().total // units.MIB
        found = self.inventory('fast')
        self.assertEqual((total, 3.0), (found['total'], found['allocation_ratio']))
        self.assertEqual(-(-total // 10) + total // 200, found['reserved'])
        self.assertEqual({'CUSTOM_PCOW', 'CUSTOM_PCOW_VOLATILE'}, self.traits('fast'))

    def test_draining_pool_takes_nothing(self) -> None:
        self.start()
        registry.PoolRegistry().set('fast', draining=True)
        self._run_periodics()
        found = self.inventory('fast')
        self.assertEqual(found['total'], found['reserved'])
        server = self.boot(self.make_flavor(root='true'), 'ERROR')
        self.assertIn('No valid host', self.fault(server))

    def test_host_without_emulator_takes_nothing(self) -> None:
        """It would refuse what is scheduled to it; the claims of its servers stay."""
        self.start()
        server = self.boot(self.make_flavor(root='true'))
        before, working = self.claims(server), (self.directory / 'qemu').read_text()
        (self.directory / 'qemu').write_text('#!/bin/sh\necho "  mem-path=<string>"\n')
        with self.assertLogs('nova_pcow.driver', 'WARNING') as logs:
            self._run_periodics()
            self._run_periodics()
        self.assertEqual(1, len([line for line in logs.output if 'has no pcow backend' in line]))
        found = self.inventory('fast')
        self.assertEqual((found['total'], before), (found['reserved'], self.claims(server)))
        self.assertIn(
            'No valid host', self.fault(self.boot(self.make_flavor(root='true'), 'ERROR'))
        )
        (self.directory / 'qemu').write_text(working)
        self._run_periodics()
        self.assertLess(self.inventory('fast')['reserved'], 64)  # by the template

    def test_images_of_others_are_reserved(self) -> None:
        registry.PoolRegistry().set('fast', overcommit=2)
        device.create(self.pool, 'volume-1', 512 * units.MIB)
        self.start()
        # 512 MiB, an info block of 2 MiB and metadata of 6 MiB; half a percent more is told
        self.assertEqual(260 + 1 + 20, self.inventory('fast')['reserved'])

    def test_claims_of_servers_are_not_reserved_twice(self) -> None:
        """But what their devices take beside the claim is: 2 MiB for the info block and 6 MiB of
        metadata; and the template.
        """
        registry.PoolRegistry().set('fast', overcommit=0.5)
        self.start()
        self.boot(self.make_flavor(1088, root='true', data_mb='64'))
        self._run_periodics()
        exact = -(-(32 * units.MIB + self.pool.account().fixed) // units.MIB)
        told = self.inventory('fast')['reserved']
        self.assertTrue(exact <= told <= exact + 40, (exact, told))

    def test_claims_of_others_while_placement_is_told(self) -> None:
        """Somebody claims something whenever nova-compute has looked at a pool, which has some
        small files more by then: Nova gives up a resize after four such conflicts.
        """
        self.flags(allow_resize_to_same_host=True)
        self.start()
        server = self.boot(self.make_flavor(root='true'))
        look, looks = inventory.update_provider_tree, 0

        def beside_others(tree: Any, nodename: str, **options: Any) -> None:
            nonlocal looks
            looks += 1
            Path(self.pool.path, f'note-{looks}').write_bytes(bytes(units.MIB))
            look(tree, nodename, **options)
            self.claim_beside()

        with (
            mock.patch.object(inventory, 'update_provider_tree', beside_others),
            mock.patch.object(
                libvirt_driver.LibvirtDriver, 'migrate_disk_and_power_off', return_value='[]'
            ),
            mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_migration'),
            contextlib.suppress(client.OpenStackApiException),  # as above
        ):
            self.api.post_server_action(
                server['id'], {'resize': {'flavorRef': self.make_flavor(2048, root='true', disk=2)}}
            )
        found = self._wait_for_server_parameter(server, {'OS-EXT-STS:task_state': None})
        self.assertEqual('VERIFY_RESIZE', found['status'])
        self.assertGreater(looks, 0)

    def claim_beside(self) -> None:
        """What another server claims."""
        provider = self.provider('compute1_pcow_fast')['uuid']
        answer = self.placement.put(
            f'/allocations/{uuidutils.generate_uuid()}',
            {
                'allocations': {provider: {'resources': {'CUSTOM_PCOW_MB': 1}}},
                'project_id': 'another',
                'user_id': 'another',
                'consumer_generation': None,
            },
            version='1.28',
        )
        self.assertEqual(204, answer.status, answer.body)

    def test_pool_that_goes_away(self) -> None:
        self.start()
        marker = Path(self.pool.path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self._run_periodics()
        found = self.inventory('fast')
        self.assertEqual(found['total'], found['reserved'])
        marker.with_name('.away').rename(marker)
        self._run_periodics()
        self.assertLess(self.inventory('fast')['reserved'], 64)  # by the template

    def test_pool_that_is_taken_out(self) -> None:
        """It takes nothing new and keeps the claims of the servers on it."""
        self.start()
        server = self.boot(self.make_flavor(root='true'))
        nova_conf.CONF.set_override('pools', [], 'nova_pcow')
        self._run_periodics()
        found = self.inventory('fast')
        self.assertEqual(found['total'], found['reserved'])
        claims = self.placement.get(f'/allocations/{server["id"]}').body['allocations']
        self.assertIn(self.provider('compute1_pcow_fast')['uuid'], claims)
        nova_conf.CONF.set_override('pools', ['fast'], 'nova_pcow')
        self._run_periodics()
        self.assertLess(self.inventory('fast')['reserved'], 64)  # by the template

    def test_required_class(self) -> None:
        """Nobody gets DRAM who asked for persistence."""
        self.start()
        flavor = str(
            self._create_flavor(
                disk=1,
                extra_spec={
                    'pcow:root': 'true',
                    'resources:CUSTOM_PCOW_MB': '1024',
                    'trait:CUSTOM_PCOW_PMEM': 'required',
                },
            )
        )
        self.assertIn('No valid host', self.fault(self.boot(flavor, 'ERROR')))
