# SPDX-License-Identifier: Apache-2.0
"""Where the time of a guest's start goes: what an emulator's process has used when the console says
what ends a part.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

_TICKS = os.sysconf('SC_CLK_TCK')
# Both kernels say what they do as soon as they can, "quiet" or not; first that they do.
WORDS = 'earlyprintk=ttyS0 ignore_loglevel'


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    end: bytes  # on the console


_SHIM = (
    Part('firmware; the shim\'s kernel is unpacked', b'ignoring loglevel'),
    Part('its start, up to its program', b'Run /init as init process'),
    Part('drivers, file systems, configuration', b'pcow boot: '),
    Part('the guest\'s kernel and initrd are loaded', b'Starting new kernel'),
    Part('they are copied; the guest\'s kernel is unpacked', b'ignoring loglevel'),
)
_DIRECT = (Part('firmware; the guest\'s kernel is unpacked', b'ignoring loglevel'),)
_GUEST = (
    Part('its start, up to the initramfs', b'Run /pcow/init as init process'),
    Part('the initramfs, up to the root', b'pcow-ready'),
)


def of(direct: bool) -> tuple[Part, ...]:
    return (_DIRECT if direct else _SHIM) + _GUEST


def processor(pid: int) -> float:
    """Seconds of the processor that a process has used."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Clock:
    """Watches a console, and notes what each part took."""

    def __init__(self, pid: int, parts: tuple[Part, ...]) -> None:
        self._pid, self._parts = pid, parts
        self._seen, self._before = b'', 0.0
        self.took: dict[str, float] = {}

    def see(self, data: bytes) -> None:
        """:param data: what the console has said since the last call"""
        self._seen += data
        while len(self.took) < len(self._parts):
            part = self._parts[len(self.took)]
            at = self._seen.find(part.end)
            if at < 0:
                return
            now = processor(self._pid)
            self.took[part.name] = now - self._before
            self._before = now
            self._seen = self._seen[at + len(part.end) :]
