# SPDX-License-Identifier: Apache-2.0
"""Servers that change their host while they run: QEMU carries what lies in the images themselves,
and not what is below them.

So the new host makes an empty image for each, of the same size and on the very file that it stood
on, known by its UUID, before QEMU begins there. Until the server has arrived, these are nothing,
and only these are deleted when it does not; those that it leaves are deleted when it has.
:mod:`nova_pcow.records.notes` tells them apart when a service was killed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from typing import Any
from typing import Self

from lxml import etree
from nova import objects

from nova_pcow.common import flavor as flavor_module
from nova_pcow.migration import cold_migration
from nova_pcow.migration import travel_base
from nova_pcow.records import notes
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging
from pcow_driver.templates import template_cache

# of the entry among Nova's volumes by which the hosts tell each other
_SERIAL = 'pcow'
_PAGE_CACHE = 'page-cache'  # the class whose devices are virtio-pmem


class LiveMigrationRefused(exception.PcowError):
    msg_fmt = '%(reason)s'


@dataclasses.dataclass(frozen=True)
class Leaving:
    """An image of a server, as its host tells it to the new one."""

    role: str
    pool: str  # UUID of it
    persistence: str  # of its pool
    size: int  # virtual, in bytes
    base: str | None  # name of what it stands on
    base_path: str | None
    base_uuid: str | None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What the new host tells: where its images are, by their roles, what runs them, and the files
    of its boot shim, if the server boots by that.
    """

    paths: dict[str, str]
    emulator: str
    shim_kernel: str | None = None
    shim_initrd: str | None = None

    def told(self) -> dict[str, Any]:
        """For the other host, which may have an earlier version: nothing that is not needed."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """Of one that may have a later version."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in told.items() if key in known})


def arrival_lock(uuid: str, *, seconds: float) -> contextlib.AbstractContextManager[None]:
    """Hold while images are made for the arrival of a server, and while those of an earlier one are
    deleted.

    :raises LockHeld: somebody holds it, and has not given it up in that time
    """
    return locks.lock(f'arrival-{uuid}', seconds=seconds)


def put(migrate_data: Any, value: Any) -> None:
    """Have Nova take something along in its LibvirtLiveMigrateData, which has no field for it but
    those of volumes.
    """
    others = (
        [item for item in migrate_data.bdms if item.serial != _SERIAL]
        if 'bdms' in migrate_data
        else []
    )
    found = objects.LibvirtLiveMigrateBDMInfo(serial=_SERIAL)
    found.connection_info = value
    migrate_data.bdms = [*others, found]


def get(migrate_data: Any) -> Any:
    """None if there is nothing."""
    others = migrate_data.bdms if migrate_data is not None and 'bdms' in migrate_data else []
    return next((item.connection_info for item in others if item.serial == _SERIAL), None)


def check_carried(wanted: flavor_module.PcowFlavor) -> None:
    """:raises LiveMigrationRefused: QEMU does not carry an image of the server"""
    if wanted.has_ram:
        raise LiveMigrationRefused(
            reason=(
                f'the RAM of the server is an image ({flavor_module.RAM_SPEC}), which stays where '
                f'it is: stop the server and migrate it then (openstack server migrate)'
            )
        )
    if wanted.root_is_disk:
        raise LiveMigrationRefused(
            reason=(
                f'the root of the server is a disk that nbdkit serves '
                f'({flavor_module.BUS_SPEC}={wanted.bus}), which stays where it is while the '
                f'server runs: stop the server and migrate it then (openstack server migrate)'
            )
        )


# ---- on the host of the server -------------------------------------------------------------------


def leaving(uuid: str) -> list[Leaving]:
    """The images of a server that runs.

    :raises PcowError: one of them cannot leave
    """
    return [_leaving(item) for item in storage.find(uuid)]


def _leaving(item: storage.ServerImage) -> Leaving:
    info = image.info(item.path, force_share=True)
    if info.snapshots:
        raise LiveMigrationRefused(
            reason=(
                f'{item.path} has snapshots, which would stay behind '
                f'({", ".join(one.name for one in info.snapshots)}): delete them '
                '(pcowctl snapshot delete), or stop the server and migrate it then (openstack '
                'server migrate)'
            )
        )
    if info.base_snapshot is not None or info.chain_depth > 2:
        raise LiveMigrationRefused(
            reason=(
                f'{item.path} is a fork of a snapshot, or stands on more than a template, and does '
                f'not travel: make an image of the '
                'server'
            )
        )
    base = travel_base.of(item.path, info)
    return Leaving(
        item.role,
        item.pool.uuid,
        item.pool.persistence(),
        info.virtual_size,
        base.name,
        base.path,
        base.uuid,
    )


def settle(uuid: str, *, is_here: bool, runs_here: bool) -> None:
    """Forget of a server on this host that it was arriving, and that it was leaving if it did not
    leave.

    :param is_here: this host has a domain of it, which libvirt defines on the new host when a
        migration has succeeded
    :param runs_here: that runs, and no migration of it is under way: one that is off may be what
        libvirt had no time to take away
    """
    if is_here:
        notes.forget(notes.ARRIVING, uuid=uuid)
    if runs_here:
        notes.forget(notes.LEAVING, uuid=uuid)


def rewritten(xml: str, uuid: str, prepared: Prepared) -> str:
    """The domain as the new host starts it.

    :raises LiveMigrationRefused: a device of it is none of those that were made there
    """
    domain = etree.fromstring(xml)
    for path in domain.findall('devices/memory/source/path'):
        role = (
            os.path.basename(path.text)
            .removeprefix(storage.image_name(uuid, ''))
            .removesuffix(names.IMAGE_SUFFIX)
        )
        if role not in prepared.paths:
            raise LiveMigrationRefused(
                reason=f'the device {path.text} has no image on the new host: hard reboot the '
                f'server'
            )
        path.text = prepared.paths[role]
    for emulator in domain.findall('devices/emulator'):
        emulator.text = prepared.emulator
    for name, file in (('kernel', prepared.shim_kernel), ('initrd', prepared.shim_initrd)):
        for element in domain.findall(f'os/{name}') if file else ():
            # not the server's own, which a rebuild that was refused leaves
            if f'/{uuid}/' not in (element.text or ''):
                element.text = file
    return str(etree.tostring(domain, encoding='unicode'))


# ---- on the new host -----------------------------------------------------------------------------


def arriving(uuid: str) -> list[storage.ServerImage]:
    """The images that are made for the arrival of a server."""
    pool = notes.get(notes.ARRIVING, uuid)
    return [item for item in storage.find(uuid) if item.pool.uuid == pool or is_marked(item)]


def is_marked(item: storage.ServerImage) -> bool:
    """Whether an image says itself that not all of it has arrived."""
    return names.ARRIVING_MARK in {
        one.name for one in image.snapshot_list(item.path, force_share=True)
    }


def discard(uuid: str) -> None:
    """Delete the images that were made for the arrival of a server that is not here, and nothing
    else of it.
    """
    made = arriving(uuid)
    if storage.delete(
        uuid, keep=frozenset(item.role for item in storage.find(uuid) if item not in made)
    ):
        notes.forget(notes.ARRIVING, uuid=uuid)


def check_arrival(
    uuid: str,
    pool: pool_module.Pool,
    there: list[pool_module.Pool],
    images: list[Leaving],
    wanted: flavor_module.PcowFlavor,
) -> None:
    """Find out what keeps a server from coming to a pool of this host, before anything is made.

    :param there: all pools of this host
    :raises PcowError:
    """
    _check_sizes(uuid, images, wanted)
    if {item.pool for item in images} & {one.uuid for one in there}:
        raise LiveMigrationRefused(
            reason=(
                'both hosts see the pool of the server, and two QEMUs cannot have one image open: '
                'stop the server and migrate it then '
                '(openstack server migrate), which copies nothing'
            )
        )
    made = arriving(uuid)
    for one in storage.find(uuid):
        if one not in made:
            raise LiveMigrationRefused(
                reason=(
                    f'{one.path} of an earlier time of the server is still on the new host: look '
                    f'what it holds, and delete it'
                )
            )
    if any(
        (item.persistence == _PAGE_CACHE) != (pool.persistence() == _PAGE_CACHE) for item in images
    ):
        raise LiveMigrationRefused(
            reason=(
                f'the guest has another kind of device than it would have in the pool {pool.name}, '
                f'of class {pool.persistence()}: '
                'stop the server and migrate it then (openstack server migrate)'
            )
        )
    pool.check_room(sum(item.size for item in images))


def _check_sizes(uuid: str, images: list[Leaving], wanted: flavor_module.PcowFlavor) -> None:
    """Make sure that no device is larger than what the flavor gives it: its host was told the size
    by the image, and has looked before this one was asked, or is of an earlier version. Where the
    data begin is not known before there is what they stand on; here the most counts that it can be.

    :raises LiveMigrationRefused:
    """
    given = storage.sizes(wanted)
    for item in images:
        page_map = info_block.PageMap.RAM if item.base is None else info_block.PageMap.PMEM
        if item.size - info_block.data_offset(item.size, page_map) > given.get(
            item.role, item.size
        ):
            raise _too_large(uuid, item, wanted)


def _too_large(uuid: str, item: Leaving, wanted: flavor_module.PcowFlavor) -> LiveMigrationRefused:
    name, given = storage.image_name(uuid, item.role), storage.sizes(wanted)[item.role]
    return LiveMigrationRefused(
        reason=(
            f'{name} has {units.format_exact(item.size)} on its host, and the flavor {wanted.name} '
            f'gives {units.format_exact(given)}: a QEMU that was taken over can write that, and '
            f'what was resized by hand can leave it. Resize the server to a flavor that gives as '
            f'much, or stop it and give up what is beyond (pcowctl image resize --shrink)'
        )
    )


def prepare(
    uuid: str,
    pool: pool_module.Pool,
    images: list[Leaving],
    wanted: flavor_module.PcowFlavor,
    source_host: str,
    directory: str,
) -> dict[str, str]:
    """Make empty images for a server that arrives; their paths by role.

    :param wanted: its flavor
    :param source_host: address to copy what they stand on from, unless it is there
    :param directory: the server's own, for the time of such a copy
    :raises PcowError: what was made is to be deleted, which :func:`arriving` tells
    """
    notes.put(notes.ARRIVING, uuid, pool.uuid)
    for item in images:
        with (
            contextlib.nullcontext()
            if item.base is None
            else _base(pool, item, source_host, directory) as base
        ):
            _create(uuid, pool, item, base, wanted)
    return {item.role: item.path for item in arriving(uuid)}


def _create(
    uuid: str,
    pool: pool_module.Pool,
    item: Leaving,
    base: str | None,
    wanted: flavor_module.PcowFlavor,
) -> None:
    """Without info block, which comes with the rest."""
    name, size = storage.image_name(uuid, item.role), item.size
    with staging.building(pool, name) as part, pool.lock():
        pool.check_room(size)
        if base is None:
            image.create(part, size)
        else:
            # the very file that the server stands on, and goes on with, whatever a scrub says of it
            image.create_overlay(part, pool.existing_path(base), size=size)
        try:
            device.check_size(part, storage.sizes(wanted).get(item.role, size), '', '')
        except exception.DeviceTooLarge:
            raise _too_large(uuid, item, wanted) from None
        image.mark_arriving(part)
        staging.publish(part, pool.image_path(name))


@contextlib.contextmanager
def _base(pool: pool_module.Pool, item: Leaving, source_host: str, directory: str) -> Iterator[str]:
    """Name of the very file, by its UUID, that an image stands on; it stays while the context is
    held.

    The template that a host made itself, of the same Glance image, holds the same and is another
    file.
    """
    assert item.base is not None and item.base_path is not None  # noqa: S101 - prepare() looked
    own = item.base.removesuffix(f'-{item.base_uuid}')
    name = own if cold_migration.has(pool, own, item.base_uuid) else f'{own}-{item.base_uuid}'
    path = item.base_path
    with template_cache.TemplateCache(pool).named(
        name, lambda: cold_migration.copy_base(pool, name, path, source_host, directory)
    ):
        if not cold_migration.has(pool, name, item.base_uuid):
            raise LiveMigrationRefused(
                reason=(
                    f'{pool.image_path(name)} is another file than {path} on {source_host}, on '
                    f'which the server stands: rename it'
                )
            )
        yield name
