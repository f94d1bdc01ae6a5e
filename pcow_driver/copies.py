# SPDX-License-Identifier: Apache-2.0
"""New images from snapshots of others: forks, which share the data, and exports, which copy it.

Both work on an image that a running guest writes to: a snapshot never changes, and is not deleted while it is read or while
an image stands on it.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import uuid as uuidlib

from oslo_log import log as logging

from pcow_driver import domain
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import names
from pcow_driver import pool

LOG = logging.getLogger(__name__)

FORMATS = ('raw', 'qcow2', 'pcow')


@contextlib.contextmanager
def _directory_lock(directory: str) -> Iterator[None]:
    """The lock of the pool in a directory, if there is one."""
    try:
        found = pool.open_directory(directory)
    except exception.PoolInvalid:
        yield
        return
    with found.lock():
        yield


def fork(path: str, snapshot: str, name: str) -> str:
    """Make an image on a snapshot of another, in the same directory, and return its path.

    :param path: of the image that has the snapshot; somebody may be writing to it
    :param name: of the new image, without directory and suffix
    :raises InvalidName:
    :raises ImageExists:
    :raises ImageNotFound: ``path`` is not there
    """
    names.check_snapshot_name(snapshot)
    directory = os.path.dirname(os.path.abspath(path))
    target = os.path.join(directory, names.check_name('image', name) + names.IMAGE_SUFFIX)
    with _directory_lock(directory):
        image.create_overlay(target, path, base_snapshot=snapshot)
    return target


def _discard(found: domain.Domain, snapshot: str, device: str | None) -> None:
    """Delete a snapshot that was made for what has failed; that failure is what counts."""
    try:
        found.snapshot_delete(snapshot, device)
    except exception.PcowError as e:
        LOG.warning('%s: the snapshot %s stays: %s', found.name, snapshot, e)


def fork_live(found: domain.Domain, name: str, device: str | None = None, *, quiesce: bool = False) -> str:
    """Snapshot what a domain holds now and make an image on that; a running guest goes on. Returns the path of the image.

    The snapshot is called ``fork-NAME`` and stays: the image stands on it.

    :raises InvalidName:
    :raises ImageExists:
    """
    path = found.select(device).path
    snapshot = names.check_snapshot_name(f'fork-{names.check_name("image", name)}')
    target = os.path.join(os.path.dirname(path), name + names.IMAGE_SUFFIX)
    if os.path.lexists(target):
        raise exception.ImageExists(path=target)
    found.snapshot_create(snapshot, device, quiesce=quiesce)
    try:
        return fork(path, snapshot, name)
    except BaseException:
        _discard(found, snapshot, device)
        raise


def export(path: str, target: str, target_format: str, *, snapshot: str | None = None) -> None:
    """Copy an image into a new file: ``raw``, ``qcow2``, or ``pcow``, which becomes a template.

    :param snapshot: what to copy; also while somebody writes to the image.  None: its present state
    :raises ImageExists: ``target`` is there already
    """
    image.convert(path, image.FORMAT, target, target_format, snapshot=snapshot, sealed=target_format == image.FORMAT)


def export_domain(found: domain.Domain, target: str, target_format: str, device: str | None = None, *,
                  snapshot: str | None = None, quiesce: bool = False) -> None:
    """Copy the image of a domain, running or not.

    :param snapshot: what to copy.  None: the present state, of a running guest by way of a snapshot for as long as it takes
    :raises ImageExists: ``target`` is there already
    """
    path = found.select(device).path
    if os.path.lexists(target):
        raise exception.ImageExists(path=os.path.abspath(target))
    if snapshot is not None or not found.active():
        export(path, target, target_format, snapshot=snapshot)
        return
    temporary = f'export-{uuidlib.uuid4().hex[:12]}'
    found.snapshot_create(temporary, device, quiesce=quiesce)
    try:
        export(path, target, target_format, snapshot=temporary)
    finally:
        _discard(found, temporary, device)
