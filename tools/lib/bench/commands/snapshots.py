# SPDX-License-Identifier: Apache-2.0
"""Creating, reverting to and deleting snapshots, beside qcow2 on the same pool (iROW, figures 9 to
11), and live through virsh.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import statistics
import tempfile
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import units
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import table
from tools.lib.bench.snapshots import limits
from tools.lib.bench.snapshots import live
from tools.lib.bench.snapshots import sides

HELP = 'snapshots beside qcow2: create, revert, delete; live through virsh beside a raw NVDIMM'
TARGETS = {'create': 0.01, 'revert': 0.01, 'delete': 0.10}
CLUSTERS: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
WAYS = {
    'open': 'in a process that has the image open',
    'mapped': 'the same, pcow mapped and all of it touched',
    'returned': 'the same, not mapped, until the pool has got the space back',
    'command': 'as a command (qemu-img, pcow-img)',
}
# (virtual size, written) of images of clusters of 64 KiB: first one grows, then the other
SIZES: tuple[tuple[int, int], ...] = tuple(
    (virtual * units.GIB, written * units.MIB)
    for virtual, written in ((1, 128), (8, 128), (64, 128), (512, 128), (64, 512), (64, 2048))
)
_MIN_PCOW = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--pool',
        type=Path,
        default=Path('/dev/shm'),  # noqa: S108
        help='directory for the images; default: %(default)s',
    )
    parser.add_argument(
        '--virtual-size',
        type=units.parse_size,
        default='50G',
        help='of the images; default: %(default)s',
    )
    parser.add_argument(
        '--written',
        type=units.parse_size,
        default='2G',
        help='written before the snapshot; default: %(default)s',
    )
    parser.add_argument(
        '--sweep-size',
        type=units.parse_size,
        default='512M',
        help='size of the images, all of it written, of the sweep over cluster sizes; default: '
        '%(default)s',
    )
    parser.add_argument(
        '--rounds', type=int, default=7, help='of which the median counts; default: %(default)s'
    )
    parser.add_argument(
        '--no-vm', action='store_true', help='leave out what needs libvirt and a guest'
    )
    parser.add_argument(
        '--quick', action='store_true', help='small and short; its numbers mean little'
    )


def _summary(times: sides.Times) -> dict[str, float]:
    """Medians, in nanoseconds."""
    return {operation: statistics.median(values) * 1e9 for operation, values in times.items()}


def _compare(title: str, work: sides.Work) -> list[dict[str, Any]]:
    found = {side.name: side.measure() for side in (sides.Qcow2(work), sides.Pcow(work))}
    rows = []
    for way in WAYS:
        qcow2, pcow = (_summary(found[name][way]) for name in ('qcow2', 'pcow'))
        for operation in sides.OPERATIONS:
            ratio = pcow[operation] / qcow2[operation] if qcow2[operation] else None
            target = TARGETS[operation] if title == 'large' else None
            rows.append(
                {
                    'name': f'{title}-{way}-{operation}',
                    'part': title,
                    'way': way,
                    'operation': operation,
                    'cluster': work.cluster_size,
                    'qcow2_ns': qcow2[operation],
                    'pcow_ns': pcow[operation],
                    'qcow2_open_ns': qcow2.get('list'),
                    'pcow_open_ns': pcow.get('list'),
                    'start_ns': pcow.get('start'),
                    'ratio': ratio,
                    'target': target,
                    'met': None if target is None or ratio is None else ratio <= target,
                }
            )
    return rows


def _by_size(work: sides.Work) -> list[dict[str, Any]]:
    """Rows of one virtual size and one amount of data, in a process that has the image open."""
    found: dict[str, dict[str, float]] = {}
    for side in (sides.Qcow2(work), sides.Pcow(work)):
        with side.made():
            found[side.name] = _summary(side.open_times())
    return [
        {
            'operation': operation,
            'virtual_size': work.virtual_size,
            'written': work.written,
            'qcow2_ns': found['qcow2'][operation],
            'pcow_ns': found['pcow'][operation],
        }
        for operation in sides.OPERATIONS
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    if options.rounds < 1:
        raise exception.UsageInvalid(reason=f'{options.rounds} rounds')
    virtual, written, sweep, rounds = (
        options.virtual_size,
        options.written,
        options.sweep_size,
        options.rounds,
    )
    clusters, sizes = CLUSTERS, SIZES
    if options.quick:
        written, sweep, rounds, clusters = 128 * units.MIB, 32 * units.MIB, 3, (512, 4096, 65536)
        sizes = ((units.GIB, 16 * units.MIB), (8 * units.GIB, 16 * units.MIB))
    rows: list[dict[str, Any]] = []
    by_size: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix='pcow-bench-', dir=options.pool) as directory:

        def work(virtual_size: int, amount: int, cluster: int) -> sides.Work:
            return sides.Work(
                directory=Path(directory),
                virtual_size=virtual_size,
                cluster_size=cluster,
                written=amount,
                changed=max(sides.EXTENT, amount // 16),
                rounds=rounds,
            )

        print(f'{units.format_size(virtual)}, {units.format_size(written)} written', flush=True)
        rows += _compare('large', work(virtual, written, 65536))
        freeze = statistics.median(
            limits.freeze(work(virtual, written, 65536)) for _round in range(rounds)
        )
        remap = statistics.median(
            limits.remap(work(virtual, written, 65536)) for _round in range(rounds)
        )
        punch = statistics.median(
            limits.punch(work(virtual, written, 65536)) for _round in range(rounds)
        )
        for cluster in clusters:
            print(f'clusters of {cluster} bytes, {units.format_size(sweep)} written', flush=True)
            rows += _compare(f'sweep-{cluster}', work(sweep, sweep, cluster))
        for virtual_size, amount in sizes:
            print(
                f'{units.format_size(virtual_size)}, {units.format_size(amount)} written',
                flush=True,
            )
            by_size += _by_size(work(virtual_size, amount, 65536))
    result: dict[str, Any] = {
        'rows': rows,
        'machine': machine.describe(),
        'virtual_size': virtual,
        'written': written,
        'sweep_size': sweep,
        'sizes': by_size,
        'rounds': rounds,
        'live': None,
        'freeze_ns': freeze * 1e9,
        'remap_ns': remap * 1e9,
        'punch_ns': punch * 1e9,
    }
    if not options.no_vm:
        print('a guest, through virsh', flush=True)
        result['live'] = live.measure(min(rounds, 3))
    return result


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    judged = (
        '-'
        if row['met'] is None
        else f'at most {row["target"]:.0%}: {"met" if row["met"] else "MISSED"}'
    )
    percent = '-' if row['ratio'] is None else f'{row["ratio"]:.2%}'
    return (table.time_text(row['qcow2_ns']), table.time_text(row['pcow_ns']), percent, judged)


def _large(result: dict[str, Any]) -> table.Table:
    rows = [
        (row['operation'], WAYS[row['way']], *_cells(row))
        for row in result['rows']
        if row['part'] == 'large'
    ]
    opened = next(
        row for row in result['rows'] if row['part'] == 'large' and row['way'] == 'command'
    )
    note = (
        f'Median of {result["rounds"]}. Of the commands, '
        f'{table.time_text(opened["qcow2_open_ns"])} (qemu-img) and '
        f'{table.time_text(opened["pcow_open_ns"])} (pcow-img) are starting, opening and ending: '
        f'what "snapshot -l" takes; a '
        f'program that does nothing takes {table.time_text(opened["start_ns"])}. '
        'Mapped means that the snapshot also takes write permission from, or the place of, each '
        'page that the VM has stored to '
        'since the last one: the work of the kernel on its page tables, which for a raw file '
        'stored to in these places takes '
        f'{table.time_text(result["freeze_ns"])} (one mprotect(), entries of 4 KiB), and for '
        f'mapping other blocks there '
        f'{table.time_text(result["remap_ns"])} (one mmap() for each 2 MiB). qcow2 gives space '
        'back to the pool within the operation, pcow after it: the rows "until the pool has got '
        'the space back" and commands '
        'compare that. Of revert and delete in these, the file system takes '
        f'{table.time_text(result["punch_ns"])}: as long as it needs for the same holes in a raw '
        f'file.'
    )
    title = (
        f'Snapshots of an image of {units.format_size(result["virtual_size"])}, clusters of 64 '
        f'KiB, '
        f'{units.format_size(result["written"])} written'
    )
    return table.Table(
        title, ('operation', 'how', 'qcow2', 'pcow', 'pcow / qcow2', 'target'), rows, note
    )


def _sweep(result: dict[str, Any]) -> table.Table:
    rows = [
        (str(row['cluster']), row['operation'], *_cells(row)[:3])
        for row in result['rows']
        if row['part'].startswith('sweep') and row['way'] == 'open'
    ]
    return table.Table(
        f'The same by size of cluster, images of {units.format_size(result["sweep_size"])}, all of '
        f'it written',
        ('cluster size', 'operation', 'qcow2', 'pcow', 'pcow / qcow2'),
        rows,
        f'In a process that has it open. pcow has no clusters below {_MIN_PCOW} bytes: those rows '
        f'are with that.',
    )


def _sizes(result: dict[str, Any]) -> table.Table:
    rows: list[tuple[str, ...]] = [
        (
            row['operation'],
            units.format_size(row['virtual_size']),
            units.format_size(row['written']),
            table.time_text(row['qcow2_ns']),
            table.time_text(row['pcow_ns']),
        )
        for operation in sides.OPERATIONS
        for row in result['sizes']
        if row['operation'] == operation
    ]
    return table.Table(
        'The same by size of the image and by what was written to it, clusters of 64 KiB',
        ('operation', 'virtual size', 'written', 'qcow2', 'pcow'),
        rows,
        'In a process that has it open, not mapped. Before each operation a sixteenth of what was '
        'written is '
        'written again. A column that does not grow is a time that does not depend on the size.',
    )


def _live(result: dict[str, Any]) -> list[table.Table]:
    live_result = result['live']
    if not live_result:
        return []
    raw, pcow = live_result['sides']['raw'], live_result['sides']['pcow']
    rows: list[tuple[str, ...]] = []
    for operation, command in (
        ('create', 'snapshot-create-as'),
        ('revert', 'snapshot-revert'),
        ('delete', 'snapshot-delete'),
    ):
        times = [statistics.median(side[operation]) * 1e9 for side in (raw, pcow)]
        rows.append(
            (f'virsh {command}', *map(table.time_text, times), f'{times[1] / times[0]:.0%}')
        )
    sizes = [units.format_size(side['state_size']) for side in (raw, pcow)]
    rows.append(('space for the VM state', *sizes, f'{pcow["state_size"] / raw["state_size"]:.0%}'))
    for name, when in (('pause', 'at rest'), ('pause-stores', 'while the guest stores')):
        rows.append(
            (
                f'snapshot of the image alone: pause, {when}',
                '-',
                table.time_text(statistics.median(live_result[name]) * 1e9),
                '-',
            )
        )
    title = (
        f'A running guest (TCG) with {units.format_size(live_result["ram"])} of RAM and an NVDIMM '
        f'of '
        f'{units.format_size(live_result["nvdimm"])}'
    )
    return [
        table.Table(
            title,
            ('operation', 'raw NVDIMM', 'pcow', 'pcow / raw'),
            rows,
            'The guest stands still from the beginning to the end of virsh snapshot-create-as. Its '
            'RAM goes into the '
            'VM state on both sides; a raw NVDIMM goes there as well.',
        )
    ]


def tables(result: dict[str, Any]) -> list[table.Table]:
    return [_large(result), _sweep(result), _sizes(result), *_live(result)]


def plots(result: dict[str, Any]) -> dict[str, plot.Bars]:
    rows = [row for row in result['rows'] if row['way'] == 'open']
    groups = tuple(
        f'{row["operation"]}, {row["part"].replace("sweep-", "cluster ")}' for row in rows
    )
    values = {side: tuple(row[f'{side}_ns'] for row in rows) for side in ('qcow2', 'pcow')}
    return {'snapshots': plot.Bars('Time of a snapshot operation', 'ns', groups, values, log=True)}
