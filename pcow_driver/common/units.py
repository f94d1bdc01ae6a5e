# SPDX-License-Identifier: Apache-2.0
"""Sizes.  Everything is in bytes unless a name says otherwise."""

import re

from pcow_driver.common import exception

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
PAGE_SIZE = 4 * KIB
SLAB_SIZE = 2 * MIB  # virtual sizes are multiples of it
MIN_CLUSTER_SIZE = PAGE_SIZE
MAX_CLUSTER_SIZE = SLAB_SIZE
MAX_VIRTUAL_SIZE = 16 * TIB

_SHIFTS = {'': 0, 'k': 10, 'm': 20, 'g': 30, 't': 40}
_SIZE = re.compile(r'(\d{1,20})\s*([kmgt]?)(?:i?b)?', re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: ``4096``, ``64k``, ``10G``, ``2 MiB``; all powers of
    1024.

    :raises InvalidSize: not a size, or zero
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or not int(match[1]):
        raise exception.InvalidSize(
            size=repr(text), reason='write a positive number of bytes, or one with k, M, G or T'
        )
    return int(match[1]) << _SHIFTS[match[2].lower()]


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def format_size(size: int) -> str:
    """A size for people, at most one decimal: ``1.5 GiB``."""
    names = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
    power = min(max(size.bit_length() - 1, 0) // 10, len(names) - 1)
    return f'{size / (1 << 10 * power):.1f}'.removesuffix('.0') + ' ' + names[power]
