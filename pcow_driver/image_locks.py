# SPDX-License-Identifier: Apache-2.0
"""Locks of image files (doc/source/format.rst, "Locks") for as long as this process wants them, or looked at only."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
import struct

from pcow_driver import exception

_LOCK = struct.Struct('hhqqi4x')       # struct flock
_IMAGE = 12288                         # byte of the lock on the active layer
_SNAPSHOT = 1 << 62                    # with the id of its layer added: of the lock on a snapshot


def is_in_use(path: str, *, writers_only: bool = True) -> bool:
    """Whether somebody has an image open; no lock is taken, so that nobody is kept out meanwhile.

    :param writers_only: leave out who only reads; what is no image yet has no locks but those that its maker holds
    :raises OSError:
    """
    wanted, begin, length = (fcntl.F_RDLCK, _IMAGE, 1) if writers_only else (fcntl.F_WRLCK, 0, 0)
    return _is_locked(path, wanted, begin, length)


def is_snapshot_in_use(path: str, snapshot_id: int) -> bool:
    """Whether somebody reads a snapshot of an image, or deletes it; no lock is taken.

    :raises OSError:
    """
    return _is_locked(path, fcntl.F_WRLCK, _SNAPSHOT + snapshot_id, 1)


def _is_locked(path: str, wanted: int, begin: int, length: int) -> bool:
    # asked of a descriptor, not of this process: the locks are open file description locks
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(wanted, os.SEEK_SET, begin, length, 0))
    finally:
        os.close(descriptor)
    return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def read_active(descriptor: int, path: str) -> None:
    """Let nobody write to an image as long as this descriptor of it is open.

    :raises ImageInUse: somebody does
    """
    if not _share(descriptor, _IMAGE):
        raise exception.ImageInUse(path=path, reason='somebody writes to it, so it cannot be sent')


@contextlib.contextmanager
def reading_snapshot(path: str, snapshot_id: int) -> Iterator[None]:
    """Let nobody delete a snapshot meanwhile; guests write to the image as before.

    :param snapshot_id: as pcow-img lists it
    :raises ImageInUse: somebody deletes it
    :raises OSError:
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not _share(descriptor, _SNAPSHOT + snapshot_id):
            raise exception.ImageInUse(path=path, reason=f'its snapshot {snapshot_id} is being deleted')
        yield
    finally:
        os.close(descriptor)


def _share(descriptor: int, byte: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
