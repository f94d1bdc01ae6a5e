# SPDX-License-Identifier: Apache-2.0
"""What of the Python packages imports what, read from the code: the drawing in the documentation.

python3 -m tools.lib.packages > doc/source/_static/packages.txt
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
import re
import statistics

TOP = Path(__file__).resolve().parents[2]
_SERVICES = ('nova_pcow', 'cinder_pcow')


def imported(path: Path) -> Iterator[str]:
    """Modules of pcow_driver that a file imports, wherever in it: ``common.units``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ''
        if module != 'pcow_driver' and not module.startswith('pcow_driver.'):
            continue
        for item in node.names:
            yield '.'.join([*module.split('.'), item.name][1:3])


def modules() -> dict[str, set[str]]:
    """Of each module of pcow_driver the others that it imports."""
    top = TOP / 'pcow_driver'
    return {
        '.'.join(path.relative_to(top).with_suffix('').parts): set(imported(path))
        for path in top.glob('*/*.py')
        if path.name != '__init__.py'
    }


def order() -> list[str]:
    """The packages, as the docstring of pcow_driver has them: each imports those above it."""
    text = (TOP / 'pcow_driver/__init__.py').read_text()
    return re.findall(r'^\* :mod:`~pcow_driver\.(\w+)`', text, re.MULTILINE)


def _row(name: str, files: list[Path], arrows: set[str]) -> str:
    lines = [len(path.read_text().splitlines()) for path in files]
    median = statistics.median_low(lines)
    shown = ' '.join(one for one in order() if one in arrows)
    return f'{name:12} {len(files):5} {median:6} {max(lines):7}  {shown}'.rstrip()


def table() -> str:
    """A row a package: its files, their median and largest number of lines, what it imports."""
    found = modules()
    rows = ['package      files median largest  imports', '']
    for package in order():
        files = [
            path for path in TOP.glob(f'pcow_driver/{package}/*.py') if path.stem != '__init__'
        ]
        arrows = {
            other.split('.')[0]
            for module, others in found.items()
            if module.startswith(f'{package}.')
            for other in others
        }
        rows.append(_row(package, files, arrows - {package}))
    rows.append('')
    for service in _SERVICES:
        files = [path for path in (TOP / service).glob('*.py') if path.stem != '__init__']
        rows.append(
            _row(service, files, {one.split('.')[0] for path in files for one in imported(path)})
        )
    return '\n'.join(rows) + '\n'


if __name__ == '__main__':
    print(table(), end='')
