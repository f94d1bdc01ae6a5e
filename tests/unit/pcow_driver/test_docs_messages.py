# SPDX-License-Identifier: Apache-2.0
"""The page of messages is about what the programs say today."""

import re

from tests.unit.pcow_driver import base
from tests.unit.pcow_driver import messages

_PAGE = base.TOP / 'doc/source/reference/messages.rst'
_MESSAGE = re.compile(r'^``(.+)``\n {4}\S', re.MULTILINE)


class MessagesTest(base.TestCase):
    def test_each_is_said(self) -> None:
        said = messages.texts(base.TOP)
        documented = _MESSAGE.findall(_PAGE.read_text())
        self.assertGreater(len(documented), 60)
        self.assertEqual([], [text for text in documented if not messages.occurs(text, said)])

    def test_none_is_there_twice(self) -> None:
        documented = _MESSAGE.findall(_PAGE.read_text())
        self.assertEqual(sorted(set(documented)), sorted(documented))

    def test_what_nobody_says(self) -> None:
        said = messages.texts(base.TOP)
        for text in ('the pool is empty; buy ... more', 'there is no ... pool named'):
            self.assertFalse(messages.occurs(text, said), text)
