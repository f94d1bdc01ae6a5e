# SPDX-License-Identifier: Apache-2.0
"""Room for what makes an image larger than what was provisioned for it."""

from collections.abc import Iterator
import contextlib
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import staging

LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def for_snapshot(*paths: str) -> Iterator[None]:
    """A snapshot of each of these images is made meanwhile, after which its guest can fill it once
    more; nobody else gets that space.

    For an image of no pool nothing is provisioned.

    :raises NoRoom:
    """
    with contextlib.ExitStack() as stack:
        for pool, files in _by_pool(paths):
            stack.enter_context(pool.lock())
            pool.check_snapshot_room(*files)
        yield


@contextlib.contextmanager
def for_long_snapshot(*paths: str) -> Iterator[None]:
    """As :func:`for_snapshot`, of snapshots that take minutes, or for which a guest or its QEMU is
    asked, which may never answer: others work on the pools meanwhile.

    :raises NoRoom:
    """
    with contextlib.ExitStack() as stack:
        for pool, files in _by_pool(paths):
            stack.enter_context(staging.set_aside_for_snapshot(pool, *files))
        yield


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
