# SPDX-License-Identifier: Apache-2.0
"""A QEMU without libvirt: what it takes by itself from its start until it goes on from a
checkpoint, and what a guest's stores to its RAM take on an image.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from pathlib import Path
import re
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.bench.guest import console
from tools.lib.bench.persist import place

_COMMAND_SECONDS = 120.0
_NAME = 'last'
_SERVES = re.compile(rb'serves\r?\n')
_RATE = re.compile(r'rate ([\d.]+) longest ([\d.]+)')


def rate(said: str) -> tuple[float, float]:
    """:return: MiB of lines per second, and the longest ms between two stores"""
    match = _RATE.search(said)
    if match is None:
        raise exception.PcowError(reason=f'the guest has not measured: {said}')
    return float(match[1]), float(match[2])


def _guest(
    where: place.Place, ram: Path, memory: int, directory: Path, *more: str
) -> console.Guest:
    directory.mkdir(exist_ok=True)
    return console.Guest(
        [
            tool.find('emulator', build_first=True),
            *('-name', f'guest={where.run.domain_name}-{directory.name}'),
            *('-nodefaults', '-no-user-config', '-display', 'none', '-accel', 'tcg'),
            *('-cpu', 'max', '-machine', 'q35,hpet=off,memory-backend=ram', '-m', f'{memory}M'),
            '-object',
            f'memory-backend-file,id=ram,mem-path={ram},share=on,size={memory}M',
            *('-kernel', str(where.kernel), '-initrd', str(where.initrd)),
            *('-append', place.CMDLINE),
            *more,
        ],
        directory,
    )


def restart(where: place.Place, memory: int, rounds: int) -> dict[str, Any]:
    """A program of the guest answers on its console before the checkpoint, and after it.

    :param memory: MiB
    """
    ram = where.image(f'restart-{memory}', memory * units.MIB)
    directory, turns = where.run.directory / 'restart', []
    vm = _guest(where, ram, memory, directory).__enter__()
    try:
        vm.wait_ready(place.BOOT_SECONDS)
        vm.ask('/pcow/program serve', _SERVES, _COMMAND_SECONDS)
        for number in range(rounds):
            _ask(vm, number)
            vm.qmp('stop', {})
            vm.qmp('pcow-checkpoint-create', {'name': _NAME})
            vm.__exit__(None, None, None)
            begun = time.monotonic()
            vm = _guest(where, ram, memory, directory, '-S').__enter__()
            there = time.monotonic()
            vm.qmp('pcow-checkpoint-revert', {'name': _NAME})
            reverted = time.monotonic()
            vm.qmp('cont', {})
            running = time.monotonic()
            _ask(vm, rounds + number)
            answered = time.monotonic()
            vm.qmp('pcow-checkpoint-delete', {'name': _NAME})
            turns.append(
                {
                    'start': (there - begun) * 1e3,
                    'revert': (reverted - there) * 1e3,
                    'running': (running - begun) * 1e3,
                    'answered': (answered - begun) * 1e3,
                }
            )
    finally:
        vm.__exit__(None, None, None)
        ram.unlink()
    return {'memory': memory, 'turns': turns}


def _ask(vm: console.Guest, number: int) -> None:
    vm.ask(f'n{number}', re.compile(rf'answer n{number}\r?\n'.encode()), _COMMAND_SECONDS)


def resident(
    where: place.Place, memory: int, size: int, seconds: float, rounds: int
) -> dict[str, Any]:
    """Stores to memory that is there, by turns: RAM on an image, and on a file of tmpfs.

    :param memory: MiB
    :param size: MiB that are stored to
    :param seconds: of each turn
    """
    raw = where.workplace.scratch / 'resident'
    paths = {'pcow': where.image('resident', memory * units.MIB), 'raw': raw}
    with raw.open('xb') as file:
        file.truncate(memory * units.MIB)
    found: dict[str, list[float]] = {side: [] for side in paths}
    try:
        with _both(where, paths, memory) as vms:
            for number in range(rounds):
                for side, vm in vms.items():
                    said = vm.run(f'/pcow/program stores {size} {seconds}', _COMMAND_SECONDS)
                    found[side].append(rate(said)[0])
                print(f'resident, round {number + 1}: {found["pcow"][-1]:.0f} MiB/s', flush=True)
    finally:
        for path in paths.values():
            path.unlink()
    return {'memory': memory, 'size': size, 'sides': found}


@contextlib.contextmanager
def _both(
    where: place.Place, paths: dict[str, Path], memory: int
) -> Iterator[dict[str, console.Guest]]:
    with contextlib.ExitStack() as stack:
        vms = {}
        for side, path in paths.items():
            vms[side] = stack.enter_context(
                _guest(where, path, memory, where.run.directory / f'resident-{side}')
            )
            vms[side].wait_ready(place.BOOT_SECONDS)
        yield vms
