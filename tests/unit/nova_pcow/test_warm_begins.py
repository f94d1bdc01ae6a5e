# SPDX-License-Identifier: Apache-2.0
"""What keeps a server from going on from a checkpoint, beside what its flavor and image are."""

from __future__ import annotations

import json
import threading
import types
from typing import Any
from unittest import mock

import fixtures
from nova import exception as nova_exception

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.common import reserved
from nova_pcow.migration import cold_migration
from nova_pcow.records import notes
from nova_pcow.records import warm_records
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from tests.unit.nova_pcow import test_warm_servers

_QMP = domain.Domain.qmp  # which other tests replace


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

    def test_parent_that_does_not_answer(self) -> None:
        """Somebody gives up another checkpoint of it meanwhile, and its QEMU takes its time."""
        self.useFixture(fixtures.MonkeyPatch('nova_pcow.records.warm_records._PATIENCE', 0.2))
        with warm_records.lock(self.parent['id']):
            server = self.create()
        words = 'it cannot begin warm: the lock '
        self.check_boots(server, words)

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
        """Nova's other work, all in one thread, goes on while it is asked, for whatever."""
        nova_conf.CONF.set_override('warm_images', 2, 'nova_pcow')
        nova = threading.get_native_id()
        asked, kept_waiting = set[str](), set[str]()

        def monitor(_domain: Any, command: str, _flags: int) -> str:
            name = json.loads(command)['execute']
            (kept_waiting if threading.get_native_id() == nova else asked).add(name)
            return json.dumps({'return': {'status': 'running', 'freed': 0}})

        def processor(found: domain.Domain) -> str:
            found.qmp('query-version')
            return '<cpu/>'

        def take(found: domain.Domain, name: str) -> None:
            found.qmp('pcow-checkpoint-create')
            self._take(found, name)

        def delete(found: domain.Domain, name: str) -> None:
            found.qmp('pcow-checkpoint-delete')
            self._delete(found, name)

        imported = libvirt_host.binding

        for name, new in (
            (
                'pcow_driver.virt.libvirt_host.binding',
                lambda name: (
                    types.SimpleNamespace(qemuMonitorCommand=monitor)
                    if name == 'libvirt_qemu'
                    else imported(name)
                ),
            ),
            ('pcow_driver.virt.domain.Domain.qmp', _QMP),
            ('pcow_driver.virt.domain.Domain._backend', lambda _found, item: item.path),
            ('nova_pcow.warm_images.warm.processor', processor),
            ('pcow_driver.vm.checkpoint.take', take),
            ('pcow_driver.vm.checkpoint.delete', delete),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, new))
        self.check_warm(self.create())
        self.make(image_id=test_warm_servers.OTHER_IMAGE)
        record = warm_records.get(test_warm_servers.OTHER_IMAGE)
        assert record is not None
        self.driver._drop(record)
        self.assertIsNone(warm_records.get(test_warm_servers.OTHER_IMAGE))
        of_warm_images = {
            'query-status',
            'query-version',
            'pcow-checkpoint-create',
            'pcow-checkpoint-revert',
            'pcow-checkpoint-delete',
        }
        self.assertEqual((set(), of_warm_images), (kept_waiting, asked))

        asked.clear()
        instance, path = self.instance(self.parent), self.path(self.parent, 'root')
        with self.driver._frozen(instance, path, 'of-one'):
            self.assertEqual({'query-status', 'pcow-snapshot-create'}, asked)
        self.assertIn('pcow-snapshot-delete', asked)

        asked.clear()
        name = f'{reserved.RESIZE}-1'
        image.snapshot_create(path, name)
        cold_migration.forget(instance.uuid, self.driver._domain(instance))
        self.assertEqual({'query-status', 'pcow-snapshot-delete'}, asked)
        image.snapshot_delete(path, name)

        asked.clear()
        with (
            mock.patch('nova_pcow.servers.ram._forget_left'),
            # Nova's libvirt for tests cannot tell
            mock.patch.object(domain.Domain, 'running', return_value=True),
            mock.patch.object(domain.Domain, 'suspend'),
        ):
            ram.suspend(self.driver._domain(instance), mock.Mock())
        self.assertEqual({'query-status', 'pcow-checkpoint-create'}, asked)
        self.assertEqual(set(), kept_waiting)


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
        """Also if a resize has noted that it left it so: the server itself goes on with it."""
        path, uuid = self.path(self.parent, 'root'), self.parent['id']
        size = image.info(path).virtual_size + 64 * units.MIB
        image.resize(path, size)
        wanted = flavor.of(self.instance(self.parent))
        for noted in (None, json.dumps({'root': size})):
            if noted is not None:
                notes.put(notes.GROWN, uuid, noted)
                storage.check_sizes(uuid, wanted)
            error = self.assertRaises(
                exception.DeviceTooLarge, warm._check, mock.Mock(), uuid, wanted
            )
            self.assertIn('says that it holds', str(error))
