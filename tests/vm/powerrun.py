# SPDX-License-Identifier: Apache-2.0
"""Power cuts, from outside: the machine is killed with SIGKILL at a random moment of its load, and started again on its NVDIMMs.

What the emulator keeps is every store that the processor did, in the order of the program: a store that was not flushed from
the caches is not lost by this, as it would be by real loss of power.
"""

from __future__ import annotations

from pathlib import Path
import random
import time
from typing import Any

from pcow_driver import units
from tests.vm import contents
from tests.vm import machine
from tests.vm import outer
from tests.vm import power
from tests.vm import tree

CUTS = 4
_MIN_STEPS = 12                                # told of before the machine is killed
_MOST_STEPS = 60
_REGION_SIZES = (2 * units.GIB,) * 2


class _Cut(Exception):
    """The power is cut now."""


class _Load:
    """Counts the steps that the machine tells of, and cuts its power."""

    def __init__(self, first: int, report: outer.Report, generator: random.Random) -> None:
        self.last = first - 1
        self._until = first + generator.randrange(_MIN_STEPS, _MOST_STEPS)
        self._wait = generator.random() * 0.2
        self._report = report

    def __call__(self, result: dict[str, Any]) -> None:
        if 'done' not in result:
            self._report(result)               # the check before the load, or its failure
        else:
            self.last = result['done']
            if self.last >= self._until:
                time.sleep(self._wait)
                raise _Cut


def run(outside: outer.Outer, root: tree.Tree, scratch: Path, report: outer.Report) -> int:
    """Cut the power CUTS times; the number of results that must have been reported.

    :raises PcowError: the machine itself failed
    """
    place: machine.Place = contents.fsdax_places()['ext4']
    generator = random.Random()
    nvdimms = contents.labelled_nvdimms(scratch, _REGION_SIZES)
    disk = scratch / 'outer.ext4'
    root.make_image(disk)
    runs: list[tuple[int, int]] = []
    for cut in range(CUTS + 1):
        check = 'power-begin' if cut == 0 else 'power-verify-' + '-'.join(f'{first}-{last}' for first, last in runs)
        first = runs[-1][1] + 1 + power.UNTOLD if runs else 1
        wanted = [(check, 'pmem')] + ([(f'power-load-{first}', 'pmem')] if cut < CUTS else [])
        load = _Load(first, report, generator)
        try:
            outside.boot(disk, nvdimms, '', load, plan=outer.plan_text(wanted, {'pmem': place}))
        except _Cut:
            runs.append((first, load.last))
        else:
            break                              # the last check, or something failed
    return CUTS + 1
