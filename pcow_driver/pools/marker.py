# SPDX-License-Identifier: Apache-2.0
"""The file ``.pcow-pool``: it makes a directory a pool, and says which one it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from typing import Any
import uuid as uuidlib

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import names

_FORMAT = 1
_MAX_SIZE = 64 << 10


@dataclasses.dataclass(frozen=True)
class Marker:
    name: str
    uuid: str
    created: str  # ISO 8601, UTC
    made_as: str | None = None  # persistence class when it was made; None: nobody noted it


def _is_pool(path: str) -> exception.PoolInvalid:
    return exception.PoolInvalid(
        path=path, reason="it is a pool already; 'pcowctl pool import' makes it known"
    )


def check_none(directory: str) -> None:
    """:raises PoolInvalid: it is a pool already"""
    if os.path.lexists(os.path.join(directory, names.MARKER)):
        raise _is_pool(directory)


def write(directory: str, marker: Marker) -> None:
    """Durably, all or nothing.

    :raises PoolInvalid: the directory is a pool already, or cannot be used
    """
    value = {'format': _FORMAT, 'uuid': marker.uuid, 'name': marker.name, 'created': marker.created}
    text = json.dumps(value | ({'class': marker.made_as} if marker.made_as else {})) + '\n'
    path = os.path.join(directory, names.MARKER)
    try:
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
        )
    except FileExistsError:
        raise _is_pool(directory) from None
    except OSError as e:
        raise exception.PoolInvalid(path=directory, reason=str(e.strerror)) from None
    try:
        with os.fdopen(fd, 'w', encoding='utf-8') as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        durable.sync(directory)
    except OSError as e:
        os.unlink(path)
        raise exception.PoolInvalid(path=directory, reason=str(e.strerror)) from None


def remove(directory: str) -> None:
    """Also the file of the pool's lock; the directory and what else is in it stay."""
    os.unlink(os.path.join(directory, names.MARKER))
    # afterwards: nobody makes it anew
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, names.LOCK))


def read(directory: str) -> Marker:
    """:raises PoolInvalid: there is none, or it cannot be believed"""
    try:
        fd = os.open(
            os.path.join(directory, names.MARKER),
            os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
        )
        with os.fdopen(fd, encoding='utf-8') as f:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise exception.PoolInvalid(path=directory, reason=f'{names.MARKER} is not a file')
            value = json.loads(f.read(_MAX_SIZE))
    except FileNotFoundError:
        raise exception.PoolInvalid(
            path=directory,
            reason=(
                f"it has no {names.MARKER}; if its file system is not mounted, mount it, "
                f"else 'pcowctl pool create' makes a pool"
            ),
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise exception.PoolInvalid(path=directory, reason=f'{names.MARKER}: {e}') from None
    return _parse(directory, value)


def _parse(directory: str, value: Any) -> Marker:
    if not isinstance(value, dict) or value.get('format') != _FORMAT:
        raise exception.PoolInvalid(
            path=directory, reason=f'{names.MARKER} was written by another version'
        )
    fields = {key: value.get(key) for key in ('name', 'uuid', 'created')}
    if not all(isinstance(field, str) for field in fields.values()):
        raise exception.PoolInvalid(
            path=directory, reason=f'{names.MARKER} lacks name, uuid or created'
        )
    try:
        uuid = str(uuidlib.UUID(fields['uuid']))
        names.check_name('pool', str(fields['name']))
    except (ValueError, exception.InvalidName) as e:
        raise exception.PoolInvalid(path=directory, reason=f'{names.MARKER}: {e}') from None
    return Marker(
        name=str(fields['name']),
        uuid=uuid,
        created=str(fields['created']),
        made_as=value['class'] if isinstance(value.get('class'), str) else None,
    )
