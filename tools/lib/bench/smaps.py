# SPDX-License-Identifier: Apache-2.0
"""Memory of a process by what it maps (proc_pid_smaps(5)): a page that several processes map is
shared out among them (Pss).
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path

from pcow_driver.common import units


def pss(pid: int, kind: Callable[[str, int], str]) -> dict[str, int]:
    """Bytes of each kind.

    :param kind: of a mapping, by its last word (the path, if it has one) and its size in bytes
    """
    found: dict[str, int] = collections.defaultdict(int)
    now = ''
    for line in Path(f'/proc/{pid}/smaps').read_text().splitlines():
        words = line.split()
        if not words[0].endswith(':'):  # a mapping begins
            begin, end = (int(word, 16) for word in words[0].split('-'))
            now = kind(words[-1], end - begin)
        elif words[0] == 'Pss:':
            found[now] += int(words[1]) * units.KIB
    return dict(found)
