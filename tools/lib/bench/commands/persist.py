# SPDX-License-Identifier: Apache-2.0
"""What it costs to be protected from a power failure: fixation, going on after it, automatic
checkpoints, and RAM on an image.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import statistics
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import table
from tools.lib.bench.persist import automatic
from tools.lib.bench.persist import fixation
from tools.lib.bench.persist import place
from tools.lib.bench.persist import qemu
from tools.lib.bench.persist import redis

HELP = 'fixation of VMs, recovery, automatic checkpoints, RAM on an image (minutes; as root)'
_PARTS = ('fixation', 'several', 'restart', 'automatic', 'resident', 'redis')
_SEVERAL = (1, 8)  # VMs
_SEVERAL_MEMORY, _SEVERAL_DIRTY = 256, 64  # MiB
_RESTART = (256, 1024)  # MiB of RAM
_STORES = 1024, 256  # MiB of RAM, and of it stored to
_FLUSHED = 512  # MiB
_RESAMPLED = 2000
_TURN, _TURNS = 1.0, 8  # seconds, and of each round, of what is measured in short turns
# targets
_FIXATION_MS = 20.0
_RUNNING_MS, _ANSWER_MS = 60.0, 150.0
_CPU, _PAUSE_MS, _THROUGHPUT, _RESIDENT = 0.03, 10.0, 0.97, 0.98
_SOONER = 20  # after a recovery than after a boot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--rounds', type=int, default=5, help='of each case (default 5)')
    parser.add_argument(
        '--cases',
        default='256:0,256:64,1024:64,4096:64,1024:512,4096:2048',
        help='MiB of RAM, and how many of them the guest stores to before each fixation '
        '(default: 256:0,256:64,1024:64,4096:64,1024:512,4096:2048)',
    )
    parser.add_argument(
        '--seconds', type=float, default=40.0, help='of stores in each turn (default 40)'
    )
    parser.add_argument(
        '--pauses', type=int, default=100, help='checkpoints for the pause (default 100)'
    )
    parser.add_argument(
        '--parts',
        default=','.join(_PARTS),
        help=f'what to measure (default: all of {",".join(_PARTS)})',
    )


def _cases(text: str) -> list[tuple[int, int]]:
    with contextlib.suppress(ValueError):
        found = [
            (int(memory), int(dirty)) for memory, dirty in (w.split(':') for w in text.split(','))
        ]
        if all(0 <= dirty <= memory - place.ROOM for memory, dirty in found):
            return found
    raise exception.UsageInvalid(
        reason=f'--cases {text}: give numbers as 1024:64, where {place.ROOM} MiB of the RAM stay'
    )


def _check(options: argparse.Namespace) -> None:
    if options.rounds < 1 or not 1 <= options.seconds <= 100 or not 0 <= options.pauses <= 1000:
        raise exception.UsageInvalid(
            reason='--rounds is at least 1, --seconds 1 to 100, --pauses 0 to 1000'
        )
    unknown = set(options.parts.split(',')) - set(_PARTS)
    if unknown:
        raise exception.UsageInvalid(reason=f'--parts: no part {", ".join(sorted(unknown))}')


def run(options: argparse.Namespace) -> dict[str, Any]:
    _check(options)
    cases, parts, rounds = _cases(options.cases), options.parts.split(','), options.rounds
    with place.prepared() as where:
        result: dict[str, Any] = {
            'rows': [],
            'several': [],
            'restart': [],
            'automatic': [],
            'resident': [],
            'redis': [],
            'flush': _flush(where, rounds),
        }
        if 'fixation' in parts:
            result['rows'] = [fixation.one(where, *case, rounds) for case in cases]
        if 'several' in parts:
            result['several'] = fixation.several(
                where, _SEVERAL, _SEVERAL_MEMORY, _SEVERAL_DIRTY, rounds
            )
        if 'restart' in parts:
            result['restart'] = [qemu.restart(where, memory, rounds) for memory in _RESTART]
        if 'automatic' in parts:
            result['automatic'] = [
                automatic.measure(where, *_STORES, options.seconds, min(rounds, 3), options.pauses)
            ]
        if 'resident' in parts:
            result['resident'] = [qemu.resident(where, *_STORES, _TURN, rounds * _TURNS)]
        if 'redis' in parts:
            result['redis'] = [redis.measure(where, min(rounds, 3))]
    result |= {'rounds': rounds, 'load': os.getloadavg()[0], 'machine': machine.describe()}
    return result


def _flush(where: place.Place, rounds: int) -> list[float]:
    """ns per MiB, on this machine's DRAM; none where it cannot."""
    found = []
    for _number in range(rounds):
        match = re.search(r'flush (\d+)', tool.run(str(where.program), 'flush', str(_FLUSHED)))
        if match:
            found.append(float(match[1]))
    return found


def _spread(values: list[float], unit: str = 'ms') -> str:
    return (
        f'{statistics.median(values):.1f} {unit} ({min(values):.1f} to {max(values):.1f})'
        if values
        else '-'
    )


def _judged(value: float, target: float, text: str, *, at_least: bool = False) -> str:
    met = value >= target if at_least else value <= target
    return f'{text}: {"met" if met else "MISSED"}'


def percentile(values: list[float], share: float) -> float:
    """The least of them that so many are not above."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def interval(values: list[float]) -> tuple[float, float]:
    """In which their median lies with 95 %: by the bootstrap, the same each time."""
    chance = random.Random(0)  # noqa: S311
    medians = [
        statistics.median(chance.choices(values, k=len(values))) for _number in range(_RESAMPLED)
    ]
    return percentile(medians, 0.025), percentile(medians, 0.975)


def _column(turns: list[dict[str, float]], key: str) -> list[float]:
    return [turn[key] for turn in turns]


def _fixations(result: dict[str, Any]) -> table.Table:
    rows: list[tuple[str, ...]] = []
    for row in result['rows']:
        took = _column(row['turns'], 'durable')
        rows.append(
            (
                f'{row["memory"]} MiB',
                f'{row["dirty"]} MiB',
                _spread(took),
                _spread(_column(row['turns'], 'ended')),
                _spread(_column(row['turns'], 'recovery')),
                _judged(statistics.median(took), _FIXATION_MS, f'at most {_FIXATION_MS:.0f} ms'),
            )
        )
    flush = result['flush']
    note = (
        'Through libvirt, from the command on; the recovery is until the guest runs. The start of '
        'Python is in none of them. libvirt looks each 200 ms whether a QEMU has ended. The pool '
        'is in DRAM (tmpfs), where nothing '
        'has to be flushed; on persistent memory the flush comes on top: '
    )
    note += (
        f'clwb of lines that were just stored to, to the DRAM of this machine, takes '
        f'{table.time_text(statistics.median(flush))} per MiB and thread.'
        if flush
        else 'this CPU has no clwb to tell how long that takes.'
    )
    return table.Table(
        'Fixation of one VM',
        ('RAM', 'stored to', 'last moment is durable', 'QEMU has ended', 'recovery', 'target'),
        rows,
        note,
    )


def _several(result: dict[str, Any]) -> list[table.Table]:
    if not result['several']:
        return []
    rows: list[tuple[str, ...]] = [
        (
            str(row['count']),
            _spread(_column(row['turns'], 'durable')),
            _spread(_column(row['turns'], 'ended')),
            _spread(_column(row['turns'], 'recovery')),
            _spread(_column(row['turns'], 'recovered')),
        )
        for row in result['several']
    ]
    first = result['several'][0]
    return [
        table.Table(
            f'Several VMs at once, {first["memory"]} MiB each, {first["dirty"]} stored to',
            (
                'VMs',
                'the slowest one is durable, from its begin',
                'all QEMUs have ended',
                'the slowest one runs, from its begin',
                'recovery of all',
            ),
            rows,
            'As pcowctl host fixate and host recover do it, with at least four at a time. The last '
            'column has the time in which the network and the clock of each guest are told.',
        )
    ]


def _restarts(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in result['restart']:
        for key, text, target in (
            ('start', 'start of QEMU until it takes commands', None),
            ('revert', 'revert to the last moment', None),
            ('running', 'start of QEMU until the guest runs', _RUNNING_MS),
            ('answered', "the same until the guest's program answers", _ANSWER_MS),
        ):
            values = _column(row['turns'], key)
            judged = (
                '-'
                if target is None
                else _judged(statistics.median(values), target, f'at most {target:.0f} ms')
            )
            rows.append((f'{text}, {row["memory"]} MiB', _spread(values), judged))
    return rows


def _automatic(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in result['automatic']:
        sides = row['sides']
        medians = {
            (side, key): statistics.median(_column(turns, key))
            for side, turns in sides.items()
            for key in ('rate', 'cpu', 'checkpoints')
        }
        ratio = medians['with', 'rate'] / medians['without', 'rate']
        cpu = medians['with', 'cpu'] - medians['without', 'cpu']
        rows += [
            (
                'stores with automatic checkpoints, by those without',
                f'{ratio:.3f} ({medians["without", "rate"]:.0f} MiB/s without)',
                _judged(ratio, _THROUGHPUT, f'at least {_THROUGHPUT}', at_least=True),
            ),
            (
                'CPU of QEMU beside its vCPU, of host watch and of libvirtd',
                f'{cpu:.1%} of a CPU more, {medians["with", "checkpoints"]:.0f} checkpoints in '
                f'{row["seconds"]:.0f} s',
                _judged(cpu, _CPU, f'at most {_CPU:.0%}'),
            ),
        ]
        if row['pauses']:
            worst = percentile(row['pauses'], 0.99)
            rows.append(
                (
                    f'pause of a checkpoint under the stores, p99 of {len(row["pauses"])}',
                    f'{worst:.1f} ms (median {statistics.median(row["pauses"]):.1f} ms)',
                    _judged(worst, _PAUSE_MS, f'at most {_PAUSE_MS:.0f} ms'),
                )
            )
    return rows


def _resident(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in result['resident']:
        # what else the machine does changes from turn to turn
        pairs = zip(row['sides']['pcow'], row['sides']['raw'], strict=True)
        ratios = [pcow / raw for pcow, raw in pairs]
        ratio, (least, most) = statistics.median(ratios), interval(ratios)
        raw = statistics.median(row['sides']['raw'])
        judged = _judged(ratio, _RESIDENT, f'at least {_RESIDENT}', at_least=True)
        rows.append(
            (
                'all resident: stores to RAM on an image, by those to raw shared memory',
                f'{ratio:.3f} (95 % sure: {least:.3f} to {most:.3f}; {raw:.0f} MiB/s raw)',
                judged if not least < _RESIDENT <= most else f'at least {_RESIDENT}: not known',
            )
        )
    return rows


def _redis(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for row in result.get('redis', ()):
        recovered, booted = (row['sides'][side] for side in ('recovered', 'booted'))
        ratio = statistics.median(booted) / statistics.median(recovered)
        guest = f'Redis with {row["used"] / units.GIB:.1f} GiB at {redis.FULL:.0%} of its rate'
        rows += [
            (f'{guest}, after a recovery', _spread(recovered, 's'), '-'),
            (f'{guest}, after a boot and its log', _spread(booted, 's'), '-'),
            (
                'how much sooner',
                table.ratio_text(ratio),
                _judged(ratio, _SOONER, f'at least {_SOONER} times', at_least=True),
            ),
        ]
    return rows


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows = [*_restarts(result), *_automatic(result), *_resident(result), *_redis(result)]
    memory, size = _STORES
    return [
        *([_fixations(result)] if result['rows'] else []),
        *_several(result),
        table.Table(
            'Going on, automatic checkpoints, and RAM on an image',
            ('what', 'measured', 'target'),
            rows,
            f'Medians of {result["rounds"]} turns (of stores and of Redis, at most 3), in brackets '
            f'the least and the most; TCG, pools in DRAM. The start is that of QEMU without '
            f'libvirt. Stores are 8 bytes in {size} MiB of a guest of {memory}, each counted as '
            f'its line of 64 bytes. Load of the machine at the end: {result["load"]:.1f}.',
        ),
    ]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
