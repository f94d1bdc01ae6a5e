# SPDX-License-Identifier: Apache-2.0
"""Sphinx configuration: HTML pages, and a man page for each file of man/."""

from pathlib import Path
import sys

# The build draws pictures, and makes pages of the code: of this checkout.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

project = 'pcow'
author = 'the pcow developers'
copyright = author
extensions = ['tools.lib.docs.extension']
exclude_patterns = ['_build']
html_theme = 'alabaster'
# '--size' in running text stays two hyphens
smartquotes = False
man_show_urls = False


def _man_page(path: Path) -> tuple[str, str, str, list[str], int]:
    """The title of a page is 'NAME - description' or just 'NAME'."""
    lines = path.read_text(encoding='utf-8').splitlines()
    title = next((line for line in lines if line.startswith(path.stem)), path.stem)
    return (f'man/{path.stem}', path.stem, title.removeprefix(path.stem).lstrip(' -:'), [author], 1)


man_pages = [
    _man_page(path)
    for path in sorted((Path(__file__).parent / 'man').glob('*.rst'))
    if path.stem != 'index'
]
