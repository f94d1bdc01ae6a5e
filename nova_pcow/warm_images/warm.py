# SPDX-License-Identifier: Apache-2.0
"""Warm images: a checkpoint of a running server that an image of Glance's stands for, and servers
that go on from it on the host which has it.

The checkpoint stays in the images of the parent. Each image of a child stands on the parent's part
of it, in the same pool. Their end is in :mod:`nova_pcow.warm_images.warm_end`. Nothing of Nova is
imported: pcowctl uses this, too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os

from oslo_log import log as logging

from nova_pcow import conf
from nova_pcow.common import flavor as flavor_module
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm_xml
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.copies import fork as image_fork
from pcow_driver.copies import verify
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.virt import domain
from pcow_driver.virt import fork_xml
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import checkpoint

LOG = logging.getLogger(__name__)

# A property of an image: true asks for it while the image is made; the service puts the name of the
# checkpoint in its place, which nothing reads.
PROPERTY = 'pcow_warm'
# in the system metadata of an instance, where Nova keeps the properties of its image
INHERITED = f'image_{PROPERTY}'
_ROLES = (storage.RAM, storage.ROOT)  # without that of the RAM the other is a mere snapshot


class WarmRefused(exception.PcowError):
    msg_fmt = 'no warm image of the server can be made: %(reason)s'


class WarmUnfit(exception.PcowError):
    msg_fmt = 'the server boots, as it cannot begin warm: %(reason)s'


class WarmStays(exception.PcowError):
    msg_fmt = 'the warm image %(image)s stays: %(reason)s'


@dataclasses.dataclass(frozen=True)
class Start:
    """Of a server whose images stand on a checkpoint, and which has not run."""

    record: warm_records.Record
    boot_instead: Callable[[], object]  # gives it images to boot from


# ---- taking --------------------------------------------------------------------------------------


def check_allowed(project: str) -> None:
    """Make sure that the operator of the host allows a project one more.

    :raises WarmRefused:
    """
    allowed = conf.CONF.nova_pcow.warm_images
    if not allowed:
        raise WarmRefused(
            reason=(
                'this host keeps none: its operator allows them by [nova_pcow] warm_images, the '
                'number of them for each project'
            )
        )
    there = [one.image for one in warm_records.find() if one.project == project]
    if len(there) >= allowed:
        raise WarmRefused(
            reason=(
                f'this host keeps {len(there)} of its project ({", ".join(there)}), and no more '
                f'are allowed ([nova_pcow] warm_images): delete one of the images'
            )
        )


def check(found: domain.Domain, uuid: str, wanted: flavor_module.PcowFlavor) -> str:
    """Find out what would keep others from going on from a checkpoint of a server; what their
    machines have to be like.

    :raises WarmRefused:
    """
    try:
        return _check(found, uuid, wanted)
    except (
        exception.DomainInvalid,
        exception.DeviceTooLarge,
        exception.XmlInvalid,
        warm_xml.MachineDiffers,
    ) as e:
        raise WarmRefused(reason=str(e)) from e


def _check(found: domain.Domain, uuid: str, wanted: flavor_module.PcowFlavor) -> str:
    if not wanted.has_ram:
        raise WarmRefused(
            reason=f'its RAM is no image: it needs a flavor with {flavor_module.RAM_SPEC}'
        )
    if wanted.data:
        raise WarmRefused(
            reason=(
                f'it has data devices ({flavor_module.DATA_SPEC}), which are no part of an image: '
                f'a server that boots from it elsewhere would be without what is on them'
            )
        )
    if not found.running():
        raise WarmRefused(reason='its guest does not run')
    # others would get images of this size
    storage.check_sizes(uuid, wanted, noted=False)
    definition, running = found.definition(), found.running_xml()
    _check_interfaces(running)
    _check_interfaces(definition)
    own = {item.path for item in storage.find(uuid)}
    for item in found.images():
        if item.path not in own:
            raise WarmRefused(reason=f'it has the volume {item.path}: detach it first')
    if not fork_xml.has_generation_id(definition):
        raise WarmRefused(
            reason=(
                'it has no generation id, so others would make the same random numbers and keys: '
                'reboot it hard first'
            )
        )
    fork_xml.check(definition, found.writable())
    for path, what in (
        ('devices/tpm', 'a TPM, whose state is in no image'),
        ('devices/filesystem', 'a file system of its host'),
        ('os/loader', 'firmware with a memory of its own'),
    ):
        if libvirt_xml.parse(definition).find(path) is not None:
            raise WarmRefused(reason=f'it has {what}')
    warm_xml.check_unchanged(running, definition)
    return warm_xml.describe(definition)


def processor(found: domain.Domain) -> str:
    """What the guest of a domain that is active may have seen of its CPU. Its definition need not
    say: the host's own model is another one after an update.

    :raises QmpFailed:
    :raises XmlInvalid:
    """
    shown, is_all = warm_xml.processor(found.running_xml())
    if is_all:
        return shown
    host = os.uname()
    return '\n'.join(
        (
            shown,
            warm_xml.host_processor(found.capabilities()),
            host.release,
            host.version,
            json.dumps(found.qmp('query-version'), sort_keys=True),
        )
    )


def _check_interfaces(xml: str) -> None:
    for interface in libvirt_xml.parse(xml).iterfind('devices/interface/mac'):
        raise WarmRefused(
            reason=(
                f'its guest has the interface {interface.get("address")}, and others would go on '
                f'with the same address: detach it first (openstack server remove port); each gets '
                f'its own ports when it has gone on'
            )
        )


@contextlib.contextmanager
def taken(
    found: domain.Domain, record: warm_records.Record, undo: Callable[[str], None]
) -> Iterator[str]:
    """A checkpoint of a server, and what this host knows of it; it counts when it is
    :func:`complete`.

    :param undo: called with the ID of the image if something fails, and has neither stay
    :return: its name
    :raises WarmRefused: the operator allows no more of the project
    :raises NoRoom: his limits have no room for what the guest can then write once more
    :raises QmpFailed: QEMU cannot, and says why
    """
    with locks.lock('warm'):  # two at once are counted one after the other
        check_allowed(record.project)
        warm_records.put(record)
    try:
        checkpoint.take(found, record.checkpoint)
        warm_records.change(record.image, members=_members(record))
        yield record.checkpoint
    except BaseException:
        with interrupt.clearing_up():
            undo(record.image)
        raise


def complete(image_id: str, *, checksum: str, is_seen: bool) -> None:
    """The image is in Glance, and servers may begin with it.

    :param checksum: of it, as Glance says
    :param is_seen: whether Glance tells the service of it
    :raises WarmRefused: it was given up meanwhile
    """
    if not checksum:
        raise WarmRefused(reason='Glance has no checksum of the image')
    if warm_records.change(image_id, checksum=checksum, is_seen=is_seen) is None:
        raise WarmRefused(reason='its checkpoint was removed while the image was made')


def _members(record: warm_records.Record) -> dict[str, warm_records.Member]:
    found = {}
    for item in images(record):
        info, snapshot = part(item, record.checkpoint)
        if info.uuid is None or snapshot is None:
            raise WarmRefused(reason=f'{item.path} has no part of the checkpoint')
        found[item.role] = warm_records.Member(info.uuid, snapshot.id)
    return found


def _pool(record: warm_records.Record) -> pool_module.Pool:
    """That of the checkpoint: pcowctl does not know which are Nova's.

    :raises WarmStays: it is not there
    """
    known = registry.PoolRegistry()
    for entry in known.list():
        if entry.uuid == record.pool:
            with contextlib.suppress(exception.PoolInvalid):
                return known.get(entry.name)
    raise WarmStays(
        image=record.image,
        reason=f'the pool {record.pool} is not there (pcowctl pool list): mount it',
    )


def images(record: warm_records.Record) -> list[storage.ServerImage]:
    """Those of the parent that are there.

    :raises WarmStays: the pool is not
    """
    pool, found = _pool(record), []
    for role in _ROLES:
        path = pool.image_path(storage.image_name(record.server, role))
        if os.path.lexists(path):
            found.append(storage.ServerImage(role, pool, path))
    return found


def part(item: storage.ServerImage, name: str) -> tuple[model.ImageInfo, model.Snapshot | None]:
    info = image.info(item.path, force_share=True)
    return info, next((one for one in listed(item.path) if one.name == name), None)


def listed(path: str) -> list[model.Snapshot]:
    return image.snapshot_list(path, force_share=True)


# ---- going on from one ---------------------------------------------------------------------------


def check_fits(
    record: warm_records.Record,
    *,
    project: str,
    checksum: str,
    vcpus: int,
    wanted: flavor_module.PcowFlavor,
    pool: pool_module.Pool,
) -> None:
    """Make sure that a new server can go on from the checkpoint of an image.

    :param checksum: of the image, as Glance says it now
    :param pool: that placement has chosen
    :raises WarmUnfit:
    """
    if record.project != project:
        raise WarmUnfit(reason='this host keeps a checkpoint for it that is of another project')
    if not record.is_complete or record.checksum != checksum:
        raise WarmUnfit(reason='the checkpoint that this host keeps is not of what the image holds')
    for what, there, given in (
        ('virtual CPUs', record.vcpus, vcpus),
        ('MiB of RAM on an image', record.ram_size // units.MIB, _mib(wanted.ram_size)),
        ('MiB of root in persistent memory', record.root_size // units.MIB, _mib(wanted.root_size)),
        ('data devices', 0, len(wanted.data)),
    ):
        if there != given:
            raise WarmUnfit(
                reason=f'its flavor gives {given} {what}, and the checkpoint has {there}'
            )
    if record.pool != pool.uuid:
        raise WarmUnfit(
            reason=f'placement has put it into the pool {pool.name}, and the checkpoint is in '
            f'another one'
        )


def check_processor(record: warm_records.Record, found: domain.Domain) -> None:
    """Before the state of the checkpoint is loaded.

    :param found: active
    :raises WarmUnfit: its guest would go on with another CPU than it has seen
    """
    if not record.processor or processor(found) != record.processor:
        raise WarmUnfit(
            reason='the CPU that this host would give it is not that of the checkpoint: updates of '
            'the host, or options of Nova, have changed it; make a new warm image'
        )


def _mib(size: int | None) -> int:
    return (size or 0) // units.MIB


def fork(record: warm_records.Record, uuid: str) -> list[str]:
    """Make the images of a server that goes on from a checkpoint; their names. None stays if it
    fails.

    :raises WarmUnfit: the checkpoint is not there any more
    :raises LockHeld: somebody gives up one of its parent
    :raises PcowError: the pool has no room, or a scrub has found damage
    """
    made: list[str] = []
    for item in images(record):  # which may take longer than others wait for the lock
        verify.compare_if_due(
            _pool(record), os.path.basename(item.path).removesuffix(names.IMAGE_SUFFIX)
        )
    with warm_records.lock(record.server), contextlib.ExitStack() as undo:
        if warm_records.get(record.image) is None:
            raise WarmUnfit(reason='its checkpoint has just been removed')
        undo.callback(storage.delete_made, _pool(record), made)
        for item in checked(record):
            name = storage.image_name(uuid, item.role)
            image_fork.fork(
                item.path, record.checkpoint, name, cluster_size=image_fork.VM_CLUSTER_SIZE
            )
            made.append(name)
        undo.pop_all()
    return made


def checked(record: warm_records.Record) -> list[storage.ServerImage]:
    """The images of the parent, which have the very checkpoint."""
    found = {item.role: item for item in images(record)}
    for role, member in record.members.items():
        if role not in found:
            raise WarmUnfit(reason=f'the image {role} of its parent is not there')
        info, snapshot = part(found[role], record.checkpoint)
        if info.uuid != member.image or snapshot is None or snapshot.id != member.snapshot:
            raise WarmUnfit(reason=f'{found[role].path} has not the checkpoint any more')
        if role == storage.RAM and not snapshot.vm_state_size:
            raise WarmUnfit(reason=f'{found[role].path} has no state of the devices')
    return [found[role] for role in record.members]
