# SPDX-License-Identifier: Apache-2.0
"""New images appear in a pool under their name when they are complete; a failed or killed build
leaves nothing under it.
"""

from collections.abc import Iterator
import contextlib
import os
import re

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.images import protection
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned

# the file, or what pcow-img makes of it until that is complete
_PART = re.compile(
    rf'\.{{1,2}}(?P<name>.+){re.escape(names.IMAGE_SUFFIX)}\.part(\.[0-9a-f]{{16}}\.partial)?'
)


@contextlib.contextmanager
def building(pool: pool_module.Pool, name: str) -> Iterator[str]:
    """Path in the pool for the unfinished image ``name``; :func:`publish` gives it its name, and
    what is left goes away.

    Nobody else builds an image of this name meanwhile.

    :raises InvalidName:
    :raises ImageExists:
    """
    target = pool.image_path(names.check_new_name('image', name))
    part = os.path.join(pool.path, f'.{os.path.basename(target)}.part')
    with locks.lock(_lock_name(pool, name)):
        # past whoever removes the pool, or deletes what killed builds left
        with pool.lock():
            pass
        if os.path.lexists(target):
            raise exception.ImageExists(path=target)
        with contextlib.ExitStack() as stack:
            stack.callback(protection.unlink, part)
            # left by a build that was killed: whoever holds the lock owns the name
            protection.unlink(part)
            yield part
        pool.remember(name)


def reserve(pool: pool_module.Pool, name: str, *, thin: int = 0, fixed: int = 0) -> None:
    """Count what an image that is being built will take, until it is there.

    The caller holds the pool's lock, under which it found that there is room.

    :param thin: what a guest can fill of it
    :param fixed: what nobody can fill, as a template
    """
    locks.note(_lock_name(pool, name), provisioned.reservation(thin, fixed))


@contextlib.contextmanager
def set_aside(pool: pool_module.Pool, first: str, *frozen: str, beside: int = 0) -> Iterator[None]:
    """What guests can fill once images are frozen is counted as what is being built, until they
    are; and what is stored into images beside what their guests store.

    :param first: name of the file by which others wait who set aside for it
    :param frozen: names of the files
    :param beside: bytes
    :raises NoRoom:
    """
    # as no image is called; what earlier versions made may have a longer name than a lock can
    name = '.' + names.shortened(first.removesuffix(names.IMAGE_SUFFIX), names.MAX_NAME_BYTES)
    with locks.lock(_lock_name(pool, name)):
        with pool.lock():
            reserve(pool, name, thin=pool.check_snapshot_room(*frozen, beside=beside))
        yield


def finish(pool: pool_module.Pool, name: str, part: str) -> None:
    """As :func:`publish`; what was reserved is the image's own from then on.

    :raises ImageExists:
    """
    publish(part, pool.image_path(name))
    reserve(pool, name)


def publish(part: str, target: str) -> None:
    """Give the finished file its name, and make that durable.  The caller holds the pool's lock.

    :raises ImageExists: somebody took the name meanwhile
    """
    try:
        os.link(part, target)
    except FileExistsError:
        raise exception.ImageExists(path=target) from None
    durable.sync(os.path.dirname(target))


def is_in_the_making(pool: pool_module.Pool, file_name: str) -> bool:
    """Whether somebody builds an image in this file of the pool now."""
    match = _PART.fullmatch(file_name)
    return match is not None and locks.is_held(_lock_name(pool, match['name']))


def in_the_making(pool: pool_module.Pool) -> list[str]:
    """Names of the images that somebody builds now; who holds the pool's lock meanwhile sees all of
    them.
    """
    return locks.held(_lock_name(pool, ''))


def _lock_name(pool: pool_module.Pool, name: str) -> str:
    return f'build-{pool.uuid}-{name}'
