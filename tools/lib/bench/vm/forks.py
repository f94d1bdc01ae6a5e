# SPDX-License-Identifier: Apache-2.0
"""Many forks of one warm guest at once: until all have answered, and what each of them takes."""

from __future__ import annotations

from concurrent import futures
import contextlib
import os
from pathlib import Path
import statistics
import time
from typing import Any

from pcow_driver.common import units
from tools.lib.bench import smaps
from tools.lib.bench.guest import console
from tools.lib.bench.guest import web
from tools.lib.bench.vm import sides

MEMORY = 256  # MiB of RAM
_BOOT_SECONDS = 600.0
_COMMAND_SECONDS = 600.0
_SETTLE_SECONDS = 20  # in which a child does what it does when idle
_LOOKED_AT = 16  # children, one after the other: those of more do not differ


def measure(side: sides.Pcow, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """The parent has a web server that has answered, and runs on."""
    rows = []
    with side.start() as vm:
        vm.wait_ready(_BOOT_SECONDS)
        web.start(vm)
        side.checkpoint(vm)
        try:
            for count in counts:
                turns = []
                for number in range(rounds):
                    turns.append(_turn(side, count))
                    print(
                        f'{count} forks, round {number + 1}: {turns[-1]["all"]:.0f} ms', flush=True
                    )
                rows.append({'count': count, 'memory': MEMORY, 'turns': turns})
        finally:
            side.delete(vm)
    return rows


def _turn(side: sides.Pcow, count: int) -> dict[str, float]:
    children: list[tuple[console.Guest, tuple[Path, ...]]] = []

    def fork(number: int) -> float:
        begun = time.monotonic()
        files = side.fork_images(f'child{number}')
        stack.callback(_remove, files)
        vm = side.fork(f'child{number}', files)
        stack.callback(vm.__exit__, None, None, None)
        children.append((vm, files))
        vm.run('true', _COMMAND_SECONDS)
        return (time.monotonic() - begun) * 1e3

    with contextlib.ExitStack() as stack:
        # As many at a time as there are CPUs: more would only wait for one another. A QEMU ends
        # with the thread that has started it, so the threads stay.
        pool = stack.enter_context(futures.ThreadPoolExecutor(os.cpu_count()))
        begun = time.monotonic()
        answered = list(pool.map(fork, range(count)))
        took = (time.monotonic() - begun) * 1e3
        time.sleep(_SETTLE_SECONDS)
        found = {'all': took, 'each': statistics.median(answered)}
        looked_at = children[:_LOOKED_AT]
        found.update(_look(looked_at, 'idle'))
        for vm, _files in looked_at:
            web.ask(vm)
        found.update(_look(looked_at, 'served'))
    return found


def _remove(files: tuple[Path, ...]) -> None:
    for path in files:
        path.unlink()


def _look(children: list[tuple[console.Guest, tuple[Path, ...]]], when: str) -> dict[str, float]:
    """Of each, the mean: bytes of its own that it maps, what its images have of the pool, and what
    it has stored to, in pages of 4 KiB.
    """
    own, taken, stored = [], [], []
    for vm, files in children:
        names = {str(path) for path in files}

        def kind(word: str, _size: int, names: set[str] = names) -> str:
            return 'own' if word in names else 'other'

        own.append(smaps.pss(vm.pid, kind).get('own', 0))
        taken.append(sum(path.stat().st_blocks * 512 for path in files))
        stored.append(
            sum(
                (item['stats']['pages-copied'] + item['stats']['pages-zeroed']) * 4 * units.KIB
                for item in vm.qmp('query-pcow', {})
            )
        )
    return {
        f'{when}_{name}': statistics.mean(values)
        for name, values in (('own', own), ('taken', taken), ('stored', stored))
    }
