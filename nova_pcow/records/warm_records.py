# SPDX-License-Identifier: Apache-2.0
"""What this host knows of warm images: images of Glance's for which it keeps a checkpoint of a
running server, from which others can go on.

A record is a file in ``[pcow] state_path``, made by the service alone, durable before what it
speaks of happens. Nothing that an image says of itself counts: whoever owns it may write that.
Nothing of Nova is imported: pcowctl reads them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import datetime
import json
import os
from typing import Any
import uuid as uuidlib

from oslo_log import log as logging

from nova_pcow.common import reserved
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks

LOG = logging.getLogger(__name__)

_SUFFIX = '.json'
_PATIENCE = 30.0  # seconds
_ROLES = frozenset(('root', 'ram'))  # of the images of a server, those that have a part
_TYPES = {'str': str, 'int': int, 'bool': bool}  # by their names


@dataclasses.dataclass(frozen=True)
class Member:
    """The part of one image of the parent."""

    image: str  # UUID
    snapshot: str  # ID of the checkpoint's snapshot in it

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Member:
        return cls(str(told['image']), str(told['snapshot']))


@dataclasses.dataclass(frozen=True)
class Record:
    """One warm image; sizes in bytes."""

    image: str  # ID of the image in Glance
    owner: str  # ID of the project that it was made by
    project: str  # ID of that of the parent: its servers alone begin with what is in the RAM
    server: str  # UUID of the parent
    pool: str  # UUID
    vcpus: int
    ram_size: int
    root_size: int  # of its data
    machine: str  # XML that the domain of another one has to be like
    taken: str  # when, ISO 8601, UTC
    processor: str = ''  # that its guest has seen; empty: an earlier version has not kept it
    members: dict[str, Member] = dataclasses.field(default_factory=dict)  # by role
    checksum: str = ''  # of the image in Glance; empty while it is made
    # the service sees it in Glance by its own rights: so it is gone if it does not
    is_seen: bool = False
    is_missed: bool = False  # it did not see it when it last looked
    is_image_deleted: bool = False  # it is kept only until it can be given up
    is_orphaned: bool = False  # this host has begun to delete the parent, whose images stay
    is_parent_deleted: bool = False  # Nova has said so

    @property
    def checkpoint(self) -> str:
        return reserved.WARM_PREFIX + self.image

    @property
    def is_complete(self) -> bool:
        return bool(self.checksum)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Record:
        members = {role: Member.of(one) for role, one in dict(told['members']).items()}
        known = {field.name for field in dataclasses.fields(cls)}
        made = cls(**{key: told[key] for key in told if key in known} | {'members': members})
        for field in dataclasses.fields(cls):
            value, wanted = getattr(made, field.name), _TYPES.get(str(field.type))
            if wanted is not None and type(value) is not wanted:
                raise ValueError(f'{field.name} is {value!r}')
        # names of files come of these
        if not _is_id(made.server):
            raise ValueError(f'server is {made.server!r}')
        if not _ROLES.issuperset(members):
            raise ValueError(f'members are {sorted(members)}')
        return made


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')


def _directory() -> str:
    return os.path.join(locks.state_path(), 'warm-images')


def path(image: str) -> str:
    return os.path.join(_directory(), f'{image}{_SUFFIX}')


def put(record: Record) -> None:
    """:raises StateInvalid: it cannot be written"""
    target = path(record.image)
    try:
        os.makedirs(_directory(), mode=0o750, exist_ok=True)
        durable.replace(target, json.dumps(dataclasses.asdict(record), indent=1))
    except OSError as e:
        raise exception.StateInvalid(path=target, reason=str(e.strerror)) from None


def get(image: str) -> Record | None:
    """
    :param image: ID of an image in Glance; anything else has no record
    :raises StateInvalid: it cannot be read
    """
    if not _is_id(image):
        return None
    source = path(image)
    try:
        found = Record.of(json.loads(durable.read(source)))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise exception.StateInvalid(path=source, reason=str(e.strerror)) from None
    except (ValueError, KeyError, TypeError) as e:
        raise _damaged(image, f'it is damaged ({e})') from None
    if found.image != image:
        raise _damaged(image, f'it is that of {found.image}')
    return found


def _damaged(image: str, reason: str) -> exception.StateInvalid:
    return exception.StateInvalid(
        path=path(image),
        reason=(
            f'{reason}: delete this file, and what it was of, the checkpoint '
            f'{reserved.WARM_PREFIX}{image} of a server (pcowctl vm delete-checkpoint) or, if that '
            f'was deleted, its images (pcowctl image delete)'
        ),
    )


def _is_id(image: str) -> bool:
    try:
        return str(uuidlib.UUID(image)) == image
    except (ValueError, AttributeError, TypeError):
        return False


def lock(server: str) -> contextlib.AbstractContextManager[None]:
    """Held by who changes what is kept of a parent: its records, or the images that stay for them.
    While QEMU gives a checkpoint up, too: Nova waits for none that does not answer. A child boots
    then, and all else is tried again.

    :param server: UUID of the parent
    :raises LockHeld: as a context
    :raises StateInvalid: the same
    """
    return locks.lock(f'warm-{server}', seconds=_PATIENCE)


def change(image: str, **values: Any) -> Record | None:
    """What a record is now; None: it has gone meanwhile.

    :raises StateInvalid:
    """
    found = get(image)
    if found is None:
        return None
    with lock(found.server):
        return change_locked(image, **values)


def change_locked(image: str, **values: Any) -> Record | None:
    """The same, of who has the lock."""
    found = get(image)
    if found is not None:
        found = dataclasses.replace(found, **values)
        put(found)
    return found


def restore(server: str) -> None:
    """A server that was taken for deleted goes on.

    :raises StateInvalid:
    """
    if any(record.is_orphaned for record in of_server(server)):
        with lock(server):
            for record in of_server(server):
                change_locked(record.image, is_orphaned=False, is_parent_deleted=False)


def forget(image: str) -> None:
    """:raises StateInvalid: it stays"""
    target = path(image)
    try:
        durable.remove(target)
    except OSError as e:
        raise exception.StateInvalid(path=target, reason=str(e.strerror)) from None


def find() -> list[Record]:
    """All that can be read; of others the log says so.

    :raises StateInvalid: nobody knows which there are
    """
    found = []
    for image in _images():
        try:
            record = get(image)
        except exception.StateInvalid as e:
            LOG.error('A record of a warm image is left out: %s', e)
            continue
        if record is not None:
            found.append(record)
    return found


def unreadable() -> list[str]:
    """IDs of the images of the others.

    :raises StateInvalid: nobody knows which there are
    """
    found = []
    for image in _images():
        try:
            get(image)
        except exception.StateInvalid:
            found.append(image)
    return found


def _images() -> list[str]:
    try:
        files = sorted(os.listdir(_directory()))
    except FileNotFoundError:
        return []
    except OSError as e:
        raise exception.StateInvalid(path=_directory(), reason=str(e.strerror)) from None
    return [
        name.removesuffix(_SUFFIX)
        for name in files
        if name.endswith(_SUFFIX) and not name.startswith('.')
    ]


def of_server(uuid: str) -> list[Record]:
    """Those of which a server is the parent.

    :raises StateInvalid:
    """
    return [record for record in find() if record.server == uuid]


def orphaned() -> set[str]:
    """UUIDs of the servers that this host has deleted, and whose images stay for a warm image."""
    return {record.server for record in find() if record.is_orphaned}
