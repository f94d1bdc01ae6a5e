# SPDX-License-Identifier: Apache-2.0
"""What an image says of its size is not believed: its QEMU can write that."""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.tests.functional.api import client

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.records import notes
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.templates import template
from tests.unit.nova_pcow import base as nova_base
from tests.unit.nova_pcow import test_resize
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
_DATA = 4 * units.MIB


def _flavor(name: str, root: int, data: int) -> flavor.PcowFlavor:
    return flavor.PcowFlavor(name, root, (flavor.DataDevice(data, 'none'),), frozenset())


class SizesTest(base.TestCase):
    """Of a server whose root has a page map in front of its data, as its template has."""

    def setUp(self) -> None:
        super().setUp()
        nova_conf.CONF.set_override('pools', ['fast'], 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'pools', 'nova_pcow')
        self.pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        raw = self.directory / 'raw'
        with raw.open('wb') as file:
            file.truncate(256 * units.MIB)
        template.build(self.pool, 't', str(raw), 'raw', page_map=info_block.PageMap.PMEM)
        self.root = device.create_on(self.pool, storage.image_name(_UUID, storage.ROOT), 't')
        self.data = device.create(self.pool, storage.image_name(_UUID, 'data0'), _DATA)
        self.small = _flavor('small', 256 * units.MIB, _DATA)
        self.offset = device.window(self.root).offset
        self.assertGreater(self.offset, info_block.OFFSET)

    def check_refused(self, path: str, words: str, wanted: flavor.PcowFlavor) -> None:
        error = self.assertRaises(exception.DeviceTooLarge, storage.nvdimms, _UUID, wanted)
        self.assertIn(f'{path} says that it holds {words}', str(error))

    def test_what_the_flavor_gives(self) -> None:
        """Also where the guest has overwritten the block in front of its data, which is its own."""
        self.assertEqual(2, len(storage.nvdimms(_UUID, self.small)))
        for path in (self.root, self.data):
            image_end = image.info(path).virtual_size
            device.write_info_block(path, image_end, image_end - 2 * units.MIB)
        self.assertEqual(2, len(storage.nvdimms(_UUID, self.small)))

    def test_more(self) -> None:
        for path, offset, size in (
            (self.root, self.offset, 256 * units.MIB),
            (self.data, info_block.OFFSET, _DATA),
        ):
            image.resize(path, offset + size + 2 * units.MIB)
            self.check_refused(
                path,
                f'{(size >> 20) + 2} MiB of data, and the flavor small gives {size >> 20} MiB',
                self.small,
            )
            image.resize(path, offset + size, shrink=True)  # what the message tells to do
            self.assertEqual(2, len(storage.nvdimms(_UUID, self.small)))

    def test_resize_that_has_failed(self) -> None:
        """What it has made larger is known, and nothing beyond."""
        larger = _flavor('larger', 512 * units.MIB, 2 * _DATA)
        largest = _flavor('largest', 1024 * units.MIB, 2 * _DATA)
        device.grow(self.root, 512 * units.MIB)
        words = '512 MiB of data, and the flavor small gives 256 MiB'
        self.check_refused(self.root, words, self.small)
        storage.note_growth(_UUID, self.small, larger)
        storage.note_growth(_UUID, self.small, larger)
        self.assertEqual(2, len(storage.nvdimms(_UUID, self.small)))
        self.assertRaises(
            exception.DeviceTooLarge, storage.check_sizes, _UUID, self.small, noted=False
        )
        image.resize(self.data, 8 * units.MIB)
        self.check_refused(self.data, '6 MiB of data, and the flavor small gives 4 MiB', self.small)
        image.resize(self.data, _DATA + info_block.OFFSET, shrink=True)
        device.grow(self.root, 1024 * units.MIB)
        self.check_refused(
            self.root, '1 GiB of data, and a resize that has failed gives 512 MiB', self.small
        )
        storage.forget_growth(_UUID, self.small)
        storage.check_sizes(_UUID, self.small, largest)
        self.assertIsNotNone(notes.get(notes.GROWN, _UUID))
        storage.forget_growth(_UUID, larger)
        self.assertIsNone(notes.get(notes.GROWN, _UUID))


class ServerTest(test_resize.ResizeTestCase):
    """Through Nova's services."""

    def setUp(self) -> None:
        super().setUp()

        def power_off(
            driver: Any, _context: Any, instance: Any, *_args: Any, **_kwargs: Any
        ) -> str:
            driver.power_off(instance)
            return '[]'

        name = 'nova.virt.libvirt.driver.LibvirtDriver.migrate_disk_and_power_off'
        self.useFixture(fixtures.MonkeyPatch(name, power_off))

    def forge(self, size: int) -> None:
        image.resize(str(self.root), info_block.OFFSET + size)

    def instance(self) -> objects.Instance:
        return objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])

    def test_hard_reboot(self) -> None:
        """Refused while the server still runs, and goes on."""
        self.forge(8 * units.GIB)
        driver = self.computes['compute1'].driver
        error = self.assertRaises(
            nova_exception.InternalError,
            driver._hard_reboot,
            context.get_admin_context(),
            self.instance(),
            [],
            None,
        )
        self.assertIn(
            f'{self.root} says that it holds 8 GiB of data, and the flavor '
            f'{self.instance().flavor.name} gives 1 GiB',
            str(error),
        )
        self.assertEqual(1, driver.get_info(self.instance()).state)

    def test_start(self) -> None:
        self._stop_server(self.server)
        self.forge(8 * units.GIB)
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'os-start': {}})
        self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})
        self.check_refused('says that it holds 8 GiB of data', 'start')
        image.resize(str(self.root), info_block.OFFSET + units.GIB, shrink=True)
        self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_state_change(self.server, 'ACTIVE')

    def test_resize(self) -> None:
        """To what is too small it goes on as it was; what is large enough is a way out."""
        self.forge(3 * units.GIB)
        self.resize('ERROR')  # of the conductor, which hears it too
        self.check_refused('says that it holds 3 GiB of data')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def snapshot(self) -> Any:
        """The driver's part of an image of the server, to a Glance that takes whatever comes."""
        driver, uploaded = self.computes['compute1'].driver, list[int]()
        with mock.patch.object(
            driver._image_api,
            'update',
            side_effect=lambda _context, _id, _metadata, f: uploaded.append(f.seek(0, os.SEEK_END)),
        ):
            driver.snapshot(
                context.get_admin_context(), self.instance(), nova_base.IMAGE, mock.Mock()
            )
        return uploaded

    def test_image_of_a_server(self) -> None:
        """Of one that runs what counts is the snapshot, in the same file."""

        @contextlib.contextmanager
        def frozen(_found: Any, path: str, _name: str, *, quiesce: bool) -> Iterator[str]:
            assert not quiesce
            image.snapshot_create(path, 'upload')
            image.resize(path, info_block.OFFSET + units.GIB, shrink=True)
            yield 'upload'

        self.flags(snapshot_image_format='raw', group='libvirt')
        self._stop_server(self.server)
        self.assertEqual([units.GIB], self.snapshot())
        self.forge(8 * units.GIB)
        words = 'says that it holds 8 GiB of data'
        error = self.assertRaises(nova_exception.InternalError, self.snapshot)
        self.assertIn(words, str(error))
        with mock.patch('nova_pcow.snapshots.snapshot.frozen', frozen):
            error = self.assertRaises(nova_exception.InternalError, self.snapshot)
        self.assertIn(words, str(error))

    def test_image_of_a_server_on_a_damaged_template(self) -> None:
        """Glance would have it with a checksum that says it is whole."""
        self.flags(snapshot_image_format='raw', group='libvirt')
        self._stop_server(self.server)
        path = image.info(str(self.root)).base_path
        assert path is not None
        base.flip(path)
        error = self.assertRaises(nova_exception.InternalError, self.snapshot)
        self.assertIn(f'{path} is damaged (the 2 MiB from guest byte', str(error))
        self.assertEqual([], image.snapshot_list(str(self.root)))
        name = os.path.basename(path).removesuffix('.pcow')
        scrub.accept(self.pool, name)
        self.assertEqual([units.GIB], self.snapshot())

    def test_resize_to_what_it_says(self) -> None:
        self.forge(2 * units.GIB)
        self.resize('VERIFY_RESIZE')
        self.assertEqual(2 * units.GIB, device.window(str(self.root)).size)
        storage.check_startable(self.server['id'], flavor.of(self.instance()))

    def test_revert_that_fails_before_the_images(self) -> None:
        """Nova has given the old flavor back by then."""
        self.resize('VERIFY_RESIZE')
        failing = mock.patch.object(
            self.computes['compute1'].driver,
            'finish_revert_migration',
            side_effect=nova_exception.InternalError('no network'),
        )
        with failing, contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'revertResize': None})
        self._wait_for_state_change(self.server, 'ERROR')
        self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_state_change(self.server, 'ACTIVE')

    def test_size_that_comes_while_it_is_stopped(self) -> None:
        """The QEMU has until then to write it."""
        mark_or_send = self.computes['compute1'].driver._mark_or_send

        def forge_first(*arguments: Any, **keywords: Any) -> str:
            self.forge(8 * units.GIB)
            return str(mark_or_send(*arguments, **keywords))

        with mock.patch.object(
            self.computes['compute1'].driver, '_mark_or_send', side_effect=forge_first
        ):
            self.resize('ERROR')
        self.check_refused('says that it holds 8 GiB of data')
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def test_revert_without_the_mark(self) -> None:
        """Who writes to the image can delete the snapshot by which its old size is known."""
        self.resize('VERIFY_RESIZE')
        for one in image.snapshot_list(str(self.root)):
            image.snapshot_delete(str(self.root), one.name)
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'revertResize': None})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ERROR'}
        )
        self.check_refused('says that it holds 2 GiB of data', 'revertResize')

    def test_resize_that_fails_when_the_images_have_grown(self) -> None:
        """The server has its old flavor again, and its images stay as they are."""
        with mock.patch.object(
            self.computes['compute1'].driver,
            '_create_images',
            side_effect=exception.ToolFailed(message='no'),
        ):
            self.resize('ERROR')
        self.assertEqual(1, self.instance().flavor.root_gb)
        self.assertEqual(2 * units.GIB, device.window(str(self.root)).size)
        self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
        self._wait_for_state_change(self.server, 'ACTIVE')
        self.assertIsNotNone(notes.get(notes.GROWN, self.server['id']))
        self._delete_server(self.server)
        self.assertIsNone(notes.get(notes.GROWN, self.server['id']))


class EvacuatedTest(nova_base.ServersTestCase):
    def test_evacuation(self) -> None:
        """Nothing has changed when it is refused."""
        self.start_compute()
        server = self.boot(self.make_flavor(root='true'))
        path = Path(self.pool.existing_path(f'server-{server["id"]}-root'))
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), server['id'])
        driver = self.computes['compute1'].driver
        self.assertTrue(driver.instance_on_disk(instance))
        image.resize(str(path), 8 * units.GIB)
        error = self.assertRaises(
            nova_exception.InstanceFaultRollback, driver.instance_on_disk, instance
        )
        self.assertIn('says that it holds', str(error.inner_exception))
