# SPDX-License-Identifier: Apache-2.0
"""Directories in ``[pcow] conversion_dir`` for files that exist while something is converted.

Whoever works in one holds a lock on it (flock), which ends with the process however that ends. A
directory without is what a killed process left, and as large as what it converted: the next one
that makes a directory here deletes it, and so does ``pcowctl pool garbage --delete work``. But not
within an hour of the last write: versions of pcow that know no such lock may still run beside this
one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import stat
import time

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import units

LOG = logging.getLogger(__name__)

_NAME = re.compile(
    r'pcow-(?P<purpose>[a-z]+)-[A-Za-z0-9_]{8}'
)  # as earlier versions drew them, too
_MIN_AGE = 3600  # seconds since the last write
# the purpose that leaves processes and a mount as well: see :func:`nbd.discard`
EXPORT = 'nbd'
PLAIN = ('template', 'fetch', 'send', 'format')


@contextlib.contextmanager
def directory(wanted: str) -> Iterator[str]:
    """A new directory, deleted with all that is in it when the block ends.

    :param wanted: its purpose: one of :data:`PLAIN`, or :data:`EXPORT`
    :raises ConversionDirUnusable:
    """
    collect()
    with errors():
        path, descriptor = _make(f'pcow-{wanted}-')
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            # what could not be deleted is a later one's to collect
            os.close(descriptor)


def check_free(size: int) -> None:
    """Refuse to write what there is no room for, before it fills what others write to as well.

    :param size: in bytes
    :raises ConversionDirUnusable:
    """
    path = str(conf.CONF.pcow.conversion_dir)
    with errors():
        status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise exception.ConversionDirUnusable(
            path=path,
            reason=(
                f'{units.format_size(free)} are free and {units.format_size(size)} may be needed'
            ),
        )


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Of what is done in ``[pcow] conversion_dir`` alone.

    :raises ConversionDirUnusable: the file system has refused it
    """
    try:
        yield
    except OSError as e:
        raise exception.ConversionDirUnusable(
            path=str(conf.CONF.pcow.conversion_dir), reason=e.strerror or str(e)
        ) from None
    except exception.PathRefused as e:
        raise exception.ConversionDirUnusable(
            path=str(conf.CONF.pcow.conversion_dir), reason=str(e)
        ) from None


def _make(prefix: str) -> tuple[str, int]:
    """Nobody takes it for a left one meanwhile: it is new."""
    path = _make_new(os.path.realpath(str(conf.CONF.pcow.conversion_dir)), prefix)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        os.close(descriptor)
        os.rmdir(path)
        raise
    return path, descriptor


def _make_new(place: str, prefix: str) -> str:
    """Nobody knows its name before: where all may make directories, one that was made under it
    would stop root.

    :raises PathRefused: this is root, and others could exchange it
    """
    while True:
        path = os.path.join(place, f'{prefix}{secrets.token_hex(4)}')
        descriptors.check_for_root(path)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            continue
        return path


def _lock(path: str) -> int | None:
    """A descriptor that holds the lock; None: somebody else has it, or the directory is gone or not
    this user's, or others may exchange it.
    """
    try:
        descriptors.check_for_root(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, exception.PathRefused):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(descriptor)
        # its name may be another directory's by now
        if status.st_uid == os.geteuid() and os.path.samestat(
            status, os.stat(path, follow_symlinks=False)
        ):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def purpose(path: str) -> str | None:
    """What one of these directories was made for."""
    found = _NAME.fullmatch(os.path.basename(path))
    return found['purpose'] if found else None


def left_over(*purposes: str) -> Iterator[str]:
    """Directories of this user, for these purposes, in which nobody works, nor has worked within
    the last hour.
    """
    place = os.path.realpath(str(conf.CONF.pcow.conversion_dir))
    try:
        names = sorted(name for name in os.listdir(place) if purpose(name) in purposes)
    except OSError:
        return
    for name in names:
        path = os.path.join(place, name)
        descriptor = _lock(path) if time.time() - _last_write(path) > _MIN_AGE else None
        if descriptor is not None:
            os.close(descriptor)
            yield path


def _last_write(path: str) -> float:
    """To the directory or a file in it; now, if that cannot be told."""
    try:
        with os.scandir(path) as entries:
            return max(
                [
                    os.stat(path).st_mtime,
                    *(entry.stat(follow_symlinks=False).st_mtime for entry in entries),
                ]
            )
    except OSError:
        return time.time()


def size(path: str) -> int:
    """Bytes that a directory holds on its file system."""
    total = 0
    for parent, _directories, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


def discard(path: str, first: Callable[[], None] = lambda: None) -> None:
    """Delete a directory that a killed process left.

    :param first: called while nobody else can work in it
    :raises ImageInUse: somebody works in it
    """
    descriptor = _lock(path)
    if descriptor is None:
        raise exception.ImageInUse(path=path, reason='somebody works in it, or it is gone')
    try:
        first()
        shutil.rmtree(path)
    except OSError as e:
        raise exception.ImageInUse(path=path, reason=f'{e.filename}: {e.strerror}') from None
    finally:
        os.close(descriptor)


def collect(purposes: Iterable[str] = PLAIN, delete: Callable[[str], None] = discard) -> None:
    """Delete what killed processes of this user left; what cannot be deleted is logged."""
    for path in left_over(*purposes):
        try:
            delete(path)
        except exception.PcowError as e:
            LOG.warning(
                '%s was left by a process that was killed, and cannot be deleted: %s', path, e
            )
        else:
            LOG.info('%s was left by a process that was killed, and is deleted', path)
