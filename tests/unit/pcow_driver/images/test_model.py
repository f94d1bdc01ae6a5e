# SPDX-License-Identifier: Apache-2.0
"""Against output of pcow-img, recorded."""

import copy
import datetime
import json
from typing import Any

from pcow_driver.common import exception
from pcow_driver.images import model
from tests.unit.pcow_driver import base

DATA = base.TOP / 'tests/unit/pcow_driver/data'


def recorded(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding='utf-8'))


class ReaderTest(base.TestCase):
    def test_what_a_terminal_would_obey(self) -> None:
        """Who has broken out of a QEMU chooses what it says."""
        data = model.Reader({'name': 'a\x1b[2J\nb\x9bc\udc80d', 'good': 'a b\u00a0ü'}, 'list')
        self.assertEqual('a\ufffd[2J\ufffdb\ufffdc\ufffdd', data.string('name'))
        self.assertEqual(data.string('name'), data.optional_string('name'))
        self.assertEqual('a b\u00a0ü', data.string('good'))
        self.assertIsNone(data.optional_string('none'))


class ImageInfoTest(base.TestCase):
    def test_chain(self) -> None:
        top, bottom = (model.ImageInfo.from_json(item) for item in recorded('chain.json'))
        self.assertEqual(
            ('/pool/c.pcow', 4 << 20, 12288, 65536, 2, False, 2, 'volatile'),
            (
                top.filename,
                top.virtual_size,
                top.actual_size,
                top.cluster_size,
                top.format,
                top.sealed,
                top.chain_depth,
                top.persistence,
            ),
        )
        self.assertEqual(
            ('a,b.pcow', '/pool/a,b.pcow', bottom.uuid, 'one'),
            (top.base_filename, top.base_path, top.base_uuid, top.base_snapshot),
        )
        self.assertIsNone(bottom.base_uuid)
        self.assertEqual(
            [('1', None, False), ('2', '1', True)],
            [(s.id, s.parent_id, s.current) for s in bottom.snapshots],
        )
        self.assertEqual(
            datetime.datetime(2026, 11, 21, 4, 42, 3, 757984, datetime.UTC),
            bottom.snapshots[0].date,
        )

    def test_every_missing_or_wrong_field_is_named(self) -> None:
        good = recorded('chain.json')[0]
        for path in (
            ('filename',),
            ('format',),
            ('virtual-size',),
            ('actual-size',),
            ('format-specific',),
            ('format-specific', 'data'),
            ('format-specific', 'data', 'uuid'),
            ('format-specific', 'data', 'sealed'),
            ('format-specific', 'data', 'persistence'),
        ):
            for wrong in (..., [1]):
                value = copy.deepcopy(good)
                parent = value
                for key in path[:-1]:
                    parent = parent[key]
                if wrong is ...:
                    del parent[path[-1]]
                else:
                    parent[path[-1]] = wrong
                error = self.assertRaises(
                    exception.ToolOutputInvalid, model.ImageInfo.from_json, value
                )
                self.assertIn(path[-1], str(error))

    def test_refuses_foreign_values(self) -> None:
        good = recorded('chain.json')[0]
        changes: tuple[dict[str, Any], ...] = (
            {'format': 'qcow2'},
            {'virtual-size': -1},
            {'virtual-size': True},
            {'virtual-size': '4M'},
            {'snapshots': {}},
            {'snapshots': [3]},
        )
        for change in changes:
            self.assertRaises(exception.ToolOutputInvalid, model.ImageInfo.from_json, good | change)
        values: tuple[Any, ...] = (None, [], 'x', {})
        for value in values:
            self.assertRaises(exception.ToolOutputInvalid, model.ImageInfo.from_json, value)

    def test_date_out_of_range(self) -> None:
        snapshot = recorded('chain.json')[1]['snapshots'][0] | {'date-sec': 1 << 62}
        self.assertRaises(exception.ToolOutputInvalid, model.Snapshot.from_json, snapshot)


class OtherOutputTest(base.TestCase):
    def test_map(self) -> None:
        extents = [model.Extent.from_json(item) for item in recorded('map.json')]
        self.assertEqual(69206016, sum(extent.length for extent in extents))
        self.assertEqual(
            (False, None, None), (extents[0].present, extents[0].offset, extents[0].filename)
        )
        self.assertEqual(
            (True, 2101248, '/pool/tpl.pcow'),
            (extents[1].present, extents[1].offset, extents[1].filename),
        )

    def test_check(self) -> None:
        clean = model.CheckResult.from_json(recorded('check.json'))
        self.assertTrue(clean.clean)
        leaking = model.CheckResult.from_json(
            recorded('check.json')
            | {'leaks': 2, 'leaks-fixed': 1, 'findings': [{'kind': 'leak', 'message': 'slab 3'}]}
        )
        self.assertFalse(leaking.clean)
        self.assertEqual((model.Finding('leak', 'slab 3'),), leaking.findings)

    def test_losses(self) -> None:
        found = model.CheckResult.from_json(
            recorded('check.json')
            | {
                'lost-size': 8192,
                'lost-size-is': 'at-most',
                'refused': True,
                'lost-left-out': 3,
                'lost': [
                    {'kind': 'data', 'layer': 2, 'guest-offset': 0, 'length': 8192, 'content': 0},
                    {'kind': 'snapshot', 'layer': 1, 'snapshot': 's', 'length': 0},
                ],
            }
        )
        self.assertEqual((8192, 'at-most'), (found.lost_size, found.lost_size_is))
        self.assertEqual(
            (model.Loss('data', 2, None, 0, 8192), model.Loss('snapshot', 1, 's', None, 0)),
            found.lost,
        )
        self.assertEqual((3, True), (found.lost_left_out, found.refused))
        self.assertIsNone(found.rescue)

    def test_nothing_tells_how_much_is_lost(self) -> None:
        """No corruption, and no mere leak."""
        value = recorded('check.json') | {
            'leaks': 1,
            'leaks-doubtful': 1,
            'lost-size': None,
            'lost-size-is': 'unknown',
            'lost': [{'kind': 'unknown', 'length': 0}],
            'findings': [{'kind': 'leak', 'message': 'slab 3'}],
        }
        found = model.CheckResult.from_json(value)
        self.assertEqual((None, 'unknown'), (found.lost_size, found.lost_size_is))
        self.assertEqual((True, 'slab 3'), (found.corrupted, found.damage))
        for change in ({'leaks-fixed': 1, 'rescue': '/x'}, {'leaks-doubtful': 0}):
            found = model.CheckResult.from_json(value | change)
            self.assertEqual((False, None), (found.corrupted, found.damage))

    def test_measure(self) -> None:
        self.assertEqual(
            model.Measure(90112, 75497472),
            model.Measure.from_json({'required': 90112, 'fully-allocated': 75497472}),
        )
