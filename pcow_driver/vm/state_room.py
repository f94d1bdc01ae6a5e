# SPDX-License-Identifier: Apache-2.0
"""What QEMU stores into images of a VM beside what the guest stores: the state of its devices, with
each checkpoint, and what it keeps of the pool for the last one. Bytes.
"""

from __future__ import annotations

import os

from pcow_driver.common import units
from pcow_driver.vm import machine
from pcow_driver.vm import tree

# As QEMU reckons (migration/pcow/last.c): what the guest does in between, and what is plugged,
# makes it larger.
_LEAST = 4 * units.MIB
# Of a VM of which nothing is known yet: twice the video memory that one usually has.
_FIRST = 32 * units.MIB


def of_state(found: machine.Machine, path: str) -> int:
    """Most that the next checkpoint stores into this image as a state, as far as can be told."""
    ram = found.ram()
    if ram is None or os.path.realpath(ram) != os.path.realpath(path):
        return 0
    known = tree.checkpoints(found)
    return _in_slabs(_LEAST + known[-1].state_size * 3 // 2 if known else _FIRST)


def of_spare(found: machine.Machine, path: str) -> int:
    """What QEMU is going to keep in this image for the last checkpoint, and does not yet: the state
    of that, and a slab of each image for what it writes of its metadata.
    """
    if found.active():
        for one in found.query():
            wanted, there = one.get('spare-wanted'), one.get('spare')
            if (
                isinstance(wanted, int)
                and isinstance(there, int)
                and wanted
                and os.path.realpath(str(one.get('filename', ''))) == os.path.realpath(path)
            ):
                return max(0, wanted - there)
    return of_state(found, path) + units.SLAB_SIZE


def _in_slabs(size: int) -> int:
    return -(-size // units.SLAB_SIZE) * units.SLAB_SIZE
