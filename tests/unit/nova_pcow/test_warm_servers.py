# SPDX-License-Identifier: Apache-2.0
"""Warm images and servers of them through Nova. No QEMU runs here: what it would do with a
checkpoint is done to the images.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import exception as nova_exception
from nova.compute import task_states
from nova.tests import fixtures as nova_fixtures

from nova_pcow import conf as nova_conf
from nova_pcow.placement import inventory
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.virt import domain
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import test_ram

WARM_IMAGE = 'dd11041e-a08b-42c9-8e28-262bd55d0b0e'
_CHECKPOINT = f'nova-warm-{WARM_IMAGE}'
OTHER_IMAGE = 'ee11041e-a08b-42c9-8e28-262bd55d0b0e'
REVERT = 'pcow-checkpoint-revert'


class WarmServersTestCase(test_ram.RamTestCase):
    def setUp(self) -> None:
        super().setUp()
        nova_conf.CONF.set_override('warm_images', 1, 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'warm_images', 'nova_pcow')
        self.checkpoints.names |= {_CHECKPOINT, f'nova-warm-{OTHER_IMAGE}'}
        self.driver = self.computes['compute1'].driver
        self.done: list[str] = []  # what was asked of QEMU and libvirt, in this order
        for name, new in (
            ('nova_pcow.warm_images.warm.check', lambda _found, _uuid, _wanted: '<domain/>'),
            ('nova_pcow.warm_images.warm.processor', lambda _found: '<cpu/>'),
            ('nova_pcow.warm_images.warm_xml.adopt', lambda definition, _machine: definition),
            ('pcow_driver.vm.checkpoint.take', self._take),
            ('pcow_driver.vm.checkpoint.delete', self._delete),
            ('pcow_driver.virt.libvirt_host.names_by_uuid', self._names),
            ('pcow_driver.virt.domain.Domain.ram', self._ram),
            ('pcow_driver.virt.domain.Domain.writable', lambda _found: []),
            (
                'nova_pcow.snapshots.snapshot.export',
                lambda *words: Path(words[3]).write_bytes(b'data'),
            ),
            (
                'pcow_driver.virt.domain.Domain.definition',
                lambda found: str(found._domain.XMLDesc(0)),
            ),
            ('pcow_driver.virt.domain.Domain.qmp', self._qmp),
            ('pcow_driver.virt.domain.Domain.attach', lambda _found, _xml: self._do('attach')),
            ('nova.virt.libvirt.guest.Guest.resume', lambda _guest: self._do('resume')),
            ('pcow_driver.virt.domain.Domain.set_clock', lambda _found: self._do('clock')),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, new))
        self.flavor = self.make_ram_flavor()
        self.parent = self.boot(self.flavor)
        self.project = str(self.instance(self.parent).project_id)

    def _take(self, found: domain.Domain, name: str) -> None:
        for role in ('root', 'ram'):
            image.snapshot_create(self.path(self.parent, role), name)

    def _delete(self, found: domain.Domain, name: str) -> None:
        for role in ('root', 'ram'):
            image.snapshot_delete(self.path(self.parent, role), name)

    @staticmethod
    def _names(connection: Any) -> dict[str, str]:
        return {one.UUIDString(): one.name() for one in connection.listAllDomains(3)}

    def _ram(self, found: domain.Domain) -> str:
        return str(self.pool.image_path(storage.image_name(found.uuid, 'ram')))

    def _qmp(self, _found: domain.Domain, command: str, **_words: Any) -> None:
        self._do(command)

    def _do(self, what: str) -> None:
        self.done.append(what)

    def make(
        self,
        asked: str = 'true',
        task: str = task_states.IMAGE_SNAPSHOT,
        image_id: str = WARM_IMAGE,
    ) -> None:
        """As Nova's manager has the driver do it."""
        made = copy.deepcopy(self.glance.images[base.IMAGE]) | {'id': image_id, 'name': 'warm'}
        self.glance.images.setdefault(image_id, made)['properties'][warm.PROPERTY] = asked
        instance = self.instance(self.parent)
        instance.task_state = task
        self.driver.snapshot(self.context(), instance, image_id, mock.Mock())

    def context(self) -> Any:
        """Of a user of the server's project."""
        return nova_context.RequestContext('u', self.project, is_admin=True)

    def create(self, flavor: str | None = None, **arguments: Any) -> Any:
        return self._create_server(
            image_uuid=WARM_IMAGE,
            flavor_id=flavor or self.flavor,
            **({'networks': 'none'} | arguments),
        )

    def create_with(self, **values: Any) -> Any:
        body = self._build_server(image_uuid=WARM_IMAGE, flavor_id=self.flavor, networks='none')
        server = self.api.post_server({'server': body | values})
        return self._wait_for_state_change(server, 'ACTIVE')

    def check_warm(self, server: Any) -> None:
        for role in ('root', 'ram'):
            self.assertEqual(
                _CHECKPOINT, image.info(self.path(server, role), force_share=True).base_snapshot
            )

    def check_boots(self, server: Any, words: str) -> None:
        """From what is in Glance, and its events say why."""
        info = image.info(self.path(server, 'root'))
        self.assertIsNone(info.base_snapshot)
        self.assertIn('image-', str(info.base_filename))
        self.assertIsNone(image.info(self.path(server)).base_filename)
        self.assertIn(words, self.event_words(server, 'create'))
        self.check_ram(server)


class WarmImageTest(WarmServersTestCase):
    def test_what_asks_for_none(self) -> None:
        for asked, task in (
            ('false', task_states.IMAGE_SNAPSHOT),
            (_CHECKPOINT, task_states.IMAGE_SNAPSHOT),
            ('true', task_states.SHELVING),
        ):
            with mock.patch(
                'nova_pcow.libvirt_driver.snapshots.SnapshotLibvirtDriver.snapshot'
            ) as plain:
                self.make(asked, task)
            plain.assert_called_once()
        instance = self.instance(self.parent)
        instance.system_metadata['image_pcow_warm'] = 'true'
        instance.save()
        with mock.patch(
            'nova_pcow.snapshots.snapshot.frozen', return_value=contextlib.nullcontext()
        ):
            self.make()  # inherited, and asked for by nobody
        self.assertEqual('false', self.glance.images[WARM_IMAGE]['properties'][warm.PROPERTY])
        self.assertEqual([], warm_records.find())

    def test_what_fails(self) -> None:
        error = exception.QmpFailed(command='c', error_class='E', description='no space')
        with (
            mock.patch('pcow_driver.vm.checkpoint.take', side_effect=error),
            self.assertLogs('nova_pcow.libvirt_driver.warm_starts', 'WARNING') as log,
        ):
            self.assertRaises(nova_exception.InternalError, self.make)
        self.assertIn('no space', log.output[0])
        self.assertEqual([], warm_records.find())
        with mock.patch.object(
            self.glance,
            'update',
            side_effect=nova_exception.GlanceConnectionFailed(server='g', reason='r'),
        ):
            self.assertRaises(nova_exception.GlanceConnectionFailed, self.make)
        self.assertEqual({'root': [], 'ram': []}, self.snapshots(self.parent))
        self.assertEqual([], warm_records.find())

    def test_limit(self) -> None:
        """A tenant deletes an image, and has another one made at once."""
        self.make()
        self.check_made()
        error = self.assertRaises(nova_exception.InternalError, self.make, image_id=OTHER_IMAGE)
        self.assertIn('no more are allowed', str(error))
        self.assertEqual([_CHECKPOINT], self.snapshots(self.parent)['ram'])
        del self.glance.images[WARM_IMAGE]
        self.make(image_id=OTHER_IMAGE)
        self.assertEqual([f'nova-warm-{OTHER_IMAGE}'], self.snapshots(self.parent)['ram'])

    def check_made(self) -> None:
        record = warm_records.get(WARM_IMAGE)
        assert record is not None
        self.assertTrue(record.is_complete)
        self.assertEqual(self.parent['id'], record.server)
        self.assertEqual({'root', 'ram'}, {*record.members})
        self.assertEqual(_CHECKPOINT, self.glance.images[WARM_IMAGE]['properties'][warm.PROPERTY])
        self.assertEqual({'root': [_CHECKPOINT], 'ram': [_CHECKPOINT]}, self.snapshots(self.parent))

    def test_parent_that_is_deleted_meanwhile(self) -> None:
        def update(*_words: Any, **_more: Any) -> None:
            self._delete_server(self.parent)
            raise nova_exception.UnexpectedDeletingTaskStateError(
                instance_uuid=self.parent['id'], expected={}, actual={}
            )

        with mock.patch.object(self.glance, 'update', side_effect=update):
            self.assertRaises(nova_exception.UnexpectedDeletingTaskStateError, self.make)
        self.assertEqual([], warm_records.find())
        self.assertEqual([], self.images())

    def test_service_that_was_killed(self) -> None:
        """While it uploaded."""

        def update(*_words: Any, **_more: Any) -> None:
            self.driver._drop_warm_leftovers()
            self.assertEqual(1, len(warm_records.find()))  # it is in the making
            raise SystemExit

        with (
            mock.patch.object(self.glance, 'update', side_effect=update),
            mock.patch('nova_pcow.libvirt_driver.warm_starts.WarmLibvirtDriver._undo'),
        ):
            self.assertRaises(SystemExit, self.make)
        (record,) = warm_records.find()
        self.assertFalse(record.is_complete)
        self.driver.init_host('compute1')  # when it is started again
        self.assertEqual([], warm_records.find())
        self.assertEqual({'root': [], 'ram': []}, self.snapshots(self.parent))


class WarmServerTest(WarmServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.make()
        self.done.clear()

    def test_goes_on(self) -> None:
        server = self.create()
        self.check_warm(server)
        self.assertEqual([REVERT, 'resume', 'clock'], self.done)
        self.assertEqual([], self.fetched[1:])
        self.assertEqual({}, self.driver._warm)
        self._delete_server(server)
        self.assertEqual(2, len(self.images()))
        self.done.clear()
        # its interfaces are there before it runs
        self.create(networks=[{'uuid': nova_fixtures.NeutronFixture.network_1['id']}])
        self.assertEqual([REVERT, 'attach', 'resume'], self.done[:3])

    def test_qemu_refuses(self) -> None:
        error = exception.QmpFailed(command=REVERT, error_class='E', description='not so')
        with mock.patch('pcow_driver.virt.domain.Domain.qmp', side_effect=error):
            server = self.create()
        self.check_boots(server, 'not so')
        self.assertNotIn('clock', self.done[:-1])

    def test_what_boots(self) -> None:
        """From what is in Glance, and the events say why."""
        self.check_boots(self.create_with(user_data='eA=='), 'user data or a key pair')
        record = warm_records.get(WARM_IMAGE)
        assert record is not None
        warm_records.put(dataclasses.replace(record, project='q'))
        self.check_boots(self.create(), 'is of another project')
        warm_records.put(record)
        image.snapshot_delete(self.path(self.parent), _CHECKPOINT)
        self.check_boots(self.create(), 'has not the checkpoint any more')
        warm_records.forget(WARM_IMAGE)
        self.check_boots(self.create(), 'this host has no checkpoint for its image')
        self.assertNotIn(REVERT, self.done)

    def test_spawn_that_fails(self) -> None:
        with mock.patch(
            'nova_pcow.libvirt_driver.warm_starts.WarmLibvirtDriver._create_guest',
            side_effect=nova_exception.HypervisorUnavailable(),
        ):
            self.create(expected_state='ERROR')
        self.assertEqual(2, len(self.images()))
        self.assertEqual({}, self.driver._warm)

    def test_parent_that_is_deleted(self) -> None:
        claimed, delete = self.reserved(), self.driver.delete_instance_files
        answers: list[bool] = []

        def deleted(instance: Any) -> bool:
            answers.append(delete(instance))
            return answers[-1]

        with mock.patch.object(self.driver, 'delete_instance_files', side_effect=deleted):
            self._delete_server(self.parent)
        self.assertEqual([True], answers)  # Nova does not ask again
        self.assertEqual(2, len(self.images()))
        self.assertGreater(self.reserved(), claimed)  # placement has no claim of it now
        server = self.create()
        self.check_warm(server)
        self._delete_server(server)
        del self.glance.images[WARM_IMAGE]
        self.driver._drop_deleted(self.context(), self.project)
        self.assertEqual([], self.images())

    def reserved(self) -> int:
        """MiB in the pool beside the claims of servers, where there is a limit."""
        return int(inventory.offer(self.limited(), None, None).inventory['reserved'])

    def limited(self) -> Any:
        return registry.PoolRegistry().set('fast', overcommit=1.0)

    def test_parent_that_cannot_be_another(self) -> None:
        found = self.act(self.parent, 'rebuild', {'imageRef': base.IMAGE})
        self.assertEqual('ACTIVE', found['status'])
        self.assertIn('parent of warm images', self.event_words(self.parent, 'rebuild'))
        self.act(self.parent, 'shelve')
        self.assertIn('parent of warm images', self.event_words(self.parent, 'shelve'))
        self.assertEqual(['nova-warm'], [one[:9] for one in self.snapshots(self.parent)['ram']])
        self.assertEqual(2, len(storage.find(self.parent['id'])))
