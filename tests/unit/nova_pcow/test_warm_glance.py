# SPDX-License-Identifier: Apache-2.0
"""Warm images that are deleted from Glance, as that tells the service or their project."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest import mock

import fixtures

from nova_pcow.records import warm_records
from nova_pcow.warm_images import warm
from nova_pcow.warm_images import warm_end
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import test_warm_servers

_IMAGE, _OTHER = test_warm_servers.WARM_IMAGE, test_warm_servers.OTHER_IMAGE
_CHILD = '6b2f5ad0-2a9c-4c6f-a2a5-8f3f0f0c7d22'


class _GlanceTestCase(test_warm_servers.WarmServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.make()

    def look(self) -> None:
        """As Nova does after its interval."""
        self.driver.manage_image_cache(self.context(), [])

    def record(self) -> warm_records.Record:
        record = warm_records.get(_IMAGE)
        assert record is not None
        return record

    def is_kept(self) -> bool:
        kept = warm_records.get(_IMAGE) is not None
        self.assertEqual(kept, bool(self.snapshots(self.parent)['ram']))
        return kept


class SeenTest(_GlanceTestCase):
    """The service asks Glance, if it has seen the image there."""

    def setUp(self) -> None:
        super().setUp()
        for name, new in (
            ('nova_pcow.libvirt_driver.warm_ends._service_context', self.context),
            ('nova.tests.fixtures.GlanceFixture.detail', self.listed),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, new))
        warm_records.put(dataclasses.replace(self.record(), is_seen=True))

    def listed(
        self, _glance: Any, _context: Any, *, filters: dict[str, str]
    ) -> list[dict[str, Any]]:
        """What Glance lists of what the service sees: Nova's own fixture has no filters."""
        return [
            {'id': one['id'], 'owner': one['owner']}
            for one in self.glance.images.values()
            if all(one.get(key) == wanted for key, wanted in filters.items())
        ]

    def show(self, visibility: str, owner: str | None = None) -> None:
        """The service sees one of the other images of the project."""
        self.glance.images['o'] = copy.deepcopy(self.glance.images[base.IMAGE]) | {
            'id': 'o',
            'owner': owner or self.project,
            'visibility': visibility,
        }

    def test_gone_twice(self) -> None:
        self.show('private')
        self.look()
        found = self.glance.images.pop(_IMAGE)
        self.look()
        self.assertTrue(self.record().is_missed)
        self.glance.images[_IMAGE] = found
        self.look()
        self.assertFalse(self.record().is_missed)
        del self.glance.images[_IMAGE]
        for _once in range(2):  # is not enough
            self.assertTrue(self.is_kept())
            self.look()
        self.assertFalse(self.is_kept())

    def test_never_seen(self) -> None:
        warm_records.put(dataclasses.replace(self.record(), is_seen=False))
        self.show('private')
        del self.glance.images[_IMAGE]
        for _once in range(3):
            self.look()
        self.assertTrue(self.is_kept())

    def test_rights_that_are_lost(self) -> None:
        """What everybody sees, or somebody of another project, says nothing of them."""
        warm_records.put(dataclasses.replace(self.record(), image=_OTHER, members={}))
        self.glance.images[_OTHER] = copy.deepcopy(self.glance.images[_IMAGE]) | {
            'id': _OTHER,
            'owner': self.project,
            'visibility': 'public',
        }
        del self.glance.images[_IMAGE]
        for visibility, owner in (
            ('public', None),
            ('shared', None),
            ('community', None),
            ('private', 'of-another'),
        ):
            self.show(visibility, owner)
            with self.assertLogs('nova_pcow.libvirt_driver.warm_ends', 'WARNING') as log:
                for _once in range(3):
                    self.look()
            self.assertIn(_IMAGE, log.output[0])
            self.assertTrue(self.is_kept())
        self.assertEqual(2, len(warm_records.find()))

    def test_misses_that_do_not_follow_each_other(self) -> None:
        """It was seen in between, when nothing told whether the service has its rights."""
        warm_records.put(dataclasses.replace(self.record(), image=_OTHER, members={}))
        self.show('private')
        found = self.glance.images.pop(_IMAGE)
        self.look()
        self.assertTrue(self.record().is_missed)
        self.glance.images[_IMAGE] = found
        del self.glance.images['o']
        self.look()
        self.assertFalse(self.record().is_missed)


class GivenUpTest(_GlanceTestCase):
    def test_what_stands_on_it(self) -> None:
        """The service never sees the image, and is told once that it is gone."""
        made = warm.fork(self.record(), _CHILD)
        del self.glance.images[_IMAGE]
        with self.assertLogs('nova_pcow.libvirt_driver.warm_ends', 'WARNING') as log:
            self.driver._drop_deleted(self.context(), self.project)
        self.assertIn('what stands on it', log.output[0])
        self.assertEqual('image deleted', warm_end.condition(self.record()))
        self.look()
        self.assertTrue(self.is_kept())
        for name in made:
            self.pool.delete_image(name)
        self.look()
        self.assertFalse(self.is_kept())

    def test_nova_that_cannot_be_asked(self) -> None:
        """Of its parent, which was deleted."""
        self._delete_server(self.parent)
        del self.glance.images[_IMAGE]
        with mock.patch('nova.objects.Instance.get_by_uuid', side_effect=RuntimeError('away')):
            self.driver._drop_deleted(self.context(), self.project)
        self.assertEqual(2, len(self.images()))
        self.look()
        self.assertEqual([], self.images())
        self.assertEqual([], warm_records.find())
