# SPDX-License-Identifier: Apache-2.0
"""What of the Python packages imports what, read from the code: the drawing in the documentation.

python3 -m tools.lib.packages > doc/source/_static/packages.txt
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from collections.abc import Iterator
from pathlib import Path
import re
import statistics

TOP = Path(__file__).resolve().parents[2]
LAYERED = ('pcow_driver', 'nova_pcow')  # those of packages that import only what is above them


def imported(path: Path, name: str = 'pcow_driver') -> Iterator[str]:
    """Modules of a distribution's package that a file imports, wherever in it: ``common.units``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ''
        if module != name and not module.startswith(f'{name}.'):
            continue
        for item in node.names:
            yield '.'.join([*module.split('.'), item.name][1:3])


def modules(name: str = 'pcow_driver') -> dict[str, set[str]]:
    """Of each module in the packages of one the others that it imports."""
    top = TOP / name
    return {
        '.'.join(path.relative_to(top).with_suffix('').parts): set(imported(path, name))
        for path in top.glob('*/*.py')
        if path.name != '__init__.py'
    }


def order(name: str = 'pcow_driver') -> list[str]:
    """The packages, as the docstring of theirs has them: each imports those above it."""
    text = (TOP / name / '__init__.py').read_text()
    return re.findall(rf'^\* :mod:`~{name}\.(\w+)`', text, re.MULTILINE)


def _row(name: str, files: list[Path], arrows: Iterable[str]) -> str:
    lines = [len(path.read_text().splitlines()) for path in files]
    median = statistics.median_low(lines)
    return f'{name:14} {len(files):5} {median:6} {max(lines):7}  {" ".join(arrows)}'.rstrip()


def _packages(name: str) -> Iterator[str]:
    """A row for each."""
    found, packages = modules(name), order(name)
    for package in packages:
        files = _files(TOP / name / package)
        arrows = {
            other.split('.')[0]
            for module, others in found.items()
            if module.startswith(f'{package}.')
            for other in others
        }
        yield _row(package, files, (one for one in packages if one in arrows - {package}))


def _files(top: Path) -> list[Path]:
    return [path for path in top.rglob('*.py') if path.stem != '__init__']


def _service(name: str) -> str:
    arrows = {one.split('.')[0] for path in _files(TOP / name) for one in imported(path)}
    return _row(name, _files(TOP / name), (one for one in order() if one in arrows))


def table() -> str:
    """A row a package: its files, their median and largest number of lines, what it imports."""
    rows = ['package        files median largest  imports', '']
    rows += [*_packages('pcow_driver'), '', _service('nova_pcow'), _service('cinder_pcow')]
    rows += ['', 'in nova_pcow', '', *_packages('nova_pcow')]
    return '\n'.join(rows) + '\n'


if __name__ == '__main__':
    print(table(), end='')
