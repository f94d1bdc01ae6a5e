# SPDX-License-Identifier: Apache-2.0
"""Locks of image files (doc/source/reference/format.rst, "Locks") for as long as this process wants
them, or looked at only.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
import stat
import struct
import time

from pcow_driver.common import exception

_LOCK = struct.Struct('hhqqi4x')  # struct flock
_IMAGE = 12288  # byte of the lock on the active layer
_SNAPSHOT = 1 << 62  # with the id of its layer added: of the lock on a snapshot
_WAIT, _PAUSE = 1.0, 0.02  # seconds: who describes an image has it for milliseconds


def is_in_use(path: str, *, writers_only: bool = True) -> bool:
    """Whether somebody has an image open; no lock is taken, so that nobody is kept out meanwhile.

    :param writers_only: leave out who only reads; what is no image yet has no locks but those that
    its maker holds :raises OSError:
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
        answer = fcntl.fcntl(
            descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(wanted, os.SEEK_SET, begin, length, 0)
        )
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
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not _share(descriptor, _SNAPSHOT + snapshot_id):
            raise exception.ImageInUse(
                path=path, reason=f'its snapshot {snapshot_id} is being deleted'
            )
        yield
    finally:
        os.close(descriptor)


def _share(descriptor: int, byte: int) -> bool:
    try:
        fcntl.fcntl(
            descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
        )
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


@contextlib.contextmanager
def alone(path: str) -> Iterator[None]:
    """Be the only one who has an image open, on all hosts that share it, and let nobody open it.

    Nothing in the file is looked at, so it may be damaged.  Whoever opened it before and asks for
    its lock afterwards finds it deleted or replaced, and gives up.

    :raises ImageNotFound:
    :raises ImageInUse: somebody has it open, or nobody can tell
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor, kind = _open_to_lock(path)
            stack.callback(os.close, descriptor)
            _wait(descriptor, kind, path)
        except FileNotFoundError:
            raise exception.ImageNotFound(path=path) from None
        except OSError as e:
            raise exception.ImageInUse(
                path=path, reason=(f'whether somebody has it open cannot be told ({e.strerror})')
            ) from None
        yield


def _wait(descriptor: int, kind: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise exception.ImageInUse(path=path, reason='it is not a file')
    deadline = time.monotonic() + _WAIT
    while not _lock_all(descriptor, kind):
        if time.monotonic() > deadline:
            raise exception.ImageInUse(path=path, reason='somebody has it open')
        time.sleep(_PAUSE)
    if not os.path.samestat(os.fstat(descriptor), os.lstat(path)):
        raise exception.ImageInUse(path=path, reason='somebody replaces it just now')


def _open_to_lock(path: str) -> tuple[int, int]:
    """A descriptor, and the strongest lock that it can hold.

    The owner of a pool may delete what he cannot write to.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_RDWR), fcntl.F_WRLCK
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY), fcntl.F_RDLCK


def _lock_all(descriptor: int, kind: int) -> bool:
    """Whether nobody else has any lock; a shared one keeps out writers, and readers are
    looked for.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, 0, 0, 0))
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    wanted = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
    return bool(_LOCK.unpack(answer)[0] == fcntl.F_UNLCK)
