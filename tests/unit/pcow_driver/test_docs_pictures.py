# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation, and the program that draws them."""

import re
from xml.etree import ElementTree

from tests.unit.pcow_driver import base
from tools.lib.docs import picture

_PAGES = base.TOP / 'doc/source'
_SOURCE = 'alt Two boxes.\ngrid 100 50\nbox a 0 0 1x1 own | one & two\nbox b 2 0 1x1 plain | b\n'


class PicturesTest(base.TestCase):
    def test_each_can_be_drawn(self) -> None:
        sources = sorted((_PAGES / 'pictures').glob('*.txt'))
        self.assertGreater(len(sources), 5)
        for path in sources:
            drawn = ElementTree.fromstring(picture.draw(picture.load(path)))
            self.assertGreater(len(drawn.get('aria-label') or ''), 100, path.name)

    def test_each_is_shown(self) -> None:
        shown = {
            name
            for page in _PAGES.rglob('*.rst')
            for name in re.findall(r'^\.\. picture:: (\S+)$', page.read_text(), re.MULTILINE)
        }
        self.assertEqual({path.stem for path in (_PAGES / 'pictures').glob('*.txt')}, shown)

    def test_what_is_drawn_is_in_the_code(self) -> None:
        """A picture names the words that it takes from the code: who renames one draws it anew."""
        seen = 0
        for path in (_PAGES / 'pictures').glob('*.txt'):
            for file, words in picture.load(path).facts.items():
                text = (base.TOP / file).read_text()
                for word in words:
                    seen += 1
                    self.assertIn(word, text, f'{path.name}: {word} is not in {file}')
        self.assertGreater(seen, 10)


class DrawTest(base.TestCase):
    def test_arrow_from_edge_to_edge(self) -> None:
        drawn = picture.draw(picture.parse(f'{_SOURCE}arrow a b | to\n'))
        self.assertIn('x1="100.0" y1="25.0"', drawn)
        self.assertIn('points="200.0,25.0', drawn)
        self.assertIn('one &amp; two', drawn)

    def test_sides(self) -> None:
        drawn = picture.draw(picture.parse(f'{_SOURCE}arrow a.top b.bottom |\n'))
        self.assertIn('x1="50.0" y1="0.0"', drawn)
        self.assertIn('points="250.0,50.0', drawn)

    def test_refused(self) -> None:
        for line, reason in (
            ('box c 0 2 1x1 own | far too many words for this', 'does not fit'),
            ('box a 0 2 1x1 own | a', 'is there already'),
            ('arrow a c |', 'there is no c'),
            ('arrow a.middle b |', 'there is no a.middle'),
            ('circle a', 'nothing that can be drawn'),
        ):
            with self.assertRaisesRegex(picture.PictureInvalid, f'p:5: .*{reason}'):
                picture.parse(_SOURCE + line + '\n', 'p')

    def test_without_words(self) -> None:
        with self.assertRaisesRegex(picture.PictureInvalid, 'alt'):
            picture.parse('box a 0 0 1x1 own | a\n')
