# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver

from pcow_driver.images import image
from tests.unit.nova_pcow import base

_VOLUME = '0b3f1f3a-6c0e-4d0f-8a3b-54b8a1c1d2e3'


class VolumeElsewhereTest(base.ServersTestCase):
    """A server with a volume of type pcow, which is memory of its host, is to go to
    another host.
    """

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        # hosts have one address here, and are told apart by it
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.virt.libvirt.driver.LibvirtDriver.get_host_ip_addr',
                lambda driver: f'address of {driver._host.get_hostname()}',
            )
        )
        self.start_compute(hostname='host1')

    def attached(self, flavor: str, kind: str = 'pcow') -> Any:
        server = self.boot(flavor, host='host1')
        objects.BlockDeviceMapping(
            context.get_admin_context(),
            instance_uuid=server['id'],
            source_type='volume',
            destination_type='volume',
            device_name='/dev/vdb',
            device_type='disk',
            disk_bus='virtio',
            boot_index=None,
            volume_id=_VOLUME,
            no_device=False,
            delete_on_termination=False,
            connection_info=json.dumps(
                {
                    'driver_volume_type': kind,
                    'data': {'volume_id': _VOLUME, 'device_path': '/pool/v.pcow'},
                }
            ),
        ).create()
        return server

    def flavors(self) -> list[str]:
        return [self.make_flavor(root='true'), str(self._create_flavor())]

    def words(self, server: Any, action: str) -> str:
        (found,) = [
            item for item in self.api.get_instance_actions(server['id']) if item['action'] == action
        ]
        return json.dumps(
            self.api.api_get(
                f'/servers/{server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def act(self, server: Any, action: dict[str, Any]) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(server['id'], action)
        return self._wait_for_server_parameter(server, {'OS-EXT-STS:task_state': None})

    def check_untouched(self, server: Any) -> None:
        self.assertEqual('host1', self.api.get_server(server['id'])['OS-EXT-SRV-ATTR:host'])
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), server['id'])
        self.assertTrue(self.computes['host1'].driver._host.get_guest(instance).is_active())
        for name in self.images():
            self.assertEqual(
                [], image.snapshot_list(self.pool.existing_path(name.removesuffix('.pcow')))
            )

    def test_cold_migration(self) -> None:
        servers = [self.attached(flavor) for flavor in self.flavors()]
        self.start_compute(hostname='host2')
        for server in servers:
            self.act(server, {'migrate': {'host': 'host2'}})
            self.assertIn(
                f'the volume {_VOLUME} is memory of this host', self.words(server, 'migrate')
            )
            # what lets a server go on as it was
            self.assertIn('InstanceFaultRollback', self.fault(server))
            self.check_untouched(server)

    def test_resize_on_its_host(self) -> None:
        """The volume stays where it is."""
        server = self.attached(self.make_flavor(root='true'))
        with (
            mock.patch.object(
                libvirt_driver.LibvirtDriver,
                'migrate_disk_and_power_off',
                new=mock.Mock(return_value='[]'),
            ),
            mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_migration'),
            mock.patch(
                'nova.compute.manager.ComputeManager._get_instance_block_device_info',
                return_value={
                    'block_device_mapping': [
                        {'connection_info': {'driver_volume_type': 'pcow', 'data': {}}}
                    ]
                },
            ),
            mock.patch('nova.compute.manager.ComputeManager._terminate_volume_connections'),
        ):
            self.act(server, {'resize': {'flavorRef': self.make_flavor(2048, root='true', disk=2)}})
        self._wait_for_server_parameter(server, {'status': 'VERIFY_RESIZE'})

    def test_evacuation(self) -> None:
        servers = [self.attached(flavor) for flavor in self.flavors()]
        self.start_compute(hostname='host2')
        self.computes['host1'].stop()
        self.api.put_service_force_down(self.computes['host1'].service_ref.uuid, True)
        for server in servers:
            found = self.act(server, {'evacuate': {}})
            self._wait_for_migration_status(server, ['failed'])
            self.assertEqual(('ACTIVE', 'host1'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
            self.assertIn(
                f'the volume {_VOLUME} is memory of the host that is down',
                self.words(server, 'evacuate'),
            )

    def test_live_migration(self) -> None:
        driver = self.computes['host1'].driver
        info = {
            'block_device_mapping': [
                {'connection_info': {'driver_volume_type': kind, 'data': {'volume_id': _VOLUME}}}
                for kind in ('iscsi', 'pcow')
            ]
        }
        instance = objects.Instance.get_by_uuid(
            context.get_admin_context(), self.attached(self.flavors()[1])['id']
        )
        with mock.patch.object(
            libvirt_driver.LibvirtDriver, 'check_can_live_migrate_source'
        ) as check:
            error = self.assertRaises(
                nova_exception.MigrationPreCheckError,
                driver.check_can_live_migrate_source,
                context.get_admin_context(),
                instance,
                mock.Mock(),
                info,
            )
            self.assertIn(f'the volume {_VOLUME} is memory of this host', str(error))
            check.assert_not_called()
            del info['block_device_mapping'][1]
            driver.check_can_live_migrate_source(
                context.get_admin_context(), instance, mock.Mock(), info
            )
            check.assert_called_once()
