# SPDX-License-Identifier: Apache-2.0
"""The largest partition of a source, moved to where a guest can map it by 2 MiB at a time.

Linux maps persistent memory so where both the physical address and the offset in the file are a
multiple of 2 MiB (fs/dax.c, PG_PMD_COLOUR); a partition that begins between two of them is mapped
by 4 KiB alone. pcow puts the data of a template at a multiple, so what counts is where the
partition begins on the disk.

The partition goes up by less than 2 MiB, and the disk grows by as much. Its contents, UUIDs and
number stay. The table is sfdisk's work, on a sparse file that has the first bytes of the disk: of
what a tenant has made nothing else is parsed, and the file is what it is written to.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import model
from pcow_driver.templates import exported
from pcow_driver.templates import limits

_SECTOR = 512
_HEAD = units.MIB  # has the table: that of GPT ends at 17 KiB
_BACKUP = 33 * _SECTOR  # of GPT, at the end of the disk


@dataclasses.dataclass(frozen=True)
class Piece:
    """Bytes of the source, and where on the disk they go."""

    offset: int
    size: int
    target: int


@dataclasses.dataclass(frozen=True)
class Move:
    """What is to be done; in bytes from the start of the disk."""

    start: int  # of the partition, in the source
    distance: int
    table: str  # path: the new disk, of which there are its first sectors and its last
    head: int  # bytes at the start that are not in a partition

    def pieces(self, size: int) -> Iterator[Piece]:
        """What to copy of a source of ``size`` bytes."""
        yield Piece(0, self.start, 0)
        yield Piece(self.start, size - self.start, self.start + self.distance)

    def write_table(self, path: str, offset: int, size: int) -> None:
        """Write the table of the new disk, of ``size`` bytes, which begins there in the file."""
        size -= size % _SECTOR
        with open(self.table, 'rb') as table, open(path, 'r+b') as file:
            for at, length in ((0, self.head), (size - _BACKUP, _BACKUP)):
                table.seek(at)
                data = table.read(length)
                # an MBR has none at the end, and what is there belongs to the partition
                if at == 0 or data.startswith(b'EFI PART', _BACKUP - _SECTOR):
                    file.seek(offset + at)
                    file.write(data)


def plan(path: str, image_format: str, size: int, offset: int, directory: str) -> Move | None:
    """What has to be done to a source; None if its largest partition is where it should be, or it
    has no partitions.

    :param size: of its data, in bytes
    :param offset: of its data, in the source
    :param directory: for the table
    :raises SourceRejected: that cannot be done
    :raises PackageMissing: there is no sfdisk
    """
    program = tool.find_system('sfdisk', 'fdisk')
    table = os.path.join(directory, 'table')
    exported.read(path, image_format, offset, _HEAD, table)
    os.truncate(table, size)
    found = _partitions(program, table)
    if not found:
        return None
    number, start, sectors = max(found, key=lambda one: one[2])
    distance = -start * _SECTOR % units.SLAB_SIZE
    if not distance:
        return None
    others = [one for one in found if one[0] != number]
    reason = None
    if any(before + length > start for _number, before, length in others):
        reason = 'as it is not the last one on the disk'
    elif start == 0 or (start + sectors) * _SECTOR > size:
        reason = 'as its table has it end where the disk does not reach'
    if reason is not None:
        raise exception.SourceRejected(
            path=path,
            reason=f'partition {number} cannot be moved to a multiple of 2 MiB, {reason}; '
            'without --align its guests map it by 4 KiB',
        )
    _rewrite(program, table, number, start + distance // _SECTOR, sectors, size + distance)
    first = min(other for _number, other, _sectors in found)
    return Move(start * _SECTOR, distance, table, min(first * _SECTOR, _HEAD))


def _partitions(program: str, table: str) -> list[tuple[int, int, int]]:
    """Number, first sector and sectors of each."""
    try:
        output = tool.run_json(program, '--json', table, limits=limits.of_look(0))
    except exception.ToolFailed:  # it has no table that sfdisk knows
        return []
    read = model.Reader(output, 'json', 'sfdisk')
    listed = [
        model.Reader(one, 'json', 'sfdisk')
        for one in read.object('partitiontable').array('partitions')
    ]
    return [
        (int(one.string('node').removeprefix(table)), one.integer('start'), one.integer('size'))
        for one in listed
    ]


def _rewrite(program: str, table: str, number: int, start: int, sectors: int, size: int) -> None:
    os.truncate(table, size)
    script = f'{table}.script'
    with open(script, 'w', encoding='ascii') as file:
        file.write(f'start={start}, size={sectors}\n')
    tool.run(
        program,
        *('--quiet', '--no-reread', '--no-tell-kernel', '--wipe=never', '--wipe-partitions=never'),
        f'--partno={number}',
        table,
        stdin=script,
        limits=limits.of_look(0),
    )
