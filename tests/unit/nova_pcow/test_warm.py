# SPDX-License-Identifier: Apache-2.0
"""Warm images, as far as the host's record and the images of the parent have them: QEMU alone makes
the checkpoint, and none runs here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any
from unittest import mock

from nova_pcow import cli
from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from nova_pcow.warm_images import warm_client
from nova_pcow.warm_images import warm_end
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from tests.unit.nova_pcow import checkpoints
from tests.unit.pcow_driver import base

PARENT = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
CHILD = '6b2f5ad0-2a9c-4c6f-a2a5-8f3f0f0c7d22'
IMAGE = 'dd11041e-a08b-42c9-8e28-262bd55d0b0e'
OTHER = 'ee11041e-a08b-42c9-8e28-262bd55d0b0e'
_MIB = 64
_FLAVOR = flavor.PcowFlavor('f', _MIB * units.MIB, (), frozenset(), ram_size=_MIB * units.MIB)


class WarmTestCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        for name, value in (('pools', ['fast']), ('warm_images', 1)):
            nova_conf.CONF.set_override(name, value, 'nova_pcow')
            self.addCleanup(nova_conf.CONF.clear_override, name, 'nova_pcow')
        self.pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        device.create(self.pool, storage.image_name(PARENT, 'root'), _MIB * units.MIB)
        self.pool.create_image(storage.image_name(PARENT, 'ram'), size=_MIB * units.MIB)
        self.checkpoints = self.useFixture(checkpoints.Checkpoints())

    def record(self, image_id: str = IMAGE, **values: Any) -> warm_records.Record:
        return warm_records.Record(
            **{
                'image': image_id,
                'owner': 'p',
                'project': 'p',
                'server': PARENT,
                'pool': self.pool.uuid,
                'vcpus': 1,
                'ram_size': _MIB * units.MIB,
                'root_size': _MIB * units.MIB,
                'machine': '<domain/>',
                'taken': warm_records.now(),
                'processor': '<cpu/>',
                'checksum': 'abc',
                **values,
            }
        )

    def make(self, image_id: str = IMAGE, **values: Any) -> warm_records.Record:
        """A warm image of the parent, with its checkpoint."""
        record = self.record(image_id, **values)
        self.checkpoints.names.add(record.checkpoint)
        for role in ('root', 'ram'):
            image.snapshot_create(self.path(PARENT, role), record.checkpoint)
        record = dataclasses.replace(record, members=warm._members(record))
        warm_records.put(record)
        return record

    def path(self, server: str, role: str) -> str:
        return str(self.pool.image_path(storage.image_name(server, role)))

    def snapshots(self, role: str) -> list[str]:
        return [one.name for one in image.snapshot_list(self.path(PARENT, role))]

    def check_unfit(self, words: str, record: warm_records.Record, **values: Any) -> None:
        error = self.assertRaises(
            warm.WarmUnfit, warm.check_fits, record, **(self.asked() | values)
        )
        self.assertIn(words, str(error))

    def asked(self) -> dict[str, Any]:
        return {'project': 'p', 'checksum': 'abc', 'vcpus': 1, 'wanted': _FLAVOR, 'pool': self.pool}


class RecordTest(WarmTestCase):
    def test_kept(self) -> None:
        self.assertEqual([], warm_records.find())
        record = self.make()
        self.assertEqual(record, warm_records.get(IMAGE))
        self.assertEqual([record], warm_records.of_server(PARENT))
        self.assertEqual(set(), warm_records.orphaned())
        warm_records.put(dataclasses.replace(record, is_orphaned=True, is_parent_deleted=True))
        self.assertEqual({PARENT}, warm_records.orphaned())
        warm_records.restore(PARENT)
        self.assertEqual(record, warm_records.get(IMAGE))
        warm_records.forget(IMAGE)
        self.assertIsNone(warm_records.get(IMAGE))
        warm_records.forget(IMAGE)

    def test_names_that_are_no_image(self) -> None:
        """A tenant names the image; a path never comes of it."""
        record = self.make()
        outside = os.path.join(os.path.dirname(warm_records.path(IMAGE)), '..', 'x.json')
        with open(outside, 'w', encoding='utf-8') as file:
            json.dump(dataclasses.asdict(record), file)
        for name in ('../x', f'../warm-images/{IMAGE}', IMAGE.upper(), '', f'{IMAGE}.json'):
            self.assertIsNone(warm_records.get(name), name)

    def test_damaged(self) -> None:
        told = dataclasses.asdict(self.make())
        self.assertEqual([], warm_records.unreadable())
        member = {'image': 'i', 'snapshot': 's'}
        for text, words in (
            *((text, 'it is damaged') for text in ('[]', 'null', '3', '"x"')),
            *(
                (json.dumps(told | values), f'it is damaged ({next(iter(values))}')
                for values in (
                    {'server': '../../etc'},
                    {'members': {'../x': member}},
                    {'vcpus': '1'},
                    {'is_orphaned': 1},
                )
            ),
            ('{', 'it is damaged'),
            ('{"members": {}}', 'it is damaged'),
            (json.dumps(dataclasses.asdict(self.record(OTHER))), f'it is that of {OTHER}'),
        ):
            with open(warm_records.path(IMAGE), 'w', encoding='utf-8') as file:
                file.write(text)
            error = self.assertRaises(exception.StateInvalid, warm_records.get, IMAGE)
            self.assertIn(words, str(error))
            self.assertIn('delete this file', str(error))
            with self.assertLogs('nova_pcow.records.warm_records', 'ERROR'):
                self.assertEqual([], warm_records.find())
            self.assertEqual([IMAGE], warm_records.unreadable())
            rows = cli.ListWarm(mock.Mock(), mock.Mock()).take_action(mock.Mock())[1]
            self.assertEqual([(IMAGE, 'damaged')], [(row[0], row[4]) for row in rows])


class FitTest(WarmTestCase):
    def test_fits(self) -> None:
        warm.check_fits(self.make(), **self.asked())

    def test_other_project(self) -> None:
        """What is in the RAM of a server is for its project, whoever sees the image."""
        self.check_unfit('of another project', self.make(), project='q')

    def test_other_data(self) -> None:
        record = self.make()
        for checksum in ('abd', ''):
            self.check_unfit('is not of what the image holds', record, checksum=checksum)
        self.check_unfit('is not of what', self.record(checksum=''), checksum='')

    def test_other_flavor(self) -> None:
        record = self.record()
        size = 128 * units.MIB
        for values, words in (
            ({'vcpus': 2}, 'gives 2 virtual CPUs, and the checkpoint has 1'),
            ({'wanted': dataclasses.replace(_FLAVOR, ram_size=size)}, '128 MiB of RAM on an image'),
            ({'wanted': dataclasses.replace(_FLAVOR, ram_size=None)}, '0 MiB of RAM on an image'),
            ({'wanted': dataclasses.replace(_FLAVOR, root_size=size)}, '128 MiB of root'),
            (
                {
                    'wanted': dataclasses.replace(
                        _FLAVOR, data=(flavor.DataDevice(4 * units.MIB, 'none'),)
                    )
                },
                '1 data devices',
            ),
            (
                {'pool': dataclasses.replace(self.pool, uuid=OTHER)},
                'the checkpoint is in another one',
            ),
        ):
            self.check_unfit(words, record, **values)

    def test_allowed(self) -> None:
        warm.check_allowed('p')
        self.make(OTHER)
        warm.check_allowed('q')
        error = self.assertRaises(warm.WarmRefused, warm.check_allowed, 'p')
        self.assertIn(f'keeps 1 of its project ({OTHER})', str(error))
        nova_conf.CONF.set_override('warm_images', 0, 'nova_pcow')
        error = self.assertRaises(warm.WarmRefused, warm.check_allowed, 'q')
        self.assertIn('this host keeps none', str(error))


class ProcessorTest(WarmTestCase):
    """What the definition says of the CPU is the same when another one comes of it."""

    def processor(
        self, cpu: str, host: str = "<model>A</model><feature name='x'/>", qemu: int = 10
    ) -> str:
        found = mock.Mock()
        found.running_xml.return_value = f'<domain>{cpu}</domain>'
        found.capabilities.return_value = (
            f"<capabilities><host><cpu>{host}<counter name='tsc'/></cpu></host></capabilities>"
        )
        found.qmp.side_effect = {'query-version': {'qemu': {'major': qemu}}}.get
        return warm.processor(found)

    def test_expanded_by_libvirt(self) -> None:
        cpu = "<cpu mode='custom' check='full'><model>A</model><feature name='x'/></cpu>"
        self.assertEqual(self.processor(cpu), self.processor(cpu, '<model>B</model>'))
        self.assertNotEqual(self.processor(cpu), self.processor(cpu.replace("'x'", "'y'")))

    def test_of_the_host(self) -> None:
        for cpu in (
            "<cpu mode='host-passthrough' check='none'/>",
            "<cpu mode='custom' check='none'><model>A</model></cpu>",
            '',
        ):
            same = self.processor(cpu)
            self.assertEqual(same, self.processor(cpu))
            self.assertNotEqual(same, self.processor(cpu, '<model>A</model>'))
            self.assertNotEqual(same, self.processor(cpu, qemu=11))
            with mock.patch('os.uname', return_value=mock.Mock(release='r', version='v')):
                self.assertNotEqual(same, self.processor(cpu))

    def test_record(self) -> None:
        for kept, is_right in (('<cpu/>', True), ('<cpu>x</cpu>', False), ('', False)):
            record = self.record(processor=kept)
            with mock.patch('nova_pcow.warm_images.warm.processor', return_value='<cpu/>'):
                if is_right:
                    warm.check_processor(record, mock.Mock())
                else:
                    error = self.assertRaises(
                        warm.WarmUnfit, warm.check_processor, record, mock.Mock()
                    )
                    self.assertIn('is not that of the checkpoint', str(error))


class ChildTest(WarmTestCase):
    def test_images(self) -> None:
        record = self.make()
        made = warm.fork(record, CHILD)
        self.assertEqual({storage.image_name(CHILD, role) for role in ('root', 'ram')}, {*made})
        for role in ('root', 'ram'):
            info = image.info(self.path(CHILD, role))
            self.assertEqual(f'nova-warm-{IMAGE}', info.base_snapshot)
            self.assertEqual(os.path.basename(self.path(PARENT, role)), info.base_filename)
        self.assertEqual(sorted(made), warm_end.children(record))

    def test_record_that_is_gone(self) -> None:
        record = self.make()
        warm_records.forget(IMAGE)
        self.assertRaises(warm.WarmUnfit, warm.fork, record, CHILD)
        self.assertEqual([], storage.find(CHILD))

    def test_checkpoint_that_is_another(self) -> None:
        """Deleted by an administrator, and one of that name made since."""
        record = self.make()
        path = self.path(PARENT, 'root')
        image.snapshot_create(path, 'between')
        image.snapshot_delete(path, record.checkpoint)
        image.snapshot_create(path, record.checkpoint)
        error = self.assertRaises(warm.WarmUnfit, warm.fork, record, CHILD)
        self.assertIn('has not the checkpoint any more', str(error))
        image.snapshot_delete(path, record.checkpoint)
        self.assertRaises(warm.WarmUnfit, warm.fork, record, CHILD)
        self.checkpoints.names.discard(record.checkpoint)
        self.assertEqual([], storage.find(CHILD))

    def test_snapshot_without_a_state(self) -> None:
        record = self.make()
        self.checkpoints.names.discard(record.checkpoint)
        error = self.assertRaises(warm.WarmUnfit, warm.fork, record, CHILD)
        self.assertIn('has no state of the devices', str(error))

    def test_image_that_is_another(self) -> None:
        """Of one name, as after a restore."""
        record = self.make()
        os.unlink(self.path(PARENT, 'root'))
        device.create(self.pool, storage.image_name(PARENT, 'root'), _MIB * units.MIB)
        image.snapshot_create(self.path(PARENT, 'root'), record.checkpoint)
        self.assertRaises(warm.WarmUnfit, warm.fork, record, CHILD)
        self.assertEqual([], storage.find(CHILD))

    def test_second_image_that_cannot_be_made(self) -> None:
        record = self.make()
        path = self.path(CHILD, 'root')
        open(path, 'xb').close()
        self.assertRaises(exception.ImageExists, warm.fork, record, CHILD)
        self.assertFalse(os.path.lexists(self.path(CHILD, 'ram')))


class ClientTest(base.TestCase):
    def test_no_openstacksdk(self) -> None:
        with mock.patch('importlib.import_module', side_effect=ImportError('no openstack')):
            error = self.assertRaises(
                warm_client.WarmFailed, warm_client.make, 'web1', 'i', timeout=1.0
            )
        self.assertIn('install python3-openstacksdk', str(error))
