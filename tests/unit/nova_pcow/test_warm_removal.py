# SPDX-License-Identifier: Apache-2.0
"""What is given up with a warm image, as far as the host's record and the images of the parent have
it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any
from unittest import mock

from nova_pcow import cli
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from nova_pcow.warm_images import warm_end
from pcow_driver.images import image
from tests.unit.nova_pcow import test_warm

_PARENT, _CHILD = test_warm.PARENT, test_warm.CHILD
_IMAGE, _OTHER = test_warm.IMAGE, test_warm.OTHER


class ConditionTest(test_warm.WarmTestCase):
    def test_conditions(self) -> None:
        record = self.make()
        self.assertEqual('ready', warm_end.condition(record))
        for values, words in (
            ({'checksum': ''}, 'in the making'),
            ({'is_image_deleted': True}, 'image deleted'),
            ({'is_image_deleted': True, 'is_orphaned': True}, 'deletion begun'),
            ({'is_orphaned': True}, 'deletion begun'),
            ({'is_orphaned': True, 'is_parent_deleted': True}, 'parent deleted'),
            ({'pool': _OTHER}, 'pool not there'),
        ):
            changed: dict[str, Any] = values
            self.assertEqual(words, warm_end.condition(dataclasses.replace(record, **changed)))
        image.snapshot_delete(self.path(_PARENT, 'ram'), record.checkpoint)
        self.assertEqual('checkpoint gone', warm_end.condition(record))


class RemovalTest(test_warm.WarmTestCase):
    def test_parent_that_is_off(self) -> None:
        record = self.make()
        warm_end.remove(record, None)
        self.assertEqual([], self.snapshots('root') + self.snapshots('ram'))
        self.assertEqual([], warm_records.find())

    def test_children(self) -> None:
        record = self.make()
        made = warm.fork(record, _CHILD)
        error = self.assertRaises(warm.WarmStays, warm_end.remove, record, None)
        self.assertIn(f'what stands on it is {", ".join(sorted(made))}', str(error))
        self.assertEqual([record], warm_records.find())
        self.assertEqual([record.checkpoint], self.snapshots('ram'))
        storage.discard(_CHILD, made)
        warm_end.remove(record, None)
        self.assertEqual([], self.snapshots('root') + self.snapshots('ram'))

    def test_parent_that_was_deleted(self) -> None:
        """Its images go with the last warm image."""
        one, two = (
            self.make(name, is_orphaned=True, is_parent_deleted=True) for name in (_IMAGE, _OTHER)
        )
        warm_end.remove(one, None)
        self.assertEqual([two.checkpoint], self.snapshots('root'))
        made = warm.fork(two, _CHILD)
        self.assertRaises(warm.WarmStays, warm_end.remove, two, None)
        self.assertEqual(2, len(storage.find(_PARENT)))
        storage.discard(_CHILD, made)
        warm_end.remove(two, None)
        self.assertEqual([], storage.find(_PARENT))
        self.assertEqual([], warm_records.find())

    def test_deletion_that_nova_has_not_confirmed(self) -> None:
        """It may have failed, and the server be brought back."""
        record = self.make(is_orphaned=True)
        error = self.assertRaises(warm.WarmStays, self.delete_warm)
        self.assertIn('Nova has not said that it has ended', str(error))
        self.assertEqual(1, str(error).count('stays:'))
        self.assertEqual(2, len(storage.find(_PARENT)))
        self.assertEqual([record], warm_records.find())
        self.delete_warm('--parent-deleted')
        self.assertEqual([], storage.find(_PARENT))

    def test_deletion_that_this_host_could_not_note(self) -> None:
        self.make()
        self.delete_warm('--parent-deleted')
        self.assertEqual([], storage.find(_PARENT))

    def delete_warm(self, *options: str) -> None:
        """By pcowctl, where the parent has no domain."""
        command = cli.DeleteWarm(mock.Mock(), mock.Mock())
        with (
            mock.patch('pcow_driver.virt.libvirt_host.connect'),
            mock.patch('pcow_driver.virt.libvirt_host.names_by_uuid', return_value={}),
        ):
            command.take_action(command.get_parser('').parse_args([_IMAGE, *options]))

    def test_what_was_cut_off(self) -> None:
        """The service was killed before there was a checkpoint, or between its removal and that of
        the record.
        """
        warm_records.put(self.record(checksum=''))
        warm_end.remove(self.record(checksum=''), None)
        self.assertEqual([], warm_records.find())
        record = self.make()
        image.snapshot_delete(self.path(_PARENT, 'ram'), record.checkpoint)
        warm_end.remove(record, None)
        self.assertEqual([], self.snapshots('root'))

    def test_pool_that_is_not_there(self) -> None:
        record = self.make()
        os.rename(self.pool.path, f'{self.pool.path}-away')
        error = self.assertRaises(warm.WarmStays, warm_end.remove, record, None)
        self.assertIn('is not there', str(error))
        self.assertEqual([record], warm_records.find())
