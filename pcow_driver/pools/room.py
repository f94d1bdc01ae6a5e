# SPDX-License-Identifier: Apache-2.0
"""Room for what makes an image larger than what was provisioned for it."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import staging

LOG = logging.getLogger(__name__)

# Bytes that are stored into the image of a path beside what its guest stores; only asked for where
# a pool has a limit.
Beside = Callable[[str], int]


def _nothing(_path: str) -> int:
    return 0


@contextlib.contextmanager
def for_snapshot(*paths: str, beside: Beside = _nothing) -> Iterator[None]:
    """A snapshot of each of these images is made meanwhile, after which its guest can fill it once
    more; nobody else gets that space.

    For an image of no pool nothing is provisioned.

    :raises NoRoom:
    """
    with contextlib.ExitStack() as stack:
        for pool, files, more in _with_more(paths, beside):
            stack.enter_context(pool.lock())
            pool.check_snapshot_room(*files, beside=more)
        yield


@contextlib.contextmanager
def for_long_snapshot(*paths: str, beside: Beside = _nothing) -> Iterator[None]:
    """As :func:`for_snapshot`, of snapshots that take minutes, or for which a guest or its QEMU is
    asked, which may never answer: others work on the pools meanwhile.

    :raises NoRoom:
    """
    with contextlib.ExitStack() as stack:
        for pool, files, more in _with_more(paths, beside):
            stack.enter_context(staging.set_aside(pool, files[0], *files, beside=more))
        yield


@contextlib.contextmanager
def for_more(*paths: str, beside: Beside) -> Iterator[bool]:
    """QEMU stores so much into images by itself meanwhile, and nobody else gets that space. Whether
    any pool has a limit.

    :raises NoRoom:
    """
    with contextlib.ExitStack() as stack:
        found = _with_more(paths, beside)
        for pool, files, more in found:
            if more:  # in a pool beyond its limit even nothing would be refused
                stack.enter_context(staging.set_aside(pool, files[0], beside=more))
        yield bool(found)


def _with_more(
    paths: tuple[str, ...], beside: Beside
) -> list[tuple[pool_module.Pool, list[str], int]]:
    """As :func:`_by_pool`, with what comes beside: asked for before anybody has a lock, as QEMU
    may take its time.
    """
    return [
        (pool, files, sum(beside(os.path.join(pool.path, file)) for file in files))
        for pool, files in _by_pool(paths)
    ]


def _by_pool(paths: tuple[str, ...]) -> list[tuple[pool_module.Pool, list[str]]]:
    """The pools with a limit, and the names of their files; everybody takes the locks of several in
    this order.
    """
    pools: dict[str, tuple[pool_module.Pool, list[str]]] = {}
    for path in paths:
        found = _pool_of(path)
        if found is not None and found.settings.overcommit:
            pools.setdefault(found.uuid, (found, []))[1].append(os.path.basename(path))
    return [pools[uuid] for uuid in sorted(pools)]


@contextlib.contextmanager
def kept(path: str) -> Iterator[None]:
    """Nobody is given any space of an image's pool meanwhile: what the image gives up for a moment
    is its own still.

    A revert to a snapshot of a smaller size, and the growth behind it, for instance.
    """
    found = _pool_of(path)
    with found.lock() if found is not None else contextlib.nullcontext():
        yield


def _pool_of(path: str) -> pool_module.Pool | None:
    try:
        return registry.PoolRegistry().find(os.path.dirname(os.path.abspath(path)))
    except exception.PcowError as e:
        LOG.debug('%s: its pool is not known: %s', path, e)
        return None
