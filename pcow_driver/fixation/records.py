# SPDX-License-Identifier: Apache-2.0
"""What the host knows of each protected domain, across its own end: whether that has to run.

A file for each in ``protected`` under ``[pcow] state_path``, durable when a function returns.
Who writes one, or acts on what stands there, holds its lock (:func:`alone`) from the look at the
domain to the end. Beside them stands when the last fixation began, and in which boot of the host.
States, and what leads to them:

========= =========== ==============================================================
from      to          when
========= =========== ==============================================================
none      RUNS        it is seen to run
RUNS,     none        its guest, or somebody, has ended it
FIXATING
RUNS      FIXATING    it is stopped for its last checkpoint
FIXATING  RUNS        that failed, or who took it was killed; it runs on
FIXATING  FIXATED     its last moment is a checkpoint, and its QEMU ends
RUNS,     RECOVERING  it is off and has to run: it is about to go on from ``checkpoint``
FIXATING,
FIXATED,
FAILED
any       RUNS        it goes on; or somebody has started it
any       FAILED      it cannot go on; or it was ended after a fixation that it was not in
any       none        it is not protected any more
========= =========== ==============================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import time
from typing import Any

from pcow_driver.common import boot_id
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks

_DIRECTORY = locks.PROTECTED
_SUFFIX = '.json'
_FIXATION = 'last-fixation'
_MODE = 0o644  # services that start domains read it


class State(enum.Enum):
    RUNS = 'runs'
    FIXATING = 'fixating'
    FIXATED = 'fixated'
    RECOVERING = 'recovering'
    FAILED = 'failed'


_LEGAL = frozenset(
    {
        *((before, State.RUNS) for before in (None, *State)),
        (State.RUNS, State.FIXATING),
        (State.FIXATING, State.FIXATED),
        *((before, State.RECOVERING) for before in State),
        *((before, State.FAILED) for before in State),
    }
)


@dataclasses.dataclass(frozen=True)
class Record:
    """Of one domain. A run is that of one QEMU."""

    state: State
    run: str = ''  # which one
    since: float = 0.0  # seconds since the epoch at which it was seen first
    # The checkpoints that were there when it was seen first, and their dates; '': any
    before: dict[str, str] = dataclasses.field(default_factory=dict)
    # RUNS: of this run, the last one of pcow's, or that it has gone on from. FIXATED, RECOVERING,
    # FAILED: that it goes on from; '': it is the one that it stands on
    checkpoint: str = ''
    durable: int = 0  # ns until the last one was durable
    paused: bool = False  # by somebody, and shall be
    tries: int = 0  # how often it has gone on, or tried to, since it last ran for long
    kept: bool = False  # RECOVERING, FAILED: what no checkpoint holds
    reason: str = ''  # FAILED
    # Seconds since the epoch: a fixation of the host that did not go down, as it ran on for long
    outlived: float = 0.0
    owner: str = ''  # of the policy


_ANY = Record(State.RUNS)  # the types of its fields


def read(uuid: str) -> Record | None:
    """None: it had not to run.

    :raises StateInvalid: the file cannot be read
    """
    path = path_of(uuid)
    try:
        return _record(json.loads(durable.read(path, own=True)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise exception.StateInvalid(
            path=path, reason=f'{e}; delete the file if its domain need not go on'
        ) from None


def check_mine(uuid: str) -> None:
    """Make sure that this user can keep what becomes of a domain.

    :raises StateInvalid: it has a record, which only another one may change
    """
    path = path_of(uuid)
    if os.path.lexists(path) and not os.access(os.path.dirname(path), os.W_OK, effective_ids=True):
        reason = 'its domain is protected, and this user cannot note there what becomes of it'
        raise exception.StateInvalid(path=path, reason=f'{reason}; become root')


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
    return locks.lock(f'protected-{uuid}', own=True)


def note_fixation() -> None:
    """One of all that run begins; durable on return.

    :raises StateInvalid:
    """
    _replace(_fixation_path(), f'{time.time()} {boot_id.current()}\n')


def last_fixation() -> float:
    """Seconds since the epoch; 0: there was none since the host was started, or nobody can tell."""
    try:
        begun, of_boot = durable.read(_fixation_path(), own=True).split()
        return float(begun) if of_boot == boot_id.current() else 0.0
    except (OSError, ValueError):
        return 0.0


def write(uuid: str, wanted: Record) -> None:
    """Durable on return.

    :raises StateInvalid: it cannot be kept, or leads from a state to one that does not follow it
    """
    path, before = path_of(uuid), read(uuid)
    if (None if before is None else before.state, wanted.state) not in _LEGAL:
        was = 'nothing' if before is None else before.state.value
        raise exception.StateInvalid(
            path=path, reason=f"'{wanted.state.value}' does not follow '{was}'"
        )
    if before == wanted:
        return
    value = dataclasses.asdict(wanted) | {'state': wanted.state.value}
    _replace(path, json.dumps(value) + '\n')


def forget(uuid: str) -> None:
    """It has not to run; durable on return.

    :raises StateInvalid:
    """
    path = path_of(uuid)
    try:
        durable.remove(path)
    except OSError as e:
        raise exception.StateInvalid(path=path, reason=str(e.strerror)) from None


def path_of(uuid: str) -> str:
    """The file of this record."""
    return os.path.join(locks.state_path(), _DIRECTORY, f'{uuid}{_SUFFIX}')


def _fixation_path() -> str:
    return os.path.join(locks.state_path(), _DIRECTORY, _FIXATION)


def _replace(path: str, text: str) -> None:
    try:
        locks.own_directory(_DIRECTORY)
        durable.replace(path, text, mode=_MODE)
    except OSError as e:
        raise exception.StateInvalid(path=path, reason=str(e.strerror)) from None


def _record(value: Any) -> Record:
    """:raises TypeError, KeyError, ValueError, AttributeError: it is none"""
    if isinstance(before := value.get('before'), str):  # as the first version wrote it
        value['before'] = {before: ''} if before else {}
    found = Record(**(value | {'state': State(value['state'])}))
    for field in dataclasses.fields(Record):
        if type(getattr(found, field.name)) is not type(getattr(_ANY, field.name)):
            raise TypeError(f'{field.name} is {getattr(found, field.name)!r}')
    if not all(isinstance(date, str) for date in found.before.values()):
        raise TypeError(f'before is {found.before!r}')
    return found
