# SPDX-License-Identifier: Apache-2.0

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

from nova import context
from nova import objects
from nova.tests.functional.api import client
from oslo_messaging.rpc import dispatcher

from nova_pcow import conf as nova_conf
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from tests.unit.nova_pcow import base


class ShelveTest(base.ServersTestCase):
    """A server leaves its host for good; its images must, too, because nothing leads back to them
    then.
    """

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(shelved_offload_time=-1)
        self.start_compute()
        self.server = self.boot(self.make_flavor(root='true'))
        self.root = Path(self.pool.existing_path(f'server-{self.server["id"]}-root'))
        with mock.patch('nova_pcow.driver.PcowLibvirtDriver.snapshot'):
            self.api.post_server_action(self.server['id'], {'shelve': None})
        self._wait_for_state_change(self.server, 'SHELVED')

    def offload(self) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'shelveOffload': None})
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def check_refused(self, words: str) -> None:
        claims = self.claims(self.server)
        with mock.patch('nova.network.neutron.API.unbind_ports') as unbind:
            found = self.offload()
        unbind.assert_not_called()  # nothing is changed
        self.assertEqual(('SHELVED', 'compute1'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual(claims, self.claims(self.server))
        (action,) = [
            item
            for item in self.api.get_instance_actions(self.server['id'])
            if item['action'] == 'shelveOffload'
        ][:1]
        body = self.api.api_get(
            f'/servers/{self.server["id"]}/os-instance-actions/{action["request_id"]}'
        ).body
        self.assertIn(words, str(body))

    def check_offloaded(self) -> None:
        self.assertEqual('SHELVED_OFFLOADED', self.offload()['status'])
        self.assertEqual([], self.images())

    def test_offload(self) -> None:
        self.check_offloaded()

    def test_pool_that_is_not_mounted(self) -> None:
        marker = Path(self.pool.path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self.check_refused('a pool of this host is not there')
        marker.with_name('.away').rename(marker)
        self.check_offloaded()

    def test_root_on_which_something_stands(self) -> None:
        image.snapshot_create(str(self.root), 's')
        device.create_on(self.pool, 'fork', self.root.stem, base_snapshot='s')
        self.check_refused('something stands on it (fork)')
        self.pool.delete_image('fork')
        self.check_offloaded()

    def test_deletion_that_fails(self) -> None:
        """Later than all checks."""
        error = exception.ImageInUse(path=str(self.root), reason='somebody came before')
        with mock.patch.object(pool_module.Pool, 'delete_image', side_effect=error):
            self.assertEqual('SHELVED', self.offload()['status'])
        self.assertTrue(self.root.exists())
        self.check_offloaded()


class ShelveDataTest(base.ServersTestCase):
    """Of a shelved server only the root is kept."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(shelved_offload_time=-1)
        self.addCleanup(nova_conf.CONF.clear_override, 'shelve_drops_data', 'nova_pcow')
        self.start_compute()

    def boot_with_data(self) -> Any:
        server = self.boot(self.make_flavor(2048, root='true', data_mb='64,32'))
        self.before = [
            image.info(self.pool.existing_path(f'server-{server["id"]}-{role}')).uuid
            for role in ('data0', 'data1')
        ]
        return server

    def act(self, server: Any, action: str) -> tuple[str, mock.Mock]:
        """The status afterwards, and how often an image was made of the server."""
        with (
            mock.patch('nova_pcow.driver.PcowLibvirtDriver.snapshot') as snapshot,
            contextlib.suppress(client.OpenStackApiException),
        ):
            self.api.post_server_action(server['id'], {action: None})
        found = self._wait_for_server_parameter(server, {'OS-EXT-STS:task_state': None})
        return str(found['status']), snapshot

    def check_refused(self, server: Any, action: str, status: str) -> None:
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver.power_off') as off:
            found, snapshot = self.act(server, action)
        self.assertEqual(status, found)
        off.assert_not_called()
        snapshot.assert_not_called()
        (began,) = [
            item for item in self.api.get_instance_actions(server['id']) if item['action'] == action
        ][:1]
        body = self.api.api_get(
            f'/servers/{server["id"]}/os-instance-actions/{began["request_id"]}'
        ).body
        self.assertIn('what is on its data devices (data0, data1) would be lost', str(body))
        self.check_data(server)

    def check_data(self, server: Any) -> None:
        self.assertEqual(
            self.before,
            [
                image.info(self.pool.existing_path(f'server-{server["id"]}-{role}')).uuid
                for role in ('data0', 'data1')
            ],
        )

    def test_server_that_runs(self) -> None:
        self.check_refused(self.boot_with_data(), 'shelve', 'ACTIVE')

    def test_server_that_is_stopped(self) -> None:
        server = self.boot_with_data()
        self._stop_server(server)
        self.check_refused(server, 'shelve', 'SHUTOFF')

    def test_server_that_was_shelved_before(self) -> None:
        """By an older driver, or when that was allowed: its data are there until it is
        offloaded.
        """
        server = self.boot_with_data()
        nova_conf.CONF.set_override('shelve_drops_data', True, 'nova_pcow')
        self.assertEqual('SHELVED', self.act(server, 'shelve')[0])
        nova_conf.CONF.clear_override('shelve_drops_data', 'nova_pcow')
        self.check_refused(server, 'shelveOffload', 'SHELVED')
        self.assertEqual('ACTIVE', self.act(server, 'unshelve')[0])
        self.check_data(server)

    def test_data_that_may_be_dropped(self) -> None:
        server = self.boot_with_data()
        nova_conf.CONF.set_override('shelve_drops_data', True, 'nova_pcow')
        self.flags(shelved_offload_time=0)
        self.assertEqual('SHELVED_OFFLOADED', self.act(server, 'shelve')[0])
        self.assertEqual([], [name for name in self.images() if name.startswith('server-')])

    def test_server_without_data_devices(self) -> None:
        self.assertEqual('SHELVED', self.act(self.boot(self.make_flavor(root='true')), 'shelve')[0])

    def test_data_in_a_pool_that_is_not_mounted(self) -> None:
        server = self.boot_with_data()
        self._stop_server(server)
        marker = Path(self.pool.path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self.assertEqual('SHUTOFF', self.act(server, 'shelve')[0])
        marker.with_name('.away').rename(marker)
        self.check_data(server)

    def test_resize_to_another_cell(self) -> None:
        """It takes an image of the root, too."""
        server, admin = self.boot_with_data(), context.get_admin_context()
        instance = objects.Instance.get_by_uuid(admin, server['id'])
        instance.task_state = 'resize_migrating'
        instance.save()
        move = objects.Migration(
            admin,
            instance_uuid=instance.uuid,
            source_compute='compute1',
            source_node='compute1',
            dest_compute='other',
            status='pre-migrating',
            migration_type='resize',
            cross_cell_move=True,
        )
        move.create()
        with mock.patch('nova.virt.libvirt.driver.LibvirtDriver.power_off') as off:
            error = self.assertRaises(
                dispatcher.ExpectedException,
                self.computes['compute1'].manager.prep_snapshot_based_resize_at_source,
                admin,
                instance,
                move,
            )
        self.assertIn(
            'what is on its data devices (data0, data1) would be lost', str(error.exc_info[1])
        )
        off.assert_not_called()
