# SPDX-License-Identifier: Apache-2.0
"""What the kernel alone takes for the work that a snapshot cannot do without."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import mmap
import os
import time

from pcow_driver.common import units
from tools.lib.bench.snapshots import sides

_PROT_READ = 1
_MAP_FIXED = 0x10
_PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


@contextlib.contextmanager
def _raw_file(work: sides.Work) -> Iterator[int]:
    path = work.directory / 'raw'
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, work.virtual_size)
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink()


def punch(work: sides.Work) -> float:
    """Seconds that a raw file takes for holes in the places that the rounds of ``work`` write
    between two operations.

    :raises OSError: fallocate() is refused
    """
    libc = ctypes.CDLL(None, use_errno=True)
    extents = work.extents(work.changed, 1)
    with _raw_file(work) as descriptor:
        for offset, length, pattern in extents:
            os.pwrite(descriptor, bytes([pattern]) * length, offset)
        begun = time.perf_counter()
        for offset, length, _pattern in extents:
            if libc.fallocate(
                descriptor, _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length)
            ):
                raise OSError(ctypes.get_errno(), 'fallocate')
        return time.perf_counter() - begun


@contextlib.contextmanager
def _stored_to(work: sides.Work) -> Iterator[tuple[int, int]]:
    """Descriptor and address of a raw file, mapped as a whole and stored to where the rounds of
    ``work`` do.
    """
    with _raw_file(work) as descriptor, mmap.mmap(descriptor, work.virtual_size) as memory:
        for offset, length, _pattern in work.extents(work.changed, 0):
            for page in range(offset, offset + length, 4 * units.KIB):
                memory[page] = 1
        yield descriptor, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def freeze(work: sides.Work) -> float:
    """Seconds that taking write permission from what a raw file has stored to takes.

    :raises OSError: mmap() or mprotect() is refused
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with _stored_to(work) as (_descriptor, address):
        begun = time.perf_counter()
        failed = libc.mprotect(
            ctypes.c_void_p(address), ctypes.c_size_t(work.virtual_size), _PROT_READ
        )
        took = time.perf_counter() - begun
        if failed:
            raise OSError(ctypes.get_errno(), 'mprotect')
        return took


def remap(work: sides.Work) -> float:
    """Seconds that mapping something else takes in the place of what a raw file has stored to: the
    same blocks here.

    :raises OSError: mmap() is refused
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with _stored_to(work) as (descriptor, address):
        begun = time.perf_counter()
        for offset, length, _pattern in work.extents(work.changed, 0):
            found = libc.mmap(
                ctypes.c_void_p(address + offset),
                ctypes.c_size_t(length),
                _PROT_READ,
                mmap.MAP_SHARED | _MAP_FIXED,
                descriptor,
                ctypes.c_int64(offset),
            )
            if found != address + offset:
                raise OSError(ctypes.get_errno(), 'mmap')
        return time.perf_counter() - begun
