# SPDX-License-Identifier: Apache-2.0
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from tests.unit.pcow_driver import base

_TABLE = base.TOP / 'tests/unit/data/sizes.txt'
# what the table says, and what people are told
_VERDICTS = {
    'not a size': 'write a number of bytes, or one with',
    'signed': 'it has a sign',
    'decimal': 'in 1000 or in 1024',
    'too large': 'it is too large',
}


class UnitsTest(base.TestCase):
    def _parsed(self, text: str) -> str:
        try:
            return str(units.parse_size(text))
        except exception.InvalidSize as e:
            reason = str(e.details['reason'])
            return next(verdict for verdict, words in _VERDICTS.items() if words in reason)

    def test_table(self) -> None:
        """That of the parser of pcow-img too."""
        lines = _TABLE.read_text(encoding='utf-8').splitlines()
        rows = [line.split('\t') for line in lines if not line.startswith('#')]
        self.assertGreater(len(rows), 80)
        for text, expected in rows:
            self.assertEqual(expected, self._parsed(text), repr(text))

    def test_words(self) -> None:
        for text, words in (
            ('-5G', "the size '-5G' cannot be used: it has a sign, which a size has not: write 5G"),
            ('1.5 gb', 'it could count in 1000 or in 1024: write 1.5G or 1.5GiB, which count in'),
        ):
            error = self.assertRaises(exception.InvalidSize, units.parse_size, text)
            self.assertIn(words, str(error))

    def test_very_long(self) -> None:
        for text in ('9' * 10000, '0x' + 'f' * 10000, '7' * 10000 + 'k'):
            self.assertEqual('too large', self._parsed(text))
        self.assertEqual('1', self._parsed('0' * 10000 + '1'))
        self.assertEqual('1536', self._parsed('1.5' + '0' * 10000 + 'k'))

    def test_format_exact(self) -> None:
        for size, text in (
            (0, '0 B'),
            (1, '1 B'),
            (1026 << 20, '1026 MiB'),
            (1 << 30, '1 GiB'),
            (3 << 41, '6 TiB'),
            (1 << 52, '4096 TiB'),
        ):
            self.assertEqual(text, units.format_exact(size))

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
    def test_of_a_service(self) -> None:
        uuid = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
        mine = f'v.{uuid}_x'
        always = (f'server-{uuid}-root', f'server-{uuid}-data12', f'volume-{uuid}')
        never = ('server-2022', f'server-{uuid}', f'volume-{uuid}-2', 'v.1_x', f'v,{uuid}_x', uuid)
        self.assertEqual(
            [*always], [name for name in (*always, *never, mine) if names.is_of_service(name)]
        )
        self.configure(volume_name_template='v.%s_x')
        self.assertEqual(
            [*always, mine], [name for name in (*always, *never, mine) if names.is_of_service(name)]
        )
        for name in (f'{mine}.pcow', f'.{mine}.pcow.part', f'.{mine}.pcow.part.0a.partial', mine):
            self.assertTrue(names.may_be_of_service(name))
        for name in ('volume-large.pcow', '.server-1.pcow.part'):
            self.assertTrue(names.may_be_of_service(name))
        self.assertFalse(names.may_be_of_service('v.large_x.pcow'))

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
