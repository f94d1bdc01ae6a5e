# SPDX-License-Identifier: Apache-2.0
"""Scenarios that start their machine more than once."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from pathlib import Path
import random
from typing import Any

from pcow_driver.common import exception
from tests.vm import confinement
from tests.vm import contents
from tests.vm import options as options_module
from tests.vm import outer
from tests.vm import parts as parts_module
from tests.vm import persist_host
from tests.vm import persistrun
from tests.vm import poolrun
from tests.vm import powerrun
from tests.vm import transcript
from tools.lib.quickstart import state

_SHOWN = ('pool-session', 'pool-refusals', 'pool-damaged')  # in the documentation


@dataclasses.dataclass(frozen=True)
class Surroundings:
    run: state.Run
    outside: outer.Outer
    parts: parts_module.Parts
    options: options_module.Options
    scratch: Path  # for this scenario alone
    report: outer.Report


def _pools(around: Surroundings, short: bool = False) -> int:
    root = contents.pools_tree(
        around.scratch / 'tree',
        around.parts,
        around.options.binaries,
        parts_module.udev(around.run),
    )

    def report(result: dict[str, Any]) -> None:
        if result['name'] in _SHOWN and result['passed']:
            try:
                transcript.keep(
                    result['name'], result['figures']['session'], write=around.options.write_docs
                )
            except exception.PcowError as e:
                result |= {'passed': False, 'error': str(e)}
        around.report(result)

    return poolrun.run(around.outside, root, around.scratch, report, short)


def _power(around: Surroundings, lost_caches: bool = False, cuts: int = powerrun.CUTS) -> int:
    root = contents.fsdax_tree(
        around.scratch / 'tree', around.options.binaries, around.options.unit_tests
    )
    return powerrun.run(around.outside, root, around.scratch, around.report, lost_caches, cuts)


def _confinement(around: Surroundings) -> int:
    """Always on Debian's kernel, which has AppArmor."""
    udev = parts_module.udev(around.run)
    root = contents.confinement_tree(
        around.scratch / 'tree', around.parts, around.options.binaries, udev
    )
    disk = around.scratch / 'outer.ext4'
    root.make_image(disk)
    wanted = [(name, 'pmem') for name in confinement.ALL]

    def report(result: dict[str, Any]) -> None:
        if result['passed'] and 'table' in result['figures']:
            try:
                transcript.keep_table(
                    'confinement', result['figures']['table'], write=around.options.write_docs
                )
            except exception.PcowError as e:
                result |= {'passed': False, 'error': str(e)}
        around.report(result)

    plan = outer.plan_text(wanted, contents.pools_places())
    around.outside.boot(disk, (), 'vm-test.writable vm-test.systemd', report, plan)
    return len(wanted)


def _persist(around: Surroundings, ends: tuple[str, ...] = persistrun.ENDS) -> int:
    root = persist_host.host_tree(
        around.scratch / 'tree', around.run, around.options.binaries, parts_module.udev(around.run)
    )
    generator = random.Random()
    if around.options.rounds:
        ends = tuple(generator.choices(persistrun.ENDS, (1, 3, 1), k=around.options.rounds))
    return persistrun.run(around.outside, root, around.scratch, around.report, ends, generator)


# Parts of others
SHORT = ('pools-session', 'caches-twice', 'persist-shutdown', 'persist-cut', 'persist-panic')
# Each returns the number of results that it must have reported.
FSDAX: dict[str, Callable[[Surroundings], int]] = {
    'pools': _pools,
    'pools-session': functools.partial(_pools, short=True),
    'power': _power,
    'caches': functools.partial(_power, lost_caches=True),
    'caches-twice': functools.partial(_power, lost_caches=True, cuts=2),
    'confinement': _confinement,
    'persist': _persist,
    'persist-shutdown': functools.partial(_persist, ends=('shutdown',)),
    'persist-cut': functools.partial(_persist, ends=('load',)),
    'persist-panic': functools.partial(_persist, ends=('panic',)),
}
