# SPDX-License-Identifier: Apache-2.0
"""Snapshots of pcow beside what XFS can do with a raw file that is mapped with DAX: FICLONE, and
the kernel's copy-on-write.

Both in one run, on file systems of one machine: an emulator's times mean nothing, their ratios do.

Files of the file system that shares blocks are not deleted: after copy-on-write with DAX that was a
BUG in Debian's 6.1 (fs/inode.c, clear_inode(): an inode that still has pages).
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
import shutil
from typing import Any

from tests.vm import machine

REGION = 'region2'  # of the file system that shares blocks
POOL = Path('/fs/reflink')
MKFS = ('mkfs.xfs', '-q', '-f', '-K', '-d', 'su=2m,sw=1', '-m', 'reflink=1')
_SLABS = 1
# each of a slab that is written, so that it takes 2 MiB at first
_SNAPSHOTS = 1000
_SECONDS = 900.0
_SHOWN = (
    'snapshot',
    'first store after mean',
    'second store after mean',
    'of many',
    'of many, last ten',
    'first store after many mean',
)


def _side(place: machine.Place, what: str, directory: Path) -> dict[str, int]:
    """Figures in nanoseconds."""
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        if not directory.is_relative_to(POOL):
            stack.callback(shutil.rmtree, directory)
        found: dict[str, int] = json.loads(
            machine.run(
                place.binaries / 'snapshot_compare',
                what,
                directory / 'file',
                _SLABS,
                _SNAPSHOTS,
                timeout=_SECONDS,
            )
        )
    return found


def _ratios(image: dict[str, int], other: dict[str, int]) -> dict[str, float]:
    """How many times as long as the other pcow takes."""
    return {name: float(f'{image[name] / other[name]:.3g}') for name in _SHOWN}


def compare(place: machine.Place, kind: str) -> dict[str, Any]:
    """Snapshot, first store after it, many snapshots: the image on this file system, the raw file
    on XFS with reflink.

    :raises Failure: no blocks are shared, so that there is nothing to compare with
    """
    image = _side(place, 'image', place.pool / 'compare')
    clone = _side(place, 'clone', POOL / f'sync-{kind}')
    later = _side(place, 'clone-async', POOL / f'async-{kind}')
    for what, figures in (('image', image), ('clone', clone), ('clone-async', later)):
        if figures['snapshots'] != _SNAPSHOTS + 1:
            raise machine.Failure(f'{what}: {figures["snapshots"]} snapshots')
    return {
        'image/clone': _ratios(image, clone),
        'image/clone without MAP_SYNC': _ratios(image, later),
        'nanoseconds': {'image': image, 'clone': clone, 'clone without MAP_SYNC': later},
    }
