# SPDX-License-Identifier: Apache-2.0
"""What a pool has provisioned: how far its images can still grow, beside all that takes its space
already. Bytes throughout.

For an image that guests can fill all blocks are provisioned that it can come to hold: its virtual
size, its metadata, and what its snapshots keep. What nobody can fill (templates, images that are
kept for their children, other files, the metadata of the file system) takes what it takes; the rest
of the pool, as often as over-commit says, is what can be provisioned. With over-commit 1.0 every
guest can therefore fill its image.
"""

from __future__ import annotations

import dataclasses

from pcow_driver.common import units

# slabs whose metadata are in one slab, see doc/source/reference/format.rst
_HEADS = 3  # slabs of each group that hold no data: metadata, its mirror, checksums
_GROUP = (1 << 14) - _HEADS


def whole_size(virtual_size: int) -> int:
    """Most blocks that a new image can come to hold."""
    return (
        virtual_size + (virtual_size // units.SLAB_SIZE // _GROUP + 1) * _HEADS * units.SLAB_SIZE
        if virtual_size
        else 0
    )


def reservation(thin: int, fixed: int) -> str:
    """What is noted of an image that is being made: what a guest will be able to fill of it, and
    what nobody will.
    """
    return f'{thin} {fixed}'


def read_reservation(text: str) -> tuple[int, int]:
    """Nothing is provisioned for one of which nothing can be read: it looks for room before it
    takes it.
    """
    numbers = text.split(' ')
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return 0, 0
    return int(numbers[0]), int(numbers[1])


@dataclasses.dataclass(frozen=True)
class Account:
    """Of one pool at one moment."""

    total: int  # of the file system
    # for this user; found out after ``held`` and ``growth``, so that no store counts twice
    free: int
    reserved: int  # by the pool's reserve
    overcommit: float  # 0: no limit
    held: int  # blocks of images that guests can fill
    growth: int  # most that can come to those
    # what guests will be able to fill of what is being made, without what it takes already
    building: int
    building_fixed: int  # the same, of what nobody will be able to fill

    @property
    def fixed(self) -> int:
        """Held by what nobody can fill, or about to be."""
        return max(self.total - self.free - self.held, 0) + self.building_fixed

    @property
    def provisioned(self) -> int:
        return self.held + self.growth + self.building

    @property
    def limit(self) -> int | None:
        """What may be provisioned; None: no limit."""
        if not self.overcommit:
            return None
        return int(max(self.total - self.reserved - self.fixed, 0) * self.overcommit)

    def reserved_beside(self, claimed: int) -> int:
        """What is not for whoever claims space of the pool, if this much was claimed of what is
        provisioned: for placement, which lets ``(total - reserved) * overcommit`` be claimed.
        """
        if not self.overcommit:
            return self.reserved
        return (
            self.reserved + self.fixed + max(int((self.provisioned - claimed) / self.overcommit), 0)
        )

    def lacks(self, thin: int, fixed: int = 0) -> bool:
        """Whether there is no room for a new image that can come to hold so much, or for something
        that nobody can fill.
        """
        limit = self.limit
        return limit is not None and self.provisioned + thin + fixed * self.overcommit > limit
