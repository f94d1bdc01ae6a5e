# SPDX-License-Identifier: Apache-2.0
"""File systems for images: made so that extents are aligned to 2 MiB, mounted with DAX, and looked
at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
import ctypes
import dataclasses
import mmap
import os
import re
import resource
import tempfile

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units

KINDS = ('xfs', 'ext4')
_LABEL_BYTES = {'xfs': 12, 'ext4': 16}
MOUNT_OPTIONS = 'dax=always,noatime,nosuid,nodev'  # nothing in a pool is a program or a device
# what is left of it for its log is then above the 64 MiB that mkfs.xfs wants
MIN_XFS_SIZE = 600 * units.MIB
MOUNTINFO = '/proc/self/mountinfo'
# white space and backslashes in the kernel's lists of mounts
_ESCAPED = re.compile(r'\\([0-7]{3})')
_MAP_SHARED_VALIDATE, _MAP_SYNC = 0x03, 0x80000  # Linux, include/uapi/asm-generic/mman.h
_PROBE_SLABS = 8
_PROBE_SIZE = _PROBE_SLABS * units.SLAB_SIZE
# one a slab, and some of Python's own; in pages of 4 KiB it would be 512 a slab
_MAX_PROBE_FAULTS = 8 * _PROBE_SLABS


def make_command(kind: str, device: str, label: str) -> tuple[str, ...]:
    """Allocation in stripes of 2 MiB is what keeps large extents aligned so that the kernel can map
    them as one entry.

    ext4: no lazy initialisation, whose writes would come later, from the kernel's own time. XFS:
    reflink off, as file systems with it refuse DAX on some of the kernels that pcow supports.
    """
    if kind == 'ext4':
        blocks = units.SLAB_SIZE // units.PAGE_SIZE
        return (
            'mkfs.ext4',
            '-q',
            '-F',
            '-b',
            str(units.PAGE_SIZE),
            '-m',
            '0',
            '-L',
            names.shortened(label, _LABEL_BYTES[kind]),
            '-E',
            f'stride={blocks},stripe_width={blocks},lazy_itable_init=0,lazy_journal_init=0,nodiscard',
            device,
        )
    return (
        'mkfs.xfs',
        '-q',
        '-f',
        '-K',
        '-b',
        f'size={units.PAGE_SIZE}',
        '-d',
        'su=2m,sw=1',
        '-m',
        'reflink=0',
        '-L',
        names.shortened(label, _LABEL_BYTES[kind]),
        device,
    )


def check_size(kind: str, size: int) -> None:
    """:raises UsageInvalid: the file system cannot be that small"""
    if kind == 'xfs' and size < MIN_XFS_SIZE:
        raise exception.UsageInvalid(
            reason=(
                f'XFS needs {units.format_size(MIN_XFS_SIZE)} and there are '
                f'{units.format_size(size)}: take --fs ext4, or more space'
            )
        )


def extent_hint_command(directory: str) -> tuple[str, ...]:
    """XFS: files made in the directory allocate space in pieces of 2 MiB."""
    return 'xfs_io', '-c', f'extsize {units.SLAB_SIZE}', directory


def mount_command(kind: str, device: str, directory: str) -> tuple[str, ...]:
    return 'mount', '-t', kind, '-o', MOUNT_OPTIONS, device, directory


def mount_memory_command(name: str, size: int, directory: str, huge: bool) -> tuple[str, ...]:
    """tmpfs; with ``huge`` its files are of pages of 2 MiB as far as there are any."""
    options = f'size={size},huge={"always" if huge else "advise"},mode=0711,nosuid,nodev'
    return 'mount', '-t', 'tmpfs', '-o', options, f'pcow-{name}', directory


def resize_memory_command(directory: str, size: int) -> tuple[str, ...]:
    return 'mount', '-o', f'remount,size={size}', directory


def grow_command(kind: str, device: str, directory: str) -> tuple[str, ...]:
    """Up to the size of the device."""
    return ('xfs_growfs', '-d', directory) if kind == 'xfs' else ('resize2fs', device)


def umount_command(directory: str) -> tuple[str, ...]:
    return 'umount', directory


def wipe_command(device: str) -> tuple[str, ...]:
    return 'wipefs', '--all', device


RELOAD_COMMAND = ('systemctl', 'daemon-reload')


def mount_point(path: str) -> str:
    """Where the file system is mounted on which ``path`` lies."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place


@dataclasses.dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo, see proc(5)."""

    number: str  # of the file system, major:minor
    at: str
    kind: str
    source: str
    options: str  # those of the file system, in the kernel's words
    id: int = 0  # of the mount


def unescape(text: str) -> str:
    """A path as it is in the kernel's lists of mounts, and in fstab(5)."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def mounts() -> Iterator[Mount]:
    """All of them, a newer one after those that it hides."""
    # What is not UTF-8 is as anywhere in Python: who mounts things chooses the names.
    with open(MOUNTINFO, encoding='utf-8', errors='surrogateescape') as f:
        for line in f:
            before, _dash, after = line.partition(' - ')
            fields, rest = before.split(' '), after.rstrip('\n').split(' ')
            yield Mount(
                number=fields[2],
                at=unescape(fields[4]),
                kind=rest[0],
                source=unescape(rest[1]),
                options=rest[2],
                id=int(fields[0]),
            )


def mount_at(path: str) -> Mount | None:
    """What is mounted at ``path``, the newest."""
    real, found = os.path.realpath(path), None
    for mount in mounts():
        if mount.at == real:
            found = mount
    return found


def mount_of(descriptor: int) -> Mount:
    """That in which a file is that this process has open."""
    with open(f'/proc/self/fdinfo/{descriptor}', encoding='ascii') as f:
        number = next(int(line.split()[1]) for line in f if line.startswith('mnt_id:'))
    return next(mount for mount in mounts() if mount.id == number)


def mounted(path: str) -> tuple[str, str]:
    """Type and source of what is mounted at ``path``; ('', ''): nothing."""
    found = mount_at(path)
    return (found.kind, found.source) if found else ('', '')


_PACKAGES = {
    'mkfs.ext4': 'e2fsprogs',
    'mkfs.xfs': 'xfsprogs',
    'xfs_io': 'xfsprogs',
    'xfs_growfs': 'xfsprogs',
    'resize2fs': 'e2fsprogs',
    'mount': 'mount',
    'umount': 'mount',
    'systemctl': 'systemd',
    'wipefs': 'util-linux',
}


def run(command: tuple[str, ...], *, cwd: str | None = None) -> None:
    """Run one of the commands above.

    :param cwd: where it runs: then its directory is '.', or a name there
    :raises ToolFailed:
    :raises PackageMissing:
    """
    tool.run(
        tool.find_system(command[0], _PACKAGES.get(command[0], command[0])), *command[1:], cwd=cwd
    )


@dataclasses.dataclass(frozen=True)
class Behaviour:
    """How a file system was found to behave."""

    map_sync: bool  # a store is durable once it has left the CPU caches
    huge_mappings: bool  # 2 MiB are mapped by one fault


def probe(directory: str) -> Behaviour:
    """Map a new file, store to it, and count the faults: what mount options promise is not taken
    for granted.

    :raises ProbeFailed: the file could not be made
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_SIZE)
            try:
                return Behaviour(
                    True,
                    _faults(file.fileno(), _MAP_SHARED_VALIDATE | _MAP_SYNC) <= _MAX_PROBE_FAULTS,
                )
            except OSError:
                return Behaviour(
                    False, _faults(file.fileno(), mmap.MAP_SHARED) <= _MAX_PROBE_FAULTS
                )
    except OSError as e:
        raise exception.ProbeFailed(
            path=directory,
            reason=f'no file of {units.format_size(_PROBE_SIZE)} could be made and '
            f'mapped there ({e.strerror})',
        ) from None


def _faults(fd: int, flags: int) -> int:
    """Page faults of one store to each page of the aligned slabs of the file."""
    with mmap.mmap(fd, _PROBE_SIZE, flags=flags) as memory:
        first = ctypes.c_char.from_buffer(memory)
        skew = -ctypes.addressof(first) % units.SLAB_SIZE
        del first  # or the mapping could not be closed
        before = resource.getrusage(resource.RUSAGE_SELF)
        for offset in range(skew, skew + (_PROBE_SLABS - 1) * units.SLAB_SIZE, units.PAGE_SIZE):
            memory[offset] = 1
        after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt
