# SPDX-License-Identifier: Apache-2.0
"""fio and Redis inside a guest, on pcow, on a raw NVDIMM and on qcow2, as in figures 6, 7 and 9 of
the paper.

One guest with all devices; they take turns, each first by turns. The guest runs under TCG: its
times are not those of a machine, only their ratios say something.
"""

from __future__ import annotations

import argparse
from pathlib import Path
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import scratch
from tools.lib.bench import table
from tools.lib.bench.guest import console
from tools.lib.bench.guest import disks
from tools.lib.bench.guest import figures
from tools.lib.quickstart import guest as quickstart_guest
from tools.lib.quickstart import state

HELP = 'fio and Redis in a guest, on pcow, raw and qcow2 (minutes; as root)'
_PACKAGES = ('fio', 'redis-server', 'redis-tools')
_MODULES = ('virtio_pci', 'virtio_blk')
_MEMORY = 1024  # MiB
_BOOT_SECONDS = 300.0
_COMMAND_SECONDS = 60.0
_TURN_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--quick', action='store_true', help='one short round; its numbers mean little'
    )
    parser.add_argument('--rounds', type=int, help='turns of each device (default 3)')


def _scale(options: argparse.Namespace) -> disks.Scale:
    scale = disks.QUICK if options.quick else disks.FULL
    if options.rounds is None:
        return scale
    if options.rounds < 1:
        raise exception.UsageInvalid(reason=f'--rounds {options.rounds}: give at least 1')
    return disks.Scale(options.rounds, scale.operations, scale.steady, scale.cow)


def _command(
    run: state.Run,
    guest: quickstart_guest.Guest,
    root: Path,
    root_size: int,
    devices: list[disks.Device],
) -> list[str]:
    return [
        tool.find('emulator', build_first=True),
        '-name',
        f'guest={run.domain_name}-bench',
        '-nodefaults',
        '-no-user-config',
        '-display',
        'none',
        '-machine',
        'q35,nvdimm=on',
        '-accel',
        'tcg,thread=multi',
        '-cpu',
        'max',
        '-smp',
        '2',
        '-m',
        f'{_MEMORY}M,slots=4,maxmem=32G',
        '-kernel',
        str(guest.kernel),
        '-initrd',
        str(guest.initrd),
        '-append',
        f'console=ttyS0 quiet panic=-1 rw pcow.init=shell mitigations=off '
        f'pcow.modules={",".join(_MODULES)}',
        *disks.nvdimm('root', root, root_size, share=False),
        *(word for device in devices for word in device.arguments),
    ]


def _mount(guest: console.Guest, devices: list[disks.Device]) -> None:
    for device in devices:
        path = f'/mnt/{device.name}'
        guest.run(
            f'mkdir -p {path} && mount -t ext4 -o {device.mount_options} {device.node} {path}',
            _COMMAND_SECONDS,
        )


def _fill(guest: console.Guest, devices: list[disks.Device], scale: disks.Scale) -> None:
    """What is the devices' own when the snapshot is made."""
    _mount(guest, devices)
    for device in devices:
        guest.run(f'echo "{disks.marker_of(device)}" >/mnt/{device.name}/marker', _COMMAND_SECONDS)
        for name in scale.own_files:
            path = f'/mnt/{device.name}/{name}'
            guest.run(f'dd if={path} of={path} bs=1M conv=notrunc,fsync 2>/dev/null', _TURN_SECONDS)
        guest.run(f'umount /mnt/{device.name}', _COMMAND_SECONDS)


def _turns(
    guest: console.Guest, devices: list[disks.Device], scale: disks.Scale
) -> dict[str, list[dict[str, float]]]:
    turns: dict[str, list[dict[str, float]]] = {device.name: [] for device in devices}
    _mount(guest, devices)
    for number in range(scale.rounds):
        first = number % len(devices)
        for device in [*devices[first:], *devices[:first]]:
            begun = time.monotonic()
            text = guest.run(
                f'sh /mnt/{device.name}/measure /mnt/{device.name} {number} {scale.operations}',
                _TURN_SECONDS,
            )
            turns[device.name].append(figures.of_turn(text))
            print(
                f'round {number + 1} of {scale.rounds}: {device.title}, '
                f'{time.monotonic() - begun:.0f} s',
                flush=True,
            )
    guest.run('sync', _COMMAND_SECONDS)
    return turns


def _measure(run: state.Run, directory: Path, scale: disks.Scale) -> dict[str, Any]:
    print('making the guest and its devices', flush=True)
    guest, _cache = quickstart_guest.prepare(run, None, None, None, _PACKAGES, _MODULES)
    root = directory / 'root.raw'
    root_size = disks.write_namespace(guest.image, 'qcow2', root)
    devices = disks.make_devices(directory, scale)
    command = _command(run, guest, root, root_size, devices)
    with console.Guest(command, directory) as machine_in_guest:
        machine_in_guest.wait_ready(_BOOT_SECONDS)
        _fill(machine_in_guest, devices, scale)
    disks.take_snapshots(directory, devices)
    with console.Guest(command, directory) as machine_in_guest:
        machine_in_guest.wait_ready(_BOOT_SECONDS)
        versions = machine_in_guest.run(
            'uname -r; fio --version; redis-server --version | cut -d" " -f3', _COMMAND_SECONDS
        )
        turns = _turns(machine_in_guest, devices, scale)
        (used,) = machine_in_guest.qmp('query-pcow', {})
        emulator = machine_in_guest.qmp('query-version', {})['qemu']
        version = '.'.join(str(emulator[part]) for part in ('major', 'minor', 'micro'))
    disks.prove(directory, devices)
    found = image.check(str(directory / 'top.pcow'))
    if found.corruptions:
        raise exception.PcowError(
            reason='pcow-img check finds corruptions in the image after the run'
        )
    return {
        'rows': figures.rows(turns),
        'machine': machine.describe(),
        'guest': {
            'accelerator': 'TCG',
            'engine': used['engine'],
            'qemu': version,
            'cpus': 2,
            'memory': _MEMORY * units.MIB,
            'software': versions.split(),
            'rounds': scale.rounds,
            'operations': scale.operations,
            'devices': {device.name: device.title for device in devices},
        },
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    scale = _scale(options)
    with scratch.directory() as (run_state, directory):
        return _measure(run_state, directory, scale)


def _shown(value: float, unit: str) -> str:
    if unit == 'ns':
        return table.time_text(value)
    return f'{value:.0f}/s' if unit == '1/s' else f'{units.format_size(int(value))}/s'


def _with_spread(value: float, turns: list[float], unit: str) -> str:
    """The value, and the least and the most of its turns."""
    if len(turns) == 1:
        return _shown(value, unit)
    return f'{_shown(value, unit)} ({_shown(min(turns), unit)} to {_shown(max(turns), unit)})'


def tables(result: dict[str, Any]) -> list[table.Table]:
    devices = result['guest']['devices']
    rows = []
    for row in result['rows']:
        bounds = '; '.join(
            f'{bound["what"]} {table.ratio_text(bound["value"])}, at least '
            f'{table.ratio_text(bound["at-least"])}: '
            f'{"met" if bound["met"] else "MISSED"}'
            for bound in row['targets']
        )
        rows.append(
            (
                row['title'],
                row['figure'] or '-',
                *(
                    _with_spread(row['values'][device], row['turns'][device], row['unit'])
                    for device in devices
                ),
                table.ratio_text(1 / row['ratio']),
                table.ratio_text(row['qcow2_ratio']),
                table.ratio_text(row['qcow2_tuned_ratio']),
                bounds or '-',
            )
        )
    return [
        table.Table(
            'In a guest (TCG: only the ratios count)',
            (
                'what',
                'figure',
                *devices,
                'pcow by raw',
                'times better than qcow2',
                'than qcow2-tuned',
                'target',
            ),
            rows,
            f'{result["guest"]["rounds"]} turns of each device with '
            f'{result["guest"]["operations"]} operations of 4 KiB in each job: '
            'the median of the turns, in brackets the least and the most of them. A time of a turn '
            'is itself a median, a rate is that '
            'of the whole turn. Ratios are of speed, of the medians.',
        )
    ]


def plots(result: dict[str, Any]) -> dict[str, plot.Bars]:
    groups = tuple(row['title'] for row in result['rows'])
    raw = [row['raw_ns'] for row in result['rows']]
    speed = {
        name: tuple(
            raw_ns / (row['values'][name] if row['unit'] == 'ns' else 1e9 / row['values'][name])
            for raw_ns, row in zip(raw, result['rows'], strict=True)
        )
        for name in ('pcow', 'qcow2', 'qcow2-tuned')
    }
    return {
        'guest': plot.Bars(
            'Speed in a guest, raw NVDIMM = 1',
            'speed by speed of raw',
            groups,
            dict(speed),
            log=True,
        )
    }
