# SPDX-License-Identifier: Apache-2.0
"""Locks that all processes, threads and green threads of this host share.

A lock is one on the open description of a file under ``[pcow] state_path``: it ends with the
process however that ends, and two threads of one process keep each other out as two processes do.
Who has to wait tries again and sleeps in between, which lets other green threads run; a system call
that waits would stop all of them, the one that has the lock included. No semaphore of the process
is involved, so it makes no difference whether eventlet has replaced those. Locks of POSIX records,
as pcow took them before, conflict with these.

A lock's file is there as long as somebody has the lock: who gives it up deletes the file first, and
who gets a lock looks whether its file is still the one of that name.

Nobody waits for a lock in a circle, because each takes its locks in one order, which is checked
(see ``_ORDER``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import contextvars
import errno
import fcntl
import os
import secrets
import stat
import struct
import time

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import text as text_module

LOG = logging.getLogger(__name__)

_PREFIX = 'pcow-'
_SHARED = 'locks'  # below the state directory
# and their modes, where the owner of that directory alone puts names
OWN, PROTECTED = 'own-locks', 'protected'
OWN_MODES = {OWN: 0o700, PROTECTED: 0o755}
_NEW = '.new-'  # of a file that nobody can lock yet
_FILE_MODE = 0o660  # who may lock writes nothing: the directory says who that is
_FIRST_RETRY, _RETRY = 0.001, 0.01  # seconds; the latter from some time on
_FIRST_WORD, _WORD = 10, 60  # seconds after which who waits says so, and says it again
_MAX_NOTE = 100
_MAX_REPLACED = 100  # times that the file of a lock is another one when it is taken
_LOCK = struct.Struct('hhqqi4x')  # struct flock
# who cannot make or open a file in a directory, or has no space for it
_NO_FILE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
# First words of the names. Who has a lock takes only later ones, or of the same kind one of a later
# name.
_ORDER = (
    'arrival',
    'protected',
    'warm',
    'vm',
    'export',
    'disk',
    'template',
    'removal',
    'build',
    'pools',
    'pool',
    'scrub',
    'notice',
)

_mine: contextvars.ContextVar[tuple[tuple[int, str], ...]] = contextvars.ContextVar(
    'pcow_locks', default=()
)


def state_path() -> str:
    """Directory of the list of pools and of the locks."""
    return os.path.abspath(str(conf.CONF.pcow.state_path))


@contextlib.contextmanager
def lock(name: str, *, own: bool = False, seconds: float | None = None) -> Iterator[None]:
    """Hold the lock of this name.

    :param own: services that share the other locks cannot hold that of the owner of the state
        directory, who would wait for them; nor does it keep them out
    :param seconds: how long to wait; None: until it is given up
    :raises LockHeld: it was not given up in that time
    :raises StateInvalid: the lock directory cannot be written to, or something that is no lock has
        the name
    :raises InvalidName: it is too long for a file
    """
    until = None if seconds is None else time.monotonic() + seconds
    with _in_order(_place(name)), contextlib.ExitStack() as stack:
        place = OWN if own and _is_owner() else _SHARED
        with _errors(name, place):
            directory = _open_directory(place, make=True)
            stack.callback(os.close, directory)
            file = _file_name(name)
            descriptor = _acquire(directory, file, until)
        stack.callback(_release, directory, file, descriptor)
        yield


@contextlib.contextmanager
def lock_directory(path: str) -> Iterator[None]:
    """Hold the lock of a directory itself (flock), which programs that do not know
    ``[pcow] state_path`` can take as well.

    :raises OSError: this user cannot list it
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _in_order((len(_ORDER) + 1, path)):
            _wait(_take_directory, descriptor)
            try:
                yield
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def lock_in(directory: str, name: str, after: str, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a directory that other hosts may have mounted as well, by a file in it that
    stays. It belongs to those who may put something there: nobody else can keep them out.

    Nothing is held by who may put nothing there, or finds no space for the file.

    :param after: name of the lock that has the same place in the order, but for being taken before
    :param check: called before the file is made; raises what keeps it from being made
    :raises OSError: something that is no lock has the name, for instance
    """
    kind, name_before = _place(after)
    check()
    with _in_order((kind, f'{name_before}/')), contextlib.ExitStack() as stack:
        place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, place)
        descriptor = _acquire_lasting(place, name, check)
        if descriptor is not None:
            stack.callback(_give_up, descriptor)
        yield


def is_held(name: str) -> bool:
    """Whether somebody holds the lock of this name; also if this user cannot tell. It is not taken
    for that.
    """
    try:
        directory = _open_directory()
    except FileNotFoundError:
        return False  # nobody ever has
    except OSError:
        return True
    try:
        return _is_held(directory, _file_name(name))
    finally:
        os.close(directory)


def held(prefix: str) -> list[str]:
    """What follows the prefix in the names of locks that somebody holds and that begin with it."""
    try:
        directory = _open_directory()
    except FileNotFoundError:
        return []
    try:
        return [
            name.removeprefix(_PREFIX + prefix)
            for name in sorted(os.listdir(directory))
            if name.startswith(_PREFIX + prefix) and _is_held(directory, name)
        ]
    finally:
        os.close(directory)


def note(name: str, text: str) -> None:
    """Let others read this as long as this process holds the lock of this name."""
    with _errors(name), contextlib.ExitStack() as stack:
        directory = _open_directory()
        stack.callback(os.close, directory)
        descriptor = _open_file(directory, _file_name(name))
        stack.callback(os.close, descriptor)
        os.truncate(descriptor, 0)
        os.write(descriptor, text.encode())


def notes(prefix: str) -> dict[str, str]:
    """What was noted (:func:`note`) of the locks of :func:`held`; ``''`` of those of which this
    user cannot tell.
    """
    found = dict.fromkeys(held(prefix), '')
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        directory = _open_directory()
        stack.callback(os.close, directory)
        for rest in found:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                descriptor = _open_file(directory, _PREFIX + prefix + rest, os.O_RDONLY)
                with os.fdopen(descriptor, 'rb') as file:
                    found[rest] = file.read(_MAX_NOTE).decode()
    return found


def collect() -> None:
    """Delete the files of locks that processes had when they were killed, and those that earlier
    versions left.
    """
    for place in (_SHARED, OWN):
        _collect(place)


def _collect(place: str) -> None:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        directory = _open_directory(place)
        stack.callback(os.close, directory)
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if name.startswith(_PREFIX):
                    descriptor = _open_file(directory, name)
                    if not _take(descriptor) or not _has_name(directory, name, descriptor):
                        os.close(descriptor)
                        continue
                    _release(directory, name, descriptor)


@contextlib.contextmanager
def _in_order(place: tuple[int, str]) -> Iterator[None]:
    mine = _mine.get()
    if mine and place <= mine[-1]:
        raise AssertionError(
            f'the lock {place[1]} is taken after {mine[-1][1]}, so that two could wait for each '
            f'other'
        )
    _mine.set((*mine, place))
    try:
        yield
    finally:
        _mine.set(mine)


def _place(name: str) -> tuple[int, str]:
    kind = name.partition('-')[0]
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER), name


@contextlib.contextmanager
def _errors(name: str, place: str = _SHARED) -> Iterator[None]:
    directory = os.path.join(state_path(), place)
    try:
        yield
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            raise exception.InvalidName(
                kind='lock',
                name=name,
                reason=(
                    f'it is too long for a file in {directory}; what it is named after needs a '
                    f'shorter name'
                ),
            ) from None
        path = os.path.join(directory, e.filename) if e.filename else directory
        if e.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EINVAL):
            raise exception.StateInvalid(
                path=path, reason='a link or something else that is no lock is there; delete it'
            ) from None
        raise exception.StateInvalid(
            path=path,
            reason=(
                f'{e.strerror}; become root, or let root give the directory to the group of the '
                f'services that work on pools '
                "('pcowctl host setup --group GROUP'); [pcow] state_path is the same for all of "
                "them, or they would not wait for "
                'each other'
            ),
        ) from None


def _file_name(name: str) -> str:
    return _PREFIX + name.replace(os.sep, '_')


def _is_owner() -> bool:
    """Whether this user alone, or root, puts names in the state directory."""
    try:
        return os.geteuid() in (0, os.stat(state_path()).st_uid)
    except FileNotFoundError:
        return True  # who makes it


def _open_directory(place: str = _SHARED, *, make: bool = False) -> int:
    """Of the locks.  Others may write to the directory above: they can put no link in its place."""
    if make:
        path = own_directory(place) if place in OWN_MODES else shared_directory(place)
    else:
        path = os.path.join(state_path(), place)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def shared_directory(name: str) -> str:
    """In the state directory, for whoever that was given to, also when root is the first who needs
    it.

    :raises OSError: it is not there, and this user cannot make it
    """
    return _make_directory(name, None)


def own_directory(name: str) -> str:
    """In the state directory, for its owner alone, whoever else may work on pools.

    :raises OSError: it is not there, and this user cannot make it
    """
    return _make_directory(name, OWN_MODES[name])


def _make_directory(name: str, mode: int | None) -> str:
    """:param mode: None: that of the state directory"""
    state = state_path()
    path = os.path.join(state, name)
    if os.path.lexists(path):
        return path
    os.makedirs(state, mode=0o755, exist_ok=True)
    try:
        os.mkdir(path, mode=0o700)
    except FileExistsError:
        return path
    status = os.stat(state)
    made = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _give(made, status, status.st_mode & 0o7777 if mode is None else mode)
    finally:
        os.close(made)
    return path


def _acquire(directory: int, name: str, until: float | None) -> int:
    """A descriptor that has the lock of the file that is there under this name.

    :raises LockHeld:
    """
    while True:
        try:
            descriptor = _open_file(directory, name)
        except FileNotFoundError:
            _make_file(directory, name)
            continue
        try:
            _wait(_take, descriptor, until)
            if _has_name(directory, name, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # somebody gave the lock up and deleted its file


def _acquire_lasting(directory: int, name: str, check: Callable[[], None]) -> int | None:
    for _replaced in range(_MAX_REPLACED):
        try:
            descriptor = _open_lasting(directory, name)
        except FileNotFoundError:
            check()
            continue
        if descriptor is None:
            return None
        try:
            _wait(_take, descriptor)
            if _has_name(directory, name, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        check()
    raise OSError(errno.EBUSY, 'it is replaced again and again', name)


def _open_lasting(directory: int, name: str) -> int | None:
    above = os.fstat(directory)
    mode = 0o600
    for may_write, bits in ((stat.S_IWGRP, 0o060), (stat.S_IWOTH, 0o006)):
        mode |= bits if above.st_mode & may_write else 0
    try:
        try:
            descriptor = _open_file(directory, name)
        except FileNotFoundError:
            _make_file(directory, name, new=f'.{name}.{secrets.token_hex(8)}.part', mode=mode)
            descriptor = _open_file(directory, name)
    except OSError as e:
        if e.errno not in _NO_FILE:
            raise
        if e.errno == errno.EACCES and _may_write(directory):
            LOG.warning(
                '%s/%s cannot be opened (%s), so that nobody on another host waits for who works '
                'here: let root give it to the owner and the group of the directory',
                os.readlink(f'/proc/self/fd/{directory}'),
                name,
                e.strerror,
            )
        return None
    found = os.fstat(descriptor)
    is_right = (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (
        above.st_uid,
        above.st_gid,
        mode,
    )
    # the directory was given away since; what has another name, or a content, is somebody's file
    if os.geteuid() == 0 and not is_right and (found.st_nlink, found.st_size) == (1, 0):
        _give(descriptor, above, mode)
    return descriptor


def _may_write(directory: int) -> bool:
    return os.access('.', os.W_OK, dir_fd=directory, effective_ids=True)


def _release(directory: int, name: str, descriptor: int) -> None:
    try:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory)
    finally:
        _give_up(descriptor)


def _give_up(descriptor: int) -> None:
    try:
        # A child that is just being started may have the same open description until it runs its
        # program.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)


def _open_file(directory: int, name: str, flags: int = os.O_RDWR) -> int:
    """:raises OSError: EINVAL if it is no regular file; a FIFO does not make anybody wait"""
    descriptor = os.open(
        name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
    )
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, 'it is not a regular file', name)
    return descriptor


def _make_file(
    directory: int, name: str, *, new: str | None = None, mode: int = _FILE_MODE
) -> None:
    """It appears with its owner and its mode: a lock that root takes first is one that others can
    wait for at once.

    :param new: its name before
    """
    new = new or f'{_NEW}{secrets.token_hex(8)}'
    descriptor = os.open(
        new,
        os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o600,
        dir_fd=directory,
    )
    try:
        _give(descriptor, os.fstat(directory), mode)
        with contextlib.suppress(FileExistsError):
            os.link(new, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(descriptor)
        os.unlink(new, dir_fd=directory)


def _wait(take: Callable[[int], bool], descriptor: int, until: float | None = None) -> None:
    """However long that takes, as a rule: a lock is there for work that breaks something if two do
    it at once, and its holder may only be slow. So who waits says so, and who holds it, as far as
    that is known: an operator can end that, which ends its lock.

    :param until: time.monotonic() at which who can do without it gives up
    :raises LockHeld:
    """
    delay, since, said = _FIRST_RETRY, time.monotonic(), 0
    while not take(descriptor):
        waited = time.monotonic() - since
        if waited >= _FIRST_WORD + said * _WORD:
            said += 1
            LOG.warning(
                'Waiting for the lock %s since %d s, until it is given up or its holder ends: %s',
                os.readlink(f'/proc/self/fd/{descriptor}'),
                waited,
                _holder(descriptor),
            )
        if until is not None and time.monotonic() >= until:
            path = os.readlink(f'/proc/self/fd/{descriptor}')
            raise exception.LockHeld(path=path, holder=_holder(descriptor))
        time.sleep(delay)
        delay = min(2 * delay, _RETRY)


def _holder(descriptor: int) -> str:
    """Who has a file locked, as far as this user can tell. The lock of an open description is that
    of no process (F_OFD_GETLK says -1), and is told beside each descriptor that has it.
    """
    file = os.fstat(descriptor)
    pids = [pid for pid in filter(str.isdigit, os.listdir('/proc')) if _has_locked(pid, file)]
    if not pids:
        return 'who holds it this user cannot see (root can), or is on another host'
    return f'process {", ".join(f"{pid} ({_command(pid)})" for pid in pids)} holds it'


def _has_locked(pid: str, file: os.stat_result) -> bool:
    """Whether this is told of one of its descriptors."""
    try:
        for name in os.listdir(f'/proc/{pid}/fd'):
            with contextlib.suppress(OSError):
                if not os.path.samestat(os.stat(f'/proc/{pid}/fd/{name}'), file):
                    continue
                with open(f'/proc/{pid}/fdinfo/{name}', encoding='ascii') as f:
                    if any(line.startswith('lock:') for line in f):
                        return True
    except OSError:
        pass  # of another user, or it has ended
    return False


def _command(pid: str) -> str:
    try:
        with open(f'/proc/{pid}/comm', encoding='utf-8', errors='replace') as f:
            return text_module.one_line(f.read())
    except OSError:
        return 'it has ended'


def _take(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError as e:
        if e.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True


def _take_directory(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(directory: int, name: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(
            os.fstat(descriptor), os.stat(name, dir_fd=directory, follow_symlinks=False)
        )
    except FileNotFoundError:
        return False


def _is_held(directory: int, name: str) -> bool:
    try:
        while True:
            descriptor = _open_file(directory, name, os.O_RDONLY)
            try:
                answer = fcntl.fcntl(
                    descriptor, fcntl.F_OFD_GETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                )
                if _LOCK.unpack(answer)[0] != fcntl.F_UNLCK:
                    return True
                if _has_name(directory, name, descriptor):
                    return False
            finally:
                os.close(descriptor)
    except OSError as e:
        return e.errno not in (errno.ENOENT, errno.ENAMETOOLONG)


def _give(made: int, like: os.stat_result, mode: int) -> None:
    """What was just made gets owner and group of the directory it is in, as far as this user can do
    that.

    :param made: a descriptor: who may write to the directory might put something else under the
        name
    """
    with contextlib.suppress(OSError):
        os.fchown(made, like.st_uid if os.geteuid() == 0 else -1, like.st_gid)
    os.fchmod(made, mode)
