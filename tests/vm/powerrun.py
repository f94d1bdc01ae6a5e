# SPDX-License-Identifier: Apache-2.0
"""Power cuts, from outside: the machine is killed with SIGKILL at a random moment of its load, and
started again on its NVDIMMs.

What an emulator keeps is every store that the processor did, in the order of the program. With
``caches`` a cut takes away, as real loss of power does, what was not written back from the caches
and fenced; all of it, or what a random eviction left.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
import random
import time
from typing import Any

from pcow_driver.common import units
from tests.vm import caches
from tests.vm import contents
from tests.vm import machine
from tests.vm import outer
from tests.vm import power
from tests.vm import tree

_MIN_STEPS = 12  # told of before the machine is killed
_MOST_STEPS = 60
_REGION_SIZES = (2 * units.GIB,) * 2
# share of the dirty lines that were evicted before a cut, of each
_EVICTIONS = (0.0, 0.0, 0.9, 1.0)
CUTS = len(_EVICTIONS)  # at most


class _Cut(Exception):
    """The power is cut now."""


class _Load:
    """Counts the steps that the machine tells of, and cuts its power."""

    def __init__(
        self, first: int, all_lost: int | None, report: outer.Report, generator: random.Random
    ) -> None:
        """:param all_lost: the last step before a cut that left nothing of the caches"""
        self.last = first - 1
        self._until = first + generator.randrange(_MIN_STEPS, _MOST_STEPS)
        self._wait = generator.random() * 0.2
        self._all_lost = all_lost
        self._report = report

    def __call__(self, result: dict[str, Any]) -> None:
        if 'done' in result:
            self.last = result['done']
            if self.last >= self._until:
                time.sleep(self._wait)
                raise _Cut
        else:
            # the check before the load, or its failure
            if (
                result['passed']
                and self._all_lost is not None
                and result['figures']['unflushed'] >= self._all_lost
            ):
                result |= {
                    'passed': False,
                    'error': f'what was stored after step {self._all_lost} and never flushed was '
                    f'kept',
                }
            self._report(result)


def _lose_caches(
    nvdimms: list[Path],
    cut: int,
    is_last: bool,
    lost_before: int,
    generator: random.Random,
    report: outer.Report,
) -> int:
    """What the cuts lost up to now, in lines. A single cut may come when all is flushed and lose
    nothing; not all of them.
    """
    begun = time.monotonic()
    loss = caches.cut(nvdimms, generator, _EVICTIONS[cut])
    lost = lost_before + loss.lost
    result: dict[str, Any] = {
        'name': 'power-caches',
        'accel': 'none',
        'pool': 'pmem',
        'passed': lost > 0 or not is_last,
        'seconds': round(time.monotonic() - begun, 2),
        'figures': dataclasses.asdict(loss),
    }
    if not result['passed']:
        result['error'] = 'no cut lost a line of a cache: this run shows nothing'
    report(result)
    return lost


def run(
    outside: outer.Outer,
    root: tree.Tree,
    scratch: Path,
    report: outer.Report,
    lost_caches: bool,
    cuts: int = CUTS,
) -> int:
    """Cut the power so many times; the number of results that must have been reported.

    :raises PcowError: the machine itself failed
    """
    place: machine.Place = contents.fsdax_places()['ext4']
    generator = random.Random()
    contents.labelled_nvdimms(scratch, _REGION_SIZES)
    nvdimms = contents.nvdimm_files(scratch, len(_REGION_SIZES))
    disk = scratch / 'outer.ext4'
    root.make_image(disk)
    runs: list[tuple[int, int]] = []
    lost = 0
    for cut in range(cuts + 1):
        check = (
            'power-begin'
            if cut == 0
            else 'power-verify-' + '-'.join(f'{first}-{last}' for first, last in runs)
        )
        first = runs[-1][1] + 1 + power.UNTOLD if runs else 1
        wanted = [(check, 'pmem')] + ([(f'power-load-{first}', 'pmem')] if cut < cuts else [])
        all_lost = runs[-1][1] if runs and lost_caches and _EVICTIONS[cut - 1] == 0 else None
        load = _Load(first, all_lost, report, generator)
        if lost_caches:
            caches.begin(nvdimms)
        try:
            outside.boot(
                disk,
                contents.labelled_nvdimms(scratch, _REGION_SIZES, lost_caches),
                '',
                load,
                plan=outer.plan_text(wanted, {'pmem': place}),
            )
        except _Cut:
            runs.append((first, load.last))
            if lost_caches:
                lost = _lose_caches(nvdimms, cut, cut == cuts - 1, lost, generator, report)
        else:
            break  # the last check, or something failed
    return cuts + 1 + (cuts if lost_caches else 0)
