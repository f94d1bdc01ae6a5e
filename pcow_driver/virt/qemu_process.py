# SPDX-License-Identifier: Apache-2.0
"""Which process the QEMU of a domain is.

libvirt tells that only in files of its own. Where these are elsewhere, the words that each QEMU of
libvirt is started with are looked for; anybody may give them to a program, so it is also looked
whose that is.
"""

from __future__ import annotations

from collections.abc import Container
import contextlib
import os
from pathlib import Path

_PIDS = '/run/libvirt/qemu'  # where the libvirt of the host keeps those of its QEMUs
_PROC = Path('/proc')


def find(name: str, uuid: str, user: int | None) -> str | None:
    """The process of the domain that is active, and since when: another one of each QEMU until the
    host boots; None: it has none on this host.

    :param user: as whom libvirt runs it; None: libvirt does not tell
    """
    with contextlib.suppress(OSError):
        pid = Path(_PIDS, f'{name}.pid').read_text().strip()
        if (found := _identify(pid, uuid)) is not None:
            return found
    users = {0, os.geteuid()} | ({user} if user is not None else set())
    for pid in os.listdir(_PROC):
        if (found := _identify(pid, uuid, users)) is not None:
            return found
    return None


def _identify(pid: str, uuid: str, users: Container[int] | None = None) -> str | None:
    """None: it is not that process.

    :param users: whose it may be
    """
    if not (pid.isascii() and pid.isdigit()):
        return None
    place = _PROC / pid
    try:
        if f'\0-uuid\0{uuid}\0'.encode() not in (place / 'cmdline').read_bytes():
            return None
        # Not the owner of the directory: that is root of each process that nobody may trace.
        if users is not None and not all(uid in users for uid in _users(place)):
            return None
        # the name, in brackets, may hold anything; see proc(5)
        fields = (place / 'stat').read_text().rpartition(')')[2].split()
        return f'{pid}-{fields[19]}'
    except (OSError, ValueError, IndexError):  # it has ended meanwhile
        return None


def _users(place: Path) -> list[int]:
    """As whom it runs, and may."""
    lines = (place / 'status').read_text(errors='replace').splitlines()
    (found,) = (line for line in lines if line.startswith('Uid:'))
    return [int(word) for word in found.split()[1:]]
