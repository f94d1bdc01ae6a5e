# SPDX-License-Identifier: Apache-2.0
"""The immutable flag of a file (chattr +i, FS_IOC_SETFLAGS), and what the header of an open image
says of it: nothing but system calls.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import os
import stat
import struct
import uuid as uuidlib

# Linux, include/uapi/linux/fs.h
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_IMMUTABLE_FL = 0x10
_FLAGS = struct.Struct('i')
# doc/source/reference/format.rst
_MAGIC, _UUID_OFFSET, _STATE_OFFSET, _SEALED = b'\x89PCOW\r\n\x1a', 40, 552, 1
_VERSION = struct.pack('<I', 2)
_FEATURES_OFFSET, _MIRROR = 24, 1


@contextlib.contextmanager
def opened(path: str, *, directory: int | None = None) -> Iterator[int]:
    """:param directory: a descriptor of where a relative path begins
    :raises OSError: also for what is no regular file
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f'{path} is not a regular file')
        yield fd
    finally:
        os.close(fd)


def _flags(fd: int) -> int:
    return int(_FLAGS.unpack(fcntl.ioctl(fd, _FS_IOC_GETFLAGS, _FLAGS.pack(0)))[0])


def is_set(path: str) -> bool:
    """False also where the file system has no such flag."""
    try:
        with opened(path) as fd:
            return bool(_flags(fd) & _FS_IMMUTABLE_FL)
    except OSError:
        return False


def set_flag(path: str, wanted: bool) -> None:
    """:raises OSError: the file system has no such flag, or this user may not
    (CAP_LINUX_IMMUTABLE)
    """
    with opened(path) as fd:
        set_flag_of(fd, wanted)


def set_flag_of(fd: int, wanted: bool) -> None:
    """As :func:`set_flag`, of an open file."""
    flags = _flags(fd)
    changed = flags | _FS_IMMUTABLE_FL if wanted else flags & ~_FS_IMMUTABLE_FL
    if changed != flags:
        fcntl.ioctl(fd, _FS_IOC_SETFLAGS, _FLAGS.pack(changed))


def is_sealed(fd: int) -> bool:
    """By the header of an open image, which is read without running anything."""
    header = os.pread(fd, _STATE_OFFSET + 1, 0)
    return (
        header.startswith(_MAGIC)
        and len(header) > _STATE_OFFSET
        and bool(header[_STATE_OFFSET] & _SEALED)
    )


def lacks_mirror(fd: int) -> bool:
    """By the header of an open image: its metadata has no second copy, and could have one."""
    header = os.pread(fd, _FEATURES_OFFSET + 1, 0)
    return (
        header.startswith(_MAGIC + _VERSION)
        and len(header) > _FEATURES_OFFSET
        and not header[_FEATURES_OFFSET] & _MIRROR
    )


def uuid_of(fd: int) -> str | None:
    """By the header of an open image; None: it is none."""
    header = os.pread(fd, _UUID_OFFSET + 16, 0)
    if not header.startswith(_MAGIC) or len(header) < _UUID_OFFSET + 16:
        return None
    return str(uuidlib.UUID(bytes=header[_UUID_OFFSET:]))
