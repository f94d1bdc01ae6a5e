# SPDX-License-Identifier: Apache-2.0
"""Packages of pcow_driver and of nova_pcow import only those that its docstring has above them, and
no two modules import each other.
"""

import graphlib

from tests.unit.pcow_driver import base
from tools.lib import packages

# modules of nova_pcow that are in no package: what Nova, pcowctl, and the build name
_NAMED = {'build_command', 'cli', 'compat', 'conf', 'driver', 'loader', 'validators'}


class StructureTest(base.TestCase):
    def test_every_package_has_its_place(self) -> None:
        for name, named in (('pcow_driver', set()), ('nova_pcow', _NAMED)):
            top = packages.TOP / name
            found = sorted(path.parent.name for path in top.glob('*/__init__.py'))
            self.assertEqual(found, sorted(packages.order(name)))
            self.assertEqual({'__init__', *named}, {path.stem for path in top.glob('*.py')})

    def test_imports_go_one_way(self) -> None:
        for name, least in (('pcow_driver', 60), ('nova_pcow', 40)):
            found, order = packages.modules(name), packages.order(name)
            self.assertGreater(len(found), least)
            for module, others in found.items():
                for other in others - {'conf'}:  # the options
                    above, below = (order.index(one.split('.')[0]) for one in (other, module))
                    self.assertLessEqual(above, below, f'{name}.{module} imports {other}')

    def test_no_circles(self) -> None:
        for name, first, last, wrong in (
            ('pcow_driver', 'common.exception', 'pools.pool', 'common.units'),
            ('nova_pcow', 'common.flavor', 'servers.storage', 'common.reserved'),
        ):
            graph = packages.modules(name)
            # raises CycleError, which names them
            order = [*graphlib.TopologicalSorter(graph).static_order()]
            self.assertLess(order.index(first), order.index(last))
            graph[wrong].add(last)
            self.assertRaises(graphlib.CycleError, graphlib.TopologicalSorter(graph).prepare)

    def test_services_import_no_command(self) -> None:
        for line in packages.table().splitlines():
            if line.startswith(('nova_pcow', 'cinder_pcow')):
                self.assertNotIn(' provision', line)

    def test_drawing_in_the_documentation(self) -> None:
        """``python3 -m tools.lib.packages`` writes it; lines of files may have changed since."""
        drawn = (base.TOP / 'doc/source/_static/packages.txt').read_text()
        now, then = (
            [[*line.split()[:1], *line.split()[4:]] for line in text.splitlines()]
            for text in (packages.table(), drawn)
        )
        self.assertEqual(now, then)
