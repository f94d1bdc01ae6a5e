# SPDX-License-Identifier: Apache-2.0
"""The images of servers: a root on the template of its Glance image, data devices and the guest's
RAM, in one pool of the host.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import re
from typing import Any

from oslo_log import log as logging

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor as flavor_module
from nova_pcow.common import reserved
from nova_pcow.placement import inventory
from nova_pcow.records import notes
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging
from pcow_driver.templates import template
from pcow_driver.templates import template_cache
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import ram as vm_ram

LOG = logging.getLogger(__name__)

ROOT = 'root'
RAM = names.RAM_SUFFIX.removeprefix('-')
_ROLE = re.compile(rf'{ROOT}|data[0-9]{{1,2}}|{RAM}')
_WAY_OUT = 'Resize the server to a flavor that gives as much'  # of a device that is larger
_MKFS = {
    'ext4': (
        'mkfs.ext4',
        'e2fsprogs',
        ('-q', '-F', '-b', '4096', '-m', '0', '-E', 'lazy_itable_init=0,lazy_journal_init=0'),
    ),
    # Linux mounts no reflink with DAX for long
    'xfs': ('mkfs.xfs', 'xfsprogs', ('-q', '-f', '-m', 'reflink=0')),
}


class ServerStorageError(exception.PcowError):
    msg_fmt = '%(reason)s'


class ServerImpossible(ServerStorageError):
    """Whatever host it would be on."""

    is_of_host = False


@dataclasses.dataclass(frozen=True)
class RootSource:
    """The Glance image of a root, and how to get its data."""

    image: template_cache.SourceImage
    fetch: Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ServerImage:
    """One image of a server."""

    role: str  # 'root', 'data0', 'data1', ..., 'ram'
    pool: pool_module.Pool
    path: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path).removesuffix(names.IMAGE_SUFFIX)

    @property
    def alias(self) -> str:
        """In the domain XML."""
        return f'ua-pcow-{self.role}'

    def virtual_size(self) -> int:
        """Bytes, with the info block; also while it is open."""
        return image.info(self.path, force_share=True).virtual_size


def checksum(found: Mapping[str, Any]) -> str:
    """Of an image's data, as Glance says it; empty: it does not."""
    return str(found.get('os_hash_value') or found.get('checksum') or '')


def data_role(number: int) -> str:
    return f'data{number}'


def image_name(uuid: str, role: str) -> str:
    return f'{names.SERVER_PREFIX}{uuid}-{role}'


def find(uuid: str) -> list[ServerImage]:
    """The images of a server on this host: its root first, then the data devices in order, and its
    RAM last.
    """
    prefix, found = image_name(uuid, ''), []
    for pool in inventory.pools():
        for entry in os.scandir(pool.path):
            role = entry.name.removeprefix(prefix).removesuffix(names.IMAGE_SUFFIX)
            if entry.name == f'{prefix}{role}{names.IMAGE_SUFFIX}' and _ROLE.fullmatch(role):
                if entry.is_file(follow_symlinks=False):
                    found.append(ServerImage(role, pool, entry.path))
    return sorted(
        found, key=lambda item: (item.role != ROOT, item.role == RAM, len(item.role), item.role)
    )


def devices(uuid: str) -> list[ServerImage]:
    """Those of :func:`find` that the guest has as persistent memory or as its disk."""
    return [item for item in find(uuid) if item.role != RAM]


def missing_roles(uuid: str, wanted: flavor_module.PcowFlavor) -> list[str]:
    """What a server should have by its flavor and has not on this host. Its RAM is not among that:
    it holds nothing of a guest that is off, and is made whenever one starts without it.
    """
    roles = [ROOT] * wanted.root + [data_role(number) for number in range(len(wanted.data))]
    there = {item.role for item in find(uuid)}
    return [role for role in roles if role not in there]


def create(
    uuid: str, wanted: flavor_module.PcowFlavor, pool: pool_module.Pool, source: RootSource | None
) -> list[str]:
    """Make the images of a server that are not there yet; the names of those that were made.

    When anything fails, those are deleted again.

    :param source: of the root; may be None if the flavor has none
    :raises PcowError: the image is refused, the pool is full, ...
    """
    missing = missing_roles(uuid, wanted)
    made: list[str] = []
    with contextlib.ExitStack() as undo:
        undo.callback(delete_made, pool, made)
        if ROOT in missing:
            if source is None or wanted.root_size is None:
                raise ServerImpossible(reason='a root in persistent memory needs an image')
            _create_root(image_name(uuid, ROOT), wanted.root_size, pool, source)
            made.append(image_name(uuid, ROOT))
        for number, data in enumerate(wanted.data):
            if data_role(number) in missing:
                name = image_name(uuid, data_role(number))
                _create_data(name, data, number, pool)
                made.append(name)
        if wanted.ram_size is not None and RAM not in {item.role for item in find(uuid)}:
            vm_ram.provide(pool, image_name(uuid, RAM), wanted.ram_size)
            made.append(image_name(uuid, RAM))
        undo.pop_all()
    return made


def delete_made(pool: pool_module.Pool, made: list[str]) -> None:
    """Of a server that cannot be created."""
    for name in made:
        try:
            pool.delete_image(name, force=True)
        except exception.PcowError as e:
            LOG.error('What was made of a server that cannot be created stays: %s', e)


def _create_root(name: str, size: int, pool: pool_module.Pool, source: RootSource) -> None:
    with _template(size, pool, source) as base:
        device.create_on(pool, name, base, data_size=size)


@contextlib.contextmanager
def _template(size: int, pool: pool_module.Pool, source: RootSource) -> Iterator[str]:
    """The template for a root of a size, which is made if it is not there."""

    def accept(needed: int) -> None:
        if size < needed:
            raise ServerImpossible(
                reason=(
                    f'the image {source.image.id} has {units.format_size(needed)} and the root '
                    f'only '
                    f'{units.format_size(size)}: take a larger flavor'
                )
            )

    with template_cache.TemplateCache(pool).template(source.image, source.fetch, accept) as base:
        yield base


def prepare_rebuild(
    uuid: str, wanted: flavor_module.PcowFlavor, pool: pool_module.Pool, source: RootSource | None
) -> None:
    """Find out what would keep a server from beginning anew with other data, while it still has
    what it has.

    :param source: of the root; may be None if the flavor has none
    :raises PcowError: an image cannot be deleted or made
    """
    _check_childless(uuid)
    if source is not None and wanted.root_size is not None:
        with _template(wanted.root_size, pool, source):
            pass


def _create_data(
    name: str, data: flavor_module.DataDevice, number: int, pool: pool_module.Pool
) -> None:
    if data.format not in _MKFS:
        device.create(pool, name, data.size)
        return
    # One empty file system for all servers: a metadata operation for the next. The number tells
    # devices of one server apart, whose file systems must have different UUIDs.
    base = f'format-{data.format}-{data.size // units.MIB}-{number}'
    with template_cache.TemplateCache(pool).named(base, lambda: _build_formatted(base, data, pool)):
        device.create_on(pool, name, base)


def _build_formatted(name: str, data: flavor_module.DataDevice, pool: pool_module.Pool) -> None:
    program, package, options = _MKFS[data.format]
    with workspace.directory('format') as directory:
        path = os.path.join(directory, 'raw')
        with open(path, 'xb') as f:
            f.truncate(data.size)
        tool.run(tool.find_system(program, package), *options, path)
        template.build(pool, name, path, 'raw')


def discard(uuid: str, made: list[str]) -> None:
    """Delete images that :func:`create` has made, as far as they are there and no QEMU has them."""
    for item in find(uuid):
        if item.name in made:
            try:
                item.pool.delete_image(item.name)
            except exception.PcowError as e:
                LOG.error('An image of a server stays: %s', e)


def discard_unfinished(uuid: str, keep: frozenset[str] = frozenset()) -> bool:
    """Delete what killed builds and copies of images of a server have left; whether all is gone.

    Nobody builds one now: the server is being deleted, or is elsewhere.
    """
    prefix, suffix = f'.{image_name(uuid, "")}', f'{names.IMAGE_SUFFIX}.part'
    done = True
    for pool in inventory.pools():
        for entry in os.listdir(pool.path):
            role = entry.removeprefix(prefix).removesuffix(suffix)
            if entry == f'{prefix}{role}{suffix}' and _ROLE.fullmatch(role) and role not in keep:
                path = os.path.join(pool.path, entry)
                try:
                    if staging.is_in_the_making(pool, entry):  # on a host that shares the pool
                        raise exception.ImageInUse(path=path, reason='somebody makes it')
                    with image_locks.alone(path):
                        os.unlink(path)
                except exception.ImageNotFound:
                    continue
                except (exception.PcowError, OSError) as e:
                    LOG.error('An unfinished image of a server stays: %s', e)
                    done = False
    return done


def delete(uuid: str, *, keep: frozenset[str] = frozenset()) -> bool:
    """Delete the images of a server, and what a killed build or copy of them left; whether all are
    gone.

    What somebody has open stays, a QEMU on another host for instance; what is damaged does not.
    Nobody knows what is in a pool that is not there: then they are not, and Nova asks again.

    :param keep: roles whose images stay
    """
    done = discard_unfinished(uuid, keep) and inventory.all_there()
    for item in find(uuid):
        if item.role in keep:
            continue
        try:
            item.pool.delete_image(item.name, force=True)
        except exception.ImageNotFound:
            continue
        except exception.PcowError as e:
            LOG.error('An image of a server stays: %s', e)
            done = False
    return done


def check_deletable(uuid: str) -> None:
    """Make sure that :func:`delete` can do all of it.

    :raises ServerStorageError:
    """
    if not inventory.all_there():
        raise ServerStorageError(
            reason=(
                'a pool of this host is not there (its log says which), and what it may have of '
                'the server would stay: mount it'
            )
        )
    _check_childless(uuid)


def _check_childless(uuid: str) -> None:
    for item in find(uuid):
        children = item.pool.children(item.name, known_only=True)
        if children:
            raise ServerStorageError(
                reason=(
                    f'{item.path} cannot be deleted, because something stands on it '
                    f'({", ".join(children)}): delete that first'
                )
            )


def check_complete(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """:raises ServerStorageError: an image is not there, or is not what the server goes on with"""
    for role in missing_roles(uuid, wanted):
        raise _not_there(uuid, role)
    check_not_sent(uuid)


def check_not_sent(uuid: str) -> None:
    """Make sure that a server does not go on with images that were copied to another host: it has,
    or may have, gone on there.

    :raises ServerStorageError: one was, and neither a confirmation nor a revert has ended that
        here; or it left while it ran
    """
    host = notes.get(notes.LEAVING, uuid)
    if host is not None:
        raise ServerStorageError(
            reason=(
                f'the server has left for {host}, when nova-compute was ended here: it runs there, '
                f'with its data, and what is here is '
                f'old; if it does not (virsh list --all), delete {notes.path(notes.LEAVING, uuid)}'
            )
        )
    if notes.get(notes.ARRIVING, uuid) is not None:
        raise ServerStorageError(
            reason=(
                'what is here of the server was made for a live migration to this host that did '
                'not come to its end: it is where it '
                f'was; if its domain is here (virsh list --all), delete '
                f'{notes.path(notes.ARRIVING, uuid)}'
            )
        )
    for item in devices(uuid):  # RAM is never sent
        marks = {one.name for one in image.snapshot_list(item.path, force_share=True)}
        if names.ARRIVING_MARK in marks:
            raise ServerStorageError(
                reason=(
                    f'{item.path} was made for a live migration of the server, and not all of it '
                    f'has arrived: the server is where it '
                    'was, and this is to be deleted'
                )
            )
        if reserved.SENT in marks:
            raise ServerStorageError(
                reason=(
                    f'{item.path} was copied to another host, and that was neither confirmed nor '
                    f'reverted here: if the server has run '
                    f'there since, this is old, and to be deleted; else delete its snapshot '
                    f'{reserved.SENT} (pcowctl snapshot delete)'
                )
            )


def check_none(uuid: str) -> None:
    """A server that begins anew would go on with the data of images that could not be deleted.

    :raises ServerStorageError: an image is there
    """
    for item in find(uuid):
        raise ServerStorageError(
            reason=(
                f'{item.path} of an earlier time of the server could not be deleted, and holds its '
                f'data: delete what stands on it '
                '(the log of nova-compute says what), then the server, which has no claim in '
                'placement after this, and create it anew'
            )
        )


def root(uuid: str) -> ServerImage:
    """:raises ServerStorageError: it is not there"""
    for item in find(uuid):
        if item.role == ROOT:
            return item
    raise _not_there(uuid, ROOT)


def _not_there(uuid: str, role: str) -> ServerStorageError:
    return ServerStorageError(
        reason=(
            f'the image {image_name(uuid, role)} is in none of the pools '
            f'{", ".join(nova_conf.CONF.nova_pcow.pools)} of this host: '
            'mount the pool that has it, or, if a rebuild failed and left none, rebuild the server'
        )
    )


def check_class(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """Make sure that a server still has the class that its flavor requires: a pool can come back
    mounted without DAX, or copied.

    :raises ServerStorageError:
    """
    if not wanted.required_traits:
        return
    for item in find(uuid):
        missing = wanted.required_traits - inventory.traits(item.pool)
        if missing:
            raise ServerStorageError(
                reason=(
                    f'the pool {item.pool.name} has not {", ".join(sorted(missing))} now, which '
                    f'the flavor of the server requires: '
                    f'what its guest flushes would not be kept as promised. Its data are there: '
                    f'mount {item.pool.path} as it was '
                    '("pcowctl doctor" helps), and start it then'
                )
            )


def sizes(wanted: flavor_module.PcowFlavor) -> dict[str, int]:
    """Bytes of the data of its devices, by their roles."""
    found = {data_role(number): item.size for number, item in enumerate(wanted.data)}
    if wanted.root_size is not None:
        found[ROOT] = wanted.root_size
    return found


def check_sizes(uuid: str, *flavors: flavor_module.PcowFlavor, noted: bool = True) -> None:
    """Make sure that no device of a server is larger than what each of these flavors gives it: its
    image is written to by its QEMU, and says what that likes. The RAM is another matter: one that
    has not the size of the flavor is made anew (:func:`nova_pcow.servers.ram.provide`).

    :param flavors: of the server, and the one that it is to get
    :param noted: or what a resize that has failed has left, which this host knows, and no other
    :raises DeviceTooLarge:
    """
    allowed = _allowed(uuid, *flavors, noted=noted)
    for item in devices(uuid):
        if item.role in allowed:
            device.check_size(item.path, *allowed[item.role], _WAY_OUT)


def window(
    uuid: str, item: ServerImage, wanted: flavor_module.PcowFlavor, snapshot: str | None = None
) -> device.Window:
    """Where the data of a device of the flavor lie in its image, or in a snapshot of that, which is
    not deleted meanwhile; no more than :func:`check_sizes` allows.

    :raises DeviceInvalid: the image is none of a device
    :raises DeviceTooLarge:
    """
    return device.checked_window(
        item.path,
        *_allowed(uuid, wanted)[item.role],
        _WAY_OUT,
        snapshot=snapshot,
        force_share=snapshot is not None,
    )


def _allowed(
    uuid: str, *flavors: flavor_module.PcowFlavor, noted: bool = True
) -> dict[str, tuple[int, str]]:
    """Bytes of the data of each device, by their roles, and what gives them."""
    allowed: dict[str, tuple[int, str]] = {}
    for one in flavors:
        for role, size in sizes(one).items():
            allowed[role] = max(allowed.get(role, (0, '')), (size, f'the flavor {one.name}'))
    for kind in (notes.GROWN, notes.RESIZING) if noted else ():
        for role, size in _noted(kind, uuid).items():
            if role in allowed:
                allowed[role] = max(allowed[role], (size, 'a resize that has failed'))
    return allowed


def _grown(uuid: str) -> dict[str, int]:
    """Bytes of the devices of a server that a resize has enlarged, before it failed, by their
    roles.
    """
    return _noted(notes.GROWN, uuid)


def _noted(kind: str, uuid: str) -> dict[str, int]:
    return dict(json.loads(notes.get(kind, uuid) or '{}'))


def note_growth(uuid: str, old: flavor_module.PcowFlavor, wanted: flavor_module.PcowFlavor) -> None:
    """Remember which images are larger than the flavor that the server has again, after the resize
    to another one has failed: there is nothing wrong with those.

    :raises PcowError: they are refused from then on
    """
    grown, there = _grown(uuid), sizes(wanted)
    for item in devices(uuid):
        size = sizes(old).get(item.role)
        if size is None or item.role not in there:
            continue
        try:
            device.check_size(item.path, size, '', '')
        except exception.DeviceTooLarge:
            grown[item.role] = max(grown.get(item.role, 0), there[item.role])
    if grown:
        notes.put(notes.GROWN, uuid, json.dumps(grown))
    notes.forget(notes.RESIZING, uuid=uuid)


def forget_growth(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """The server has a flavor for good, which may give all of what a resize that failed has left.

    :raises StateInvalid:
    """
    given = sizes(wanted)
    if all(size <= given.get(role, 0) for role, size in _grown(uuid).items()):
        notes.forget(notes.GROWN, uuid=uuid)


def check_startable(uuid: str, wanted: flavor_module.PcowFlavor) -> None:
    """Damage that a scrub has found is only told: whether it matters, the guest alone can tell.

    :raises ServerStorageError: as :func:`check_complete` and :func:`check_class`
    :raises DeviceTooLarge: as :func:`check_sizes`
    """
    check_complete(uuid, wanted)
    check_class(uuid, wanted)
    check_sizes(uuid, wanted)
    _warn_of_damage(uuid)


def _warn_of_damage(uuid: str) -> None:
    for item in find(uuid):
        try:
            for damaged, found in item.pool.known_damage(item.name):
                LOG.warning(
                    'The server %s starts on damaged data: the scrub of %s has found of %s: %s '
                    '(see the runbook of a damaged image)',
                    uuid,
                    found.checked,
                    damaged.path,
                    found.findings[0],
                )
        except (exception.PcowError, OSError) as e:  # it looks at each image of the pool
            LOG.warning('Whether %s stands on damaged data cannot be told: %s', item.path, e)


def nvdimms(uuid: str, wanted: flavor_module.PcowFlavor) -> list[libvirt_xml.Nvdimm]:
    """The devices of a server for its domain, the root first.

    :raises PcowError: as :func:`check_startable`
    """
    check_startable(uuid, wanted)
    return [nvdimm(item.path, item.pool, item.alias) for item in devices(uuid)]


def nvdimm(path: str, pool: pool_module.Pool | None, alias: str) -> libvirt_xml.Nvdimm:
    """A device for a domain.

    On page cache an nvdimm could not keep its promise to the guest, and a virtio-pmem, which
    flushes, can.

    :param pool: that it lies in; None: an nvdimm, whatever it is
    """
    model = (
        libvirt_xml.MODELS[1]
        if pool is not None and pool.persistence() == 'page-cache'
        else libvirt_xml.MODELS[0]
    )
    return libvirt_xml.Nvdimm(
        path=path, size=image.info(path, force_share=True).virtual_size, alias=alias, model=model
    )
