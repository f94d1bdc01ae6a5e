# SPDX-License-Identifier: Apache-2.0
"""How long a fixation takes, of one VM and of several at once, and a recovery after it: through
libvirt, as ``pcowctl host fixate`` and ``pcowctl host recover`` do it, without the start of Python.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.fixation import fixate
from pcow_driver.fixation import policy
from pcow_driver.fixation import recover
from pcow_driver.virt import domain
from tools.lib.bench.persist import place
from tools.lib.quickstart import vm

_MS = 1e-6  # of a nanosecond


def _protect(where: place.Place, machine: vm.Vm) -> None:
    policy.change(domain.Domain(where.connection, machine.name), interval=policy.OFF)


def _fixate(names: list[str]) -> tuple[list[fixate.Result], float]:
    """:return: of each, and ms for all of them"""
    begun = time.monotonic()
    done = list(fixate.fixate_all(names))
    took = (time.monotonic() - begun) * 1e3
    for one in done:
        if one.problem:
            raise exception.PcowError(reason=f'{one.name} was not fixated: {one.problem}')
    return done, took


def _recover(machines: list[vm.Vm]) -> tuple[float, float]:
    """:return: ms until the last one runs, by its own count; ms for all of them, with the time in
    which the network and the clock of each are told
    """
    begun = time.monotonic()
    back = recover.recover_all()
    took = (time.monotonic() - begun) * 1e3
    if {one.name for one in back if one.checkpoint} != {one.name for one in machines}:
        raise exception.PcowError(reason=f'not all of them went on: {back}')
    for machine in machines:
        machine.attach()
        machine.run('true')
    return max(one.time for one in back) * _MS, took


def one(where: place.Place, memory: int, dirty: int, rounds: int) -> dict[str, Any]:
    """:param memory: MiB
    :param dirty: MiB that the guest stores to before each
    """
    turns = []
    with where.vm('one', memory) as machine:
        _protect(where, machine)
        for number in range(rounds):
            if dirty:
                machine.run(f'/pcow/program fill {dirty}')
            machine.run('true')
            (done,), _took = _fixate([machine.name])
            turn = {'ended': done.time * _MS, 'durable': done.durable * _MS}
            turn['recovery'], _took = _recover([machine])
            turns.append(turn)
            print(
                f'{memory} MiB, {dirty} written, round {number + 1}: {turn["durable"]:.1f} ms',
                flush=True,
            )
    return {'memory': memory, 'dirty': dirty, 'turns': turns}


def several(
    where: place.Place, counts: tuple[int, ...], memory: int, dirty: int, rounds: int
) -> list[dict[str, Any]]:
    """The same guests, so many of them at once, by turns."""
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with contextlib.ExitStack() as stack:
        machines = [
            stack.enter_context(where.vm(f'vm{number}', memory)) for number in range(max(counts))
        ]
        for number in range(rounds):
            for count in counts:
                chosen = machines[:count]
                for machine in chosen:
                    _protect(where, machine)
                    machine.run(f'/pcow/program fill {dirty}')
                done, took = _fixate([machine.name for machine in chosen])
                turn = {'ended': took, 'durable': max(one.durable for one in done) * _MS}
                turn['recovery'], turn['recovered'] = _recover(chosen)
                found[count].append(turn)
                print(f'{count} VMs, round {number + 1}: {took:.1f} ms', flush=True)
    return [
        {'count': count, 'memory': memory, 'dirty': dirty, 'turns': turns}
        for count, turns in found.items()
    ]
