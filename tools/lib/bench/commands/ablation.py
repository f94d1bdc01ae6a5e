# SPDX-License-Identifier: Apache-2.0
"""What each of the monitor's guesses is for: the rows of pcow-bench with all of them and without
one, by turns.
"""

import argparse
import json
import os
import statistics
import subprocess
from typing import Any

from pcow_driver.common import exception
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import program
from tools.lib.bench import table

HELP = "the rows of pcow-bench without one of the monitor's guesses"
NAME = 'pcow-bench-ablation'
VARIABLE = 'PCOW_BENCH_WITHOUT'
# the words of qemu-backend/tools/bench/ablation.c
GUESSES = {
    'sequence': 'where the last window ends a sequence goes on, twice as much',
    'one-page': 'a copy begins with one page of its cluster',
    'grown': 'where the guest comes back to clusters, they are copied at once',
    'rest': 'the rest of a slab that is used page for page comes in one go',
    'whole': 'a whole slab comes at its first store, of a guest that fills them',
    'fill': "the page table is filled for a sequence's next window",
    'neighbours': 'a page brings those beside it into the page table',
    'anew': 'a slab that has become own is mapped as one',
    'keep': 'a slab stays one mapping, of which pages are let in (engine minor)',
    'hot': 'hot slabs are copied whole in the background',
    'job': 'the thread prepares the rest of slabs, and touches their source',
    'guess': 'the thread touches the source of slabs that may follow',
    'lead': 'as many slabs are kept ready as are taken',
}
ROWS = (
    'first-touch-single',
    'first-touch-sequential',
    'first-touch-clustered',
    'cow-4k',
    'cow-4k-scattered',
    'cow-64k',
    'cow-2m',
)
QUICK_ROWS = ('scattered-writes',)  # in its full size it takes 64 GiB of copies
_CONTROL = 'nothing'  # all guesses, as the other side has them: what differs is noise
_WORTH = 1.2  # times as long: less is noise, as the control shows

# of a row: name, threads, engine
Key = tuple[str, int, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--pool', help='directory for the files')
    parser.add_argument('--size', default='128M', help='working set of each side (default: 128M)')
    parser.add_argument('--rounds', type=int, default=5, help='of which the median counts')
    parser.add_argument('--rows', metavar='NAME,...', help='only these')
    parser.add_argument('--guess', choices=GUESSES, action='append', help='only this one')


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 1:
        raise exception.UsageInvalid(reason='--rounds is at least 1')
    sides = {'': '', _CONTROL: ''} | {name: name for name in options.guess or GUESSES}
    found: dict[str, dict[Key, list[float]]] = {side: {} for side in sides}
    for _round in range(options.rounds):
        for side, without in sides.items():
            for key, ns in _measure(options, without).items():
                found[side].setdefault(key, []).append(ns)
    rows = [
        {
            'without': side,
            'name': key[0],
            'threads': key[1],
            'engine': key[2],
            'ns': statistics.median(values),
            'with_ns': statistics.median(found[''][key]),
            'ratio': statistics.median(values) / statistics.median(found[''][key]),
        }
        for side in list(sides)[1:]
        for key, values in found[side].items()
        if key in found['']
    ]
    return {'rows': rows, 'rounds': options.rounds, 'machine': machine.describe()}


def _measure(options: argparse.Namespace, without: str) -> dict[Key, float]:
    """Nanoseconds of each row. One that does not measure what it says without the guess is left
    out.
    """
    found: dict[Key, float] = {}
    for name in options.rows.split(',') if options.rows else (*ROWS, *QUICK_ROWS):
        done = subprocess.run(
            [
                program.path().resolve().parent / NAME,
                *program.given(options, 'pool'),
                *(['--quick'] if name in QUICK_ROWS else [f'--size={options.size}', '--repeat=3']),
                f'--rows={name}',
                '--output=json',
            ],
            env=os.environ | {VARIABLE: without},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            found |= {
                (row['name'], row['threads'], row['engine']): row['pcow_ns']
                for row in json.loads(done.stdout)['rows']
            }
        elif not without:
            raise exception.ToolFailed(
                tool=NAME, exit_code=done.returncode, message=done.stderr.strip()
            )
    return found


def _effect(row: dict[str, Any]) -> str:
    where = f'{row["name"]} ({row["threads"]}, {row["engine"]})'
    return f'{where} {table.ratio_text(row["ratio"])}'


def _effects(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Rows that take longer without it, and rows that take less; the largest effect first."""
    slower = sorted((row for row in rows if row['ratio'] >= _WORTH), key=lambda row: -row['ratio'])
    faster = sorted(
        (row for row in rows if row['ratio'] <= 1 / _WORTH), key=lambda row: row['ratio']
    )
    return ('; '.join(map(_effect, slower)) or '-', '; '.join(map(_effect, faster)) or '-')


def tables(result: dict[str, Any]) -> list[table.Table]:
    by_side: dict[str, list[dict[str, Any]]] = {}
    for row in result['rows']:
        by_side.setdefault(row['without'], []).append(row)
    return [
        table.Table(
            'Rows without one of the guesses, by with all of them',
            ('guess', 'what it is', 'longer without it', 'shorter without it'),
            [
                (side, GUESSES.get(side, 'all are there: noise'), *_effects(rows))
                for side, rows in by_side.items()
            ],
            f'Medians of {result["rounds"]} rounds by turns; in brackets threads and engine. '
            f'Less than {_WORTH:g} times is not shown.',
        )
    ]


def plots(result: dict[str, Any]) -> dict[str, plot.Bars]:
    del result
    return {}
