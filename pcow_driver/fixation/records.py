# SPDX-License-Identifier: Apache-2.0
"""What the host knows of each protected domain, across its own end: whether that has to run.

A file for each in ``protected`` under ``[pcow] state_path``, durable when a function returns.
Who writes one, or acts on what stands there, holds its lock (:func:`alone`) from the look at the
domain to the end. States, and what leads to them:

========= =========== ==============================================================
from      to          when
========= =========== ==============================================================
none      RUNS        the loop sees that it runs
RUNS      none        its guest, or somebody, has ended it
RUNS      FIXATED     its last moment is a checkpoint, and its QEMU ends
RUNS      FAILED      it was killed, and cannot go on
FIXATED   RUNS        it goes on; or somebody has started it
FIXATED   FAILED      it cannot go on
FAILED    RUNS        the same by command; or somebody has started it
any       none        it is not protected any more, or is no domain
========= =========== ==============================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
from typing import Any

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks

_DIRECTORY = 'protected'
_SUFFIX = '.json'


class State(enum.Enum):
    RUNS = 'runs'
    FIXATED = 'fixated'
    FAILED = 'failed'


_LEGAL = frozenset(
    {
        (None, State.RUNS),
        (State.RUNS, State.RUNS),
        (State.RUNS, State.FIXATED),
        (State.RUNS, State.FAILED),
        (State.FIXATED, State.RUNS),
        (State.FIXATED, State.FAILED),
        (State.FAILED, State.RUNS),
        (State.FAILED, State.FAILED),
    }
)


@dataclasses.dataclass(frozen=True)
class Record:
    """Of one domain."""

    state: State
    checkpoint: str = ''  # FIXATED: its last moment; RUNS: the last one that pcow took
    durable: int = 0  # ns that this took, until it was durable
    paused: bool = False  # FIXATED: it was before
    tries: int = 0  # RUNS: how often it has gone on from that checkpoint
    reason: str = ''  # FAILED


def read(uuid: str) -> Record | None:
    """None: it had not to run.

    :raises StateInvalid: the file cannot be read
    """
    path = _path(uuid)
    try:
        with open(path, encoding='utf-8') as f:
            value = json.load(f)
        return _record(value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise exception.StateInvalid(
            path=path, reason=f'{e}; delete the file if its domain need not go on'
        ) from None


def all_uuids() -> list[str]:
    """Of the domains that have a record."""
    try:
        entries = os.listdir(os.path.join(locks.state_path(), _DIRECTORY))
    except FileNotFoundError:
        return []
    return sorted(
        entry.removesuffix(_SUFFIX)
        for entry in entries
        if entry.endswith(_SUFFIX) and not entry.startswith('.')
    )


def alone(uuid: str) -> contextlib.AbstractContextManager[None]:
    """Nobody else decides about this domain meanwhile."""
    return locks.lock(f'protected-{uuid}')


def write(uuid: str, wanted: Record) -> None:
    """Durable on return.

    :raises StateInvalid: it cannot be kept, or leads from a state to one that does not follow it
    """
    path, before = _path(uuid), read(uuid)
    if (None if before is None else before.state, wanted.state) not in _LEGAL:
        was = 'nothing' if before is None else before.state.value
        raise exception.StateInvalid(
            path=path, reason=f"'{wanted.state.value}' does not follow '{was}'"
        )
    if before == wanted:
        return
    value = dataclasses.asdict(wanted) | {'state': wanted.state.value}
    try:
        locks.shared_directory(_DIRECTORY)
        durable.replace(path, json.dumps(value) + '\n')
    except OSError as e:
        raise exception.StateInvalid(path=path, reason=str(e.strerror)) from None


def forget(uuid: str) -> None:
    """It has not to run; durable on return.

    :raises StateInvalid:
    """
    path = _path(uuid)
    try:
        os.unlink(path)
        durable.sync(os.path.dirname(path))
    except FileNotFoundError:
        return
    except OSError as e:
        raise exception.StateInvalid(path=path, reason=str(e.strerror)) from None


def _path(uuid: str) -> str:
    return os.path.join(locks.state_path(), _DIRECTORY, f'{uuid}{_SUFFIX}')


def _record(value: Any) -> Record:
    """:raises TypeError, KeyError, ValueError: it is none"""
    found = Record(
        state=State(value['state']),
        checkpoint=value['checkpoint'],
        durable=value['durable'],
        paused=value['paused'],
        tries=value['tries'],
        reason=value['reason'],
    )
    for field, kind in (
        ('checkpoint', str),
        ('durable', int),
        ('paused', bool),
        ('tries', int),
        ('reason', str),
    ):
        if type(getattr(found, field)) is not kind:
            raise TypeError(f'{field} is {getattr(found, field)!r}')
    return found
