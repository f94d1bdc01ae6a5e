# SPDX-License-Identifier: Apache-2.0
"""What the programs may say: the texts in the sources, with \0 for what is filled in."""

import ast
from collections.abc import Iterator
from pathlib import Path
import re

GAP = '\0'
_C_LITERALS = re.compile(r'"((?:[^"\\\n]|\\.)*)"((?:\s|PRI\w+|LOST_\w+|/\*.*?\*/)*(?="))?')
_C_FILLED = re.compile(r'%[-+ #0]*[\d.*]*(?:hh|h|ll|l|z|j)?[diouxXscpmfg]')
_PYTHON_FILLED = re.compile(r'%\(\w+\)[\d.]*[a-z]|%[dsr]')
PYTHON = ('pcow_driver', 'nova_pcow', 'cinder_pcow')


def _of_python(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _PYTHON_FILLED.sub(GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        return ''.join(
            str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values
        )
    return None


def _python(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding='utf-8'))
    # docstrings, and what else is no value
    unused = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = None if id(node) in unused else _of_python(node)
        if text:
            yield text


def _c(path: Path) -> Iterator[str]:
    """Literals one behind the other are one text."""
    text = ''
    for match in _C_LITERALS.finditer(path.read_text(encoding='utf-8')):
        text += match[1].replace('\\"', '"').replace('\\n', ' ')
        if match[2] is None:
            yield _C_FILLED.sub(GAP, text.replace('%"', '%s').replace('%%', '%'))
            text = ''
        elif 'PRI' in match[2]:
            text = text.removesuffix('%') + GAP


def texts(top: Path) -> list[str]:
    """All of them, with the white space of a line."""
    found = [
        text
        for package in PYTHON
        for path in sorted((top / package).rglob('*.py'))
        for text in _python(path)
    ]
    found += [text for path in sorted((top / 'qemu-backend').rglob('*.c')) for text in _c(path)]
    for patch in sorted((top / 'qemu-backend').rglob('*.patch')):
        added = '\n'.join(
            line[1:] for line in patch.read_text(errors='replace').splitlines() if line[:1] == '+'
        )
        found += [' '.join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', added))]
    return [' '.join(text.split()) for text in found]


def occurs(message: str, among: list[str]) -> bool:
    """Is it said? ``...`` in it is what is filled in, or left out."""
    pieces = [re.escape(piece.strip()) for piece in message.split('...') if piece.strip()]
    wanted = re.compile('.{0,200}?'.join(pieces))
    return any(wanted.search(text) for text in among)
