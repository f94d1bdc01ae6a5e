# SPDX-License-Identifier: Apache-2.0
"""Servers that change their size or their host while they are shut off.

On one host the images stay where they are: a snapshot inside each marks the old size and contents
until the resize is confirmed or reverted. To another host each top file travels, and stands there
on that host's template of the same contents.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import json
import os
from typing import Any
from typing import Self

from nova.virt.libvirt import utils as libvirt_utils
from oslo_concurrency import processutils
from oslo_log import log as logging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.common import reserved
from nova_pcow.migration import travel_base
from nova_pcow.placement import inventory
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import verify
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned
from pcow_driver.pools import room
from pcow_driver.pools import scrubs
from pcow_driver.pools import staging
from pcow_driver.templates import template as template_module
from pcow_driver.templates import template_cache
from pcow_driver.virt import domain
from pcow_driver.virt import notices
from pcow_driver.vm import ram as vm_ram

LOG = logging.getLogger(__name__)

# of an image that has arrived, and whose copy is about to be in the pool, or is
_TAKEN = '.taken'
# of our entries in the list of disks that Nova hands to the destination
_KEY = 'pcow'
# A file does not become shorter when snapshots in it are deleted: so many of those an image may
# have had at one time beside the ones that it has.
_DELETED = 8
_STEP = 128 * units.MIB  # by which it grows


@dataclasses.dataclass(frozen=True)
class Transferred:
    """An image on its way: a file in the server's directory on the destination."""

    role: str
    path: str
    base: str | None  # name of the template that it stands on
    base_path: str | None  # of that template on the source
    base_uuid: str | None  # as the image has it
    damaged: bool = False  # already where it comes from

    def told(self) -> dict[str, Any]:
        """For a host that may have an earlier version: nothing that is not needed."""
        fields = dataclasses.asdict(self)
        if not self.damaged:
            del fields['damaged']
        return fields

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """Of one that may have a later version."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in told.items() if key in known})


def mark(uuid: str, migration: int) -> None:
    """Remember size and contents of a server's images before a resize on its host.

    A mark that is there already is of a resize that failed, or was confirmed where it could not be
    deleted. A service that ends before this, when Nova has noted the new resize already, reverts
    that: it must not find the old mark, so each has a name of its own.

    :param migration: Nova's id of the resize
    :raises PcowError: then it has marked none
    """
    _forget_failed(uuid)
    _mark(uuid, _resize_mark(migration))


def _resize_mark(migration: int) -> str:
    return f'{reserved.RESIZE}-{migration}'


def _resize_marks(path: str) -> list[str]:
    return sorted(name for name in _snapshots(path) if name.startswith(reserved.RESIZE))


def _forget_failed(uuid: str) -> None:
    """Delete the marks of a resize that failed."""
    for item in storage.devices(uuid):
        for name in _resize_marks(item.path):
            image.snapshot_delete(item.path, name)


def _mark(uuid: str, name: str) -> None:
    with contextlib.ExitStack() as undo:
        for item in storage.devices(uuid):
            with room.for_snapshot(item.path):
                image.snapshot_create(item.path, name)
            undo.callback(_unmark, item.path, name)
        undo.pop_all()


def _unmark(path: str, name: str) -> None:
    try:
        image.snapshot_delete(path, name)
    except exception.PcowError as e:
        LOG.error('%s keeps the snapshot %s: %s', path, name, e)


def confirm(uuid: str, found: domain.Domain | None, *, is_here: bool) -> None:
    """Forget what :func:`mark` has remembered; images that were sent to another host are deleted.

    Only their mark tells: without one, an image is the server's own in a pool that its hosts share,
    also when this is called again.

    :param found: the domain of the server, if this host has one
    :param is_here: the server is on this host now
    :raises PcowError: also if what was sent cannot be deleted
    """
    marks = {item: _snapshots(item.path) for item in storage.devices(uuid)}
    if is_here:
        _delete_marks([item.path for item in marks], found)
        return
    if not marks and not inventory.all_there():  # they lie in one pool
        raise storage.ServerStorageError(
            reason=(
                'a pool of this host is not there (its log says which), and what it may have of '
                'the server stays: mount it and delete '
                f'{storage.image_name(uuid, "*")}'
            )
        )
    keep = {item.role for item, there in marks.items() if reserved.SENT not in there}
    if keep:
        keep.add(storage.RAM)  # never sent, and so of who has the others
    storage.delete(uuid, keep=frozenset(keep))
    stays = [item.path for item in storage.devices(uuid) if reserved.SENT in marks.get(item, ())]
    if stays:
        raise storage.ServerStorageError(
            reason=(
                f'{", ".join(stays)} was copied to the new host of the server, and cannot be '
                f'deleted (the log of nova-compute says '
                'why): delete it by hand'
            )
        )
    for item in storage.devices(uuid):
        for name in _resize_marks(item.path):
            try:
                image.snapshot_delete(item.path, name)
            except exception.ToolFailed as e:  # the QEMU of the other host has it
                LOG.warning(
                    '%s keeps the snapshot %s until the server is started again: %s',
                    item.path,
                    name,
                    e,
                )


def _delete_marks(paths: list[str], found: domain.Domain | None) -> None:
    active = found is not None and found.active()
    for path in paths:
        for name in _resize_marks(path):
            if found is not None and active:
                found.snapshot_delete(name, path)
            else:
                image.snapshot_delete(path, name)


def forget(uuid: str, found: domain.Domain | None) -> None:
    """Delete the marks of a server on this host for which no resize waits; what cannot be deleted
    stays, for the next time.
    """
    try:
        confirm(uuid, found, is_here=True)
    except exception.PcowError as e:
        LOG.warning('A snapshot of an earlier resize stays: %s', e)


def revert(uuid: str, old: flavor_module.PcowFlavor, migration: int) -> None:
    """Go back to what :func:`mark` has remembered for this resize, if it was; images that the old
    flavor has not are deleted. The RAM is of the resized server, then, and goes with checkpoints of
    the time since; without a mark the resize did not come so far, and they stay.

    :raises PcowError:
    """
    keep = {storage.ROOT} | {storage.data_role(number) for number in range(len(old.data))}
    if any(_resize_mark(migration) in _snapshots(item.path) for item in storage.devices(uuid)):
        ram.drop(uuid)
    elif old.has_ram:
        keep.add(storage.RAM)
    for item in storage.devices(uuid):
        marks, name = _snapshots(item.path), _resize_mark(migration)
        if item.role in keep and name in marks:
            image.snapshot_revert(item.path, name)
            image.snapshot_delete(item.path, name)
        if reserved.SENT in marks:
            image.snapshot_delete(item.path, reserved.SENT)
    storage.delete(uuid, keep=frozenset(keep))


def _snapshots(path: str) -> set[str]:
    return {snapshot.name for snapshot in image.snapshot_list(path, force_share=True)}


def check_travels(uuid: str, *, memory: int = 0) -> None:
    """Find out what would keep the images of a server from being sent to another host, while it
    still runs.

    :param memory: of the server, in bytes
    :raises PcowError: an image stands on something else than the template it was made on, or is
        longer than it needs to be
    """
    for item in storage.devices(uuid):
        info = image.info(item.path, force_share=True)
        if info.base_snapshot is not None:
            raise storage.ServerStorageError(
                reason=(
                    f'{item.path} is a fork of a snapshot, which does not travel: make an image of '
                    f'the server'
                )
            )
        travel_base.of(item.path, info)
        _check_length(item, info, memory)


def _check_length(item: storage.ServerImage, info: model.ImageInfo, memory: int) -> None:
    """A copy to another host transfers holes, and stores them there. Who has broken out of a QEMU
    can make the file of its image as long as he likes, at no cost, and say that it has snapshots.

    :raises ServerStorageError:
    """
    times = len(info.snapshots) + 1 + _DELETED
    once = info.virtual_size + memory
    # what it has held at one time its pool had room for
    most = provisioned.whole_size(min(times * once, max(2 * once, item.pool.capacity().total)))
    if info.file_size > most + _STEP:
        raise storage.ServerStorageError(
            reason=(
                f'{item.path} is {units.format_size(info.file_size)} long, and an image of '
                f'{units.format_size(info.virtual_size)} is no longer than '
                f'{units.format_size(most + _STEP)}: a copy of it would fill the new host. Make a '
                "shorter one while the server is off ('pcow-img convert -B BASE IMAGE COPY.pcow', "
                'without its snapshots), and put that in its place, with the same owner and mode'
            )
        )


def send(uuid: str, directory: str, host: str | None, *, memory: int = 0) -> list[Transferred]:
    """Copy the top file of each image of a server that is off into its directory on another host,
    and mark what was sent.

    They stand on templates (:func:`check_travels`).

    :param directory: the same path on both hosts
    :param host: address; None if the directory is shared
    :param memory: of the server, in bytes
    :raises PcowError:
    :raises ProcessExecutionError: a copy failed
    """
    _forget_failed(uuid)
    sent = []
    check_travels(uuid, memory=memory)  # its QEMU had the time until now
    for item in storage.devices(uuid):
        info, inode, checked = image.info(item.path), os.stat(item.path).st_ino, scrubs.now()
        found = image.check_data(item.path)
        damage = found.damage
        if damage is not None:
            LOG.error('%s is damaged, and is sent as it is: %s', item.path, damage)
            verify.keep(item.path, scrubs.of_check(inode, checked, found))
        base = travel_base.of(item.path, info)
        target = os.path.join(directory, os.path.basename(item.path))
        libvirt_utils.copy_image(item.path, target, host=host, compression=False)
        sent.append(
            Transferred(item.role, target, base.name, base.path, base.uuid, damage is not None)
        )
    _mark(uuid, reserved.SENT)
    return sent


def pack(disk_info: str, sent: list[Transferred]) -> str:
    """Add what was sent to Nova's list of disks (JSON), which the destination gets."""
    return json.dumps(json.loads(disk_info) + [{_KEY: item.told()} for item in sent])


def unpack(disk_info: str) -> tuple[str, list[Transferred]]:
    """Undo :func:`pack`."""
    disks = json.loads(disk_info)
    return (
        json.dumps([item for item in disks if _KEY not in item]),
        [Transferred.of(item[_KEY]) for item in disks if _KEY in item],
    )


def receive(
    uuid: str,
    pool: pool_module.Pool,
    arrived: list[Transferred],
    source_host: str,
    directory: str,
    template: Callable[[template_cache.TemplateCache, str], Any],
) -> None:
    """Take over what :func:`send` has put into the server's directory; called again, go on where
    that failed.

    :param pool: of this host
    :param source_host: address to copy a template from whose image Glance no longer has
    :param directory: the server's own, for the time of such a copy
    :param template: makes the template of a Glance image, given its cache and the id; a context
    manager that gives its name :raises PcowError:
    """
    there = {item.role for item in storage.find(uuid)}
    for item in arrived:
        taken = item.path + _TAKEN
        if item.role in there and not os.path.lexists(item.path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(taken)  # the last call took it
            continue
        name = storage.image_name(uuid, item.role)
        # First: who makes an image takes no lock of a template any more (pcow_driver/locks.py).
        base = (
            None
            if item.base is None
            else _provide_base(pool, item, source_host, directory, template)
        )
        with staging.building(pool, name) as part:
            source = taken if os.path.lexists(taken) else item.path
            with pool.lock():
                # Placement has room for it, but nobody else knows that before the image is there.
                staging.reserve(
                    pool, name, thin=provisioned.whole_size(image.info(source).virtual_size)
                )
            _copy(source, part)
            damaged = _check_arrived(item, source, part, source_host)
            with pool.lock():
                if base is not None:
                    image.rebase(part, pool.existing_path(base), unsafe=True)
                    # the chain can be read, and is what a device should be
                    device.window(part)
                _set_apart(pool, name, item.path, taken)
                staging.finish(pool, name, part)
        if damaged is not None:
            verify.keep(pool.image_path(name), damaged)
        os.unlink(taken)


def _check_arrived(
    item: Transferred, source: str, part: str, source_host: str
) -> scrubs.Result | None:
    """The checksums of its data came along.

    :return: damage from before it was sent; None: it is whole
    :raises ServerStorageError: it was damaged on its way
    """
    inode, checked, found = os.stat(part).st_ino, scrubs.now(), image.check_data(part)
    damage = found.damage
    if damage is None:
        return None
    if not item.damaged:
        raise storage.ServerStorageError(
            reason=(
                f'{source} was damaged on its way: {damage}. Copy '
                f'{os.path.basename(item.path)} from its pool on {source_host} there once more, '
                'and hard reboot the server'
            )
        )
    # The server ran on it, and is not stopped for that.
    LOG.error('%s has arrived damaged, as it was on %s: %s', source, source_host, damage)
    return scrubs.of_check(inode, checked, found)


def _set_apart(pool: pool_module.Pool, name: str, path: str, taken: str) -> None:
    """What has arrived, before its copy appears: whoever finds both knows that it is no image of an
    earlier time.

    :raises ImageExists: there is another one
    """
    if os.path.lexists(pool.image_path(name)):
        raise exception.ImageExists(path=pool.image_path(name))
    if os.path.lexists(path):
        os.rename(path, taken)
        durable.sync(os.path.dirname(path))


def _copy(source: str, target: str, *, sparse: bool = False) -> None:
    """Durable on return: once an image has its name, its source is deleted.

    :param sparse: leave out zeros, which a copy between hosts has where there were holes. Only of a
        template: a guest's store to a page that is its own finds no room missing
    :raises ServerStorageError:
    """
    try:
        if sparse:
            processutils.execute('cp', '--sparse=always', source, target)
        else:
            libvirt_utils.copy_image(source, target)
    except processutils.ProcessExecutionError as e:
        said = ' '.join(str(e.stderr or e).split())
        raise storage.ServerStorageError(
            reason=f'what has arrived cannot be put into the pool: {said}'
        ) from e
    with open(target, 'rb') as f:
        os.fsync(f.fileno())


def _provide_base(
    pool: pool_module.Pool,
    item: Transferred,
    source_host: str,
    directory: str,
    template: Callable[[template_cache.TemplateCache, str], Any],
) -> str:
    """Make sure that the pool has the template that an image stands on; its name.

    Templates of a Glance image hold the same under one name. Empty file systems do not, each host
    makes its own: one that comes from another host has its UUID in its name.
    """
    assert item.base is not None and item.base_path is not None  # noqa: S101 - receive() looked
    name, glance_id = template_cache.common_name(item.base), template_cache.image_id(item.base)
    if glance_id is None and not has(pool, name, item.base_uuid):
        name = f'{name.removesuffix(f"-{item.base_uuid}")}-{item.base_uuid}'
    if os.path.lexists(pool.image_path(name)):
        return name
    if glance_id is not None:
        try:
            with template(template_cache.TemplateCache(pool), glance_id) as made:
                if made == name:
                    return name
        except exception.PcowError as e:
            LOG.info('Template %s is copied from %s: %s', name, source_host, e)
    copy_base(pool, name, item.base_path, source_host, directory)
    return name


def _copy_template(
    pool: pool_module.Pool, name: str, path: str, source_host: str, part: str, staged: str
) -> model.CheckResult:
    """Once more if it arrives damaged, which was on the way then.

    :returns: what a check says of it. What is damaged of its data also then was damaged before: a
        server runs on it, and is not stopped for that
    :raises ServerStorageError: its metadata are damaged
    """
    for _try in range(2):
        if os.path.lexists(staged):
            os.unlink(staged)
        libvirt_utils.copy_image(path, part, host=source_host, receive=True, compression=False)
        with pool.lock():
            staging.reserve(pool, name, fixed=os.stat(part).st_blocks * 512)
        _copy(part, staged, sparse=True)
        try:
            found = image.check_data(staged)
            damage, usable = found.damage, found.data_checked
        except exception.ToolFailed as e:
            damage, usable = str(e), False
        if damage is None:
            return found
        LOG.warning('What has come of %s from %s is damaged: %s', path, source_host, damage)
    if not usable:
        raise storage.ServerStorageError(
            reason=(
                f'the metadata of {path} on {source_host} are damaged ({damage}): repair it there '
                '(pcow-img check), then migrate again, or hard reboot the server where it arrived'
            )
        )
    return found


def copy_base(
    pool: pool_module.Pool, name: str, path: str, source_host: str, directory: str
) -> None:
    """Copy a template from another host as the very file that it is, with its UUID.

    :param directory: of the server, on this host, for the time of the copy
    :raises PcowError:
    :raises ProcessExecutionError: it cannot be copied from there
    """
    part = os.path.join(directory, os.path.basename(path))
    try:
        with staging.building(pool, name) as staged:
            found = _copy_template(pool, name, path, source_host, part, staged)
            if found.damage is not None:
                LOG.error(
                    '%s is damaged on %s, and so is the copy of it: %s. Servers on it go on as '
                    'they did',
                    path,
                    source_host,
                    found.damage,
                )
                # before anybody finds it
                inode = os.stat(staged).st_ino
                notices.keep(pool, name, scrubs.of_check(inode, scrubs.now(), found))
            with pool.lock():
                staging.finish(pool, name, staged)
        template_module.protect(pool, pool.image_path(name))
    except exception.ImageExists:
        pass  # another migration brought it
    finally:
        if os.path.lexists(part):
            os.unlink(part)


def has(pool: pool_module.Pool, name: str, uuid: str | None) -> bool:
    """Whether the pool has an image of this name and UUID."""
    try:
        return image.info(pool.existing_path(name), force_share=True).uuid == uuid
    except exception.ImageNotFound:
        return False


def check_evacuation(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """Make sure that this host can go on with the images of a server whose host is said to be down.

    :raises ServerStorageError: they are in no pool of this host, or old, or the server still runs
    """
    missing = storage.missing_roles(uuid, wanted)
    if missing:
        raise storage.ServerStorageError(
            reason=(
                f'{storage.image_name(uuid, missing[0])} is in no pool that this host shares with '
                f'the one that is down, and an '
                'evacuation would begin with empty memory: bring that host back, or delete the '
                'server'
            )
        )
    storage.check_not_sent(uuid)
    for item in storage.devices(uuid):
        try:
            image.info(item.path)  # without force_share: fails while a writer has it
        except exception.ToolFailed as e:
            raise storage.ServerStorageError(
                reason=(
                    f'the server still runs on the host that is said to be down, or its image '
                    f'cannot be read ({e}): end it there '
                    'first'
                )
            ) from None


def check_stays(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """Find out what would keep the images of a server from getting the sizes of its new flavor
    where they are, while it still runs.

    :raises PcowError: no room, or the pool is not of the class that the flavor requires
    """
    sizes, there = storage.sizes(wanted), storage.devices(uuid)
    for item in there:
        if wanted.has_ram:
            vm_ram.check_pool(item.pool)
        missing = wanted.required_traits - inventory.traits(item.pool)
        if missing:
            raise inventory.PlacementMismatch(
                reason=(
                    f'it lies in the pool {item.pool.name}, which has not '
                    f'{", ".join(sorted(missing))}, and a resize on its host '
                    'leaves it there: make an image of it and a new server, or have it resized on '
                    'another host'
                )
            )
    now = {item.role: device.window(item.path, force_share=True).size for item in there}
    more = sum(max(0, size - now.get(role, 0)) for role, size in sizes.items())
    more += ram.growth(uuid, wanted)
    if there and more:
        there[0].pool.check_room(more)  # a server lies in one


def grow(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """Give the images of a server that is off the sizes of its new flavor.

    :raises PcowError:
    """
    sizes = storage.sizes(wanted)
    for item in storage.devices(uuid):
        # The same size: also of one whose growth was interrupted.
        if item.role in sizes and sizes[item.role] >= device.window(item.path).size:
            device.extend(item.pool, storage.image_name(uuid, item.role), sizes[item.role])
