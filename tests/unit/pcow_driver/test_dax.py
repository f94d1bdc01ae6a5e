# SPDX-License-Identifier: Apache-2.0
import hashlib
import uuid

from pcow_driver import dax
from pcow_driver import exception
from pcow_driver import units
from tests.unit.pcow_driver import base

# The block of a 66 MiB namespace, made by the script whose result Linux 6.1 booted from.
SIZE = 66 * units.MIB
UUID = uuid.UUID('6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27')
FIELDS = ('4e5644494d4d5f50464e5f494e464f00' '6d0f2b5e7c1a4e399b540a1f6c3d8e27' '00000000000000000000000000000000'
          '00000000' '0100' '0400' '0000200000000000' '0040000000000000' '01000000' '00000000' '00000000' '00002000'
          '00100000' '4000' '0000')
CHECKSUM = '6144a8c1a8f51752'
SHA256 = '373316949b3018e5c07e7f86c3ca894bc136f466c4e40ec2cf5cde6ac6b13053'


class InfoBlockTest(base.TestCase):
    def test_known_block(self) -> None:
        block = dax.info_block(SIZE, dax.PageMap.RAM, UUID)
        self.assertEqual(FIELDS, block[:len(FIELDS) // 2].hex())
        self.assertEqual(CHECKSUM, block[-8:].hex())
        self.assertEqual(SHA256, hashlib.sha256(block).hexdigest())

    def test_parse(self) -> None:
        block = dax.info_block(SIZE, dax.PageMap.RAM, UUID)
        self.assertEqual(dax.InfoBlock(2 * units.MIB, SIZE - 2 * units.MIB), dax.parse(block))
        for position in (0, 16, 56, 94, 2000, 4088, 4095):
            damaged = bytearray(block)
            damaged[position] ^= 1
            self.assertIsNone(dax.parse(bytes(damaged)), f'byte {position}')
        self.assertIsNone(dax.parse(block[:-1]))
        self.assertIsNone(dax.parse(b''))

    def test_page_map_in_the_image(self) -> None:
        size = 10 * units.GIB
        offset = dax.data_offset(size, dax.PageMap.PMEM)
        self.assertEqual(0, offset % dax.ALIGNMENT)
        self.assertGreaterEqual(offset, 8192 + size // 4096 * 64)
        self.assertLess(offset, 8192 + size // 4096 * 64 + dax.ALIGNMENT)
        self.assertEqual(dax.InfoBlock(offset, size - offset), dax.parse(dax.info_block(size, dax.PageMap.PMEM, UUID)))

    def test_offset_that_is_there_already(self) -> None:
        block = dax.info_block(2 * SIZE, dax.PageMap.RAM, UUID, offset=8 * units.MIB)
        self.assertEqual(dax.InfoBlock(8 * units.MIB, 2 * SIZE - 8 * units.MIB), dax.parse(block))

    def test_refuses_sizes(self) -> None:
        for size in (0, 2 * units.MIB, SIZE + 4096):
            self.assertRaises(exception.InvalidSize, dax.info_block, size, dax.PageMap.RAM, UUID)


class SizeTest(base.TestCase):
    def test_ram(self) -> None:
        for data, size in ((1, 4), (2 * units.MIB, 4), (2 * units.MIB + 1, 6), (64 * units.MIB, 66)):
            self.assertEqual(size * units.MIB, dax.namespace_size(data, dax.PageMap.RAM))

    def test_is_the_smallest(self) -> None:
        for data in (1, 100 * units.MIB, 127 * units.MIB, 10 * units.GIB + 1, 15 * units.TIB):
            for page_map in dax.PageMap:
                size = dax.namespace_size(data, page_map)
                self.assertGreaterEqual(size - dax.data_offset(size, page_map), data)
                smaller = size - dax.ALIGNMENT
                self.assertLess(smaller - dax.data_offset(smaller, page_map), data)
