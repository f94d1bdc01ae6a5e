# SPDX-License-Identifier: Apache-2.0
"""When an automatic checkpoint was begun. Needs nothing that the machines of tests/vm have not."""

import datetime
import re

_NAME = re.compile(r'pcow-auto-(\d{8}T\d{6})(\d{3})Z')


def moment_of(name: str) -> float:
    """Seconds since the epoch, at the earliest; 0: it is none of these."""
    match = _NAME.fullmatch(name)
    if match is None:
        return 0.0
    date = datetime.datetime.strptime(f'{match[1]}+0000', '%Y%m%dT%H%M%S%z')
    return date.timestamp() + int(match[2]) / 1000
