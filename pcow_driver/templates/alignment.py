# SPDX-License-Identifier: Apache-2.0
"""The largest partition of a source, moved to where a guest can map it by 2 MiB at a time.

Linux maps persistent memory so where both the physical address and the offset in the file are a
multiple of 2 MiB (fs/dax.c, PG_PMD_COLOUR); a partition that begins between two of them is mapped
by 4 KiB alone. pcow puts the data of a template at a multiple, so what counts is where the
partition begins on the disk.

The partition goes up by less than 2 MiB, and the disk grows by as much. Its contents, UUIDs and
number stay. The table is sfdisk's work, on a sparse file that has the first bytes of the disk: of
what a tenant has made nothing else is parsed, and the file is what it is written to. What sfdisk
does not see all of there (a GPT that lies elsewhere, logical partitions), or would leave half
changed (a hybrid MBR), is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.images import model
from pcow_driver.templates import exported
from pcow_driver.templates import limits

LOG = logging.getLogger(__name__)

_SECTOR = 512
_HEAD = units.MIB  # has the table: that of GPT ends at 17 KiB, unless it has many entries
# of an MBR: four entries, each with its type at byte 4
_ENTRIES, _ENTRY, _TYPE = 446, 16, 4
_WHOLE_DISK = 0xEE  # what an MBR says beside a GPT
_EXTENDED = {'5', 'f', '85'}


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
    tail: int  # bytes at the end that are the table's

    def pieces(self, size: int) -> Iterator[Piece]:
        """What to copy of a source of ``size`` bytes."""
        yield Piece(0, self.start, 0)
        yield Piece(self.start, size - self.start, self.start + self.distance)

    def write_table(self, path: str, offset: int, size: int) -> None:
        """Write the table of the new disk, of ``size`` bytes, which begins there in the file."""
        size -= size % _SECTOR
        with open(self.table, 'rb') as table, open(path, 'r+b') as file:
            for at, length in ((0, self.head), (size - self.tail, self.tail)):
                table.seek(at)
                file.seek(offset + at)
                file.write(table.read(length))


@dataclasses.dataclass(frozen=True)
class _Partition:
    number: int
    start: int  # sectors
    sectors: int
    type: str

    @property
    def end(self) -> int:
        return self.start + self.sectors


@dataclasses.dataclass(frozen=True)
class _Table:
    label: str  # gpt or dos, what else there may be
    first: int  # sector that may be a partition's
    last: int | None  # the same, of GPT
    partitions: list[_Partition]


def plan(path: str, image_format: str, size: int, offset: int, directory: str) -> Move | None:
    """What has to be done to a source; None if its largest partition is where it should be, or it
    has no partitions.

    :param size: of its data, in bytes
    :param offset: of its data, in the source
    :param directory: for the table, in ``[pcow] conversion_dir``
    :raises SourceRejected: that cannot be done
    :raises PackageMissing: there is no sfdisk
    :raises ConversionDirUnusable:
    """
    program = tool.find_system('sfdisk', 'fdisk')
    place = os.path.join(directory, 'table')
    exported.read(path, image_format, offset, _HEAD, place)
    with workspace.errors():
        os.truncate(place, size)
    table = _read(program, place)
    if table is None or not table.partitions:
        LOG.warning('%s has no partitions that sfdisk knows: it stays as it is', path)
        return None
    largest = max(table.partitions, key=lambda one: (one.sectors, one.start))
    distance = -largest.start * _SECTOR % units.SLAB_SIZE
    reason = _not_seen(table)
    if reason is None and not distance:
        return None
    reason = reason or _unmovable(table, largest, size, place)
    if reason is not None:
        raise exception.SourceRejected(
            path=path,
            reason=f'partition {largest.number} cannot be moved to a multiple of 2 MiB, {reason}; '
            'without --align its guests may map it by 4 KiB',
        )
    with workspace.errors():
        os.truncate(place, size + distance)
    _rewrite(program, place, largest, largest.start + distance // _SECTOR)
    made = _read(program, place)
    if made is None:
        raise exception.SourceRejected(path=path, reason='sfdisk does not read what it has written')
    # that of an MBR has no part at the end
    tail = 0 if made.last is None else (size + distance) // _SECTOR - (made.last + 1)
    first = min(one.start for one in table.partitions)
    return Move(
        largest.start * _SECTOR, distance, place, min(first * _SECTOR, _HEAD), tail * _SECTOR
    )


def _not_seen(table: _Table) -> str | None:
    """Why what is listed may not be all that there is."""
    types = {one.type.lower() for one in table.partitions}
    if table.label not in ('gpt', 'dos') or f'{_WHOLE_DISK:x}' in types:
        return 'as the table is no MBR, and no GPT that is whole at the start of the disk'
    if types & _EXTENDED:
        return 'as there is an extended one, with more of them inside'
    return None


def _unmovable(table: _Table, largest: _Partition, size: int, place: str) -> str | None:
    """Why the partition stays where it is."""
    if table.label == 'gpt' and _other_slots(place):
        return 'as an MBR beside the GPT names partitions, too'
    if any(one.start < table.first or one.end * _SECTOR > size for one in table.partitions):
        return 'as its table has one where no partition can be'
    if any(one.end > largest.start for one in table.partitions if one is not largest):
        return 'as it is not the last one on the disk'
    return None


def _other_slots(table: str) -> bool:
    """Whether its MBR names more than the whole disk."""
    with open(table, 'rb') as file:
        sector = file.read(_SECTOR)
    types = sector[_ENTRIES + _TYPE : _ENTRIES + 4 * _ENTRY : _ENTRY]
    return any(kind not in (0, _WHOLE_DISK) for kind in types)


def _read(program: str, table: str) -> _Table | None:
    """None: there is none that sfdisk knows."""
    try:
        output = tool.run_json(program, '--json', table, limits=limits.of_look(0))
    except exception.ToolFailed:
        return None
    read = model.Reader(output, 'json', 'sfdisk').object('partitiontable')
    if read.integer('sectorsize') != _SECTOR:
        return None
    listed = [model.Reader(one, 'json', 'sfdisk') for one in read.array('partitions')]
    return _Table(
        read.string('label'),
        read.integer('firstlba', 1),
        read.optional_integer('lastlba'),
        [
            _Partition(
                int(one.string('node').removeprefix(table)),
                one.integer('start'),
                one.integer('size'),
                one.string('type'),
            )
            for one in listed
        ],
    )


def _rewrite(program: str, table: str, partition: _Partition, start: int) -> None:
    script = f'{table}.script'
    with workspace.errors(), open(script, 'w', encoding='ascii') as file:
        file.write(f'start={start}, size={partition.sectors}\n')
    tool.run(
        program,
        *('--quiet', '--no-reread', '--no-tell-kernel', '--wipe=never', '--wipe-partitions=never'),
        f'--partno={partition.number}',
        table,
        stdin=script,
        limits=limits.of_look(0),
    )
