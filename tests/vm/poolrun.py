# SPDX-License-Identifier: Apache-2.0
"""The boots of the machine that tests pools, and what happens to its NVDIMMs in between."""

from __future__ import annotations

import os
from pathlib import Path

from pcow_driver.common import units
from tests.vm import contents
from tests.vm import machine
from tests.vm import outer
from tests.vm import pools
from tests.vm import tree

_REGIONS = (2 * units.GIB, 2 * units.GIB, units.GIB + 6 * units.MIB)
_RESERVED = f' memmap={pools.RESERVED // units.MIB}M!4G'  # the machine has RAM there
_DAMAGED = 2  # the region whose labels are written over
_BOOTS = (('session', 'other', 'refusals', 'odd', 'killed'), ('rebooted',), ('damaged', 'rebooted'))
_SHORT = (('session',),)


def run(
    outside: outer.Outer, root: tree.Tree, scratch: Path, report: outer.Report, short: bool = False
) -> int:
    """The scenarios of tests/vm/pools.py, one boot after the other.

    :param short: only what an operator does
    :return: how many there are
    :raises PcowError: the machine itself failed
    """
    boots = _SHORT if short else _BOOTS
    places: dict[str, machine.Place] = contents.pools_places()
    disk = scratch / 'outer.ext4'
    root.make_image(disk)
    for number, names in enumerate(boots):
        if 'damaged' in names:
            _damage_labels(scratch / f'nvdimm-{_DAMAGED}')
        nvdimms = contents.labelled_nvdimms(scratch, _REGIONS)
        started_by = '' if number == 0 else ' vm-test.systemd'
        plan = outer.plan_text([(f'pool-{name}', 'pmem') for name in names], places)
        outside.boot(disk, nvdimms, f'vm-test.writable{started_by}{_RESERVED}', report, plan)
    return sum(len(names) for names in boots)


def _damage_labels(nvdimm: Path) -> None:
    """As if a firmware or another driver had written over both index blocks and the labels."""
    with open(nvdimm, 'r+b') as file:
        file.seek(-contents.LABEL_SIZE, os.SEEK_END)
        file.write(os.urandom(contents.LABEL_SIZE))
