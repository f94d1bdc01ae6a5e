# SPDX-License-Identifier: Apache-2.0
"""What power cuts take away: lines of the CPUs' caches that were not written back and fenced
(nvdimm-media.h of our QEMU).
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os
from pathlib import Path
import random

from pcow_driver.common import tool
from pcow_driver.common import units

LINE = 64  # bytes
_CHUNK = units.MIB
_PAGE = 4 * units.KIB


def media_of(nvdimm: Path) -> Path:
    """The file that has what the NVDIMM keeps."""
    return nvdimm.with_name(f'{nvdimm.name}.media')


def begin(nvdimms: list[Path]) -> None:
    """Before a boot: memory and media are the same."""
    for path in nvdimms:
        tool.run('/bin/cp', '--sparse=always', str(path), str(media_of(path)))


@dataclasses.dataclass
class Loss:
    lost: int = 0  # lines
    # lines that left the caches by themselves, just before
    evicted: int = 0


def _data(descriptor: int) -> Iterator[int]:
    """Offsets of the chunks that are not a hole."""
    position, end = 0, os.fstat(descriptor).st_size
    while position < end:
        try:
            start = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole
            return
        position = start - start % _CHUNK
        yield position
        position += _CHUNK


def _differing(seen: bytes, kept: bytes) -> Iterator[int]:
    """Offsets of the lines that differ."""
    for page in range(0, len(seen), _PAGE):
        if seen[page : page + _PAGE] != kept[page : page + _PAGE]:
            for line in range(page, min(page + _PAGE, len(seen)), LINE):
                if seen[line : line + LINE] != kept[line : line + LINE]:
                    yield line


def cut(nvdimms: list[Path], generator: random.Random, eviction: float) -> Loss:
    """After the machine was killed: make each NVDIMM's file what the media has.

    :param eviction: the share of dirty lines that caches had room for no longer; which ones is
        drawn
    """
    loss = Loss()
    for path in nvdimms:
        with (
            open(path, 'r+b', buffering=0) as memory,
            open(media_of(path), 'rb', buffering=0) as media,
        ):
            for offset in sorted({*_data(memory.fileno()), *_data(media.fileno())}):
                seen, kept = (
                    os.pread(memory.fileno(), _CHUNK, offset),
                    os.pread(media.fileno(), _CHUNK, offset),
                )
                for line in _differing(seen, kept):
                    if generator.random() < eviction:
                        loss.evicted += 1
                    else:
                        os.pwrite(memory.fileno(), kept[line : line + LINE], offset + line)
                        loss.lost += 1
        media_of(path).unlink()
    return loss
