# SPDX-License-Identifier: Apache-2.0

import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

from nova import context
from nova import objects
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver

from pcow_driver import image
from pcow_driver import registry
from tests.unit.nova_pcow import base


class ResizeTest(base.ServersTestCase):
    """Servers that are resized on their host while something of them is not there."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        self.start_compute()
        self.server = self.boot(self.make_flavor(root='true'))
        self.root = Path(self.pool.existing_path(f'server-{self.server["id"]}-root'))
        self.before = image.info(str(self.root)).uuid

    def resize(self, status: str, flavor: str = '') -> None:
        flavor = flavor or self.make_flavor(2048, root='true', disk=2)
        with contextlib.suppress(client.OpenStackApiException):      # casts are calls here: the API hears what compute raises
            self.api.post_server_action(self.server['id'], {'resize': {'flavorRef': flavor}})
        self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None, 'status': status})

    def check_refused(self, words: str = '') -> None:
        (found,) = [item for item in self.api.get_instance_actions(self.server['id']) if item['action'] == 'resize']
        found_words = json.dumps(self.api.api_get(f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}').body)
        wanted = words or f'{self.root.stem} is in none of the pools fast of this host: mount the pool that has it'
        self.assertIn(wanted, found_words)

    def test_pool_that_is_not_mounted(self) -> None:
        marker = Path(self.pool.path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self.resize('ERROR')               # of the conductor, which hears it too: see above
        marker.with_name('.away').rename(marker)
        self.check_refused()
        self.assertIn('InstanceFaultRollback', self.fault(self.server))      # what lets a server go on as it was
        self.assertEqual(self.before, image.info(str(self.root)).uuid)

    def test_pool_without_room(self) -> None:
        """Found out while the server still runs."""
        registry.PoolRegistry().set('fast', overcommit=0.0001)
        self.resize('ERROR')               # as above
        self.check_refused('more cannot be promised in the pool fast')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def test_flavor_with_a_misspelt_extra_spec(self) -> None:
        """Of a server without persistent memory as well, which would have got none."""
        self.server = self.boot(self._create_flavor(disk=1))
        self.resize('ERROR', self.make_misspelt_flavor())       # as above
        self.check_refused('has the property pcow:rooot, which does not exist')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))

    def test_each_resize_has_its_own_mark(self) -> None:
        """A service that ends before it has made that does not go back to what an earlier resize left."""
        image.snapshot_create(str(self.root), 'nova-resize-0')
        with mock.patch.object(libvirt_driver.LibvirtDriver, 'migrate_disk_and_power_off', new=mock.Mock(return_value='[]')), \
                mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_migration'):
            self.resize('VERIFY_RESIZE')
        (migration,) = [one for one in self.api.get_migrations() if one['instance_uuid'] == self.server['id']]
        self.assertEqual([f'nova-resize-{migration["id"]}'], [one.name for one in image.snapshot_list(str(self.root))])
        size = image.info(str(self.root)).virtual_size
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        driver = self.computes['compute1'].driver
        for number, marks, compare in ((migration['id'] + 1, 1, self.assertEqual), (migration['id'], 0, self.assertGreater)):
            with mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_revert_migration'):
                driver.finish_revert_migration(context.get_admin_context(), instance, [], mock.Mock(id=number))
            self.assertEqual(marks, len(image.snapshot_list(str(self.root))))
            compare(size, image.info(str(self.root)).virtual_size)

    def test_root_that_was_copied_to_another_host(self) -> None:
        image.snapshot_create(str(self.root), 'nova-sent')
        self.resize('ERROR')               # as above
        self.check_refused('was copied to another host')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual(['nova-sent'], [one.name for one in image.snapshot_list(str(self.root))])

    def test_root_that_goes_away_meanwhile(self) -> None:
        """No new one is made of the image in its place."""
        def power_off(*_args: Any) -> str:
            os.rename(self.root, self.root.with_suffix('.away'))
            return '[]'

        with mock.patch.object(libvirt_driver.LibvirtDriver, 'migrate_disk_and_power_off', new=mock.Mock(side_effect=power_off)):
            self.resize('ERROR')
        self.check_refused()
        self.assertFalse(self.root.exists())
