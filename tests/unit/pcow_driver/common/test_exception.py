# SPDX-License-Identifier: Apache-2.0
"""What a guest, or a QEMU that it has broken out of, has put into a message says nothing to the
terminal or the journal of root.
"""

from pcow_driver.common import exception
from tests.unit.pcow_driver import base

SAID = 'a\x1b]0;owned\x07b\x9b2Jc\udc80d\x7fe'
SHOWN = 'a\ufffd]0;owned\ufffdb\ufffd2Jc\ufffdd\ufffde'


class MessageTest(base.TestCase):
    def test_control_characters(self) -> None:
        for error in (
            exception.ToolFailed(tool='pcow-img', exit_code=1, message=SAID),
            exception.QmpFailed(command='x', error_class='GenericError', description=SAID),
            exception.LibvirtFailed(uri='qemu:///system', reason=SAID),
            exception.DomainInvalid(domain='vm', reason=SAID),
        ):
            self.assertIn(SHOWN, str(error))

    def test_one_line(self) -> None:
        error = exception.QmpFailed(
            command='x', error_class='GenericError', description='a\r\nroot: all\tis well\u2028b\n'
        )
        self.assertEqual('x: a root: all is well b', str(error))

    def test_letters_of_all_languages(self) -> None:
        text = 'Größe 大きさ \N{NO-BREAK SPACE}\N{GRINNING FACE}'
        self.assertIn(text, str(exception.ToolFailed(tool='t', exit_code=1, message=text)))
