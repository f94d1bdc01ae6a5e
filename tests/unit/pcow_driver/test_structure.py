# SPDX-License-Identifier: Apache-2.0
"""Packages of pcow_driver import only those that its docstring has above them, and no two modules
import each other.
"""

import graphlib

from tests.unit.pcow_driver import base
from tools.lib import packages

_TOP = packages.TOP / 'pcow_driver'


class StructureTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.order = packages.order()

    def test_every_package_has_its_place(self) -> None:
        found = sorted(path.parent.name for path in _TOP.glob('*/__init__.py'))
        self.assertEqual(found, sorted(self.order))
        self.assertEqual(['__init__.py'], [path.name for path in _TOP.glob('*.py')])

    def test_imports_go_one_way(self) -> None:
        found = packages.modules()
        self.assertGreater(len(found), 60)
        for module, others in found.items():
            for other in others:
                above, below = (self.order.index(name.split('.')[0]) for name in (other, module))
                self.assertLessEqual(above, below, f'{module} imports {other}')

    def test_no_circles(self) -> None:
        graph = packages.modules()
        # raises CycleError, which names them
        order = [*graphlib.TopologicalSorter(graph).static_order()]
        self.assertLess(order.index('common.exception'), order.index('pools.pool'))
        graph['common.units'].add('pools.pool')
        self.assertRaises(graphlib.CycleError, graphlib.TopologicalSorter(graph).prepare)

    def test_services_import_no_command(self) -> None:
        for line in packages.table().splitlines():
            if line.startswith(('nova_pcow', 'cinder_pcow')):
                self.assertNotIn(' provision', line)

    def test_drawing_in_the_documentation(self) -> None:
        """``python3 -m tools.lib.packages`` writes it; lines of files may have changed since."""
        drawn = (base.TOP / 'doc/source/_static/packages.txt').read_text()
        now, then = (
            [[line.split()[0], *line.split()[4:]] for line in text.splitlines() if line]
            for text in (packages.table(), drawn)
        )
        self.assertEqual(now, then)
