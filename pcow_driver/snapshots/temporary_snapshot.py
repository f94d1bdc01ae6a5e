# SPDX-License-Identifier: Apache-2.0
"""Snapshots of running guests that a command makes for itself, and that go with it.

In a pool they are marked for deletion before they are made (see
:mod:`pcow_driver.snapshots.trash`), so that one that a killed command left goes with the next
``pool garbage --delete snapshot``.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import trash
from pcow_driver.virt import domain

LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def snapshot(
    found: domain.Domain,
    name: str,
    device: str | None,
    pool: pool_module.Pool | None,
    *,
    quiesce: bool,
    keep: bool = False,
) -> Iterator[None]:
    """A snapshot of what a domain holds now; nobody deletes it during the block, and it goes at its
    end.

    :param pool: in which the image is, if it is in one
    :param keep: it stays if the block ends well
    """
    path = os.path.realpath(found.select(device).path)
    stem = os.path.basename(path).removesuffix(names.IMAGE_SUFFIX)
    # in this order: what undoes takes the lock itself
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as locked:
        marked = pool if pool is not None and _mark(pool, stem, path, name, locked) else None
        if marked is not None:
            undo.callback(_collect, marked, stem, name)
        try:
            found.snapshot_create(name, device, quiesce=quiesce)
        except (
            exception.ToolFailed,
            exception.QmpFailed,
        ):  # refused: one that has this name is somebody else's
            undo.pop_all()
            if marked is not None:
                trash.keep_snapshot(marked, stem, name)
            raise
        except exception.NoAnswer:  # QEMU may make it yet: the mark stays
            undo.pop_all()
            raise
        except exception.StillFrozen:  # it was made
            if marked is None:
                undo.callback(_discard, found, name, device)
            raise
        if marked is None:
            undo.callback(_discard, found, name, device)
        with contextlib.nullcontext() if marked is None else _read(path, name):
            locked.close()  # from here on the lock of the snapshot is enough
            yield
            if keep and marked is not None:
                with trash.lock(marked, stem):
                    trash.keep_snapshot(marked, stem, name)
        if keep:
            undo.pop_all()


def _mark(
    pool: pool_module.Pool, stem: str, path: str, name: str, locked: contextlib.ExitStack
) -> bool:
    """Mark a snapshot that shall be made, unless one of this name is there already.

    :param locked: holds the lock that keeps others from removing it
    """
    try:
        locked.enter_context(trash.lock(pool, stem))
        if any(one.name == name for one in image.info(path, force_share=True).snapshots):
            return False
        trash.mark_snapshot(pool, stem, name)
    except exception.PcowError as e:  # who may not write to the pool goes without
        LOG.debug('%s: the snapshot %s is not marked: %s', path, name, e)
        return False
    return True


@contextlib.contextmanager
def _read(path: str, name: str) -> Iterator[None]:
    made = next(
        (one for one in image.info(path, force_share=True).snapshots if one.name == name), None
    )
    if made is None:
        raise exception.ImageInUse(
            path=path, reason=f'its snapshot {name} was deleted as soon as it was made'
        )
    with image_locks.reading_snapshot(path, int(made.id)):
        yield


def _collect(pool: pool_module.Pool, stem: str, name: str) -> None:
    """Delete a snapshot that was made for what has ended; failures are logged, what has ended
    counts.
    """
    try:
        with interrupt.clearing_up(), trash.lock(pool, stem):
            trash.collect_snapshot(pool, stem, name)
    except exception.PcowError as e:
        LOG.warning('%s: the snapshot %s stays: %s', pool.image_path(stem), name, e)


def _discard(found: domain.Domain, name: str, device: str | None) -> None:
    try:
        with interrupt.clearing_up():
            found.snapshot_delete(name, device)
    except exception.PcowError as e:
        LOG.warning('%s: the snapshot %s stays: %s', found.name, name, e)
