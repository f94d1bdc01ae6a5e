# SPDX-License-Identifier: Apache-2.0
"""What the kernel alone takes for the work that a snapshot of mapped memory cannot do without."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from pcow_driver import units
from pcow_driver.bench.snapshots import sides

_PROT_READ = 1


def freeze(work: sides.Work) -> float:
    """Seconds that taking write permission from a raw file takes, mapped as a whole and stored to where the rounds of ``work`` do.

    :raises OSError: mmap() or mprotect() is refused
    """
    path = work.directory / 'raw'
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, work.virtual_size)
        with mmap.mmap(descriptor, work.virtual_size) as memory:
            for offset, length, _pattern in work.extents(work.changed, 0):
                for page in range(offset, offset + length, 4 * units.KIB):
                    memory[page] = 1
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            begun = time.perf_counter()
            failed = libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(work.virtual_size), _PROT_READ)
            took = time.perf_counter() - begun
            if failed:
                raise OSError(ctypes.get_errno(), 'mprotect')
            return took
    finally:
        os.close(descriptor)
        path.unlink()
