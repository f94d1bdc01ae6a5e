# SPDX-License-Identifier: Apache-2.0
"""The end of warm images (:mod:`nova_pcow.warm_images.warm`): the checkpoint goes and, with the
last one of a server that was deleted, the images of that.

Nothing of Nova is imported: pcowctl removes warm images, too.
"""

from __future__ import annotations

from typing import Any

from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree


def condition(record: warm_records.Record) -> str:
    """In words: whether servers can go on from it."""
    try:
        if record.is_complete:
            warm.checked(record)
    except warm.WarmStays:
        return 'pool not there'
    except exception.PcowError:
        return 'checkpoint gone'
    if not record.is_complete:
        return 'in the making'
    if record.is_orphaned and not record.is_parent_deleted:
        return 'deletion begun'
    if record.is_image_deleted:
        return 'image deleted'
    return 'parent deleted' if record.is_orphaned else 'ready'


def children(record: warm_records.Record) -> list[str]:
    """Names of images that stand on those of its parent."""
    names: set[str] = set()
    for item in warm.images(record):
        names |= set(item.pool.children(item.name, known_only=True))
    return sorted(names)


def find_parent(connection: Any, record: warm_records.Record) -> domain.Domain | None:
    """Its domain on this host.

    :param connection: virConnect
    """
    name = libvirt_host.names_by_uuid(connection).get(record.server)
    return None if name is None else domain.Domain(connection, name)


def remove(
    record: warm_records.Record,
    parent: domain.Domain | None,
    *,
    is_parent_deleted: bool = False,
    unless_complete: bool = False,
) -> None:
    """Give up a checkpoint, and what this host knows of it; of a parent that was deleted, its
    images go with the last one.

    :param parent: None: it has no domain on this host
    :param is_parent_deleted: somebody says so, if Nova has not
    :param unless_complete: of one that was in the making: not if it is there by now
    :raises warm.WarmStays: something stands on it, or it cannot be deleted now
    :raises LockHeld: somebody works on the warm images of its parent
    :raises StateInvalid:
    """
    with warm_records.lock(record.server):
        found = warm_records.get(record.image)
        if found is None or (unless_complete and found.is_complete):
            return
        record = found
        standing = children(record)
        try:
            _remove(record, parent, is_parent_deleted or record.is_parent_deleted)
        except warm.WarmStays:  # says so itself
            raise
        except exception.PcowError as e:
            words = f'what stands on it is {", ".join(standing)}: ' if standing else ''
            raise warm.WarmStays(image=record.image, reason=f'{words}{e}') from e
        warm_records.forget(record.image)


def _remove(
    record: warm_records.Record, parent: domain.Domain | None, is_parent_deleted: bool
) -> None:
    others = [one for one in warm_records.of_server(record.server) if one.image != record.image]
    if parent is None and not others and (record.is_orphaned or is_parent_deleted):
        if not is_parent_deleted:
            raise warm.WarmStays(
                image=record.image,
                reason=(
                    f'the deletion of its server {record.server} has begun, and Nova has not said '
                    f'that it has ended: delete the server once more, or reboot it hard to keep '
                    f'it; if Nova has no such server, pcowctl server delete-warm --parent-deleted'
                ),
            )
        for item in warm.images(record):
            item.pool.delete_image(item.name)
        return
    if parent is not None and _delete_checkpoint(parent, record.checkpoint):
        return
    if not (record.is_complete or record.is_orphaned):
        _check_finished(record)
    for item in warm.images(record):
        _info, snapshot = warm.part(item, record.checkpoint)
        if snapshot is None:
            continue
        if parent is not None:
            parent.snapshot_delete(record.checkpoint, item.path)
            continue
        if snapshot.pinned:
            image.snapshot_unpin(item.path, record.checkpoint)
        image.snapshot_delete(item.path, record.checkpoint)


def _delete_checkpoint(parent: domain.Domain, name: str) -> bool:
    """Whether there was one.

    :raises PcowError: it stays
    """
    if not parent.active():
        if not parent.is_checkpoint(name):
            return False
        checkpoint.delete(parent, name)
        return True
    for path in parent.writable():
        # QEMU may not list the pool to see whether the images that were made on it still exist
        if any(one.name == name and one.pinned for one in warm.listed(path)):
            image.snapshot_unpin(path, name)
    try:
        # asked in any case: one that is durable may have no name yet, and QEMU gives it that first
        checkpoint.delete(parent, name)
    except exception.PcowError:
        ram = parent.ram()
        if parent.is_checkpoint(name) or (ram is not None and tree.is_unfinished_in(ram)):
            raise
        return False
    return True


def _check_finished(record: warm_records.Record) -> None:
    """Of a parent that is off: what QEMU has not named yet may be the checkpoint.

    :raises warm.WarmStays:
    """
    for item in warm.images(record):
        if item.role == storage.RAM and tree.is_unfinished_in(item.path):
            raise warm.WarmStays(
                image=record.image,
                reason=(
                    f'its server {record.server} has a checkpoint that was cut off when it was '
                    f'taken, and its next start finishes that: start it, and stop it again if it '
                    f'was off'
                ),
            )
