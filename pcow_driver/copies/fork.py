# SPDX-License-Identifier: Apache-2.0
"""New images from snapshots of others: forks, which share the data, and exports, which copy it.

Both work on an image that a running guest writes to: a snapshot never changes, and is not deleted
while it is read or while an image stands on it.
"""

from __future__ import annotations

import contextlib
import os
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.copies import verify
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import temporary_snapshot
from pcow_driver.virt import domain

FORMATS = ('raw', 'qcow2', 'pcow')
# Of the images of a VM that is forked as a whole. A guest that goes on stores to a word here and
# there; with 64 KiB a child takes two to three times the memory (explanation/vm-snapshots.rst).
VM_CLUSTER_SIZE = 16 * units.KIB


def _pool_of(path: str) -> pool_module.Pool | None:
    """The pool in the directory of a file, with what this host's operator decided for it if he
    knows it.

    :raises PoolInvalid: one should be there
    """
    directory = os.path.dirname(os.path.abspath(path))
    found = registry.PoolRegistry().find(directory)
    if found is None:
        with contextlib.suppress(exception.PoolInvalid):
            return pool_module.open_directory(directory)
    return found


def _pool_for_marks(path: str) -> pool_module.Pool | None:
    """None also if the list of pools or the marker is damaged: a guest's data can be copied all the
    same.
    """
    with contextlib.suppress(exception.PcowError):
        return _pool_of(os.path.realpath(path))
    return None


def _snapshot_size(path: str, snapshot: str) -> int:
    """Virtual size of what stands on a snapshot of an image; if there is none, whoever needs it
    says so.
    """
    info = image.info(path, force_share=True)
    return next(
        (one.virtual_size for one in info.snapshots if one.name == snapshot), info.virtual_size
    )


def check_sound(path: str) -> None:
    """Before something is made to stand on a snapshot of an image.

    :raises ImageDamaged: a scrub has found it damaged, or what it stands on
    :raises PoolInvalid: a pool should be there
    """
    found = _pool_of(path)
    if found is not None:
        name = os.path.basename(path).removesuffix(names.IMAGE_SUFFIX)
        verify.compare_if_due(found, name)
        found.check_sound(name)


def fork(path: str, snapshot: str, name: str, *, cluster_size: int | None = None) -> str:
    """Make an image on a snapshot of another, in the same directory, and return its path.

    :param path: of the image that has the snapshot; somebody may be writing to it
    :param name: of the new image, without directory and suffix
    :param cluster_size: of it, in bytes; None: as of any image
    :raises InvalidName:
    :raises ImageExists:
    :raises ImageNotFound: ``path`` is not there
    :raises PoolDraining:
    :raises NoRoom: the operator's limits have no room for it
    :raises ImageDamaged: a scrub has found the image damaged, or what it stands on
    """
    names.check_snapshot_name(snapshot)
    directory = os.path.dirname(os.path.abspath(path))
    target = os.path.join(directory, names.check_new_name('image', name) + names.IMAGE_SUFFIX)
    found, own = _pool_of(path), os.path.basename(path).removesuffix(names.IMAGE_SUFFIX)
    if found is not None:
        verify.compare_if_due(found, own)
    with contextlib.nullcontext() if found is None else found.lock():
        if found is not None:
            found.check_room(_snapshot_size(path, snapshot))
            found.check_sound(own)
        image.create_overlay(target, path, base_snapshot=snapshot, cluster_size=cluster_size)
    if found is not None:
        found.remember(name)
    return target


def fork_live(
    found: domain.Domain, name: str, device: str | None = None, *, quiesce: bool = False
) -> str:
    """Snapshot what a domain holds now and make an image on that; a running guest goes on. Returns
    the path of the image.

    The snapshot is called ``fork-NAME`` and stays: the image stands on it.

    :raises InvalidName:
    :raises ImageExists:
    :raises ImageDamaged: as of :func:`fork`, before there is a snapshot
    """
    path = found.select(device).path
    snapshot = names.check_snapshot_name(f'fork-{names.check_new_name("image", name)}')
    target = os.path.join(os.path.dirname(path), name + names.IMAGE_SUFFIX)
    if os.path.lexists(target):
        raise exception.ImageExists(path=target)
    check_sound(path)
    with temporary_snapshot.snapshot(
        found, snapshot, device, _pool_for_marks(path), quiesce=quiesce, keep=True
    ):
        return fork(path, snapshot, name)


def export(
    path: str,
    target: str,
    target_format: str,
    *,
    snapshot: str | None = None,
    accept_damage: bool = False,
) -> None:
    """Copy an image into a new file: ``raw``, ``qcow2``, or ``pcow``, which becomes a template.
    Damage that keeps it from being copied is known from then on, as if a scrub had found it.

    :param snapshot: what to copy; also while somebody writes to the image.  None: its present state
    :param accept_damage: also if it is known to be damaged, as it is
    :raises ImageExists: ``target`` is there already
    :raises PoolDraining: it would be a template in a pool
    :raises NoRoom: the same, and more is provisioned there than the operator's limits allow
    """
    found = _pool_of(target) if target_format == image.FORMAT else None
    if found is not None:
        found.check_room(0)
    with verify.keeping(path):
        image.convert(
            path,
            image.FORMAT,
            target,
            target_format,
            snapshot=snapshot,
            sealed=target_format == image.FORMAT,
            accept_damage=accept_damage,
        )


def export_domain(
    found: domain.Domain,
    target: str,
    target_format: str,
    device: str | None = None,
    *,
    snapshot: str | None = None,
    quiesce: bool = False,
    accept_damage: bool = False,
) -> None:
    """Copy the image of a domain, running or not.

    :param snapshot: what to copy. None: the present state, of a running guest by way of a snapshot
        for as long as it takes
    :raises ImageExists: ``target`` is there already
    """
    path = found.select(device).path
    if os.path.lexists(target):
        raise exception.ImageExists(path=os.path.abspath(target))
    if snapshot is not None or not found.active():
        export(path, target, target_format, snapshot=snapshot, accept_damage=accept_damage)
        return
    temporary = f'export-{uuidlib.uuid4().hex[:12]}'
    with temporary_snapshot.snapshot(
        found, temporary, device, _pool_for_marks(path), quiesce=quiesce
    ):
        export(path, target, target_format, snapshot=temporary, accept_damage=accept_damage)
