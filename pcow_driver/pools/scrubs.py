# SPDX-License-Identifier: Apache-2.0
"""What the scrubs of a pool have found: for each image whether its data are what their checksums
were made of. In ``scrubs`` under ``[pcow] state_path``, a file for each pool.

A result is of a file and not of a name: what is put in its place is another one.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import datetime
import json
import math
import os
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.images import image
from pcow_driver.images import model

LOG = logging.getLogger(__name__)

_MAX_FINDINGS = 20  # of an image that are kept


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one image; bytes."""

    inode: int
    checked: str  # when, in UTC
    verified: int = 0
    damaged: int = 0
    unjudged: int = 0  # its checksum is damaged
    without: int = 0  # there is none
    problem: str = ''  # why it could not be looked at
    findings: tuple[str, ...] = ()
    accepted: bool = False  # the operator knows, and wants it to be used

    @property
    def is_damaged(self) -> bool:
        return bool(self.findings)

    def age(self) -> float:
        """Seconds since it was looked at; of one that nobody can tell, without end."""
        with contextlib.suppress(ValueError):
            age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(
                self.checked
            )
            return age.total_seconds()
        return math.inf

    def same_damage(self, other: Result) -> bool:
        return self.inode == other.inode and self.findings == other.findings


_ANY = Result(inode=0, checked='')  # the types of its fields


@dataclasses.dataclass(frozen=True)
class Scrub:
    """``begun`` and not ended since: it was interrupted, or is under way."""

    begun: str = ''
    ended: str = ''  # the last one that came to its end
    images: dict[str, Result] = dataclasses.field(default_factory=dict)

    @property
    def is_interrupted(self) -> bool:
        return self.begun > self.ended

    def told(self) -> str:
        """When, for people."""
        ended = self.ended[:19] + ' UTC' if self.ended else 'never'
        return f'{ended}; begun again {self.begun[:19]} UTC' if self.is_interrupted else ended

    @property
    def ended_seconds(self) -> int:
        """Since the epoch; 0: never."""
        with contextlib.suppress(ValueError):
            return int(datetime.datetime.fromisoformat(self.ended).timestamp())
        return 0

    def damaged(self) -> list[str]:
        """Those that nobody has accepted."""
        return sorted(
            name for name, one in self.images.items() if one.is_damaged and not one.accepted
        )

    def damage_of(self, name: str, path: str) -> Result | None:
        """What nobody has accepted of this very file; None: nothing is known against it."""
        found = self.images.get(name)
        if found is not None and found.is_damaged and not found.accepted:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == found.inode:
                    return found
        return None

    def unknown(self) -> list[str]:
        """Those that could not be looked at."""
        return sorted(name for name, one in self.images.items() if one.problem)


def _path(uuid: str) -> str:
    return os.path.join(locks.state_path(), 'scrubs', f'{uuid}.json')


def _result(value: Any) -> Result:
    """:raises TypeError, KeyError: it is none"""
    fields = {field.name: value[field.name] for field in dataclasses.fields(Result)}
    result = Result(**(fields | {'findings': tuple(map(str, fields['findings']))}))
    for field in dataclasses.fields(Result):
        if type(getattr(result, field.name)) is not type(getattr(_ANY, field.name)):
            raise TypeError(f'{field.name} is {getattr(result, field.name)!r}')
    return result


def read(uuid: str) -> Scrub:
    """Of the pool with this uuid; of what cannot be read, as if there had been none."""
    try:
        value = json.loads(durable.read(_path(uuid)))
        return Scrub(
            begun=str(value['begun']),
            ended=str(value['ended']),
            images={str(name): _result(one) for name, one in value['images'].items()},
        )
    except FileNotFoundError:
        return Scrub()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        LOG.warning('What scrubs have found cannot be read (%s: %s)', _path(uuid), e)
        return Scrub()


def write(uuid: str, scrub: Scrub) -> None:
    """:raises StateInvalid: it cannot be kept"""
    text = json.dumps(dataclasses.asdict(scrub), indent=1)
    try:
        locks.shared_directory('scrubs')
        durable.replace(_path(uuid), text + '\n', mode=0o644)
    except OSError as e:
        raise exception.StateInvalid(path=_path(uuid), reason=str(e.strerror)) from None


@contextlib.contextmanager
def changing(uuid: str) -> Iterator[Scrub]:
    """What is known, while nobody else changes it: an operator may accept damage during a scrub.

    :raises StateInvalid:
    """
    with locks.lock(f'scrub-{uuid}'):
        yield read(uuid)


def put(uuid: str, name: str, result: Result) -> Scrub:
    """Keep the result of one image, beside what others have kept meanwhile.

    :raises StateInvalid:
    """
    with changing(uuid) as known:
        before = known.images.get(name)
        if before is not None and before.inode == result.inode and result.problem:
            # what could not be looked at is as damaged as it was
            result = dataclasses.replace(before, checked=result.checked, problem=result.problem)
        elif before is not None and before.accepted and before.same_damage(result):
            result = dataclasses.replace(result, accepted=True)
        known = dataclasses.replace(known, images=known.images | {name: result})
        write(uuid, known)
        return known


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec='microseconds')


def of_check(inode: int, checked: str, found: model.CheckResult, *, certain: bool = True) -> Result:
    """What a check with its data has found of one image.

    :param inode: of the file, from before it was looked at
    :param certain: False: somebody writes to it, and what is doubtful may be what he begins
    """
    findings = [one.message for one in found.findings if one.kind == 'corruption']
    if certain and not findings and found.damage:
        findings = [found.damage]
    return Result(
        inode,
        checked,
        verified=found.data_verified,
        damaged=found.data_damaged,
        unjudged=found.data_unjudged,
        without=found.data_without,
        findings=limited(findings),
    )


def compare(path: str, *, sealed: bool, rate: int = 0) -> Result:
    """Look at one image now. A guest may write to one that is not sealed: of that only what its
    checksums say counts, of data and of pages of metadata that nobody changes.

    :param rate: bytes of data a second at most; 0: as fast as it goes
    :raises ImageNotFound:
    """
    try:
        inode = os.stat(path).st_ino
    except FileNotFoundError:
        raise exception.ImageNotFound(path=path) from None
    checked = now()
    try:
        found = image.check_data(path, rate=rate, force_share=not sealed)
    except (exception.ToolFailed, exception.ToolOutputInvalid) as e:
        return Result(inode, checked, problem=str(e))
    if not found.data_checked and not sealed and not found.corruptions_certain:
        return Result(inode, checked, problem='it is in use, or its metadata is damaged')
    return of_check(inode, checked, found, certain=sealed or found.certain)


def limited(findings: list[str]) -> tuple[str, ...]:
    """As many as are kept."""
    more = len(findings) - _MAX_FINDINGS
    return tuple(findings[:_MAX_FINDINGS] + ([f'and {more} more'] if more > 0 else []))


def forget(uuid: str) -> None:
    """The pool is one of this host no longer."""
    with contextlib.suppress(OSError):
        durable.remove(_path(uuid))
