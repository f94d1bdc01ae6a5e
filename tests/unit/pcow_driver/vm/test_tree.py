# SPDX-License-Identifier: Apache-2.0
"""The tree, from QEMU and from images."""

import datetime
from typing import Any

from pcow_driver.common import exception
from pcow_driver.vm import model
from pcow_driver.vm import tree
from tests.unit.pcow_driver.vm import recorded


def _state(number: int, name: str, **fields: Any) -> dict[str, Any]:
    return recorded.snapshot(number, name, **{'vm-state-size': 500, **fields})


class TreeTest(recorded.TestCase):
    def test_from_qemu(self) -> None:
        self.recorded.replies['query-pcow-checkpoints'] = [
            {
                'name': name,
                'date-sec': recorded.SECOND,
                'date-nsec': 5000,
                **({'parent': parent} if parent else {}),
                'current': name == 'b',
                'state-size': 1,
                'data-size': 2,
                'shared-size': 3,
                'delete-frees': 4,
            }
            for name, parent in (('a', None), ('b', 'a'))
        ]
        first, second = tree.checkpoints(self.found)
        self.assertEqual((None, 'a'), (first.parent, second.parent))
        self.assertEqual((False, True), (first.current, second.current))
        self.assertEqual(
            (1, 2, 3, 4), (first.state_size, first.data_size, first.shared_size, first.delete_frees)
        )
        self.assertEqual(5, first.date.microsecond)
        self.assertEqual(datetime.UTC, first.date.tzinfo)

    def test_from_qemu_of_another_version(self) -> None:
        self.recorded.replies['query-pcow-checkpoints'] = [{'name': 'a'}]
        self.assertRaises(exception.ToolOutputInvalid, tree.checkpoints, self.found)

    def test_from_qemu_what_makes_no_sense(self) -> None:
        wrong: tuple[Any, ...] = (None, 1, {'a': 1}, [None], [[]], 0)
        for value in wrong:
            self.recorded.replies['query-pcow-checkpoints'] = value
            self.assertRaises(exception.ToolOutputInvalid, tree.checkpoints, self.found)

    def test_from_images(self) -> None:
        """What is no checkpoint is passed over: a snapshot of the RAM alone, and what QEMU has
        still to finish, or take back.
        """
        self.recorded.active = False
        self.write(
            [
                _state(1, 'a'),
                recorded.snapshot(2, 'mine', **{'parent-id': '1'}),
                _state(3, 'b', **{'parent-id': '2'}),
                _state(4, '.deleting-1.2-3', **{'parent-id': '3'}),
                recorded.snapshot(5, '.checkpoint-1.2-3', **{'parent-id': '4'}, current=True),
                _state(6, 'c', **{'parent-id': '1'}),
            ],
            [
                recorded.snapshot(1, 'a'),
                # another one's
                recorded.snapshot(9, 'b'),
                recorded.snapshot(6, 'c', **{'delete-frees': 7}),
            ],
        )
        found = tree.checkpoints(self.found)
        self.assertEqual([('a', None), ('b', 'a'), ('c', 'a')], [(x.name, x.parent) for x in found])
        self.assertEqual(['b'], [x.name for x in found if x.current])
        self.assertEqual([8192, 4096, 8192], [x.data_size for x in found])
        self.assertEqual([200, 100, 107], [x.delete_frees for x in found])
        self.assertEqual([500] * 3, [x.state_size for x in found])
        self.assertEqual([], self.recorded.calls)

    def test_no_ram(self) -> None:
        self.recorded.active, self.recorded.has_ram = False, False
        error = self.assertRaises(exception.DomainInvalid, tree.checkpoints, self.found)
        self.assertIn('pcowctl domain-xml --ram', str(error))

    def test_parts(self) -> None:
        self.recorded.active = False
        self.write([_state(1, 'a')], [recorded.snapshot(1, 'a')])
        parts = tree.find_parts(self.found, 'a')
        self.assertEqual([str(self.ram), str(self.nvdimm)], list(parts.snapshots))
        self.assertRaises(exception.CheckpointNotFound, tree.find_parts, self.found, 'b')


class BranchesTest(recorded.TestCase):
    def test_each_stands_below_its_parent(self) -> None:
        date = datetime.datetime.now(datetime.UTC)
        found = [
            model.Checkpoint(name, date, parent, False, 0, 0, 0, 0)
            for name, parent in (
                ('a', None),
                ('b', 'a'),
                ('c', 'a'),
                ('d', 'b'),
                ('e', None),
                ('f', 'gone'),
            )
        ]
        self.assertEqual(
            [(0, 'a'), (1, 'b'), (2, 'd'), (1, 'c'), (0, 'e'), (0, 'f')],
            [(depth, one.name) for depth, one in tree.branches(found)],
        )
