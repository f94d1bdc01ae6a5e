# SPDX-License-Identifier: Apache-2.0
"""What a block device carries, and whether somebody uses it.  Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Iterator
import errno
import os
import stat

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units

# where every file system, partition table and volume manager leaves something
_HEAD = 8 * units.MIB
_TAIL = units.MIB  # where GPT and RAID leave more
_SAMPLES = 8192  # looked at between them, a page each, evenly spread
# Copies of super blocks: btrfs' mirrors; ext4's in groups 1 and powers of 3, 5 and 7, with blocks
# of 1, 2 and 4 KiB.
_MIRRORS = (64 * units.MIB, 256 * units.GIB)
_GROUPS = (1, 3, 5, 7, 9, 25, 27, 49, 81)
# and how far behind the beginning
_GROUP_SIZES = ((8 * units.MIB, units.KIB), (32 * units.MIB, 0), (128 * units.MIB, 0))
_BLKID_NOTHING = 2  # blkid(8): nothing was found
SYSFS = '/sys/dev/block'


def signature(device: str) -> str | None:
    """Type of the file system, partition table or volume that blkid(8) knows; None: it knows
    nothing there.

    :raises ToolFailed: the device cannot be read, or two signatures contradict each other
    """
    output = tool.run(
        tool.find_system('blkid', 'util-linux'),
        '--probe',
        '--output',
        'export',
        device,
        ok_exit_codes=(0, _BLKID_NOTHING),
    )
    values = dict(line.split('=', 1) for line in output.splitlines() if '=' in line)
    return values.get('TYPE') or values.get('PTTYPE') or ('something' if values else None)


def _places(size: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what is looked at; small pieces, in no order."""
    for start, length in ((0, _HEAD), (max(size - _TAIL, 0), _TAIL)):
        yield from (
            (offset, units.MIB) for offset in range(start, min(start + length, size), units.MIB)
        )
    copies = [
        *_MIRRORS,
        *(group * group_size + skip for group_size, skip in _GROUP_SIZES for group in _GROUPS),
    ]
    step = max(size // _SAMPLES // units.PAGE_SIZE, 1) * units.PAGE_SIZE
    yield from (
        (offset, units.PAGE_SIZE) for offset in (*copies, *range(0, size, step)) if offset < size
    )


def is_blank(device: str) -> bool:
    """Zeros only, as far as it was looked at: what blkid does not know may still be somebody's
    data.

    Looked at are head and tail, the copies that file systems keep of their super blocks, and pages
    all over the rest.

    :raises DeviceRefused: it cannot be read
    """
    try:
        with open(device, 'rb', buffering=0) as f:
            size = f.seek(0, os.SEEK_END)
            for offset, length in _places(size):
                data = os.pread(f.fileno(), length, offset)
                if data.count(0) != len(data):
                    return False
    except OSError as e:
        raise exception.DeviceRefused(
            device=device, reason=f'it cannot be read ({e.strerror})'
        ) from None
    return True


def check_block_device(device: str) -> None:
    """:raises DeviceRefused: it is none"""
    try:
        mode = os.stat(device).st_mode
    except OSError as e:
        raise exception.DeviceRefused(device=device, reason=str(e.strerror)) from None
    if not stat.S_ISBLK(mode):
        raise exception.DeviceRefused(device=device, reason='it is not a block device')


def check_dax(device: str) -> None:
    """:raises DeviceRefused: no file system on it could be mounted with DAX, which shows only when
    it has been made
    """
    check_block_device(device)
    number = os.stat(device).st_rdev
    place = os.path.realpath(f'{SYSFS}/{os.major(number)}:{os.minor(number)}')
    if os.path.exists(os.path.join(place, 'partition')):
        place = os.path.dirname(place)  # a partition has no queue of its own
    try:
        with open(os.path.join(place, 'queue/dax'), encoding='ascii') as f:
            said = f.read().strip()
    except OSError:
        said = ''
    if said != '1':
        raise exception.DeviceRefused(
            device=device,
            reason=(
                'it has no DAX (the kernel says so in queue/dax): take a region or a namespace of '
                'persistent memory (ndctl list '
                "-RN), or make a pool in a directory of a file system on it ('pcowctl pool create "
                "NAME DIRECTORY')"
            ),
        )


def check_unused(device: str) -> None:
    """:raises DeviceRefused: it is mounted, held by another device, or no block device"""
    check_block_device(device)
    try:
        # O_EXCL on a block device: refused while it is mounted, swap, or part of another device
        # (open(2)).
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as e:
        busy = 'it is in use (mounted, or part of another device): unmount it first'
        reason = busy if e.errno == errno.EBUSY else str(e.strerror)
        raise exception.DeviceRefused(device=device, reason=reason) from None


def check_formattable(device: str, *, force: bool, unknown: bool = False) -> None:
    """Make sure that a new file system destroys nothing that anybody may want.

    :param force: known or unknown content may be destroyed; a device in use is refused all the same
    :param unknown: what blkid does not know may be destroyed
    :raises DeviceRefused:
    """
    check_unused(device)
    if force:
        return
    found = signature(device)
    if found:
        raise exception.DeviceRefused(
            device=device, reason=f'it carries {found}; give --force to destroy that'
        )
    if not unknown and not is_blank(device):
        raise exception.DeviceRefused(
            device=device,
            reason=('it carries data that blkid does not know; give --force to destroy that'),
        )
