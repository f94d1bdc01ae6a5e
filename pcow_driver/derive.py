# SPDX-License-Identifier: Apache-2.0
"""New device images from snapshots and from the present state of others: thin where that is possible, else copied.

Thin is what stands in the same pool, up to a number of files in its chain; each of them costs an open file and a mapping.
"""

import contextlib
import os

from pcow_driver import attached
from pcow_driver import device
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import names
from pcow_driver import pool as pool_module
from pcow_driver import removal
from pcow_driver import staging


def from_snapshot(source_pool: pool_module.Pool, source: str, snapshot: str, pool: pool_module.Pool, name: str, data_size: int, *,
                  max_chain: int) -> str:
    """Make a device of a snapshot of another, which may be in use, and return the path of its image.

    :param data_size: bytes, a multiple of 2 MiB, not less than that of the snapshot
    :param max_chain: longest chain of files, this one included, that may come out; a longer one is copied into one file
    :raises ImageNotFound: the source is not there
    :raises ImageExists:
    :raises InvalidSize:
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: there is no such snapshot, or the pool is full, for instance
    """
    path = source_pool.existing_path(source)
    if source_pool.uuid == pool.uuid and image.info(path, force_share=True).chain_depth < max_chain:
        return device.create_on(pool, name, source, base_snapshot=snapshot, data_size=data_size)
    return copy(path, pool, name, data_size, snapshot=snapshot)


def clone(source_pool: pool_module.Pool, source: str, pool: pool_module.Pool, name: str, data_size: int, *, max_chain: int) -> str:
    """Make a device of what another, which may be in use, holds now, and return the path of its image.

    It stands on a snapshot of its own of the source, which goes with it.

    :raises: as :func:`from_snapshot`
    """
    path, snapshot = source_pool.existing_path(source), names.check_snapshot_name(f'clone-{name}')
    if os.path.lexists(pool.image_path(name)):
        raise exception.ImageExists(path=pool.image_path(name))
    with removal.lock(source_pool, source):
        removal.mark_snapshot(source_pool, source, snapshot)    # first, so that a crash leaves nothing for ever
        try:
            if snapshot not in [one.name for one in image.snapshot_list(path, force_share=True)]:
                attached.snapshot_create(path, snapshot)
            made = from_snapshot(source_pool, source, snapshot, pool, name, data_size, max_chain=max_chain)
        except BaseException:
            removal.collect_snapshot(source_pool, source, snapshot)
            raise
        removal.collect_snapshot(source_pool, source, snapshot)    # a copy does not need it any more
    return made


def copy(path: str, pool: pool_module.Pool, name: str, data_size: int, *, snapshot: str | None = None) -> str:
    """Make a device that stands on nothing, with the content of another image, and return the path of its image.

    :param snapshot: what to copy; also while somebody writes to the image.  None: its present state
    :raises: as :func:`from_snapshot`
    """
    with staging.building(pool, name) as part:
        with pool.lock():
            pool.check_room(device.window(path, snapshot=snapshot, force_share=snapshot is not None).offset + data_size)
        image.convert(path, image.FORMAT, part, snapshot=snapshot)
        device.grow(part, data_size)
        target = pool.image_path(name)
        with pool.lock():
            staging.publish(part, target)
    return target


def rename(pool: pool_module.Pool, name: str, new_name: str) -> str:
    """Give an image that nobody uses and nothing stands on another name, and return its path.

    :raises ImageNotFound:
    :raises ImageExists: the new name is taken
    :raises ImageInUse: it has children, which know it by its name, or somebody has it open
    """
    path, target = pool.existing_path(name), pool.image_path(new_name)
    with pool.lock():
        try:
            image.info(path)
        except exception.ToolFailed as e:
            raise exception.ImageInUse(path=path, reason=str(e)) from None
        children = pool.children(name)
        if children:
            raise exception.ImageInUse(path=path, reason=f'images stand on it, and know it by its name: {", ".join(children[:5])}')
        staging.publish(path, target)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return target
