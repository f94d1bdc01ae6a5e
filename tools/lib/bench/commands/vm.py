# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole VM, beside QEMU's savevm of the same guest on qcow2 with ordinary RAM.

Both sides run the same guest in the same QEMU, by turns. Before each turn the guest writes to so
much of its RAM as a row says. What a checkpoint costs the guest is how long it stands: with savevm
that is all of the command. Forks have no other side: savevm's state belongs to one qcow2 file.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import dataclasses
import os
from pathlib import Path
import statistics
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
from tools.lib.quickstart import guest as quickstart_guest

HELP = 'checkpoint, revert, restart and fork of a VM, beside savevm (minutes; as root)'
_MODULES = ('virtio_pci', 'virtio_blk')
_BOOT_SECONDS = 600.0
_COMMAND_SECONDS = 600.0
_ROOM = 256  # MiB of its RAM that the guest needs besides
_SETTLE_SECONDS = 20  # in which a fork does what it does when idle
_NAME = 'bench'
_MS = 1e-6  # of a nanosecond
_TEXT = {
    'pause': 'checkpoint: the guest stands',
    'durable': 'checkpoint: it is durable',
    'revert': 'revert in place',
    'restart': 'start of QEMU to running from it',
    'fork': 'fork: images, QEMU, running',
    'answer': 'fork: the guest has answered',
}


@dataclasses.dataclass(frozen=True)
class Case:
    memory: int  # MiB of RAM
    dirty: int  # MiB that the guest writes to before each checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--rounds', type=int, default=5, help='of each case (default 5)')
    parser.add_argument(
        '--cases',
        default='512:64,2048:64,2048:1024',
        help='MiB of RAM, and how many of them the guest writes to (default: '
        '512:64,2048:64,2048:1024)',
    )


def _cases(text: str) -> list[Case]:
    with contextlib.suppress(ValueError):
        found = [Case(*map(int, word.split(':'))) for word in text.split(',')]
        if all(0 <= case.dirty <= case.memory - _ROOM for case in found):
            return found
    raise exception.UsageInvalid(
        reason=f'--cases {text}: give numbers as 512:64, where {_ROOM} MiB of the RAM stay'
    )


class Side(abc.ABC):
    """A VM that runs, and what it has taken of the pool."""

    words = ''  # for the guest's kernel
    files: tuple[Path, ...]  # what it stores to

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        self.directory, self.case = directory, case
        self._guest = guest
        directory.mkdir()

    def start(self, *more: str, files: tuple[Path, ...] = (), name: str = 'vm') -> console.Guest:
        place = self.directory / name
        place.mkdir(exist_ok=True)
        return console.Guest(
            [
                tool.find('emulator', build_first=True),
                *('-name', f'guest=bench-{name}', '-nodefaults', '-no-user-config'),
                *('-display', 'none', '-accel', 'tcg', '-cpu', 'max', '-machine', 'q35,nvdimm=on'),
                *(
                    '-m',
                    f'{self.case.memory}M,slots=2,maxmem=70G',
                    '-machine',
                    'memory-backend=ram',
                ),
                *('-kernel', str(self._guest.kernel), '-initrd', str(self._guest.initrd)),
                '-append',
                'console=ttyS0 quiet panic=-1 rw no_timer_check pcow.init=shell '
                f'pcow.modules={",".join(_MODULES)}{self.words}',
                *self.devices(files),
                *more,
            ],
            place,
        )

    @abc.abstractmethod
    def devices(self, files: tuple[Path, ...]) -> list[str]:
        """Arguments of QEMU.

        :param files: rather than those of this side; none: those
        """


class Pcow(Side):
    title = 'pcow'

    def __init__(
        self, directory: Path, guest: quickstart_guest.Guest, case: Case, base: Path
    ) -> None:
        super().__init__(directory, guest, case)
        self.base = base
        self.files = (
            base.parent / f'{directory.name}.pcow',
            base.parent / f'{directory.name}.ram.pcow',
        )
        image.create_overlay(str(self.files[0]), str(base))
        image.create(str(self.files[1]), case.memory * units.MIB)

    def devices(self, files: tuple[Path, ...]) -> list[str]:
        root, ram = files or self.files
        return [
            '-object',
            f'memory-backend-file,id=ram,mem-path={ram},share=on,size={self.case.memory}M',
            *disks.nvdimm('root', root, image.info(str(self.base)).virtual_size),
        ]

    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        said = vm.qmp('pcow-checkpoint-create', {'name': _NAME})
        return {
            'pause': said['pause'] * _MS,
            'durable': said['durable'] * _MS,
            'bytes': float(said['state-size']),
        }

    def revert(self, vm: console.Guest) -> None:
        vm.qmp('pcow-checkpoint-revert', {'name': _NAME})

    def delete(self, vm: console.Guest) -> None:
        vm.qmp('pcow-checkpoint-delete', {'name': _NAME})

    def restart(self) -> console.Guest:
        vm = self.start('-S').__enter__()
        self.revert(vm)
        vm.qmp('cont', {})
        return vm

    def fork(self) -> dict[str, float]:
        """Of a VM that runs; the child is gone afterwards."""
        begun = time.monotonic()
        files = tuple(path.parent / f'child-{path.name}' for path in self.files)
        for child, path in zip(files, self.files, strict=True):
            image.create_overlay(str(child), str(path), base_snapshot=_NAME)
        try:
            with self.start('-S', files=files, name='child') as vm:
                vm.qmp('pcow-checkpoint-revert', {})
                vm.qmp('cont', {})
                running = time.monotonic()
                vm.run('true', _COMMAND_SECONDS)
                answered = time.monotonic()
                time.sleep(_SETTLE_SECONDS)
                own = sum(path.stat().st_blocks * 512 for path in files)
        finally:
            for child in files:
                child.unlink(missing_ok=True)
        return {
            'fork': (running - begun) * 1e3,
            'answer': (answered - begun) * 1e3,
            'own': float(own),
        }


class Stock(Side):
    title = 'savevm'
    words = ' pcow.disk=/dev/vda'

    def __init__(self, directory: Path, guest: quickstart_guest.Guest, case: Case) -> None:
        super().__init__(directory, guest, case)
        self.files = (directory / 'top.qcow2',)
        options = ('-q', '-f', 'qcow2', '-F', 'qcow2', '-b', str(guest.image), str(self.files[0]))
        tool.run(tool.find('qemu_img'), 'create', *options)

    def devices(self, files: tuple[Path, ...]) -> list[str]:
        return [
            *('-object', f'memory-backend-memfd,id=ram,share=on,size={self.case.memory}M'),
            *('-drive', f'if=none,id=root,file={self.files[0]},format=qcow2'),
            *('-device', 'virtio-blk-pci,drive=root'),
        ]

    def _monitor(self, vm: console.Guest, line: str) -> None:
        said = vm.qmp('human-monitor-command', {'command-line': line})
        if said:
            raise exception.PcowError(reason=f'{line}: {said}')

    def checkpoint(self, vm: console.Guest) -> dict[str, float]:
        begun = time.monotonic()
        self._monitor(vm, f'savevm {_NAME}')
        took = (time.monotonic() - begun) * 1e3
        (kept,) = (
            snapshot['vm-state-size']
            for node in vm.qmp('query-named-block-nodes', {})
            for snapshot in node['image'].get('snapshots', ())
            if snapshot['name'] == _NAME
        )
        return {'pause': took, 'durable': took, 'bytes': float(kept)}

    def revert(self, vm: console.Guest) -> None:
        self._monitor(vm, f'loadvm {_NAME}')

    def delete(self, vm: console.Guest) -> None:
        self._monitor(vm, f'delvm {_NAME}')

    def restart(self) -> console.Guest:
        return self.start('-loadvm', _NAME).__enter__()


def _turn(
    side: Pcow | Stock, vm: console.Guest, number: int
) -> tuple[dict[str, float], console.Guest]:
    """Milliseconds, and bytes of VM state; the VM that runs afterwards."""
    letter = chr(ord('a') + number % 26)
    vm.run(
        f'mount -o remount,size=100% /tmp; yes {letter} | head -c {side.case.dirty}M > /tmp/fill',
        _COMMAND_SECONDS,
    )
    found = side.checkpoint(vm)
    vm.run('echo after > /tmp/after', _COMMAND_SECONDS)
    begun = time.monotonic()
    side.revert(vm)
    found['revert'] = (time.monotonic() - begun) * 1e3
    vm.run(f'! test -e /tmp/after && test "$(head -c 1 /tmp/fill)" = {letter}', _COMMAND_SECONDS)
    if isinstance(side, Pcow):
        found.update(side.fork())
    vm.__exit__(None, None, None)
    begun = time.monotonic()
    vm = side.restart()
    found['restart'] = (time.monotonic() - begun) * 1e3
    vm.run('! test -e /tmp/after', _COMMAND_SECONDS)
    side.delete(vm)
    return found, vm


def _measure(
    case: Case, rounds: int, guest: quickstart_guest.Guest, base: Path, directory: Path
) -> dict[str, Any]:
    turns: dict[str, list[dict[str, float]]] = {}
    label = f'{case.memory}-{case.dirty}'
    sides: list[Pcow | Stock] = [
        Pcow(directory / f'pcow-{label}', guest, case, base),
        Stock(directory / f'stock-{label}', guest, case),
    ]
    vms = []
    try:
        for side in sides:
            vm = side.start().__enter__()
            vms.append(vm)
            vm.wait_ready(_BOOT_SECONDS)
        for number in range(rounds):
            for at, side in enumerate(sides):
                found, vms[at] = _turn(side, vms[at], number)
                turns.setdefault(side.title, []).append(found)
                print(
                    f'{case.memory} MiB, {case.dirty} written, round {number + 1}: {side.title} '
                    f'{found["pause"]:.1f} ms',
                    flush=True,
                )
    finally:
        for vm in vms:
            vm.__exit__(None, None, None)
    for side in sides:
        for path in side.files:
            path.unlink()
    return {'memory': case.memory, 'dirty': case.dirty, 'turns': turns}


def run(options: argparse.Namespace) -> dict[str, Any]:
    cases = _cases(options.cases)
    if options.rounds < 1:
        raise exception.UsageInvalid(reason=f'--rounds {options.rounds}: give at least 1')
    with scratch.directory() as (own, directory):
        guest, _cache = quickstart_guest.prepare(own, None, None, None, (), _MODULES)
        raw, base = directory / 'base.raw', directory / 'base.pcow'
        disks.write_namespace(guest.image, 'qcow2', raw)
        image.convert(str(raw), 'raw', str(base))
        image.seal(str(base))
        raw.unlink()
        rows = [_measure(case, options.rounds, guest, base, directory) for case in cases]
    return {
        'rows': rows,
        'rounds': options.rounds,
        'load': os.getloadavg()[0],
        'machine': machine.describe(),
    }


def _median(turns: list[dict[str, float]], what: str) -> float | None:
    return statistics.median(turn[what] for turn in turns) if what in turns[0] else None


def _cells(row: dict[str, Any], what: str, unit: str, scale: float) -> tuple[str, ...]:
    ours, theirs = (_median(row['turns'][side], what) for side in (Pcow.title, Stock.title))
    if ours is None:
        raise exception.PcowError(reason=f'there is no figure of {what}')
    least = min(turn[what] for turn in row['turns'][Pcow.title])
    most = max(turn[what] for turn in row['turns'][Pcow.title])
    return (
        f'{ours / scale:.1f} {unit} ({least / scale:.1f} to {most / scale:.1f})',
        '-' if theirs is None else f'{theirs / scale:.1f} {unit}',
        '-' if theirs is None or not ours else table.ratio_text(theirs / ours),
    )


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows: list[tuple[str, ...]] = []
    for row in result['rows']:
        what = f'{row["memory"]} MiB of RAM, {row["dirty"]} written to'
        rows += [(what, text, *_cells(row, key, 'ms', 1)) for key, text in _TEXT.items()]
        rows.append((what, 'bytes of a checkpoint', *_cells(row, 'bytes', 'MiB', units.MIB)))
        rows.append((what, 'a fork takes, idle', *_cells(row, 'own', 'MiB', units.MIB)))
    return [
        table.Table(
            'Checkpoints of a VM, and savevm',
            ('guest', 'what', 'pcow', 'savevm on qcow2', 'ratio'),
            rows,
            f'Medians of {result["rounds"]} turns, in brackets the least and the most; both in '
            f'DRAM (tmpfs), under TCG. Load of the machine at the end: {result["load"]:.1f}.',
        )
    ]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
