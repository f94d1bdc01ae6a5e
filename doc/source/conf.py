# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: HTML pages, and a man page for each file of man/."""

from pathlib import Path

project = 'pcow'
author = 'the pcow developers'
copyright = author
extensions: list[str] = []
exclude_patterns = ['_build']
html_theme = 'alabaster'
nitpicky = True


def _man_page(path: Path) -> tuple[str, str, str, list[str], int]:
    """Name and description are in the page's first title line: 'name - description'."""
    for line in path.read_text(encoding='utf-8').splitlines():
        name, dash, description = line.partition(' - ')
        if dash and name == path.stem:
            return (f'man/{path.stem}', name, description, [author], 1)
    raise ValueError(f"{path} has no line '{path.stem} - description'")


man_pages = [_man_page(path) for path in sorted((Path(__file__).parent / 'man').glob('*.rst')) if path.stem != 'index']
