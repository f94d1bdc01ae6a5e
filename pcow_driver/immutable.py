# SPDX-License-Identifier: Apache-2.0
"""The immutable flag of files (chattr +i): while it is set nobody, root included, changes, renames or deletes them.

Templates have it where the file system has it, so that no base goes or changes under its children.  Whoever must change
something about one (an ACL, the mark of a pinned snapshot, its time) takes the flag off and sets it again, holding a lock
of the directory (flock) that the libvirt hook takes as well.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import os
import stat
import struct

from oslo_log import log as logging

from pcow_driver import conf
from pcow_driver import exception
from pcow_driver import tool

LOG = logging.getLogger(__name__)

# Linux, include/uapi/linux/fs.h
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS = 0x80086601, 0x40086602
_FS_IMMUTABLE_FL = 0x10
_FLAGS = struct.Struct('i')
_SUFFIX, _MARKER = '.pcow', '.pcow-pool'


def _open(path: str) -> int:
    """:raises OSError: also for what is no regular file"""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f'{path} is not a regular file')
    return fd


def _flags(fd: int) -> int:
    return int(_FLAGS.unpack(fcntl.ioctl(fd, _FS_IOC_GETFLAGS, _FLAGS.pack(0)))[0])


def is_set(path: str) -> bool:
    """False also where the file system has no such flag."""
    try:
        fd = _open(path)
    except OSError:
        return False
    try:
        return bool(_flags(fd) & _FS_IMMUTABLE_FL)
    except OSError:
        return False
    finally:
        os.close(fd)


def set_flag(path: str, wanted: bool) -> None:
    """:raises OSError: the file system has no such flag, or this user may not (CAP_LINUX_IMMUTABLE)"""
    fd = _open(path)
    try:
        flags = _flags(fd)
        changed = flags | _FS_IMMUTABLE_FL if wanted else flags & ~_FS_IMMUTABLE_FL
        if changed != flags:
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, _FLAGS.pack(changed))
    finally:
        os.close(fd)


def checked(path: str) -> str:
    """What a service that is not root may have the flag of changed: a sealed image in a pool.

    :raises PoolInvalid: it is something else
    """
    plain = os.path.isabs(path) and os.path.normpath(path) == path and path.endswith(_SUFFIX)
    if not plain or not os.path.isfile(os.path.join(os.path.dirname(path), _MARKER)) or os.path.islink(path):
        raise exception.PoolInvalid(path=path, reason='it is no image of a pool')
    info = tool.run_json(tool.find('pcow_img'), 'info', '-U', '-f', 'pcow', '--output=json', path)
    if not info['format-specific']['data'].get('sealed'):
        raise exception.PoolInvalid(path=path, reason='it is no template')
    return path


def _change(path: str, wanted: bool) -> None:
    """As this user, or as root if privsep was set up for pcow.

    :raises OSError:
    :raises PcowError:
    """
    try:
        set_flag(path, wanted)
    except PermissionError:
        from pcow_driver.privileged import context
        from pcow_driver.privileged import files

        if not context.conf.helper_command:
            raise
        files.set_immutable(path, wanted)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Nobody else changes flags of this directory."""
    try:
        fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield                                  # who cannot list it changes no flags in it, nor anything else
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def protect(path: str) -> bool:
    """Set the flag of a template, if that is wanted and can be done; whether it is set."""
    if not conf.CONF.pcow.protect_templates:
        return False
    try:
        with _locked(path):
            if not is_set(path):
                _change(path, True)
    except (OSError, exception.PcowError) as e:
        LOG.debug('%s is not made immutable: %s', path, e)
        return False
    return True


def unprotect(path: str) -> None:
    """Take the flag off for good.

    :raises ImageProtected: this user may not
    """
    with _locked(path):
        if is_set(path):
            _take_off(path)


@contextlib.contextmanager
def lifted(path: str) -> Iterator[None]:
    """Meanwhile the file can be changed or deleted; if it is still there, it has the flag again afterwards.

    :raises ImageProtected: this user may not
    """
    with _locked(path):
        was_set = is_set(path)
        if was_set:
            _take_off(path)
        try:
            yield
        finally:
            if was_set and os.path.lexists(path):
                _change(path, True)


def unlink(path: str) -> None:
    """Delete one name of a file, whose other names keep the flag; a name that is not there is no error.

    A build that was killed while it gave its file the final name leaves two, and the flag belongs to both.

    :raises ImageProtected: this user may not
    """
    with contextlib.suppress(FileNotFoundError), _locked(path):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or not is_set(path):
            os.unlink(path)
            return
        other = _other_name(path, status)
        _take_off(other or path)
        try:
            os.unlink(path)
        finally:
            if other is not None:
                _change(other, True)


def _other_name(path: str, status: os.stat_result) -> str | None:
    """Of the same file in the same directory, as an image."""
    directory = os.path.dirname(os.path.abspath(path))
    for name in os.listdir(directory) if status.st_nlink > 1 else ():
        other = os.path.join(directory, name)
        if name.endswith(_SUFFIX) and other != os.path.abspath(path) and os.path.samestat(status, os.lstat(other)):
            return other
    return None


def _take_off(path: str) -> None:
    try:
        _change(path, False)
    except (OSError, exception.PcowError) as e:
        raise exception.ImageProtected(path=path, reason=str(e)) from None
