# SPDX-License-Identifier: Apache-2.0
"""The sessions that the documentation shows: written by the tests that ran them, and compared with
them later.
"""

from __future__ import annotations

from pathlib import Path
import re
from typing import Any

from pcow_driver.common import exception

_DIRECTORY = Path(__file__).resolve().parents[2] / 'doc/source/_static'
_PROMPT = '# '
# What differs from run to run.
_VARIABLE = (
    (
        re.compile(r'[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}'),
        '6f0c1c52-....-....-....-............',
    ),
    (re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d'), '2026-11-21T10:21:49'),
    (re.compile(r'guest: [0-9a-f]{64}'), 'guest: 9d4e1e23...'),
    (re.compile(r'/suite/disk\.raw'), 'debian.raw'),
)


def _steady(text: str) -> str:
    for pattern, replacement in _VARIABLE:
        text = pattern.sub(replacement, text)
    return text


def keep(name: str, session: list[dict[str, Any]], *, write: bool) -> None:
    """Write a session to the documentation, or see that its commands are those that are shown
    there.

    :raises PcowError: they are not
    """
    file = _DIRECTORY / f'{name}.txt'
    if write:
        parts = (
            f'{_PROMPT}{_steady(item["command"])}\n{_steady(item["output"]).rstrip()}\n'
            for item in session
        )
        file.write_text('\n'.join(parts))
        return
    shown = [
        line.removeprefix(_PROMPT)
        for line in file.read_text().splitlines()
        if line.startswith(_PROMPT)
    ]
    done = [_steady(item['command']) for item in session]
    if shown != done:
        raise exception.PcowError(
            reason=(
                f'{file} shows other commands than those that were tried: run tools/vm-test fsdax '
                f'--only pools --write-docs'
            )
        )


def keep_table(name: str, lines: list[str], *, write: bool) -> None:
    """The same for a table that the documentation shows.

    :raises PcowError: it is another one
    """
    file = _DIRECTORY / f'{name}.txt'
    text = _steady('\n'.join(lines)) + '\n'
    if write:
        file.write_text(text)
    elif file.read_text() != text:
        raise exception.PcowError(
            reason=(
                f'{file} shows another table than this one: run tools/vm-test fsdax --only {name} '
                f'--write-docs\n{text}'
            )
        )
