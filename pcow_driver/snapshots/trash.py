# SPDX-License-Identifier: Apache-2.0
"""Deleting images and snapshots on which others may stand.

What nothing stands on goes at once. Else it is *marked* and goes with the last that stands on it;
for its owner it is deleted either way. A marked image keeps only what its children need and is
sealed and protected as templates are, so that nobody can use it and its size no longer counts as
provisioned. The marks are symbolic links in ``.deleted`` in the pool, whose targets name an image
and, if only that is deleted, a snapshot.

Every step can be the last before a crash: a mark is written before anything is changed, everything
may be done again, and :func:`collect` completes what was interrupted. Whoever makes an image on a
snapshot that is marked already (a clone) holds the lock of the image that has the snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import hashlib
import json
import os
import stat

from oslo_log import log as logging

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.images import model
from pcow_driver.images import protection
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import attached
from pcow_driver.templates import template

LOG = logging.getLogger(__name__)

DIRECTORY = '.deleted'
_NO_MARKS = (FileNotFoundError, NotADirectoryError)  # nothing is marked; or a link is there


@dataclasses.dataclass(frozen=True)
class Mark:
    """Something that is deleted for its owner and still there."""

    image: str
    snapshot: str | None = None  # None: the whole image


def lock(pool: pool_module.Pool, name: str) -> contextlib.AbstractContextManager[None]:
    """Neither the image nor a snapshot of it is removed meanwhile. Taken before the pool's own
    lock, never after it.
    """
    return locks.lock(f'removal-{pool.uuid}-{name}')


def marks(pool: pool_module.Pool) -> list[Mark]:
    """What is deleted and still there."""
    found = []
    with contextlib.suppress(*_NO_MARKS), _directory(pool) as directory:
        for entry in sorted(os.listdir(directory)):
            path = os.path.join(pool.path, DIRECTORY, entry)
            try:
                found.append(_parse(os.readlink(entry, dir_fd=directory)))
            except FileNotFoundError:
                continue
            except (
                OSError,
                ValueError,
                LookupError,
                TypeError,
                RecursionError,
                exception.PcowError,
            ):
                LOG.warning('%s is no mark of a deletion and is left alone', path)
    return found


def _parse(text: str) -> Mark:
    value = json.loads(text)
    return Mark(
        names.check_name('image', str(value[0])),
        None if value[1] is None else names.check_snapshot_name(str(value[1])),
    )


def deleted_images(pool: pool_module.Pool) -> frozenset[str]:
    """Names of the images that are deleted and still there."""
    return frozenset(mark.image for mark in marks(pool) if mark.snapshot is None)


def mark_snapshot(pool: pool_module.Pool, name: str, snapshot: str) -> None:
    """Have a snapshot go as soon as nothing stands on it; the caller holds :func:`lock`."""
    _mark(pool, Mark(name, names.check_snapshot_name(snapshot)))


def collect_snapshot(pool: pool_module.Pool, name: str, snapshot: str) -> None:
    """Delete a marked snapshot if nothing stands on it; errors are logged. The caller holds
    :func:`lock`.
    """
    _collect(pool, Mark(name, snapshot))


def keep_snapshot(pool: pool_module.Pool, name: str, snapshot: str) -> None:
    """Undo :func:`mark_snapshot`; the caller holds :func:`lock`."""
    _unmark(pool, Mark(name, snapshot))


def delete_image(pool: pool_module.Pool, name: str) -> bool:
    """Delete an image and what was only kept for it, now or when the last image that stands on it
    goes.

    :return: whether it is gone; True also if there was none
    :raises InvalidName:
    :raises IsATemplate:
    :raises ImageInUse: somebody has it open
    """
    with lock(pool, name):
        _discard_unfinished(pool, name)
        gone, base = _delete_image(pool, name)
    _collect_of(pool, base)
    return gone


def delete_snapshot(pool: pool_module.Pool, name: str, snapshot: str) -> bool:
    """Delete a snapshot of an image, in use or not, now or when the last image that stands on it
    goes.

    :return: whether it is gone; True also if there was none
    :raises InvalidName:
    :raises ToolFailed: it is being read, or something that is no running domain has the image open
    :raises QmpFailed: the same, as QEMU says it
    """
    with lock(pool, name):
        return _delete_snapshot(pool, name, names.check_snapshot_name(snapshot))


def collect(pool: pool_module.Pool) -> None:
    """Delete what is marked and no longer needed, and what processes that were killed left of their
    locks; errors are logged.
    """
    locks.collect()
    for name in sorted({mark.image for mark in marks(pool)}):
        _collect_of(pool, name)


def _collect_of(pool: pool_module.Pool, name: str | None) -> None:
    """Collect what is marked of an image, then of that on which it stood, and so on; never with two
    locks at once.
    """
    while name is not None:
        base = None
        try:
            with lock(pool, name):
                for mark in marks(pool):
                    if mark.image == name:
                        base = _collect(pool, mark) or base
        except exception.InvalidName as e:  # for a lock; nobody else must wait for it
            LOG.warning('%s: %s is deleted and stays: %s', pool.path, name, e)
        name = base


def _collect(pool: pool_module.Pool, mark: Mark) -> str | None:
    """Name of the image on which one stood that has gone."""
    try:
        if mark.snapshot is None:
            gone, base = _delete_image(pool, mark.image)
            return base if gone else None
        _delete_snapshot(pool, mark.image, mark.snapshot)
    except (exception.PcowError, OSError) as e:  # OSError: read-only for instance
        LOG.warning('%s: %s is deleted and stays for now: %s', pool.path, mark, e)
    return None


def _delete_image(pool: pool_module.Pool, name: str) -> tuple[bool, str | None]:
    """Whether it is gone, and the name of what it stood on."""
    mark = Mark(name)
    base: str | None = None
    try:
        path = pool.existing_path(name)  # a link is no image: what it leads to stays as it is
        info = _info(path)
        base = _base(info)
        if mark in marks(pool):
            if info is not None:
                image.unseal(path)
        elif info is not None and info.sealed and _has_children(pool, name):
            return _keep(pool, mark), base
        try:
            # no image that can be read stands on it
            pool.delete_image(name, damaged=info is None)
        except exception.ImageHasChildren as e:
            LOG.info('It is kept: %s', e)
            return _keep(pool, mark), base
    except exception.ImageNotFound:
        LOG.debug('%s: %s is gone already', pool.path, name)
    for one in marks(pool):
        if one.image == name:
            _unmark(pool, one)
    return True, base


def _keep(pool: pool_module.Pool, mark: Mark) -> bool:
    """What stands on the image, or may, keeps it; it is not gone."""
    _mark(pool, mark)
    _reduce(pool, mark.image)
    return False


def _info(path: str) -> model.ImageInfo | None:
    """None: it cannot be read.

    :raises ImageNotFound:
    :raises ToolFailed: the program was killed, which says nothing of the image
    """
    try:
        return image.info(path, force_share=True)
    except exception.ToolFailed as e:
        if e.details['exit_code'] < 0:
            raise
        return None


def _base(info: model.ImageInfo | None) -> str | None:
    """Name of the image on which this one stands."""
    if info is None or info.base_filename is None:
        return None
    return os.path.basename(info.base_filename).removesuffix(names.IMAGE_SUFFIX)


def _has_children(pool: pool_module.Pool, name: str) -> bool:
    """Also if that cannot be told, because another image is damaged for instance; but two damaged
    ones do not keep each other.
    """
    try:
        return bool(pool.children(name))
    except exception.ImageInUse as e:
        LOG.warning('%s is kept for what may stand on it: %s', name, e)
        return True


def _stood_on(pool: pool_module.Pool, name: str, uuid: str) -> set[int | None]:
    """Ids of the snapshots of an image on which others stand, 0 for its active layer, and None if
    an image cannot be read.
    """
    return {
        item.summary.base_snapshot_id if item.summary else None
        for item in pool.standing_on(name, uuid)
    }


def _reduce(pool: pool_module.Pool, name: str) -> None:
    """Give back what no child needs, and seal."""
    path = pool.existing_path(name)
    try:
        info = image.info(path)
        used = _stood_on(pool, name, info.uuid)
        needed = [one.name for one in info.snapshots if one.pinned and used & {int(one.id), None}]
        if needed and not used & {0, None}:
            image.snapshot_revert(path, needed[-1])
            for snapshot in reversed(info.snapshots):
                if snapshot.name not in needed:
                    image.snapshot_delete(path, snapshot.name)
        image.seal(path)
        template.protect(pool, path)
    except exception.ToolFailed as e:
        LOG.warning('%s is deleted and keeps its data for now: %s', path, e)


def _delete_snapshot(pool: pool_module.Pool, name: str, snapshot: str) -> bool:
    mark = Mark(name, snapshot)
    found: model.ImageInfo | None = None
    with contextlib.suppress(exception.ImageNotFound):
        found = image.info(pool.existing_path(name), force_share=True)
    made = (
        next((one for one in found.snapshots if one.name == snapshot), None)
        if found is not None
        else None
    )
    if found is not None and made is not None:
        if found.sealed and Mark(name) in marks(pool):
            return False  # it goes with the image, which keeps only what is needed
        if found.sealed and names.is_of_service(name):
            LOG.warning('%s says that it is a template, which nobody made of it', name)
            with contextlib.suppress(exception.ToolFailed):  # somebody has it open
                image.unseal(pool.existing_path(name))
        try:
            attached.snapshot_delete(pool.existing_path(name), snapshot)
        except (exception.ToolFailed, exception.QmpFailed):
            # libpcow knows only what it can read
            if not _stood_on(pool, name, found.uuid) & {int(made.id), None} and all(
                item.summary for item in pool.listed()
            ):
                raise
            _mark(pool, mark)
            return False
    _unmark(pool, mark)
    return True


def _discard_unfinished(pool: pool_module.Pool, name: str) -> None:
    """What a killed build of this image left.

    :raises ImageInUse: somebody builds it, on another host perhaps
    """
    part = os.path.join(pool.path, f'.{os.path.basename(pool.image_path(name))}.part')
    with contextlib.suppress(exception.ImageNotFound), image_locks.alone(part):
        protection.unlink(part)


def _mark_path(pool: pool_module.Pool, mark: Mark) -> str:
    key = json.dumps([mark.image, mark.snapshot]).encode()
    return os.path.join(pool.path, DIRECTORY, hashlib.sha256(key).hexdigest()[:32])


def _mark(pool: pool_module.Pool, mark: Mark) -> None:
    """Durable on return.  A symbolic link appears in one step and needs no space for data."""
    path = _mark_path(pool, mark)
    try:
        with pool.lock(), _directory(pool, make=True) as directory:
            os.symlink(
                json.dumps([mark.image, mark.snapshot]), os.path.basename(path), dir_fd=directory
            )
            os.fsync(directory)
            durable.sync(pool.path)
    except FileExistsError:
        return
    except OSError as e:
        raise exception.PoolInvalid(path=pool.path, reason=f'{path}: {e.strerror}') from None


@contextlib.contextmanager
def _directory(pool: pool_module.Pool, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the directory of the marks; what lies behind a link is none.

    It is made for whom the pool is: what root marks is collected by the service whose images are
    in the pool, and the reverse.

    :raises OSError: it is not there, for instance
    """
    path, made = os.path.join(pool.path, DIRECTORY), False
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
            made = True
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if made and os.geteuid() == 0:
            status = os.stat(pool.path)
            os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, 0o700 | stat.S_IMODE(status.st_mode) & 0o070)
        yield descriptor
    finally:
        os.close(descriptor)


def _unmark(pool: pool_module.Pool, mark: Mark) -> None:
    path = _mark_path(pool, mark)
    with pool.lock():
        with contextlib.suppress(*_NO_MARKS), _directory(pool) as directory:
            os.unlink(os.path.basename(path), dir_fd=directory)
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(path))  # when it was the last
