# SPDX-License-Identifier: Apache-2.0
"""The RAM of a server as an image (``pcow:ram``): an administrator of its host takes checkpoints of
the whole server and reverts it to them (``pcowctl vm``), beside Nova.

Of a guest that is off the image holds nothing but those checkpoints. So whenever there is none a
start makes a new one, and what gives a server another size or host gives the old one up. A server
that is suspended is one at a checkpoint of the driver's own.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import os
from typing import Any

from lxml import etree
from nova import exception as nova_exception
import nova.conf
from nova.virt import hardware
from nova.virt.libvirt import config as vconfig
from oslo_log import log as logging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.common import reserved
from nova_pcow.placement import inventory
from nova_pcow.placement import resize_claims
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.fixation import automatic
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import checkpoint
from pcow_driver.vm import ram as vm_ram
from pcow_driver.vm import state_room
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF


class RamRefused(exception.PcowError):
    msg_fmt = '%(reason)s'


class RamImpossible(RamRefused):
    """Whatever host it would be on."""

    is_of_host = False


def check(flavor: Any, image_meta: Any) -> None:
    """What a server whose RAM is an image cannot have, found out before anything is made.

    :param flavor: nova.objects.Flavor
    :raises RamRefused:
    """
    try:
        topology = hardware.numa_get_constraints(flavor, image_meta)
    except nova_exception.NovaException as e:  # flavor and image want different things
        raise RamImpossible(reason=str(e)) from e
    if topology is not None:
        raise RamImpossible(
            reason=(
                f'its RAM is one image ({flavor_module.RAM_SPEC}), and flavor or image ask for '
                f'NUMA nodes, huge pages or dedicated CPUs (hw:numa_nodes, hw:mem_page_size, '
                f'hw:cpu_policy): leave them out, or take a flavor without {flavor_module.RAM_SPEC}'
            )
        )
    if CONF.libvirt.file_backed_memory:
        raise RamRefused(
            reason=(
                f'this host has [libvirt] file_backed_memory, which puts the RAM of its servers '
                f'elsewhere: set it to 0 for servers with {flavor_module.RAM_SPEC}'
            )
        )


def check_new_host(context: Any, uuid: str) -> None:
    """Of the pool that placement has chosen there.

    :raises RamRefused: no RAM can be on it
    :raises PlacementMismatch: placement cannot be asked
    """
    if resize_claims.is_on_class(context, uuid, 'page-cache'):
        raise RamRefused(
            reason=(
                f'its pool on the new host is of class page-cache, on which no RAM can be: give '
                f'the flavor trait:{flavor_module.CLASS_TRAITS["page-cache"]}=forbidden'
            )
        )


class RamGuest(vconfig.LibvirtConfigGuest):
    """Another guest, with this image as its RAM."""

    def __init__(self, guest: vconfig.LibvirtConfigGuest, path: str) -> None:
        """:raises RamRefused: its memory is to be something else"""
        super().__init__()
        self.__dict__.update(vars(guest))
        if guest.membacking is not None:
            raise RamRefused(
                reason=(
                    f'{path} is to be the RAM of the server, and Nova has it backed otherwise '
                    f'([libvirt] file_backed_memory, huge pages, locked memory): take that away'
                )
            )
        backing = vconfig.LibvirtConfigGuestMemoryBacking()
        backing.filesource = backing.sharedaccess = True
        self.membacking: Any = backing
        self.metadata: list[Any] = [*guest.metadata, _Metadata(path)]

    def format_dom(self) -> Any:
        root = super().format_dom()
        # The guest gets another one after each revert, and makes no random numbers twice.
        root.append(etree.Element('genid'))
        return root


class _Metadata(vconfig.LibvirtConfigObject):
    """What the hook of libvirt and ``pcowctl vm`` read."""

    def __init__(self, path: str) -> None:
        super().__init__(root_name='ram')
        self._path = path

    def format_dom(self) -> Any:
        return etree.fromstring(libvirt_xml.to_string(libvirt_xml.ram_metadata(self._path)))


def provide(uuid: str, size: int) -> str:
    """Path of the image for a start of a server that is off, which is made if it is not there.

    :raises PcowError: the pool has no room, or is of a class that RAM cannot be on
    """
    found = _find(uuid)
    try:
        is_old = found is not None and found.virtual_size() != size
    except exception.ToolFailed as e:
        raise RamRefused(
            reason=(
                f'the RAM of the server cannot be read ({e}), and holds nothing of a guest that is '
                f'off but its checkpoints: pcowctl image delete --force '
                f'{storage.root(uuid).pool.name}/{storage.image_name(uuid, storage.RAM)}'
            )
        ) from e
    if is_old:
        give_up(uuid)
    # a server lies in one pool
    return vm_ram.provide(storage.root(uuid).pool, storage.image_name(uuid, storage.RAM), size)


def growth(uuid: str, wanted: flavor_module.PcowFlavor) -> int:
    """Bytes that the image of another flavor takes beyond that of now."""
    found = _find(uuid)
    return max(0, (wanted.ram_size or 0) - (0 if found is None else found.virtual_size()))


def check_no_checkpoints(uuid: str) -> None:
    """Make sure that nothing is lost if :func:`give_up` follows.

    :raises RamRefused:
    """
    found = _find(uuid)
    snapshots = [] if found is None else _snapshots(found.path)
    if any(map(tree.is_unfinished, snapshots)):
        raise RamRefused(
            reason=(
                'the server has a checkpoint that was cut off when it was taken, or gone back to, '
                'and its next start finishes that: start it, and stop it again if it was off'
            )
        )
    there = [
        one.name
        for one in snapshots
        if tree.is_checkpoint(one)
        and one.name != reserved.SUSPENDED
        and not automatic.is_own(one.name)  # nobody misses those of a server that persists
    ]
    warm = [name for name in there if name.startswith(reserved.WARM_PREFIX)]
    if warm:
        raise RamRefused(
            reason=(
                f'the server has checkpoints of warm images '
                f'({", ".join(name.removeprefix(reserved.WARM_PREFIX) for name in warm)}), and '
                f'none could go on with another size or on another host: delete those images, then '
                f'have its host give the checkpoints up (pcowctl server delete-warm)'
            )
        )
    if there:
        raise RamRefused(
            reason=(
                f'the server has checkpoints ({", ".join(there)}), and none could go on with '
                f'another size or on another host: delete them on its host (pcowctl vm '
                f'delete-checkpoint)'
            )
        )


def check_not_reverting(uuid: str) -> None:
    """Make sure that the next start does not take the images elsewhere.

    :raises RamRefused:
    """
    found = _find(uuid)
    try:
        reverts = found is not None and tree.reverts_at_start(found.path)
    except exception.ToolFailed as e:  # so no start reverts by it, and a rescue may be the way out
        LOG.warning('The RAM of the server is damaged: %s', e)
        return
    if reverts:
        raise RamRefused(
            reason=(
                'the server was being reverted to a checkpoint, and its next start takes its '
                'images there, with what is changed in them until then: reboot it hard first '
                '(openstack server reboot --hard)'
            )
        )


def give_up(uuid: str) -> None:
    """Delete the image of a server that is off.

    :raises RamRefused: it has checkpoints
    :raises PcowError: somebody has it open, for instance
    """
    check_no_checkpoints(uuid)
    drop(uuid)


def drop(uuid: str) -> None:
    """Delete the image of a server that is off, with its checkpoints.

    :raises PcowError: something stands on one of them
    """
    found = _find(uuid)
    if found is None:
        return
    try:
        # by which QEMU knows the parts as well, whatever either is called
        dates = {one.date for one in _snapshots(found.path) if one.vm_state_size}
    except exception.ToolFailed as e:
        LOG.warning('What checkpoints of the server have in its other images stays: %s', e)
        dates = set()
    parts = [
        (item.path, one.name)
        for item in storage.devices(uuid)
        for one in _snapshots(item.path)
        if one.date in dates
    ]
    for path, name in parts:  # should this be cut off
        LOG.info('%s: the snapshot %s goes with the RAM of the server', path, name)
    # first: without it the other parts are snapshots of their images, and no more
    found.pool.delete_image(found.name, force=True)
    for path, name in parts:
        image.snapshot_delete(path, name)


def _find(uuid: str) -> storage.ServerImage | None:
    return next((item for item in storage.find(uuid) if item.role == storage.RAM), None)


def _snapshots(path: str) -> list[model.Snapshot]:
    return image.snapshot_list(path, force_share=True)


def suspend(found: domain.Domain, begin: Callable[[], None]) -> None:
    """Keep RAM, devices and what lies in the images, and end the guest.

    :param begin: called when nothing is left of an earlier one
    :raises PcowError: it does not run; a pool has no room for what it can write once more; QEMU
        refuses it, and says why, or does not end. The guest goes on
    """
    with libvirt_host.errors():
        if not found.running():
            raise RamRefused(
                reason=(
                    'its guest does not run now (virsh domstate --reason tells why): it would not '
                    'be clear what it is to go on from'
                )
            )
        _forget_left(found)
        # as the checkpoint, which finds out exactly when nothing is stored any more
        of_state = functools.partial(state_room.of_state, found)
        with room.for_snapshot(*found.writable(), beside=of_state):
            pass
        found.check_answers()
        begin()
        try:
            found.suspend()  # what is stored behind the checkpoint would be lost
            # not the last one: it goes on before this is deleted
            checkpoint.take(found, reserved.SUSPENDED)
            found.destroy()
        except exception.NoAnswer as e:
            # what there may be of its state is given up before it is suspended again
            found.resume_later(e)
            raise
        except BaseException:
            with interrupt.clearing_up():
                _go_on(found)
            raise


def _go_on(found: domain.Domain) -> None:
    try:
        with libvirt_host.errors():
            if found.active() and not found.running():
                found.resume()
            if found.running():  # else it may have ended after all, and have a state
                forget_suspended(found)
    except exception.PcowError as e:  # the first error is what its owner wants to know
        LOG.error('%s could not be suspended, and does not go on: %s', found.name, e)


def is_suspended(found: domain.Domain) -> bool:
    """Whether there is something that a server resumes from."""
    return found.is_checkpoint(reserved.SUSPENDED)


def check_there(found: domain.Domain) -> None:
    """:raises RamRefused: nobody can tell whether a server is suspended"""
    path = found.ram()
    if path is not None and not os.path.exists(path) and not inventory.all_there():
        raise RamRefused(
            reason=(
                'a pool of this host is not there (its log says which), and may have what the '
                'server was suspended at: mount it'
            )
        )


def may_be_suspended(found: domain.Domain) -> bool:
    """The same of one that is off, or what a power cut has left is that: a QEMU will know."""
    path = found.ram()
    return is_suspended(found) or (path is not None and tree.is_unfinished_in(path))


def go_back(found: domain.Domain) -> None:
    """Have the guest where :func:`suspend` ended it, paused.

    :param found: off, or paused at a start that was cut off
    :raises PcowError: QEMU refuses it, and says why, and it is still suspended
    """
    if found.active():
        checkpoint.revert(found, reserved.SUSPENDED)
    else:
        checkpoint.start_at(found, reserved.SUSPENDED, run=False)


def forget_suspended(found: domain.Domain) -> None:
    """Give up what a suspended server would resume from; what it has written stays."""
    try:
        with libvirt_host.errors():
            if is_suspended(found):
                checkpoint.delete(found, reserved.SUSPENDED)
    except exception.PcowError as e:
        LOG.warning(
            '%s keeps the checkpoint %s, of no use any more, until it is suspended: %s',
            found.name,
            reserved.SUSPENDED,
            e,
        )


def _forget_left(found: domain.Domain) -> None:
    """QEMU refuses a checkpoint for a snapshot of the same name in any image; an earlier suspension
    may have left one in a volume.
    """
    if is_suspended(found):
        checkpoint.delete(found, reserved.SUSPENDED)
    for item in found.images():
        if any(one.name == reserved.SUSPENDED for one in found.snapshot_list(item.path)):
            found.snapshot_delete(reserved.SUSPENDED, item.path)
