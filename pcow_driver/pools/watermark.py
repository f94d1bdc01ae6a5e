# SPDX-License-Identifier: Apache-2.0
"""Whether the space that is left in a pool is enough."""

from __future__ import annotations

import dataclasses
import enum
import os

from pcow_driver.common import units
from pcow_driver.pools import settings as settings_module


class State(enum.IntEnum):
    """Of a pool; the values are exit codes as monitoring systems know them (Nagios plug-ins)."""

    OK = 0
    LOW = 1
    CRITICAL = 2
    UNKNOWN = 3


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Of the file system that holds a pool, in bytes."""

    total: int
    free: int  # for this user
    read_only: bool = False

    @classmethod
    def of(cls, path: str) -> Capacity:
        status = os.statvfs(path)
        return cls(
            total=status.f_blocks * status.f_frsize,
            free=status.f_bavail * status.f_frsize,
            read_only=bool(status.f_flag & os.ST_RDONLY),
        )


def judge(capacity: Capacity, settings: settings_module.Settings) -> tuple[State, str]:
    """Whether the space that is left is enough, and can be used, and the sentence that says so."""
    if capacity.read_only:
        return (
            State.CRITICAL,
            'its file system is read-only (dmesg says why, if nobody mounted it so): guests cannot '
            'write',
        )
    percent = 100 * capacity.free / max(capacity.total, 1)
    text = (
        f'{units.format_size(capacity.free)} of {units.format_size(capacity.total)} free '
        f'({percent:.1f} %)'
    )
    if percent < settings.critical:
        return (
            State.CRITICAL,
            f'{text}, less than {settings.critical} %: guests wait when it is full; free space or '
            f'extend it now',
        )
    if percent < settings.low:
        return State.LOW, f'{text}, less than {settings.low} %: free space or extend it'
    return State.OK, text
