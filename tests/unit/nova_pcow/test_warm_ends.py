# SPDX-License-Identifier: Apache-2.0
"""The end of warm images, and of the servers that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import threading
from typing import Any
from unittest import mock

import fixtures
from nova import exception as nova_exception
from nova.compute import task_states

from nova_pcow.libvirt_driver import deletion
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from nova_pcow.warm_images import warm_end
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.images import model
from tests.unit.nova_pcow import test_ram
from tests.unit.nova_pcow import test_warm
from tests.unit.nova_pcow import test_warm_servers

_IMAGE, _OTHER = test_warm_servers.WARM_IMAGE, test_warm_servers.OTHER_IMAGE
_CHILD = test_warm.CHILD
_RAW = 'unnamed'
_OTHER_SECONDS = 0.3  # what who does not wait is given


class ParentTest(test_warm_servers.WarmServersTestCase):
    """Whatever deletes the files of a server, only its own end leaves its images to warm ones."""

    def setUp(self) -> None:
        super().setUp()
        self.make()

    def delete_files(self, **values: Any) -> None:
        instance = self.instance(self.parent)
        for name, value in values.items():
            setattr(instance, name, value)
        self.driver.delete_instance_files(instance)

    def is_orphaned(self) -> bool:
        record = warm_records.get(_IMAGE)
        assert record is not None
        return record.is_orphaned

    def condition(self) -> str:
        (record,) = warm_records.find()
        return warm_end.condition(record)

    def test_what_is_no_end(self) -> None:
        uuid = self.parent['id']
        with self.driver._keep_images(uuid, storage.find(uuid)):  # an evacuation that failed
            self.delete_files(task_state=task_states.DELETING)
        self.delete_files()
        self.delete_files(task_state=task_states.REBUILDING)
        self.assertFalse(self.is_orphaned())
        self.assertEqual(2, len(storage.find(uuid)))
        del self.glance.images[_IMAGE]
        self.driver._drop_deleted(self.context(), self.project)
        self.assertEqual([], warm_records.find())
        self.assertEqual(2, len(storage.find(uuid)))

    def test_deletion_that_does_not_end(self) -> None:
        """Its domain has gone, and Nova still has the server."""
        self.delete_files(task_state=task_states.DELETING)
        self.assertTrue(self.is_orphaned())
        del self.glance.images[_IMAGE]
        with (
            mock.patch('nova_pcow.warm_images.warm_end.find_parent', return_value=None),
            self.assertLogs('nova_pcow.libvirt_driver.warm_ends', 'WARNING') as log,
        ):
            self.driver._drop_deleted(self.context(), self.project)
            self.driver.manage_image_cache(self.context(), [])
        self.assertEqual(2, len(log.output))
        for words in log.output:
            self.assertIn('reboot it hard to keep it', words)
        self.assertEqual(2, len(storage.find(self.parent['id'])))
        self.assertTrue(self.is_orphaned())
        self.assertEqual('deletion begun', self.condition())
        self._reboot_server(self.parent, hard=True)
        self.assertFalse(self.is_orphaned())

    def test_deletion_that_has_ended(self) -> None:
        """Nova says so when it looks after its image cache, if its database can be asked."""
        self._delete_server(self.parent)
        with mock.patch('nova.objects.Instance.get_by_uuid', side_effect=RuntimeError('away')):
            self.driver.manage_image_cache(self.context(), [])
        self.assertEqual('deletion begun', self.condition())
        self.driver.manage_image_cache(self.context(), [])
        self.assertEqual('parent deleted', self.condition())
        (record,) = warm_records.find()
        warm_end.remove(record, None)
        self.assertEqual([], storage.find(self.parent['id']))

    def test_no_space_for_its_lock(self) -> None:
        """It stays as it is until Nova asks again, which it does for others meanwhile."""
        instance = self.instance(self.parent)
        instance.task_state = task_states.DELETING
        error = OSError(errno.ENOSPC, 'No space left on device', 'pcow-warm')
        for name, cause in (
            ('pcow_driver.common.locks._make_file', error),
            (
                'nova_pcow.records.warm_records.of_server',
                exception.StateInvalid(path='p', reason='r'),
            ),
        ):
            with (
                mock.patch(name, side_effect=cause),
                self.assertLogs('nova_pcow.libvirt_driver.deletion', 'WARNING') as log,
            ):
                self.assertIs(False, self.driver.delete_instance_files(instance))
            self.assertIn('The images of the server stay for now', log.output[0])
        self.assertEqual(2, len(storage.find(self.parent['id'])))
        self.assertIs(True, self.driver.delete_instance_files(instance))
        self.assertTrue(self.is_orphaned())

    def test_deletion_that_was_given_up(self) -> None:
        """Nova has asked as often as it does, and none of the times this host could note it."""
        error = exception.StateInvalid(path='p', reason='r')
        with mock.patch('nova_pcow.records.warm_records.of_server', side_effect=error):
            self._delete_server(self.parent)
        self.assertFalse(self.is_orphaned())
        self.driver.manage_image_cache(self.context(), [])
        self.assertEqual('parent deleted', self.condition())
        del self.glance.images[_IMAGE]
        self.driver._drop_deleted(self.context(), self.project)
        self.assertEqual([], storage.find(self.parent['id']))

    def test_records_that_cannot_be_listed(self) -> None:
        """Servers that have nothing of pcow go on to be deleted."""
        flavor = self._create_flavor(memory_mb=256, disk=1, ephemeral=0)
        plain = self._create_server(flavor_id=flavor, networks='none')
        error = exception.StateInvalid(path='p', reason='r')
        with mock.patch('nova_pcow.records.warm_records.of_server', side_effect=error):
            self._delete_server(plain)


class MakingTest(test_warm_servers.WarmServersTestCase):
    def test_completed_meanwhile(self) -> None:
        """Its making ends just after who gives up what nobody makes has listed it."""
        listed: list[warm_records.Record] = []

        def update(*_words: Any, **_more: Any) -> None:
            listed.extend(warm_records.find())

        with mock.patch.object(self.glance, 'update', side_effect=update):
            self.make()
        self.assertEqual([False], [one.is_complete for one in listed])
        with mock.patch.object(self.driver, '_records', return_value=listed):
            self.driver._drop_pending()
        self.assertEqual([True], [one.is_complete for one in warm_records.find()])
        self.assertEqual([f'nova-warm-{_IMAGE}'], self.snapshots(self.parent)['ram'])


class UnnamedTest(test_warm_servers.WarmServersTestCase):
    """QEMU has made a checkpoint, and had no space to give it its name; it only warns of that."""

    def test_parent_that_runs(self) -> None:
        """QEMU names it when it is asked to delete it."""
        uuid = self.parent['id']

        def take(_found: Any, _name: str) -> None:
            for item in storage.find(uuid):
                image.snapshot_create(item.path, _RAW)

        def delete(_found: Any, _name: str) -> None:
            self.done.append('delete')
            for item in storage.find(uuid):
                image.snapshot_delete(item.path, _RAW)

        with (
            mock.patch('pcow_driver.vm.checkpoint.take', take),
            mock.patch('pcow_driver.vm.checkpoint.delete', delete),
            unnamed_snapshots(),
            self.assertLogs('nova_pcow.libvirt_driver.warm_starts', 'WARNING'),
        ):
            self.assertRaises(nova_exception.InternalError, self.make)
        self.assertEqual(['delete'], self.done)
        self.assertEqual([], warm_records.find())

    def test_what_is_not_deleted_now(self) -> None:
        """It is tried again whenever Nova looks after its image cache."""
        error = exception.QmpFailed(command='c', error_class='E', description='busy')
        with (
            mock.patch('pcow_driver.vm.checkpoint.delete', side_effect=error),
            mock.patch.object(self.glance, 'update', side_effect=KeyError),
            self.assertLogs('nova_pcow.libvirt_driver.warm_ends', 'WARNING') as log,
        ):
            self.assertRaises(KeyError, self.make)
        self.assertIn('busy', log.output[0])
        self.assertEqual(1, len(warm_records.find()))
        self.driver.manage_image_cache(self.context(), [])
        self.assertEqual([], warm_records.find())
        self.assertEqual({'root': [], 'ram': []}, self.snapshots(self.parent))


@contextlib.contextmanager
def unnamed_snapshots() -> Iterator[None]:
    """Those of one name bear the mark of QEMU; pcow-img makes none of that name."""
    read = image.snapshot_list

    def listed(path: str, **options: Any) -> list[model.Snapshot]:
        return [
            dataclasses.replace(
                one, name=test_ram.TAKING, vm_state_size=500 if path.endswith('-ram.pcow') else 0
            )
            if one.name == _RAW
            else one
            for one in read(path, **options)
        ]

    with mock.patch('pcow_driver.images.image.snapshot_list', listed):
        yield


class OffTest(test_warm.WarmTestCase):
    def test_unnamed(self) -> None:
        """The next start of the parent names it: until then it has to be known."""
        record = self.record(checksum='')
        warm_records.put(record)
        for role in ('root', 'ram'):
            image.snapshot_create(self.path(record.server, role), _RAW)
        with unnamed_snapshots():
            error = self.assertRaises(warm.WarmStays, warm_end.remove, record, None)
            self.assertIn('its next start finishes that', str(error))
            parent = mock.Mock(active=lambda: False, is_checkpoint=lambda _name: False)
            self.assertRaises(warm.WarmStays, warm_end.remove, record, parent)
        self.assertEqual([record], warm_records.find())
        for role in ('root', 'ram'):
            path = self.path(record.server, role)
            image.snapshot_rename(path, _RAW, record.checkpoint)
        warm_end.remove(record, None)
        self.assertEqual([], self.snapshots('root') + self.snapshots('ram'))


class RaceTest(test_warm.WarmTestCase):
    """Two at once: one waits for the other."""

    def meanwhile(self, record: warm_records.Record) -> Callable[[], None]:
        """Another process gives up a warm image when this is called for the first time."""
        other = threading.Thread(
            target=warm_end.remove, args=(record, None), kwargs={'is_parent_deleted': True}
        )
        self.addCleanup(other.join)

        def run() -> None:
            if other.ident is None:
                other.start()
                other.join(_OTHER_SECONDS)

        self.join = other.join
        return run

    def test_removals(self) -> None:
        """Of the last two of a parent that was deleted: the second one takes its images."""
        one, two = (self.make(name, is_orphaned=True) for name in (_IMAGE, _OTHER))
        run, delete = self.meanwhile(two), image.snapshot_delete

        def deleted(path: str, name: str) -> int:
            run()
            return delete(path, name)

        with mock.patch('pcow_driver.images.image.snapshot_delete', deleted):
            warm_end.remove(one, None)
            self.join()
        self.assertEqual([], warm_records.find())
        self.assertEqual([], storage.find(one.server))

    def test_qemu_that_does_not_answer(self) -> None:
        """Who gives a checkpoint up waits for it, and nobody else does."""
        self.useFixture(fixtures.MonkeyPatch('nova_pcow.records.warm_records._PATIENCE', 0.2))
        one, two = (self.make(name) for name in (_IMAGE, _OTHER))
        asked, answered = threading.Event(), threading.Event()
        self.addCleanup(answered.set)

        def delete(_found: Any, _name: str) -> None:
            asked.set()
            answered.wait()

        parent = mock.Mock(active=lambda: True, writable=lambda: [])
        with mock.patch('pcow_driver.vm.checkpoint.delete', delete):
            waiting = threading.Thread(target=warm_end.remove, args=(one, parent))
            waiting.start()
            self.assertTrue(asked.wait(60))
            self.assertRaises(exception.LockHeld, warm.fork, two, _CHILD)
            self.assertRaises(exception.LockHeld, warm_end.remove, two, parent)
            self.assertIs(False, self.end_parent())
            self.assertEqual(2, len(storage.find(one.server)))
            answered.set()
            waiting.join()
        self.assertEqual([two], warm_records.find())

    def end_parent(self) -> bool:
        """As Nova has the driver do it: whether nothing stays that has to go."""
        instance = mock.Mock(uuid=test_warm.PARENT, deleted=True)
        driver = mock.Mock(_orphan=deletion.DeletionLibvirtDriver._orphan)
        with mock.patch('nova_pcow.common.flavor.is_pcow', return_value=True):
            return deletion.DeletionLibvirtDriver._delete_images(driver, instance, frozenset())

    def test_removal_and_the_end_of_the_parent(self) -> None:
        record = self.make()
        run, of_server = self.meanwhile(record), warm_records.of_server

        def found(uuid: str) -> list[warm_records.Record]:
            known = of_server(uuid)
            run()
            return known

        with mock.patch('nova_pcow.records.warm_records.of_server', found):
            self.end_parent()
            self.join()
        self.assertEqual([], warm_records.find())
        self.assertEqual([], storage.find(record.server))
