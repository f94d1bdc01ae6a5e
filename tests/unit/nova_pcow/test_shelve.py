# SPDX-License-Identifier: Apache-2.0

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

from nova.tests.functional.api import client

from pcow_driver import device
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import pool as pool_module
from tests.unit.nova_pcow import base


class ShelveTest(base.ServersTestCase):
    """A server leaves its host for good; its images must, too, because nothing leads back to them then."""

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
        with contextlib.suppress(client.OpenStackApiException):      # casts are calls here: the API hears what compute raises
            self.api.post_server_action(self.server['id'], {'shelveOffload': None})
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def check_refused(self, words: str) -> None:
        claims = self.claims(self.server)
        with mock.patch('nova.network.neutron.API.unbind_ports') as unbind:
            found = self.offload()
        unbind.assert_not_called()             # nothing is changed
        self.assertEqual(('SHELVED', 'compute1'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual(claims, self.claims(self.server))
        (action,) = [item for item in self.api.get_instance_actions(self.server['id']) if item['action'] == 'shelveOffload'][:1]
        body = self.api.api_get(f'/servers/{self.server["id"]}/os-instance-actions/{action["request_id"]}').body
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
