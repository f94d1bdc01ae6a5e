# SPDX-License-Identifier: Apache-2.0
"""pcow-bench: loads, stores, traps, copies and snapshots beside raw memory, the paper's method and
qcow2.
"""

import argparse
from typing import Any

from tools.lib.bench import plot
from tools.lib.bench import program
from tools.lib.bench import table

HELP = 'loads, stores, traps, copies and snapshots (pcow-bench; takes its options)'
_COLUMNS = (
    'row',
    'threads',
    'engine',
    'limit',
    'bare trap',
    'bare trap p99',
    'raw',
    'raw p99',
    'paper',
    'pcow',
    'pcow p99',
    'pcow p99.9',
    'pcow cold',
    'pcow/raw',
    'pcow/limit',
    'paper/pcow',
    'target',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, text in (
        ('--pool', 'directory for the files'),
        ('--rows', 'NAME,...: only these'),
        ('--size', 'working set of each side'),
        ('--repeat', 'repetitions'),
    ):
        parser.add_argument(option, help=text)
    parser.add_argument(
        '--quick', action='store_true', help='small and short; its numbers mean little'
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    return program.run(
        [
            *program.given(options, 'pool', 'rows', 'size', 'repeat'),
            *(['--quick'] if options.quick else []),
        ]
    )


def _excess(target: dict[str, Any]) -> str:
    """By how much a bound is missed."""
    if target['value'] == 0:
        return 'there are none'
    if 'at-most' in target:
        return f'{table.ratio_text(target["value"] / target["at-most"])} times as much'
    return f'{table.ratio_text(target["at-least"] / target["value"])} times too little'


def _missed(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row['name'], str(row['threads']), row['engine'], _bound(target), _excess(target))
        for row in result['rows']
        for target in row['targets']
        if not target['met'] and target['value'] is not None
    ]


def _bound(target: dict[str, Any]) -> str:
    what, value, bound = target['what'], target['value'], target.get('at-most')
    sign = 'at most'
    if bound is None:
        bound, sign = target['at-least'], 'at least'
    if what == 'ns':
        shown, wanted, what = table.time_text(value), table.time_text(bound), 'time'
    else:
        shown, wanted = (
            table.ratio_text(value),
            f'{bound:.6g}' if bound >= 1000 else table.ratio_text(bound),
        )
    return f'{what} {shown}, {sign} {wanted}: {"met" if target["met"] else "MISSED"}'


def _times(row: dict[str, Any]) -> list[float | None]:
    details = row.get('details', {})
    return [
        row['limit_ns'],
        details.get('bare_trap_ns'),
        details.get('bare_trap_p99_ns'),
        row['raw_ns'],
        row.get('raw_p99_ns'),
        row['paper_ns'],
        row['pcow_ns'],
        row.get('pcow_p99_ns'),
        row.get('pcow_p999_ns'),
        details.get('unprepared_ns'),
    ]


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows = [
        (
            row['name'],
            str(row['threads']),
            row['engine'],
            *(table.time_text(time) for time in _times(row)),
            *(table.ratio_text(row[key]) for key in ('ratio', 'limit_ratio', 'paper_ratio')),
            '; '.join(_bound(target) for target in row['targets']) or '-',
        )
        for row in result['rows']
    ]
    notes = [f'{row["name"]}: {row["note"]}.' for row in result['rows'] if row.get('note')]
    found = [table.Table('Loads, stores and traps', _COLUMNS, rows, ' '.join(notes))]
    missed = _missed(result)
    if missed:
        found.append(
            table.Table(
                'Targets that are missed', ('row', 'threads', 'engine', 'target', 'by'), missed
            )
        )
    return found


def plots(result: dict[str, Any]) -> dict[str, plot.Bars]:
    # minor is the default here; it has no rows of its own where it does what signal does
    shown = {
        row['name']: row
        for engine in ('signal', 'minor')
        for row in result['rows']
        if row['threads'] == 1 and row['engine'] == engine and row['raw_ns']
    }
    rows = tuple(shown.values())
    sides = {
        'limit': 'limit_ns',
        'raw memory': 'raw_ns',
        "the paper's method": 'paper_ns',
        'pcow': 'pcow_ns',
    }
    values = {side: tuple(row[key] for row in rows) for side, key in sides.items()}
    values['bare trap'] = tuple(row.get('details', {}).get('bare_trap_ns') for row in rows)
    names = tuple(row['name'] for row in rows)
    return {
        'datapath': plot.Bars(
            'Time of one operation, one thread, the default engine', 'ns', names, values, log=True
        )
    }
