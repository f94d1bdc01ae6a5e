# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole VM, beside what QEMU has without pcow, and forks of one.

All sides run the same guest in the same QEMU, by turns. Before each turn the guest writes to so
much of its RAM as a row says. What a checkpoint costs the guest is how long it stands: elsewhere
that is all of the command. Forks have no other side: such a state belongs to one VM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import contextlib
import os
from pathlib import Path
import statistics
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import scratch
from tools.lib.bench import table
from tools.lib.bench.guest import console
from tools.lib.bench.guest import disks
from tools.lib.bench.guest import web
from tools.lib.bench.vm import forks
from tools.lib.bench.vm import sides
from tools.lib.quickstart import guest as quickstart_guest

HELP = 'checkpoint, revert, restart and forks of a VM, beside savevm (minutes; as root)'
_BOOT_SECONDS = 600.0
_COMMAND_SECONDS = 600.0
_ROOM = 256  # MiB of its RAM that the guest needs besides
_OTHERS = (sides.Savevm, sides.MappedRam, sides.IgnoreShared)
_TITLES = tuple(side.title for side in (sides.Pcow, *_OTHERS))
# what is measured; its target in ms
_TEXT: dict[str, tuple[str, float | None]] = {
    'pause': ('checkpoint: the guest stands', 10),
    'durable': ('checkpoint: it is durable', None),
    'revert': ('revert in place', 30),
    'restart': ('start of QEMU to running from it', 60),
    'fork': ('fork: images, QEMU, running', 60),
    'answer': ('fork: the guest has answered', 150),
}
_ALL = {16: 1500, 100: 10000}  # ms until so many forks have answered
_SHARE = 1.5  # of what a child has stored to, that it takes of the pool
_IDLE, _SERVED = 4, 25  # MiB of its own that a child maps
_SOONER, _BYTES, _LARGE = 50, 0.01, 4096  # than savevm, with so many MiB of RAM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--rounds', type=int, default=5, help='of each case (default 5)')
    parser.add_argument(
        '--cases',
        default='512:64,2048:1024,4096:64,4096:1024',
        help='MiB of RAM, and how many of them the guest writes to (default: '
        '512:64,2048:1024,4096:64,4096:1024; none: only forks)',
    )
    parser.add_argument(
        '--forks', default='1,16,100', help='of one guest at once (default: 1,16,100; none: no)'
    )


def _cases(text: str) -> list[sides.Case]:
    with contextlib.suppress(ValueError, TypeError):
        words = [] if text == 'none' else text.split(',')
        found = [sides.Case(*map(int, word.split(':'))) for word in words]
        if all(0 <= case.dirty <= case.memory - _ROOM for case in found):
            return found
    raise exception.UsageInvalid(
        reason=f'--cases {text}: give numbers as 512:64, where {_ROOM} MiB of the RAM stay'
    )


def _counts(text: str) -> list[int]:
    with contextlib.suppress(ValueError):
        found = [] if text == 'none' else [int(word) for word in text.split(',')]
        if all(count > 0 for count in found):
            return found
    raise exception.UsageInvalid(reason=f'--forks {text}: give numbers as 1,16')


def _turn(
    side: sides.Side, vm: console.Guest, number: int
) -> tuple[dict[str, float], console.Guest]:
    """Milliseconds, and bytes of VM state; the VM that runs afterwards."""
    letter = chr(ord('a') + number % 26)
    vm.run(
        f'mount -o remount,size=100% /tmp; yes {letter} | head -c {side.case.dirty}M > /tmp/fill',
        _COMMAND_SECONDS,
    )
    check = f'! test -e /tmp/after && test "$(head -c 1 /tmp/fill)" = {letter}'
    found = side.checkpoint(vm)
    if isinstance(side, sides.InPlace):
        vm.run('echo after > /tmp/after', _COMMAND_SECONDS)
        begun = time.monotonic()
        side.revert(vm)
        found['revert'] = (time.monotonic() - begun) * 1e3
        vm.run(check, _COMMAND_SECONDS)
    if isinstance(side, sides.Pcow):
        found.update(_fork(side))
    vm.__exit__(None, None, None)
    begun = time.monotonic()
    vm = side.restart()
    found['restart'] = (time.monotonic() - begun) * 1e3
    vm.run(check, _COMMAND_SECONDS)
    side.delete(vm)
    return found, vm


def _fork(side: sides.Pcow) -> dict[str, float]:
    """Of a VM that runs; the child is gone afterwards."""
    begun = time.monotonic()
    files = side.fork_images('child')
    try:
        vm = side.fork('child', files)
        try:
            running = time.monotonic()
            vm.run('true', _COMMAND_SECONDS)
            answered = time.monotonic()
        finally:
            vm.__exit__(None, None, None)
    finally:
        for path in files:
            path.unlink()
    return {'fork': (running - begun) * 1e3, 'answer': (answered - begun) * 1e3}


def _measure(
    case: sides.Case, rounds: int, guest: quickstart_guest.Guest, base: Path, directory: Path
) -> dict[str, Any]:
    turns: dict[str, list[dict[str, float]]] = {}
    label = f'{case.memory}-{case.dirty}'
    found: list[sides.Side] = [
        sides.Pcow(directory / f'pcow-{label}', guest, case, base),
        *(one(directory / f'{one.title}-{label}', guest, case) for one in _OTHERS),
    ]
    vms = []
    try:
        for side in found:
            vm = side.start().__enter__()
            vms.append(vm)
            vm.wait_ready(_BOOT_SECONDS)
        for number in range(rounds):
            for at, side in enumerate(found):
                turn, vms[at] = _turn(side, vms[at], number)
                turns.setdefault(side.title, []).append(turn)
                print(
                    f'{case.memory} MiB, {case.dirty} written, round {number + 1}: {side.title} '
                    f'{turn["pause"]:.1f} ms',
                    flush=True,
                )
    finally:
        for vm in vms:
            vm.__exit__(None, None, None)
        for side in found:
            for path in side.files:
                path.unlink(missing_ok=True)
    return {'memory': case.memory, 'dirty': case.dirty, 'turns': turns}


def run(options: argparse.Namespace) -> dict[str, Any]:
    cases, counts = _cases(options.cases), _counts(options.forks)
    if options.rounds < 1:
        raise exception.UsageInvalid(reason=f'--rounds {options.rounds}: give at least 1')
    with scratch.directory() as (own, directory):
        guest, _cache = quickstart_guest.prepare(own, None, None, None, web.PACKAGES, sides.MODULES)
        raw, base = directory / 'base.raw', directory / 'base.pcow'
        disks.write_namespace(guest.image, 'qcow2', raw)
        image.convert(str(raw), 'raw', str(base))
        image.seal(str(base))
        raw.unlink()
        rows = [_measure(case, options.rounds, guest, base, directory) for case in cases]
        forked = []
        if counts:
            parent = sides.Pcow(directory / 'forks', guest, sides.Case(forks.MEMORY, 0), base)
            forked = forks.measure(parent, counts, options.rounds)
    return {
        'rows': rows,
        'forks': forked,
        'rounds': options.rounds,
        'load': os.getloadavg()[0],
        'machine': machine.describe(),
    }


def _median(turns: list[dict[str, float]], what: str) -> float | None:
    return statistics.median(turn[what] for turn in turns) if what in turns[0] else None


def _spread(turns: list[dict[str, float]], what: str, unit: str, scale: float = 1) -> str:
    values = [turn[what] / scale for turn in turns]
    return f'{statistics.median(values):.1f} {unit} ({min(values):.1f} to {max(values):.1f})'


def _judged(value: float, target: float, text: str, *, at_least: bool = False) -> str:
    met = value >= target if at_least else value <= target
    return f'{text}: {"met" if met else "MISSED"}'


def _others(row: dict[str, Any], what: str, shown: Callable[[float], str]) -> list[str]:
    sides = (row['turns'].get(title) for title in _TITLES[1:])
    values = (None if turns is None else _median(turns, what) for turns in sides)
    return ['-' if value is None else shown(value) for value in values]


def _checkpoints(row: dict[str, Any]) -> list[tuple[str, ...]]:
    guest = f'{row["memory"]} MiB of RAM, {row["dirty"]} written to'
    ours, savevm = row['turns'][_TITLES[0]], row['turns'][_TITLES[1]]
    rows: list[tuple[str, ...]] = []
    for key, (text, target) in _TEXT.items():
        value = _median(ours, key)
        if value is None:
            raise exception.PcowError(reason=f'there is no figure of {key}')
        judged = '-' if target is None else _judged(value, target, f'at most {target:.0f} ms')
        others = _others(row, key, lambda value: f'{value:.1f} ms')
        rows.append((guest, text, _spread(ours, key, 'ms'), *others, judged))
    kept = [
        *(_spread(ours, 'bytes', 'MiB', units.MIB),),
        *_others(row, 'bytes', lambda value: f'{value / units.MIB:.1f} MiB'),
    ]
    rows.append((guest, 'bytes of a checkpoint', *kept, '-'))
    if row['memory'] >= _LARGE:
        for text, key, target in (
            ('the guest stands: savevm by pcow', 'pause', float(_SOONER)),
            ('bytes: savevm by pcow', 'bytes', 1 / _BYTES),
        ):
            mine, theirs = _median(ours, key), _median(savevm, key)
            assert mine and theirs  # noqa: S101 - of each turn of both
            ratio = theirs / mine
            judged = _judged(ratio, target, f'at least {target:.0f}', at_least=True)
            rows.append((guest, text, table.ratio_text(ratio), '-', '-', '-', judged))
    return rows


def _forks(result: dict[str, Any]) -> list[table.Table]:
    rows: list[tuple[str, ...]] = []
    for row in result.get('forks', ()):
        turns, count = row['turns'], f'{row["count"]} at once'
        target = _ALL.get(row['count'])
        took = statistics.median(turn['all'] for turn in turns)
        judged = '-' if target is None else _judged(took, target, f'at most {target / 1e3:.1f} s')
        rows += [
            (count, 'all have answered', _spread(turns, 'all', 'ms'), judged),
            (count, 'one has answered', _spread(turns, 'each', 'ms'), '-'),
        ]
        for when, text, most in (
            ('idle', 'idle for 20 s', _IDLE),
            ('served', f'after {web.REQUESTS} requests', _SERVED),
        ):
            own = statistics.median(turn[f'{when}_own'] for turn in turns) / units.MIB
            rows.append(
                (
                    count,
                    f'memory of its own, {text}',
                    _spread(turns, f'{when}_own', 'MiB', units.MIB),
                    _judged(own, most, f'at most {most} MiB'),
                )
            )
            shares = [turn[f'{when}_taken'] / turn[f'{when}_stored'] for turn in turns]
            share = statistics.median(shares)
            rows.append(
                (
                    count,
                    f'of the pool, {text}',
                    f'{_spread(turns, f"{when}_taken", "MiB", units.MIB)}, {share:.2f} of its '
                    'pages that traps brought in',
                    _judged(share, _SHARE, f'at most {_SHARE}'),
                )
            )
    return (
        [
            table.Table(
                f'Forks of a warm guest of {forks.MEMORY} MiB with a web server',
                ('forks', 'what', 'measured', 'target'),
                rows,
                f'Medians of {result["rounds"]} turns, in brackets the least and the most; under '
                'TCG, pools in DRAM. As many are forked at a time as the machine has CPUs. Memory '
                'of its own: what a child maps of its own images (Pss), without what it shares '
                'with its parent and without QEMU itself.',
            )
        ]
        if rows
        else []
    )


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows = [cells for row in result['rows'] for cells in _checkpoints(row)]
    note = (
        f'Medians of {result["rounds"]} turns, in brackets the least and the most; all in DRAM '
        f'(tmpfs), under TCG. savevm and mapped-ram copy RAM; with x-ignore-shared it stays in the '
        f'file of the VM, which may not run on then. Load of the machine at the end: '
        f'{result["load"]:.1f}.'
    )
    columns = ('guest', 'what', *_TITLES, 'target')
    found = [table.Table('Checkpoints of a VM, and what QEMU has', columns, rows, note)]
    return [*(found if rows else []), *_forks(result)]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
