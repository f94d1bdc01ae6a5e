# SPDX-License-Identifier: Apache-2.0
"""Checks of sources.  Building with real tools: tests/functional/test_pcowctl.py."""

import struct

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import info_block
from pcow_driver.templates import template
from tests.unit.pcow_driver import base


def qcow2_header(*, size: int = 64 * units.MIB, backing: bytes = b'', features: int = 0) -> bytes:
    """A qcow2 version 3 header without anything behind it."""
    header = struct.pack(
        '>4sIQIIQIIQQIIQQQQII',
        b'QFI\xfb',
        3,
        512 if backing else 0,
        len(backing),
        16,
        size,
        0,
        1,
        0x30000,
        0x10000,
        1,
        0,
        0,
        features,
        0,
        0,
        4,
        104,
    )
    return header.ljust(512, b'\0') + backing.ljust(65536 - 512, b'\0')


class SourceTest(base.TestCase):
    def _write(self, content: bytes, size: int = 0) -> str:
        path = self.directory / 'source'
        path.write_bytes(content)
        if size:
            with open(path, 'r+b') as f:
                f.truncate(size)
        return str(path)

    def _rejected(self, content: bytes, source_format: str) -> str:
        return str(
            self.assertRaises(
                exception.SourceRejected,
                template.inspect_source,
                self._write(content),
                source_format,
            )
        )

    def test_accepts(self) -> None:
        self.assertEqual(
            64 * units.MIB,
            template.inspect_source(self._write(qcow2_header()), 'qcow2').virtual_size,
        )
        self.assertEqual(
            5 * units.MIB,
            template.inspect_source(self._write(b'data', 5 * units.MIB), 'raw').virtual_size,
        )

    def test_accepts_partition_tables(self) -> None:
        boot_record = (
            bytes(446)
            + struct.pack('<B3sB3sII', 0, b'\0\x02\0', 0xEE, b'\xff\xff\xff', 1, 0xFFFFFFFF)
            + bytes(48)
        )
        path = self._write(boot_record + b'\x55\xaa', 8 * units.MIB)
        self.assertEqual(8 * units.MIB, template.inspect_source(path, 'raw').virtual_size)

    def test_refuses_references_to_other_files(self) -> None:
        self.assertIn('unsafe', self._rejected(qcow2_header(backing=b'/etc/shadow'), 'qcow2'))
        self.assertIn('unsafe', self._rejected(qcow2_header(features=1 << 2), 'qcow2'))
        self.assertIn('unsafe', self._rejected(qcow2_header(features=1 << 40), 'qcow2'))

    def test_the_format_is_not_guessed(self) -> None:
        self.assertIn('holds qcow2', self._rejected(qcow2_header(), 'raw'))
        self.assertIn('holds raw', self._rejected(bytes(65536), 'qcow2'))
        for source_format in ('vmdk', 'pcow', '', 'QCOW2'):
            self.assertIn('is not one of', self._rejected(qcow2_header(), source_format))

    def test_refuses_what_is_no_image(self) -> None:
        self.assertIn('empty', self._rejected(b'', 'raw'))
        self._rejected(qcow2_header()[:60], 'qcow2')
        for path in (str(self.directory), str(self.directory / 'missing'), '/dev/null'):
            self.assertRaises(exception.SourceRejected, template.inspect_source, path, 'raw')


class SizeTest(base.TestCase):
    def test_default_and_wanted(self) -> None:
        ram = info_block.PageMap.RAM
        self.assertEqual(66 * units.MIB, template.virtual_size(64 * units.MIB, ram))
        self.assertEqual(66 * units.MIB, template.virtual_size(64 * units.MIB, ram, 66 * units.MIB))
        self.assertEqual(
            102 * units.MIB, template.virtual_size(64 * units.MIB, ram, 100 * units.MIB + 1)
        )

    def test_refuses(self) -> None:
        ram = info_block.PageMap.RAM
        self.assertRaises(
            exception.InvalidSize, template.virtual_size, 64 * units.MIB, ram, 64 * units.MIB
        )
        self.assertRaises(exception.InvalidSize, template.virtual_size, 1 << 62, ram)
        self.configure(max_image_size='100M')
        self.assertRaises(exception.InvalidSize, template.virtual_size, 99 * units.MIB, ram)
        self.assertRaises(
            exception.InvalidSize, template.virtual_size, units.MIB, ram, 102 * units.MIB
        )
