# SPDX-License-Identifier: Apache-2.0
"""Room for what makes an image larger than what was provisioned for it."""

from collections.abc import Iterator
import contextlib
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry

LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def for_snapshot(*paths: str) -> Iterator[None]:
    """A snapshot of each of these images is made meanwhile, after which its guest can fill it once
    more; nobody else gets that space.

    For an image of no pool nothing is provisioned.

    :raises NoRoom:
    """
    pools: dict[str, pool_module.Pool] = {}
    files: dict[str, list[str]] = {}
    for path in paths:
        found = _pool_of(path)
        if found is not None and found.settings.overcommit:
            pools[found.uuid] = found
            files.setdefault(found.uuid, []).append(os.path.basename(path))
    with contextlib.ExitStack() as stack:
        for uuid in sorted(pools):  # everybody takes the locks of several in this order
            stack.enter_context(pools[uuid].lock())
            pools[uuid].check_snapshot_room(*files[uuid])
        yield


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
