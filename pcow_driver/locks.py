# SPDX-License-Identifier: Apache-2.0
"""Locks that all processes and threads of this host share."""

from collections.abc import Iterator
import contextlib
import os

from oslo_concurrency import lockutils

from pcow_driver import conf
from pcow_driver import exception

_PREFIX = 'pcow-'


def state_path() -> str:
    """Directory of the list of pools and of the locks."""
    return os.path.abspath(str(conf.CONF.pcow.state_path))


@contextlib.contextmanager
def lock(name: str) -> Iterator[None]:
    """Hold the lock of this name, a file under ``[pcow] state_path``.

    :raises StateInvalid: the lock directory cannot be written to
    """
    directory = os.path.join(state_path(), 'locks')
    with contextlib.ExitStack() as stack:
        try:
            os.makedirs(directory, mode=0o755, exist_ok=True)
            stack.enter_context(lockutils.lock(name, lock_file_prefix=_PREFIX, external=True, lock_path=directory))
        except OSError as e:
            raise exception.StateInvalid(path=directory, reason=(
                f'{e.strerror}; become root, or set [pcow] state_path to a directory that this user may write to')) from None
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
