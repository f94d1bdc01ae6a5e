# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that pcow takes by itself: their names, how often, and which of them stay.

They are checkpoints as any, and can be reverted to, forked and deleted. Only their names tell that
nobody will miss one that is old.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import datetime
import re
from typing import TypeVar

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.images import model as image_model
from pcow_driver.virt import domain
from pcow_driver.vm import checkpoint
from pcow_driver.vm import model
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

_Result = TypeVar('_Result')

PERIODIC = 'pcow-auto-'
FIXATION = 'pcow-fixation-'
_NAME = re.compile(rf'(?:{PERIODIC}|{FIXATION})\d{{8}}T\d{{9}}Z')

MINUTES, HOURS = 6, 24  # the last one of each of so many is kept
# With an interval of AUTO: seconds, and the part of the time that checkpoints may take.
MIN_INTERVAL = 10.0
MAX_INTERVAL = 300.0  # also of a guest that pays more: it would lose more than it spares
SHARE = 0.03
# Seconds that a guest takes for a page which is copied as it stores to it, traps and all, if it
# stores at random to many: under TCG, "tools/bench persist".
COPY = 7e-6


def new_name(prefix: str) -> str:
    """By the clock, to the millisecond."""
    now = datetime.datetime.now(datetime.UTC)
    return f'{prefix}{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z'


def is_own(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def seconds_between(wanted: policy.Policy, durable: int, copied: int = 0) -> float | None:
    """How long after the last checkpoint the next one is due; None: there is none.

    With AUTO at most ``SHARE`` of all time is what a checkpoint takes: until it is durable, of
    which its flushes are most, and what the guest stands behind it, as it stores to what that
    keeps; but five minutes are enough for any.

    :param durable: ns that the last one took until then
    :param copied: pages that were copied behind it until now, for whatever reason
    """
    if wanted.interval == policy.OFF:
        return None
    if isinstance(wanted.interval, int):
        return float(wanted.interval)
    return min(MAX_INTERVAL, max(MIN_INTERVAL, (durable / 1e9 + copied * COPY) / SHARE))


def copied(found: domain.Domain) -> int:
    """Pages of all its images that were copied in this run; only while it is active.

    :raises PcowError: QEMU does not tell
    """
    total = 0
    for fields in found.query():
        reader = image_model.Reader(fields, 'query-pcow', 'QEMU')
        total += reader.object('stats').integer('pages-copied')
    return total


def surplus(found: Sequence[model.Checkpoint]) -> list[str]:
    """Names of those that pcow has taken and need not keep: neither the last one of one of the
    last minutes nor of the last hours that have one. The last one of all is never among them.

    Nor is the one that the VM stands on: it would have none to go on from.

    Minutes and hours are those of the clock, so that one that is kept once is kept until its hour
    goes.

    :param found: in order of creation, which no clock that was put back changes
    :return: the oldest first
    """
    own = [one for one in reversed(found) if is_own(one.name)]
    kept = {one.name for one in own[:1]}
    for seconds, count in ((60, MINUTES), (3600, HOURS)):
        last: dict[int, str] = {}
        for one in own:
            last.setdefault(int(one.date.timestamp()) // seconds, one.name)
        kept |= set(list(last.values())[:count])
    return [one.name for one in reversed(own) if one.name not in kept and not one.current]


def newest(found: Sequence[model.Checkpoint]) -> model.Checkpoint | None:
    """Of all, also those that somebody else has taken.

    :param found: in order of creation
    """
    return found[-1] if found else None


def take(found: domain.Domain, prefix: str, *, last: bool = False) -> tuple[str, model.Taken]:
    """Take one; where there is no room for it, those that need not be kept go first, and then the
    oldest ones of pcow's.

    :param last: as :func:`pcow_driver.vm.checkpoint.take`
    :return: its name
    :raises PcowError: as that
    """

    def attempt() -> tuple[str, model.Taken]:
        name = new_name(prefix)
        return name, checkpoint.take(found, name, last=last)

    return make_room(found, '', attempt)


def make_room(found: domain.Domain, kept: str, attempt: Callable[[], _Result]) -> _Result:
    """What ``attempt`` gives, after as many checkpoints of pcow's were deleted as it needs.

    :param kept: name of one that is not deleted, nor is the last one; '': of none
    :raises PcowError: as ``attempt``; of want of room, if there is none to be had
    """
    old: list[str] | None = None
    while True:
        try:
            return attempt()
        except exception.PcowError as e:
            if not _is_for_want_of_room(e):
                raise
            if old is None:
                old = _dispensable(tree.checkpoints(found))
                if kept in old:
                    old.remove(kept)
            if not old:
                raise
        _delete(found, old.pop(0))


def thin(found: domain.Domain) -> None:
    """Delete what need not be kept.

    :raises PcowError: as :func:`pcow_driver.vm.tree.checkpoints`
    """
    for name in surplus(tree.checkpoints(found)):
        _delete(found, name)


def _delete(found: domain.Domain, name: str) -> None:
    """One that a fork stands on, or whose mark has no room, stays for now."""
    try:
        checkpoint.delete(found, name)
    except exception.PcowError as e:
        LOG.debug('%s: %s stays: %s', found.name, name, e)


def _dispensable(found: Sequence[model.Checkpoint]) -> list[str]:
    """In the order in which they go: the last one of all stays."""
    first = surplus(found)
    rest = [
        one.name
        for one in found[:-1]
        if is_own(one.name) and not one.current and one.name not in first
    ]
    return first + rest


def _is_for_want_of_room(error: exception.PcowError) -> bool:
    return isinstance(error, exception.NoRoom) or 'No space left' in str(error)
