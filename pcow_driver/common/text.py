# SPDX-License-Identifier: Apache-2.0
"""Text that somebody else has written, before a terminal or a journal has it."""

import re

# control characters of both sets (a terminal obeys C1, too), and what is no character at all
_OBEYED = re.compile('[\\x00-\\x1f\\x7f-\\x9f\\ud800-\\udfff]')


def printable(text: str) -> str:
    """Letters of all languages stay."""
    return _OBEYED.sub('\N{REPLACEMENT CHARACTER}', text)


def one_line(text: str) -> str:
    """As :func:`printable`; nobody makes a line of his own of a part of it."""
    return printable(' '.join(text.expandtabs(1).splitlines()))
