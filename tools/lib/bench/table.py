# SPDX-License-Identifier: Apache-2.0
"""Tables, for a terminal and for the documentation, and how numbers look in them."""

import dataclasses
import math

_HYPHEN = '\\-'


def time_text(ns: float | None) -> str:
    """Nanoseconds with three digits and a unit; a hyphen for None."""
    if ns is None or math.isnan(ns):
        return '-'
    value, unit = ns, 'ns'
    for name in ('us', 'ms', 's'):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, name
    return f'{ratio_text(value)} {unit}'


def ratio_text(value: float | None) -> str:
    """Three digits; a hyphen for None."""
    if value is None or math.isnan(value):
        return '-'
    return f'{value:.{0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2}f}'


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]  # as many cells as columns
    note: str = ''  # a paragraph under the table

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.columns))]
        shown = [
            '  '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        shown.insert(1, '-' * len(shown[0]))
        return '\n'.join([self.title, '', *shown, *(['', self.note] if self.note else [])]) + '\n'

    def rst(self) -> str:
        """A list-table: cells may be of any length."""
        lines = [f'.. list-table:: {self.title}', '   :header-rows: 1', '']
        for line in (self.columns, *self.rows):
            for number, cell in enumerate(line):
                # a lone hyphen would begin a list
                lines.append(f'   {" " if number else "*"} - {_HYPHEN if cell == "-" else cell}')
        return '\n'.join([*lines, *(['', self.note] if self.note else [])]) + '\n'
