# SPDX-License-Identifier: Apache-2.0
"""Directories that are reached step by step, each from the descriptor of the one above it; and
files that are opened once.

On the way to a directory no link is followed, so nobody leads the way elsewhere. With ``trusted``
it is also refused where somebody else could exchange a step after it was looked at: what root then
does to the descriptor, or to a name in it, it does to what the path says.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import os
import stat

from pcow_driver.common import exception

_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# an ACL that lets somebody write shows in the bits of the group
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # as the kernel


def place(descriptor: int) -> str:
    """A path of what a descriptor of this process stands for, whatever becomes of its names."""
    return f'/proc/self/fd/{descriptor}'


def open_file(path: str) -> int:
    """A descriptor of a regular file, to read it. A link at its name is followed if it is root's or
    this user's, as libpcow does; nobody has to wait for a FIFO.

    :raises OSError: also for what is no regular file, and for a link of another user
    """
    return _regular(_open(path, os.O_RDONLY | os.O_NONBLOCK), path)


def open_source(path: str) -> int:
    """As :func:`open_file`, of what somebody has named for this user to read: the same holds for
    each link on the way. Else who may write to a directory there leads root to any file.

    :raises OSError:
    """
    return _regular(_walk_by_links(os.path.abspath(path)), path)


def _regular(descriptor: int, path: str) -> int:
    """:raises OSError: it is something else, and closed"""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, 'it is not a regular file', path)
    return descriptor


def _walk_by_links(path: str) -> int:
    """A descriptor to read what is there, or of a directory."""
    left, links, at = _reversed_parts(path), 0, os.open('/', _STEP)
    try:
        while left:
            how = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC if len(left) == 1 else _STEP
            try:
                below = os.open(left[-1], how | os.O_NOFOLLOW, dir_fd=at)
            except OSError as e:
                if e.errno not in (errno.ELOOP, errno.ENOTDIR) or links == _MAX_LINKS:
                    raise
                links += 1
                target = _target(left.pop(), e, at)
                left += _reversed_parts(target)
                if not target.startswith('/'):
                    continue
                below = os.open('/', _STEP)
            else:
                left.pop()
            os.close(at)
            at = below
    except BaseException:
        os.close(at)
        raise
    return at


def _reversed_parts(path: str) -> list[str]:
    return [part for part in path.split('/') if part not in ('', '.')][::-1]


@contextlib.contextmanager
def directory_place(path: str) -> Iterator[str]:
    """A path of a directory (:func:`place`), whatever becomes of its names; a link at its name is
    followed as by :func:`open_file`.

    :raises OSError:
    """
    descriptor = _open(path, os.O_PATH | os.O_DIRECTORY)
    try:
        yield place(descriptor)
    finally:
        os.close(descriptor)


def _open(path: str, flags: int) -> int:
    for _link in range(_MAX_LINKS):
        try:
            return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as e:
            if e.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            path = os.path.join(os.path.dirname(path), _target(path, e))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _target(path: str, refused: OSError, above: int | None = None) -> str:
    """Of a link that is followed.

    :param refused: raised if it is no link
    :param above: the directory that a relative path begins at; None: that of this process
    :raises OSError:
    """
    link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            raise refused
        if status.st_uid not in {0, os.geteuid()}:
            raise OSError(
                errno.ELOOP,
                'it is, or lies behind, a symbolic link of another user, and is not followed: name '
                'the file itself',
                path,
            )
        return os.readlink('', dir_fd=link)
    finally:
        os.close(link)


@contextlib.contextmanager
def directory(path: str, *, trusted: bool = False) -> Iterator[int]:
    """A descriptor (O_PATH) of the directory at an absolute path without links.

    :raises PathRefused: it has a link or something else that is no directory; or with ``trusted``,
        others may exchange a step
    :raises OSError: it is not there, or this user may not go there
    """
    descriptor = _walk(_parts(path), trusted)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def parent(path: str, *, trusted: bool = False) -> Iterator[tuple[int, str]]:
    """A descriptor of the directory above a path, and its last part.

    With ``trusted``, only this user and root may put something else under that name.

    :raises PathRefused:
    :raises OSError:
    """
    *above, name = _parts(path) or ['']
    if not name:
        raise exception.PathRefused(path=path, reason='it is the root directory')
    descriptor = _walk(above, trusted)
    try:
        if trusted:
            _check_step(descriptor, name, path)
        yield descriptor, name
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def parent_for_root(path: str) -> Iterator[tuple[int, str]]:
    """As :func:`parent`, trusted, if this is root. Who is not root has only the rights that its
    neighbours have, too, and links on the way are his own affair.

    :raises PathRefused: this is root, and others may put something else there
    :raises OSError:
    """
    if os.geteuid() == 0:
        with parent(path, trusted=True) as found:
            yield found
        return
    above, name = os.path.split(path)
    descriptor = os.open(above, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor, name
    finally:
        os.close(descriptor)


def make(path: str, mode: int = 0o755) -> None:
    """Make a directory and those above it that are missing, each where nobody else can exchange it.

    :raises PathRefused:
    :raises OSError: it is there already, for instance
    """
    parts = _parts(path)
    for count in range(1, len(parts) + 1):
        with parent('/' + '/'.join(parts[:count]), trusted=True) as (descriptor, name):
            try:
                os.mkdir(name, mode, dir_fd=descriptor)
            except FileExistsError:
                if count == len(parts):
                    raise


def check(path: str) -> None:
    """The way to a directory that may be missing, as far as it is there.

    :raises PathRefused:
    """
    parts = _parts(path)
    while parts:
        try:
            with directory('/' + '/'.join(parts), trusted=True):
                return
        except FileNotFoundError:
            parts.pop()


def check_for_root(path: str) -> None:
    """A directory that root works in by its path. Who is not root has only the rights that its
    neighbours have, too.

    :raises PathRefused: others may put something else there
    """
    if os.geteuid() == 0:
        check(os.path.abspath(path))


def _parts(path: str) -> list[str]:
    if not os.path.isabs(path) or os.path.normpath(path) != path or path.startswith('//'):
        raise exception.PathRefused(path=path, reason='it is no plain absolute path')
    parts = path.split('/')[1:]
    return [part for part in parts if part]


def _walk(parts: list[str], trusted: bool) -> int:
    descriptor = os.open('/', _STEP)
    try:
        for count, part in enumerate(parts, 1):
            path = '/' + '/'.join(parts[:count])
            if trusted:
                _check_step(descriptor, part, path)
            try:
                below = os.open(part, _STEP, dir_fd=descriptor)
            except NotADirectoryError:
                raise exception.PathRefused(
                    path=path, reason='it is a link, or no directory: give the place itself'
                ) from None
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_step(descriptor: int, name: str, path: str) -> None:
    """Whoever may write to a directory may exchange what is in it; in one with the sticky bit, what
    belongs to him.

    :raises PathRefused:
    """
    above = os.fstat(descriptor)
    trusted = {0, os.geteuid()}
    if above.st_uid not in trusted:
        raise exception.PathRefused(
            path=path, reason='the directory above it belongs to another user'
        )
    if above.st_mode & _OTHERS:
        try:
            owner = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid
        except FileNotFoundError:
            owner = os.geteuid()  # as it will be, if this user makes it
        if not above.st_mode & stat.S_ISVTX or owner not in trusted:
            raise exception.PathRefused(
                path=path, reason='others may write to the directory above it (chmod go-w)'
            )
