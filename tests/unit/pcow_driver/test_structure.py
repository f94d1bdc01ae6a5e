# SPDX-License-Identifier: Apache-2.0
"""Packages of pcow_driver import only those that its docstring has above them, and no two modules
import each other.
"""

import ast
from collections.abc import Iterator
import graphlib
from pathlib import Path
import re

import pcow_driver
from tests.unit.pcow_driver import base

_TOP = Path(pcow_driver.__file__).parent


def imported(path: Path) -> Iterator[str]:
    """Modules of pcow_driver that a file imports, wherever in it: ``common.units``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not (node.module or '').startswith(
            'pcow_driver'
        ):
            continue
        for item in node.names:
            parts = [*str(node.module).split('.'), item.name]
            yield '.'.join(parts[1:3])


def modules() -> dict[str, set[str]]:
    found = {}
    for path in _TOP.glob('*/*.py'):
        if path.name != '__init__.py':
            found['.'.join(path.relative_to(_TOP).with_suffix('').parts)] = set(imported(path))
    return found


class StructureTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.order = re.findall(
            r'^\* :mod:`~pcow_driver\.(\w+)`', pcow_driver.__doc__ or '', re.MULTILINE
        )

    def test_every_package_has_its_place(self) -> None:
        self.assertEqual(
            sorted(path.parent.name for path in _TOP.glob('*/__init__.py')), sorted(self.order)
        )
        self.assertEqual(['__init__.py'], [path.name for path in _TOP.glob('*.py')])

    def test_imports_go_one_way(self) -> None:
        found = modules()
        self.assertGreater(len(found), 60)
        for module, others in found.items():
            for other in others:
                above, below = (self.order.index(name.split('.')[0]) for name in (other, module))
                self.assertLessEqual(above, below, f'{module} imports {other}')

    def test_no_circles(self) -> None:
        graph = modules()
        # raises CycleError, which names them
        order = [*graphlib.TopologicalSorter(graph).static_order()]
        self.assertLess(order.index('common.exception'), order.index('pools.pool'))
        graph['common.units'].add('pools.pool')
        self.assertRaises(graphlib.CycleError, graphlib.TopologicalSorter(graph).prepare)
