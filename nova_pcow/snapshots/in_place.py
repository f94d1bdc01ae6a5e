# SPDX-License-Identifier: Apache-2.0
"""Snapshots inside the images of a server, made and reverted to by an administrator of its host,
beside Nova.

Nova is told nothing and needs to know nothing: the server stays what it is for it (ACTIVE, SHUTOFF,
PAUSED), with the sizes of its flavor. What it could not know without harm is refused. Nothing of
Nova is imported: pcowctl runs this.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from nova_pcow.common import reserved
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import device
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import tree as vm_tree

_RESCUE_DISK = 'disk.rescue'  # Nova's name of it


class ServerRefused(exception.PcowError):
    msg_fmt = 'the server %(server)s: %(reason)s'


def _not_found(domains: list[Any], name: str) -> str:
    """A tenant gives a server its name, that of somebody else's too: so it finds none."""
    named = [item.UUIDString() for item in domains if _display_name(item) == name]
    if named:
        return f'that is a name, which tenants choose: give the ID ({", ".join(sorted(named))})'
    return (
        'no domain of this host has this ID (openstack server show tells the host): a server that '
        'is shelved, or on its way to another host, has none'
    )


def _display_name(virtual: Any) -> str | None:
    xml = libvirt_xml.parse(virtual.XMLDesc(0))
    return xml.findtext(f'metadata/{{{libvirt_xml.NOVA_NAMESPACE}}}instance/{{*}}name')


class Server:
    """A server that is on this host, on or off, by its domain."""

    def __init__(self, connection: Any, name: str) -> None:
        """
        :param connection: virConnect
        :param name: the ID of the server, or the name of its domain
        :raises ServerRefused: it is not on this host, or has no persistent memory
        """
        self.name = name
        domains = connection.listAllDomains()
        virtual = next((item for item in domains if name in (item.UUIDString(), item.name())), None)
        if virtual is None:
            raise ServerRefused(server=name, reason=_not_found(domains, name))
        self._virtual = virtual
        self.domain = domain.Domain(connection, virtual.name())
        prefix = storage.image_name(virtual.UUIDString(), '')
        self.images = [
            item for item in self.domain.images() if os.path.basename(item.path).startswith(prefix)
        ]
        if not self.images:
            raise ServerRefused(server=name, reason='it has no persistent memory of its own')

    def snapshot(self, name: str) -> None:
        """Freeze what all its images hold at one moment.

        :raises ServerRefused: the name is taken or reserved
        """
        self._check_name(name)
        for item in self.images:
            if name in self._snapshots(item):
                raise ServerRefused(
                    server=self.name,
                    reason=f'{item.path} has a snapshot {name} already: choose another name',
                )
        made: list[domain.Image] = []
        with (
            contextlib.ExitStack() as undo,
            self.domain.paused() if self.domain.active() else contextlib.nullcontext(),
        ):
            undo.callback(self._delete, name, made)
            for item in self.images:
                self.domain.snapshot_create(name, item.path)
                made.append(item)
            undo.pop_all()

    def _delete(self, name: str, images: list[domain.Image]) -> None:
        for item in images:
            self.domain.snapshot_delete(name, item.path)

    def revert(self, name: str, *, reset: bool = False) -> list[str]:
        """Go back to a snapshot in all images that have it; the aliases of those. Calling it again
        completes what was interrupted.

        :param reset: restart the guest if it runs
        :raises ServerRefused: before anything is changed
        """
        self._check_name(name)
        have = {item: self._snapshots(item) for item in self.images}
        chosen = [item for item in self.images if name in have[item]]
        if not chosen:
            known = sorted(
                {
                    one
                    for there in have.values()
                    for one in there
                    if not one.startswith(reserved.PREFIX)
                }
            )
            raise ServerRefused(
                server=self.name,
                reason=f'it has no snapshot {name}; there are: {", ".join(known) or "none"}',
            )
        if self.domain.is_checkpoint(name):
            raise ServerRefused(
                server=self.name,
                reason=(
                    f'{name} is a checkpoint of it, with its RAM and devices: use pcowctl vm revert'
                ),
            )
        self._check_state(have)
        if self.domain.active():
            self._revert_active(name, chosen, have, reset)
        else:
            for item in chosen:
                # What libvirt gives the server, too: a call that was killed before it grew the
                # image has left it small.
                size = max(image.info(item.path).virtual_size, item.size)
                with room.kept(item.path):
                    image.snapshot_revert(item.path, name)
                    # the flavor has become larger since
                    if image.info(item.path).virtual_size < size:
                        device.grow(item.path, size - device.window(item.path).offset)
        return [item.alias or item.path for item in chosen]

    def _revert_active(
        self,
        name: str,
        chosen: list[domain.Image],
        have: dict[domain.Image, dict[str, model.Snapshot]],
        reset: bool,
    ) -> None:
        if not reset:
            raise ServerRefused(
                server=self.name,
                reason=(
                    'it runs, and its memory would change beneath it: stop it (openstack server '
                    'stop), or give --reset to restart it'
                ),
            )
        for item in chosen:
            if (
                have[item][name].virtual_size
                != image.info(item.path, force_share=True).virtual_size
            ):
                raise ServerRefused(
                    server=self.name,
                    reason=(
                        f'{item.path} had another size then: stop the server first (openstack '
                        f'server stop)'
                    ),
                )
        with self.domain.paused():  # until all are back
            for item in chosen:
                self.domain.snapshot_revert(name, item.path, reset=True)

    def _check_name(self, name: str) -> None:
        if name.startswith(reserved.PREFIX):
            raise ServerRefused(
                server=self.name,
                reason=f"names that begin with '{reserved.PREFIX}' are of Nova's own snapshots",
            )

    def _check_state(self, have: dict[domain.Image, dict[str, model.Snapshot]]) -> None:
        """:raises ServerRefused: Nova is in the middle of something that goes by what the images
        hold
        """
        if not self.domain.active() and (
            self.domain.saved()
            or reserved.SUSPENDED in {item.getName() for item in self._virtual.listAllSnapshots()}
            or self.domain.is_checkpoint(reserved.SUSPENDED)
        ):
            raise ServerRefused(
                server=self.name,
                reason=(
                    'it is suspended, and would resume with what it had then: resume it first '
                    '(openstack server resume)'
                ),
            )
        ram = self.domain.ram()
        if not self.domain.active() and ram is not None and vm_tree.reverts_at_start(ram):
            raise ServerRefused(
                server=self.name,
                reason=(
                    'it was being reverted to a checkpoint, and its next start takes its images '
                    'there: start it first, or resume it, and stop it again'
                ),
            )
        if any(name.startswith(reserved.RESIZE) for there in have.values() for name in there):
            raise ServerRefused(
                server=self.name,
                reason=(
                    'a resize waits for its end: confirm or revert it first (openstack server '
                    'resize confirm, ... resize revert)'
                ),
            )
        if any(reserved.SENT in there for there in have.values()):
            raise ServerRefused(
                server=self.name,
                reason=(
                    'it was copied to another host, where it may run by now, and that waits for '
                    'its end: confirm or revert it first '
                    '(openstack server migration confirm, ... migration revert)'
                ),
            )
        files = (
            item.get('file', '')
            for item in libvirt_xml.parse(self._virtual.XMLDesc(0)).findall('devices/disk/source')
        )
        if _RESCUE_DISK in map(os.path.basename, files):
            raise ServerRefused(
                server=self.name,
                reason='it is in rescue mode: end that first (openstack server unrescue)',
            )

    def _snapshots(self, item: domain.Image) -> dict[str, model.Snapshot]:
        return {one.name: one for one in image.snapshot_list(item.path, force_share=True)}


@contextlib.contextmanager
def server(name: str) -> Iterator[Server]:
    """A server of this host's libvirt.

    :raises LibvirtFailed:
    :raises ServerRefused:
    """
    with libvirt_host.connect() as connection:
        yield Server(connection, name)
