# SPDX-License-Identifier: Apache-2.0
"""New images appear in a pool under their name when they are complete; a failed or killed build leaves nothing under it."""

from collections.abc import Iterator
import contextlib
import os

from pcow_driver import exception
from pcow_driver import immutable
from pcow_driver import locks
from pcow_driver import pool as pool_module


@contextlib.contextmanager
def building(pool: pool_module.Pool, name: str) -> Iterator[str]:
    """Path in the pool for the unfinished image ``name``; :func:`publish` gives it its name, and what is left goes away.

    Nobody else builds an image of this name meanwhile.

    :raises InvalidName:
    :raises ImageExists:
    """
    target = pool.image_path(name)
    part = os.path.join(pool.path, f'.{os.path.basename(target)}.part')
    with locks.lock(f'build-{pool.uuid}-{name}'):
        if os.path.lexists(target):
            raise exception.ImageExists(path=target)
        with contextlib.ExitStack() as stack:
            stack.callback(immutable.unlink, part)
            immutable.unlink(part)              # left by a build that was killed: whoever holds the lock owns the name
            yield part


def publish(part: str, target: str) -> None:
    """Give the finished file its name, and make that durable.  The caller holds the pool's lock.

    :raises ImageExists: somebody took the name meanwhile
    """
    try:
        os.link(part, target)
    except FileExistsError:
        raise exception.ImageExists(path=target) from None
    directory = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
