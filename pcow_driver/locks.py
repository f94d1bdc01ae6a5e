# SPDX-License-Identifier: Apache-2.0
"""Locks that all processes and threads of this host share."""

from collections.abc import Iterator
import contextlib
import errno
import os

from oslo_concurrency import lockutils

from pcow_driver import conf
from pcow_driver import exception

_PREFIX = 'pcow-'
_FILE_MODE = 0o660                     # who may lock writes nothing: the directory says who that is


def state_path() -> str:
    """Directory of the list of pools and of the locks."""
    return os.path.abspath(str(conf.CONF.pcow.state_path))


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock of this name, a file under ``[pcow] state_path``.

    :raises StateInvalid: the lock directory cannot be written to
    :raises InvalidName: it is too long for a file
    """
    state = state_path()
    directory = os.path.join(state, 'locks')
    with contextlib.ExitStack() as stack:
        try:
            _make_directory(state, directory)
            _make_file(directory, _PREFIX + name)
            stack.enter_context(lockutils.lock(name, lock_file_prefix=_PREFIX, external=True, lock_path=directory))
        except OSError as e:
            if e.errno == errno.ENAMETOOLONG:
                raise exception.InvalidName(kind='lock', name=name, reason=(
                    f'it is too long for a file in {directory}; what it is named after needs a shorter name')) from None
            raise exception.StateInvalid(path=e.filename or directory, reason=(
                f'{e.strerror}; become root, or let root give the directory to the services that work on pools '
                f"('chown -R OWNER:GROUP {state}; chmod -R g+rwX {state}'); [pcow] state_path is the same for all of them, or they "
                'would not wait for each other')) from None
        yield


def is_held(name: str) -> bool:
    """Whether somebody holds the lock of this name; also if this user cannot tell."""
    directory = os.path.join(state_path(), 'locks')
    if not os.path.lexists(os.path.join(directory, f'{_PREFIX}{name}')):
        return False                           # nobody ever has
    try:
        with lockutils.lock(name, lock_file_prefix=_PREFIX, external=True, lock_path=directory, do_log=False, blocking=False):
            return False
    except (OSError, lockutils.AcquireLockFailedException):
        return True


def held(prefix: str) -> list[str]:
    """What follows the prefix in the names of locks that somebody holds and that begin with it."""
    try:
        files = sorted(os.listdir(os.path.join(state_path(), 'locks')))
    except FileNotFoundError:
        return []
    found = [name.removeprefix(_PREFIX + prefix) for name in files if name.startswith(_PREFIX + prefix)]
    return [rest for rest in found if is_held(prefix + rest)]


def _make_directory(state: str, directory: str) -> None:
    """Whoever the state directory was given to may take locks, also when root is the first to take one."""
    os.makedirs(state, mode=0o755, exist_ok=True)
    try:
        os.mkdir(directory, mode=0o700)
    except FileExistsError:
        return
    status = os.stat(state)
    made = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _give(made, status, status.st_mode & 0o7777)
    finally:
        os.close(made)


def _make_file(directory: str, name: str) -> None:
    """A lock that root takes first is one that the owner and the group of the directory can take later."""
    path = os.path.join(directory, name.replace(os.sep, '_'))          # as lockutils names it
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        _give(file, os.stat(directory), _FILE_MODE)
    finally:
        os.close(file)


def _give(made: int, like: os.stat_result, mode: int) -> None:
    """What was just made gets owner and group of the directory it is in, as far as this user can do that.

    :param made: a descriptor: who may write to the directory might put something else under the name
    """
    with contextlib.suppress(OSError):
        os.fchown(made, like.st_uid if os.geteuid() == 0 else -1, like.st_gid)
    os.fchmod(made, mode)
