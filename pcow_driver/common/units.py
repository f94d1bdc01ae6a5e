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

_MAX_SIZE = (1 << 63) - 1
_UNITS = 'kmgtpe'
_NAMES = ('B', 'KiB', 'MiB', 'GiB', 'TiB')
_SIZE = re.compile(
    r'(?P<number>\d+)(?P<fraction>\.\d+)?( *(?P<unit>b|[kmgtpe](i?b)?))?', re.IGNORECASE | re.ASCII
)
_HEXADECIMAL = re.compile(r'0x(?P<number>[0-9a-f]+)', re.IGNORECASE | re.ASCII)


def _number(digits: str, base: int) -> int:
    digits = digits.lstrip('0') or '0'
    return int(digits, base) if len(digits) < 20 else _MAX_SIZE + 1


def _fraction(digits: str, shift: int) -> int:
    """Digits after the point as a part of ``1 << shift``, the part of a byte cut off."""
    fraction = 0
    for digit in reversed(digits):
        fraction = (fraction + (int(digit) << shift)) // 10
    return fraction


def _unsigned(text: str) -> int | str:
    """Bytes, or why there are none."""
    unknown = 'write a number of bytes, or one with K, M, G, T, P or E, which count in 1024'
    if match := _HEXADECIMAL.fullmatch(text):
        size = _number(match['number'], 16)
    elif match := _SIZE.fullmatch(text):
        unit, fraction = (match['unit'] or 'b').lower(), match['fraction'] or ''
        shift = 10 * (_UNITS.find(unit[0]) + 1)
        if len(unit) == 2:
            number = f'{match["number"]}{fraction}{unit[0].upper()}'
            return (
                f'it could count in 1000 or in 1024: write {number} or {number}iB, which count in '
                f'1024, or a number of bytes'
            )
        if fraction and not shift:  # a part of a byte
            return unknown
        size = (_number(match['number'], 10) << shift) + _fraction(fraction[1:], shift)
    else:
        return unknown
    return size if size <= _MAX_SIZE else 'it is too large'


def parse_size(text: str) -> int:
    """Bytes of a size as people write it: ``4096``, ``64k``, ``1.5G``, ``2 MiB``, ``0x1000``; all
    units are powers of 1024.

    pcow-img and pcow-io take the same (``qemu-backend/tools/common/size.c``):
    ``tests/unit/data/sizes.txt`` is the table of both.

    :raises InvalidSize: not a size
    """
    found = _unsigned(text)
    if not isinstance(found, int) and text[:1] in ('-', '+'):
        found = _unsigned(text[1:])
        if found != _unsigned(''):
            found = f'it has a sign, which a size has not: write {text[1:]}'
    if isinstance(found, str):
        raise exception.InvalidSize(size=repr(text), reason=found)
    return found


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def format_exact(size: int) -> str:
    """A size for people who compare it with another: in the largest unit of which it is a multiple,
    ``1026 MiB``.
    """
    power = 0
    while power + 1 < len(_NAMES) and size and size % (1 << 10 * (power + 1)) == 0:
        power += 1
    return f'{size >> 10 * power} {_NAMES[power]}'


def format_size(size: int) -> str:
    """A size for people, at most one decimal: ``1.5 GiB``."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_NAMES) - 1)
    return f'{size / (1 << 10 * power):.1f}'.removesuffix('.0') + ' ' + _NAMES[power]
