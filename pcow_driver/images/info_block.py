# SPDX-License-Identifier: Apache-2.0
"""The info block that makes a label-less NVDIMM an fsdax namespace in the guest.

A guest mounts with DAX only what has struct pages. For a namespace without labels Linux learns
about them from ``struct nd_pfn_sb`` (drivers/nvdimm/pfn.h) at byte 4096: if it is there and its
checksum holds, /dev/pmem0 begins at ``dataoff`` and supports DAX. A boot disk therefore carries
this block in front of its file system or partition table. All fields are little-endian::

    offset  size  field             value
         0    16  signature         "NVDIMM_PFN_INFO\\0"
        16    16  uuid              of this namespace
        32    16  parent_uuid       zero: no labels
        48     4  flags             0
        52     2  version_major     1
        54     2  version_minor     4 (page_size and page_struct_size are there, padding is zero)
        56     8  dataoff           bytes from the start of the namespace
        64     8  npfns             4 KiB pages from dataoff to the end
        72     4  mode              1: struct pages in guest RAM, 2: in front of dataoff
        76     4  start_pad         0
        80     4  end_trunc         0
        84     4  align             of the mapping, in bytes
        88     4  page_size         4096
        92     2  page_struct_size  64
        94  3994  padding           0
      4088     8  checksum          fletcher64 of the block with this field zero
"""

import dataclasses
import enum
import struct
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import units

BLOCK_OFFSET = 4096
BLOCK_SIZE = 4096
ALIGNMENT = units.SLAB_SIZE
SIGNATURE = b'NVDIMM_PFN_INFO\0'
PAGE_STRUCT_SIZE = 64

OFFSET = ALIGNMENT  # of the data with PageMap.RAM, whatever the size

_FIELDS = struct.Struct('<16s16s16sIHHQQIIIIIH')
_CHECKSUM = struct.Struct('<Q')
_RESERVE = BLOCK_OFFSET + BLOCK_SIZE
_VERSION = (1, 4)


class PageMap(enum.Enum):
    """Where the guest keeps its 64-byte struct pages, one per 4 KiB."""

    RAM = 'ram'  # 16 MiB of guest RAM per GiB; the image is not written to for it
    # in the image, in front of the data: every boot writes 1.6 % of the size
    PMEM = 'pmem'

    @property
    def mode(self) -> int:
        return 1 if self is PageMap.RAM else 2


def fletcher64(block: bytes) -> int:
    """The kernel's nd_fletcher64() over little-endian 32-bit words."""
    low = high = 0
    for (word,) in struct.iter_unpack('<I', block):
        low = (low + word) & 0xFFFFFFFF
        high = (high + low) & 0xFFFFFFFF
    return high << 32 | low


def data_offset(size: int, page_map: PageMap) -> int:
    """Bytes in front of the data in a namespace of ``size`` bytes, a multiple of 2 MiB."""
    pages = size // units.PAGE_SIZE * PAGE_STRUCT_SIZE if page_map is PageMap.PMEM else 0
    return units.round_up(_RESERVE + pages, ALIGNMENT)


def namespace_size(data_size: int, page_map: PageMap) -> int:
    """Smallest size of a namespace that has room for ``data_size`` bytes behind the info block."""
    data_size = units.round_up(data_size, ALIGNMENT)
    size = 0
    while size != (needed := data_offset(size, page_map) + data_size):
        size = needed
    return size


@dataclasses.dataclass(frozen=True)
class InfoBlock:
    """What a valid info block says, in bytes; a guest can write it, so nothing but its checksum has
    been verified.
    """

    data_offset: int
    data_size: int


def info_block(
    size: int, page_map: PageMap, uuid: uuidlib.UUID, *, offset: int | None = None
) -> bytes:
    """The 4096 bytes for offset 4096 of a namespace of ``size`` bytes.

    :param offset: where the data begins, a multiple of 2 MiB; by default as near to the start as
        can be
    :raises InvalidSize: not a multiple of 2 MiB, or no room for data
    """
    offset = max(offset or 0, data_offset(size, page_map))
    if size % ALIGNMENT or size <= offset:
        raise exception.InvalidSize(
            size=size, reason=f'a DAX namespace is a multiple of 2 MiB above {offset} bytes'
        )
    block = _FIELDS.pack(
        SIGNATURE,
        uuid.bytes,
        bytes(16),
        0,
        *_VERSION,
        offset,
        (size - offset) // units.PAGE_SIZE,
        page_map.mode,
        0,
        0,
        ALIGNMENT,
        units.PAGE_SIZE,
        PAGE_STRUCT_SIZE,
    ).ljust(BLOCK_SIZE, b'\0')
    return block[: -_CHECKSUM.size] + _CHECKSUM.pack(fletcher64(block))


def parse(block: bytes) -> InfoBlock | None:
    """The content of a valid info block; None for anything else."""
    if len(block) != BLOCK_SIZE or not block.startswith(SIGNATURE):
        return None
    body, (checksum,) = block[: -_CHECKSUM.size], _CHECKSUM.unpack(block[-_CHECKSUM.size :])
    if fletcher64(body + bytes(_CHECKSUM.size)) != checksum:
        return None
    fields = _FIELDS.unpack_from(block)
    return InfoBlock(int(fields[6]), int(fields[7]) * units.PAGE_SIZE)
