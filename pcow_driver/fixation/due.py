# SPDX-License-Identifier: Apache-2.0
"""When the next automatic checkpoint of a domain is to be taken."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import math
import time

from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.virt import domain

RETRY = 60.0  # seconds after one that could not be taken


@dataclasses.dataclass
class _Last:
    """The last one of a domain; times are those of time.monotonic()."""

    taken: float = -math.inf
    failed: float = -math.inf  # until one is taken
    seconds: float = 0.0  # in which the next one is not due, as far as is known
    run: str = ''
    copied: int = 0  # pages, in that run until then
    now_copied: int = 0  # when it was asked last


class Due:
    """Of all domains; those of one domain are one thread's at a time."""

    def __init__(self) -> None:
        self._last: dict[str, _Last] = {}  # by UUID

    def is_due(self, found: domain.Domain, wanted: policy.Policy, record: records.Record) -> bool:
        """:raises PcowError: nobody can tell; as of one that could not be taken"""
        last, now = self._last.setdefault(found.uuid, _Last()), time.monotonic()
        seconds = automatic.seconds_between(wanted, record.durable)
        if seconds is None or now < max(last.taken + seconds, last.failed + RETRY):
            return False
        if wanted.interval != policy.AUTO:
            return True
        # what it has cost the guest until now is what it costs at least
        if last.run == record.run and now < last.taken + last.seconds:
            return False
        failed, last.failed = last.failed, now
        last.now_copied = automatic.copied(found)
        last.failed = failed
        behind = max(0, last.now_copied - last.copied) if last.run == record.run else 0
        last.seconds = automatic.seconds_between(wanted, record.durable, behind) or 0.0
        return now >= last.taken + last.seconds

    @contextlib.contextmanager
    def attempt(self, found: domain.Domain, record: records.Record) -> Iterator[None]:
        """One that is due is taken in it, or could not be."""
        last, now = self._last[found.uuid], time.monotonic()
        last.failed = now
        yield
        self._last[found.uuid] = _Last(taken=now, run=record.run, copied=last.now_copied)
