# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from nova.tests.fixtures.libvirt import libvirtError
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver
from nova.virt.libvirt import guest

from pcow_driver.images import image
from tests.unit.nova_pcow import base


class EvacuateTest(base.ServersTestCase):
    """Two hosts that see the same pool; the one with the server goes down."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.start_compute(hostname='host1')
        self.server = self.boot(self.make_flavor(root='true'), host='host1')
        self.root = self.pool.existing_path(f'server-{self.server["id"]}-root')
        self.start_compute(hostname='host2')
        self.computes['host1'].stop()
        self.api.put_service_force_down(self.computes['host1'].service_ref.uuid, True)

    def evacuate(self, state: str) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'evacuate': {}})
        self._wait_for_migration_status(self.server, [state])
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def words(self) -> str:
        (found,) = [
            item
            for item in self.api.get_instance_actions(self.server['id'])
            if item['action'] == 'evacuate'
        ]
        return json.dumps(
            self.api.api_get(
                f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def check_refused(self, words: str) -> None:
        before = self.claims(self.server)
        server = self.evacuate('failed')
        self.assertEqual(('ACTIVE', 'host1'), (server['status'], server['OS-EXT-SRV-ATTR:host']))
        self.assertIn(words, self.words())
        self.assertEqual(before, self.claims(self.server))

    def test_shared_pool(self) -> None:
        before = image.info(self.root).uuid
        server = self.evacuate('done')
        self.assertEqual('host2', server['OS-EXT-SRV-ATTR:host'])
        self.assertEqual(before, image.info(self.root).uuid)
        self.assertIn(self.root, self.xml(self.server))
        provider = self.provider('host2_pcow_fast')
        self.assertIn(provider['uuid'], self.claims(self.server))

    def test_libvirt_fails(self) -> None:
        """On a host that does not see the directories of servers: Nova takes away the one that it
        made.
        """
        before = image.info(self.root).uuid
        with (
            mock.patch.object(
                libvirt_driver.LibvirtDriver,
                '_create_image',
                new=mock.Mock(return_value=(True, True)),
            ),
            mock.patch.object(
                guest.Guest,
                'create',
                new=mock.Mock(side_effect=libvirtError('the monitor is gone')),
            ),
        ):
            self.evacuate('failed')
        self.assertIn('the monitor is gone', self.words())
        self.assertEqual(before, image.info(self.root).uuid)

    def test_pool_of_its_own(self) -> None:
        away = Path(self.root).with_suffix('.away')
        os.rename(self.root, away)
        self.check_refused('in no pool that this host shares with the one that is down')
        self.assertFalse(os.path.exists(self.root))
        os.rename(away, self.root)

    def test_server_that_still_runs(self) -> None:
        with contextlib.closing(base.Writer(self.root)):
            self.check_refused('still runs on the host that is said to be down')
