# SPDX-License-Identifier: Apache-2.0
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from tests.unit.pcow_driver import base


class UnitsTest(base.TestCase):
    def test_parse_size(self) -> None:
        for text, size in (
            ('1', 1),
            ('4096', 4096),
            ('64k', 65536),
            ('64K', 65536),
            ('2M', 2 << 20),
            ('10G', 10 << 30),
            ('1t', 1 << 40),
            ('2 MiB', 2 << 20),
            ('3GB', 3 << 30),
            (' 7 ', 7),
        ):
            self.assertEqual(size, units.parse_size(text), text)

    def test_parse_size_refuses(self) -> None:
        for text in ('', '0', '-1', '1.5G', '1x', 'G', '1 2', '٣', '0x10', '9' * 21):
            self.assertRaises(exception.InvalidSize, units.parse_size, text)

    def test_format_size(self) -> None:
        for size, text in (
            (0, '0 B'),
            (1, '1 B'),
            (1023, '1023 B'),
            (1024, '1 KiB'),
            (1536, '1.5 KiB'),
            (2 << 20, '2 MiB'),
            (5 << 30, '5 GiB'),
            (16 << 40, '16 TiB'),
            (4096 << 40, '4096 TiB'),
        ):
            self.assertEqual(text, units.format_size(size))

    def test_round_up(self) -> None:
        self.assertEqual([0, 4, 4, 8], [units.round_up(size, 4) for size in (0, 1, 4, 5)])


class NamesTest(base.TestCase):
    def test_accepts(self) -> None:
        for name in ('a', 'debian-12', 'Größe 1', 'x' * 240, 'a.b', 'a,b'):
            self.assertEqual(name, names.check_name('image', name))

    def test_refuses(self) -> None:
        for name in (
            '',
            '.',
            '..',
            '.hidden',
            '-f',
            'a/b',
            '/a',
            'a\0b',
            'a\nb',
            'a\x1b[1m',
            'x' * 241,
            'ü' * 121,
            'a.pcow',
            '\udc80',
        ):
            error = self.assertRaises(exception.InvalidName, names.check_name, 'image', name)
            self.assertTrue(str(error).isprintable(), name)

    def test_new_names(self) -> None:
        """Of the locks that have the name of an image in theirs, the longest is that of
        a template.
        """
        for name in ('vm', 'x' * 204, 'ü' * 102):
            self.assertEqual(name, names.check_new_name('image', name))
            self.assertLessEqual(len(f'pcow-template-{uuidlib.UUID(int=0)}-{name}'.encode()), 255)
        for name in ('x' * 205, 'ü' * 103, '../vm', ''):
            self.assertRaises(exception.InvalidName, names.check_new_name, 'image', name)
        error = self.assertRaises(exception.InvalidName, names.check_new_name, 'image', 'x' * 205)
        self.assertIn('more than 204 bytes', str(error))
        self.assertEqual('x' * 240, names.check_name('image', 'x' * 240))  # one that is there

    def test_snapshot_names(self) -> None:
        for name in ('s1', 'before/after', '.x', 'x' * 127):
            self.assertEqual(name, names.check_snapshot_name(name))
        for name in ('', '-l', 'x' * 128, 'a\tb'):
            self.assertRaises(exception.InvalidName, names.check_snapshot_name, name)
        for name in ('.incomplete-1.2-1', '.loading-'):
            # to be looked at, or deleted
            self.assertEqual(name, names.check_snapshot_name(name))
            self.assertRaises(exception.InvalidName, names.check_new_snapshot_name, name)
