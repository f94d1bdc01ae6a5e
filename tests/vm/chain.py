# SPDX-License-Identifier: Apache-2.0
"""The images that the test guest finds: what is in them is told by guest/layout.c."""

from __future__ import annotations

import os
from pathlib import Path

from tests.vm import machine

MIB = 1 << 20
SIZE = 32 * MIB
# small, so that many stores are the first one to theirs
_CLUSTER = '16k'
_BLOCK_OFFSET = 4096
_LEVELS = {'base': 1, 'middle': 2, 'all': 5}
CARRIER = 'carrier.qcow2'  # an empty disk that takes the state of a VM
RAW = 'all.raw'  # a file with the same content as the chain


def _write_raw(guest: Path, info_block: Path, level: str, path: Path) -> None:
    machine.run(guest, 'raw', _LEVELS[level], SIZE, path)
    with open(path, 'r+b') as file:
        file.seek(_BLOCK_OFFSET)
        file.write(info_block.read_bytes())


def make(directory: Path, binaries: Path, guest: Path, info_block: Path) -> None:
    """Make the chain base.pcow <- middle.pcow <- vm.pcow with the snapshots first and second, RAW
    and CARRIER.

    :raises Failure: a tool failed, or the chain is not what it must be
    """
    directory.mkdir()
    img, io, raw, expected = (
        binaries / 'pcow-img',
        binaries / 'pcow-io',
        directory / 'raw',
        directory / RAW,
    )
    base, middle, image = (directory / f'{name}.pcow' for name in ('base', 'middle', 'vm'))
    _write_raw(guest, info_block, 'base', raw)
    machine.run(img, 'convert', '-q', '-f', 'raw', '-O', 'pcow', raw, base)
    machine.run(img, 'seal', base)
    _write_raw(guest, info_block, 'middle', raw)
    machine.run(img, 'convert', '-q', '-f', 'raw', '-O', 'pcow', '-B', base, raw, middle)
    machine.run(img, 'seal', middle)
    raw.unlink()
    machine.run(img, 'create', '-q', '-b', middle, '-o', f'cluster_size={_CLUSTER}', image)
    machine.run(io, image, stdin=machine.run(guest, 'script', SIZE).encode())
    _write_raw(guest, info_block, 'all', expected)
    machine.run(img, 'compare', '-q', '-f', 'pcow', '-F', 'raw', image, expected)
    raw.write_bytes(bytes(MIB))
    machine.run(img, 'convert', '-q', '-f', 'raw', '-O', 'qcow2', raw, directory / CARRIER)
    raw.unlink()


def copy_sparse(source: Path, target: Path) -> None:
    """Copy a file and leave its holes."""
    with open(source, 'rb') as reader, open(target, 'wb') as writer:
        size, end = os.fstat(reader.fileno()).st_size, 0
        writer.truncate(size)
        while end < size:
            try:
                begin = os.lseek(reader.fileno(), end, os.SEEK_DATA)
            except OSError:  # no data any more
                break
            end = os.lseek(reader.fileno(), begin, os.SEEK_HOLE)
            os.lseek(writer.fileno(), begin, os.SEEK_SET)
            os.lseek(reader.fileno(), begin, os.SEEK_SET)
            while begin < end:
                begin += os.sendfile(writer.fileno(), reader.fileno(), begin, end - begin)


def copy(original: Path, directory: Path) -> Path:
    """The image of a chain of its own in a directory."""
    for path in original.glob('*.pcow'):
        copy_sparse(path, directory / path.name)
    return directory / 'vm.pcow'
