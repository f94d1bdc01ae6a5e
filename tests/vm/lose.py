# SPDX-License-Identifier: Apache-2.0
"""Has the kernel lose pages of a file: ``lose FILE OFFSET...``, when it reads a line. A process of
its own, as the kernel tells it as well."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
import signal
import struct
import sys
from typing import BinaryIO

PAGE = 4096
READY = 'ready'
_SECTOR = 512
_FIEMAP = 0xC020660B  # linux/fs.h: FS_IOC_FIEMAP
# linux/fiemap.h: start, length, flags, mapped, room, -
_REQUEST = struct.Struct('=QQIIII')
_EXTENT = struct.Struct('=QQQ32x')  # logical, physical, length
_SYNC = 1
_HWPOISON = 100


def _on_device(file: BinaryIO, offset: int) -> int:
    """Where a page of a file is on its device.

    :raises OSError: nowhere
    """
    answer = bytearray(_REQUEST.pack(offset, PAGE, _SYNC, 0, 1, 0) + bytes(_EXTENT.size))
    fcntl.ioctl(file, _FIEMAP, answer)
    if _REQUEST.unpack_from(answer)[3] != 1:
        raise OSError(f'{file.name} has no block at {offset}')
    logical, physical, _length = _EXTENT.unpack_from(answer, _REQUEST.size)
    return int(physical + offset - logical)


def _mark_bad(file: BinaryIO, offset: int) -> None:
    """What the driver of an NVDIMM does when the processor has reported a lost line of it, before
    others hear of it.
    """
    device = os.stat(file.fileno()).st_dev
    bad = Path(f'/sys/dev/block/{os.major(device)}:{os.minor(device)}/badblocks')
    bad.write_text(f'{_on_device(file, offset) // _SECTOR} {PAGE // _SECTOR}\n')


def uses_dax(path: Path) -> bool:
    """Is this on a file system that is mounted with DAX?"""
    device = os.stat(path).st_dev
    name = f'{os.major(device)}:{os.minor(device)}'
    lines = (line.split() for line in Path('/proc/self/mountinfo').read_text().splitlines())
    return any(words[2] == name and 'dax=always' in words[-1].split(',') for words in lines)


def _map_page(file: BinaryIO, offset: int) -> mmap.mmap:
    memory = mmap.mmap(file.fileno(), PAGE, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset)
    memory[0]  # the kernel maps no page that it knows to be bad
    return memory


def main() -> None:
    path, offsets = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
    signal.signal(signal.SIGBUS, lambda number, frame: None)
    with open(path, 'rb') as file:
        pages = [_map_page(file, offset) for offset in offsets]
        print(READY, flush=True)
        sys.stdin.readline()
        for offset, memory in zip(offsets, pages, strict=True):
            if uses_dax(path):
                _mark_bad(file, offset)
            memory.madvise(getattr(mmap, 'MADV_HWPOISON', _HWPOISON))


if __name__ == '__main__':
    main()
