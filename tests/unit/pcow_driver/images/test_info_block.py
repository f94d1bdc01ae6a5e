# SPDX-License-Identifier: Apache-2.0
import hashlib
import uuid

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import info_block
from tests.unit.pcow_driver import base

# The block of a 66 MiB namespace, made by the script whose result Linux 6.1 booted from.
SIZE = 66 * units.MIB
UUID = uuid.UUID('6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27')
FIELDS = (
    '4e5644494d4d5f50464e5f494e464f00'
    '6d0f2b5e7c1a4e399b540a1f6c3d8e27'
    '00000000000000000000000000000000'
    '00000000'
    '0100'
    '0400'
    '0000200000000000'
    '0040000000000000'
    '01000000'
    '00000000'
    '00000000'
    '00002000'
    '00100000'
    '4000'
    '0000'
)
CHECKSUM = '6144a8c1a8f51752'
SHA256 = '373316949b3018e5c07e7f86c3ca894bc136f466c4e40ec2cf5cde6ac6b13053'


class InfoBlockTest(base.TestCase):
    def test_known_block(self) -> None:
        block = info_block.info_block(SIZE, info_block.PageMap.RAM, UUID)
        self.assertEqual(FIELDS, block[: len(FIELDS) // 2].hex())
        self.assertEqual(CHECKSUM, block[-8:].hex())
        self.assertEqual(SHA256, hashlib.sha256(block).hexdigest())

    def test_parse(self) -> None:
        block = info_block.info_block(SIZE, info_block.PageMap.RAM, UUID)
        self.assertEqual(
            info_block.InfoBlock(2 * units.MIB, SIZE - 2 * units.MIB), info_block.parse(block)
        )
        for position in (0, 16, 56, 94, 2000, 4088, 4095):
            damaged = bytearray(block)
            damaged[position] ^= 1
            self.assertIsNone(info_block.parse(bytes(damaged)), f'byte {position}')
        self.assertIsNone(info_block.parse(block[:-1]))
        self.assertIsNone(info_block.parse(b''))

    def test_page_map_in_the_image(self) -> None:
        size = 10 * units.GIB
        offset = info_block.data_offset(size, info_block.PageMap.PMEM)
        self.assertEqual(0, offset % info_block.ALIGNMENT)
        self.assertGreaterEqual(offset, 8192 + size // 4096 * 64)
        self.assertLess(offset, 8192 + size // 4096 * 64 + info_block.ALIGNMENT)
        self.assertEqual(
            info_block.InfoBlock(offset, size - offset),
            info_block.parse(info_block.info_block(size, info_block.PageMap.PMEM, UUID)),
        )

    def test_offset_that_is_there_already(self) -> None:
        block = info_block.info_block(2 * SIZE, info_block.PageMap.RAM, UUID, offset=8 * units.MIB)
        self.assertEqual(
            info_block.InfoBlock(8 * units.MIB, 2 * SIZE - 8 * units.MIB), info_block.parse(block)
        )

    def test_refuses_sizes(self) -> None:
        for size in (0, 2 * units.MIB, SIZE + 4096):
            self.assertRaises(
                exception.InvalidSize, info_block.info_block, size, info_block.PageMap.RAM, UUID
            )


class SizeTest(base.TestCase):
    def test_ram(self) -> None:
        for data, size in (
            (1, 4),
            (2 * units.MIB, 4),
            (2 * units.MIB + 1, 6),
            (64 * units.MIB, 66),
        ):
            self.assertEqual(
                size * units.MIB, info_block.namespace_size(data, info_block.PageMap.RAM)
            )

    def test_is_the_smallest(self) -> None:
        for data in (1, 100 * units.MIB, 127 * units.MIB, 10 * units.GIB + 1, 15 * units.TIB):
            for page_map in info_block.PageMap:
                size = info_block.namespace_size(data, page_map)
                self.assertGreaterEqual(size - info_block.data_offset(size, page_map), data)
                smaller = size - info_block.ALIGNMENT
                self.assertLess(smaller - info_block.data_offset(smaller, page_map), data)
