# SPDX-License-Identifier: Apache-2.0
"""What keeps a server from going on from a checkpoint, beside what its flavor and image are."""

from __future__ import annotations

from typing import Any
from unittest import mock

from nova import exception as nova_exception

from nova_pcow.common import flavor
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from tests.unit.nova_pcow import test_warm_servers


class WarmBeginsTest(test_warm_servers.WarmServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.make()
        self.done.clear()

    def test_other_processor(self) -> None:
        """It is known when QEMU has begun, and no state is loaded."""
        with mock.patch('nova_pcow.warm_images.warm.processor', return_value='<cpu>less</cpu>'):
            server = self.create()
        self.check_boots(server, 'the CPU that this host would give it is not that')
        self.assertNotIn(test_warm_servers.REVERT, self.done)

    def test_config_drive(self) -> None:
        """The guest has read another one, and would go on over it."""
        server = self.create_with(config_drive=True)
        self.check_boots(server, 'it has a config drive, which its guest reads when it boots')
        self.assertNotIn(test_warm_servers.REVERT, self.done)

    def test_signatures(self) -> None:
        self.flags(verify_glance_signatures=True, group='glance')
        self.check_boots(self.create(), 'the signature of its image is to be checked')

    def test_images_that_no_domain_may_have(self) -> None:
        """Those of a parent that a resize has left larger than its flavor."""
        check = storage.check_sizes

        def checked(uuid: str, *words: Any, **more: Any) -> None:
            check(uuid, *words, **more)
            if image.info(self.path({'id': uuid}, 'root'), force_share=True).base_snapshot:
                raise storage.ServerStorageError(reason='it is too large')

        with mock.patch('nova_pcow.servers.storage.check_sizes', checked):
            server = self.create()
        self.check_boots(server, 'it is too large')

    def test_qemu_keeps_nobody_waiting(self) -> None:
        """Nova's other work goes on while it takes a checkpoint, or loads one."""
        with mock.patch('nova.utils.tpool_wrap', side_effect=lambda found: found) as wrap:
            self.create()
        self.assertEqual(1, wrap.call_count)
        with (
            mock.patch('nova.utils.tpool_wrap', side_effect=ValueError('in a thread')),
            self.assertLogs('nova_pcow.libvirt_driver.warm_starts', 'WARNING'),
        ):
            self.assertRaises(ValueError, self.make, image_id=test_warm_servers.OTHER_IMAGE)


class WarmRefusedTest(test_warm_servers.WarmServersTestCase):
    def refused(self) -> str:
        with self.assertLogs('nova_pcow.libvirt_driver.warm_starts', 'WARNING'):
            error = self.assertRaises(nova_exception.InternalError, self.make)
        self.assertEqual([], warm_records.find())
        return str(error)

    def test_config_drive(self) -> None:
        with mock.patch('nova.virt.configdrive.required_by', return_value=True):
            self.assertIn('others would go on over another one', self.refused())

    def test_larger_than_the_flavor(self) -> None:
        path = self.path(self.parent, 'root')
        image.resize(path, image.info(path).virtual_size + 64 * units.MIB)
        found = mock.Mock()
        wanted = flavor.of(self.instance(self.parent))
        error = self.assertRaises(
            exception.DeviceTooLarge, warm._check, found, self.parent['id'], wanted
        )
        self.assertIn('says that it holds', str(error))
