# SPDX-License-Identifier: Apache-2.0
"""What automatic checkpoints cost a guest that stores at random, and the host: with the loop of
``pcow-protect.service`` and without it, by turns.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import subprocess
import sys
import threading
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.virt import domain
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree
from tools.lib.bench.persist import place
from tools.lib.bench.persist import qemu
from tools.lib.quickstart import vm

_MS = 1e-6  # of a nanosecond
_TICK = os.sysconf('SC_CLK_TCK')
_BEGINS = 60.0  # seconds in which the loop has taken its first one
_ENDS = 30.0
_SETTLES = 1.0
_LOOKS = 0.5  # less than between two checkpoints


def measure(
    where: place.Place, memory: int, size: int, seconds: float, rounds: int, pauses: int
) -> dict[str, Any]:
    """:param memory: MiB
    :param size: MiB that are stored to
    :param seconds: of each turn
    :param pauses: checkpoints that are taken by hand, one each second, for their pauses
    """
    found: dict[str, list[dict[str, float]]] = {'without': [], 'with': []}
    with where.vm('automatic', memory) as machine:
        one = domain.Domain(where.connection, machine.name)
        for number in range(rounds):
            for side in found:
                turn = _turn(where, one, machine, side, f'{size} {seconds:.0f}')
                found[side].append(turn)
                print(
                    f'{side} checkpoints, round {number + 1}: {turn["rate"]:.0f} MiB/s', flush=True
                )
        taken = _pauses(one, machine, size, pauses) if pauses else []
    return {'memory': memory, 'size': size, 'seconds': seconds, 'sides': found, 'pauses': taken}


def _turn(
    where: place.Place, one: domain.Domain, machine: vm.Vm, side: str, words: str
) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(_loop(where, one)) if side == 'with' else None
        others = [where.libvirtd_pid] + ([loop] if loop is not None else [])
        taken = stack.enter_context(_counted(one))
        before = _cpu(one, others)
        begun = time.monotonic()
        rate, longest = qemu.rate(machine.run(f'/pcow/program stores {words}'))
        took = time.monotonic() - begun
        used = _cpu(one, others) - before
    # nobody stores while these are thrown away
    for found in tree.checkpoints(one):
        checkpoint.delete(one, found.name)
    return {'rate': rate, 'longest': longest, 'cpu': used / took, 'checkpoints': float(len(taken))}


@contextlib.contextmanager
def _counted(one: domain.Domain) -> Iterator[set[str]]:
    """Names of the checkpoints that the loop takes meanwhile, by its record of the last one: it
    thins them.
    """
    found: set[str] = set()
    done = threading.Event()

    def last() -> str:
        record = records.read(one.uuid)
        return record.checkpoint if record is not None else ''

    def work() -> None:
        while not done.wait(_LOOKS):
            if last() != before:
                found.add(last())

    before = last()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def _loop(where: place.Place, one: domain.Domain) -> Iterator[int]:
    """pcowctl host watch, when it has taken its first checkpoint."""
    policy.change(one, interval=policy.AUTO)
    process = subprocess.Popen(
        [
            Path(sys.prefix) / 'bin/pcowctl',
            *('--config-file', str(where.workplace.config), 'host', 'watch'),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + _BEGINS
        while not any(automatic.is_own(found.name) for found in tree.checkpoints(one)):
            if process.poll() is not None or time.monotonic() > end:
                raise exception.PcowError(reason='host watch takes no checkpoint')
            time.sleep(0.2)
        time.sleep(_SETTLES)
        yield process.pid
    finally:
        try:
            process.terminate()
            process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            policy.remove(one)


def _cpu(one: domain.Domain, others: list[int]) -> float:
    """Seconds of CPU that the host has worked for it, without the guest's own instructions."""
    pid = int(one.process().split('-')[0])
    threads = Path(f'/proc/{pid}/task').iterdir()
    own = sum(_seconds(path) for path in threads if not _is_vcpu(path))
    return own + sum(_seconds(Path(f'/proc/{other}')) for other in others)


def _is_vcpu(thread: Path) -> bool:
    return thread.joinpath('comm').read_text().startswith('CPU ')


def _seconds(process: Path) -> float:
    fields = process.joinpath('stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _pauses(one: domain.Domain, machine: vm.Vm, size: int, count: int) -> list[float]:
    """ms that the guest stood in each."""
    machine.run(f'(/pcow/program stores {size} {count + 60} >/dev/null &)')
    time.sleep(_SETTLES)
    taken, last = [], ''
    for _number in range(count):
        begun = time.monotonic()
        name, said = automatic.take(one, automatic.PERIODIC)
        taken.append(said.pause * _MS)
        if last:
            checkpoint.delete(one, last)
        last = name
        time.sleep(max(0.0, 1.0 - (time.monotonic() - begun)))
    machine.run('killall program')
    checkpoint.delete(one, last)
    return taken
