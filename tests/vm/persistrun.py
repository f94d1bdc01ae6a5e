# SPDX-License-Identifier: Apache-2.0
"""The boots of a host with a protected VM, and how each of them ends: a shutdown, a power cut, a
panic of its kernel. In each end what was not written back from the CPUs' caches is lost.
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
from tests.vm import persist_host
from tests.vm import tree

_REGION_SIZES = (2 * units.GIB,) * 2
_CHECKPOINTS = (2, 5)  # that are told of before a cut, at least and at most
# share of the dirty lines that were evicted before the end of each boot, by turns
_EVICTIONS = (0.0, 0.0, 0.5, 1.0)
ENDS = ('shutdown', 'load', 'panic')


class _Cut(Exception):
    """The power is cut now."""


class _Boot:
    """Takes what the host tells in a boot."""

    def __init__(self, report: outer.Report, generator: random.Random) -> None:
        self.least = 0
        self.told = 0
        self.failed = False
        self.cuts = False
        self._report = report
        self._until = generator.randint(*_CHECKPOINTS)
        self._wait = generator.uniform(0, 2)

    def __call__(self, result: dict[str, Any]) -> None:
        if 'told' in result:
            self.least = result['told']['least']
            self.told += 1
            if self.cuts and self.told >= self._until:
                time.sleep(self._wait)
                raise _Cut
            return
        self.failed = self.failed or not result['passed']
        if result['passed'] and 'shutdown' in result['name']:
            self.least = result['figures']['generation'] + 1
        self._report(result)


def run(
    outside: outer.Outer,
    root: tree.Tree,
    scratch: Path,
    report: outer.Report,
    ends: tuple[str, ...],
    generator: random.Random,
) -> int:
    """The number of results that must have been reported.

    :raises PcowError: the machine itself failed
    """
    places: dict[str, machine.Place] = contents.pools_places()
    disk = scratch / 'outer.ext4'
    root.make_image(disk, persist_host.ROOM)
    contents.labelled_nvdimms(scratch, _REGION_SIZES)
    nvdimms = contents.nvdimm_files(scratch, len(_REGION_SIZES))
    check = 'begin'
    for number, end in enumerate((*ends, '')):
        wanted = [(f'persist-{name}', 'pmem') for name in (check, end) if name]
        boot = _Boot(report, generator)
        boot.cuts = end == 'load'
        caches.begin(nvdimms)
        arguments = contents.labelled_nvdimms(scratch, _REGION_SIZES, caches=True)
        plan = outer.plan_text(wanted, places)
        try:
            outside.boot(disk, arguments, 'vm-test.writable vm-test.systemd', boot, plan)
        except _Cut:
            pass
        except outer.Ended as e:
            if end != 'panic' or not boot.told or 'sysrq' not in str(e):
                raise
        if boot.failed:
            break
        begun = time.monotonic()
        loss = caches.cut(nvdimms, generator, _EVICTIONS[number % len(_EVICTIONS)])
        report(
            {
                'name': f'persist-lost-{end or "end"}',
                'accel': 'none',
                'pool': 'pmem',
                'passed': True,
                'seconds': round(time.monotonic() - begun, 2),
                'figures': dataclasses.asdict(loss),
            }
        )
        check = f'verify-{boot.least}-{"fixation" if end == "shutdown" else "auto"}'
    # each check, what a shutdown tells, and what each boot lost
    return len(ends) + 1 + ends.count('shutdown') + len(ends) + 1
