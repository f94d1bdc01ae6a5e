# SPDX-License-Identifier: Apache-2.0
"""Locks that all processes and threads of this host share."""

from collections.abc import Iterator
import contextlib
import os

from oslo_concurrency import lockutils

from pcow_driver import conf
from pcow_driver import exception


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
            stack.enter_context(lockutils.lock(name, lock_file_prefix='pcow-', external=True, lock_path=directory))
        except OSError as e:
            raise exception.StateInvalid(path=directory, reason=(
                f'{e.strerror}; become root, or set [pcow] state_path to a directory that this user may write to')) from None
        yield
