# SPDX-License-Identifier: Apache-2.0
"""Snapshots of the pcow images of a libvirt domain, whether it runs or not.

A running QEMU holds the only writer's lock, so it must do the work itself, told over QMP; where the
image is a disk, nbdkit has the lock, told over its socket. Otherwise pcow-img works on the file.
Which of these is decided here, call by call.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.export import control_socket
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import room
from pcow_driver.virt import disk_xml
from pcow_driver.virt import guest_agent
from pcow_driver.virt import libvirt_domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml

Image = libvirt_xml.Nvdimm | disk_xml.Disk


class Domain(libvirt_domain.LibvirtDomain):
    """A domain and its images. Methods also raise what :mod:`pcow_driver.images.image` raises."""

    def images(self) -> list[Image]:
        """Its NVDIMMs and disks that are pcow images, as they are now."""
        xml = self._domain.XMLDesc(0)
        nvdimms = [
            nvdimm
            for nvdimm in libvirt_xml.nvdimms(xml)
            if nvdimm.path.endswith(names.IMAGE_SUFFIX)
        ]
        return [*nvdimms, *disk_xml.disks(xml)]

    def ram(self) -> str | None:
        """Path of the image that is its RAM, as it is now; None: its RAM is none."""
        return libvirt_xml.ram(self._domain.XMLDesc(0))

    def is_checkpoint(self, name: str) -> bool:
        """Whether the image that is its RAM keeps a state of the whole VM by that name."""
        ram = self.ram()
        return (
            ram is not None
            and os.path.exists(ram)  # one that is off may have lost it
            and any(
                snapshot.name == name and snapshot.vm_state_size
                for snapshot in image.snapshot_list(ram, force_share=True)
            )
        )

    def writable(self) -> list[str]:
        """Paths of the images that its guest stores to: its RAM first, then its NVDIMMs.

        :raises DomainInvalid: it has a disk on an image, which QEMU does not know
        """
        ram, found = self.ram(), []
        for item in self.images():
            if isinstance(item, disk_xml.Disk):
                raise exception.DomainInvalid(
                    domain=self.name,
                    reason=(
                        f'{item.path} is a disk of it, of which a checkpoint takes nothing: have '
                        f'it as persistent memory (pcowctl domain-xml --bus pmem)'
                    ),
                )
            if not item.readonly:
                found.append(item.path)
        return found if ram is None else [ram, *found]

    def select(self, device: str | None = None) -> Image:
        """The image that is meant.

        :param device: its alias (of a disk: its target), its path or the last part of it; may be
            None if there is only one
        :raises DomainInvalid: none or several match
        """
        images = self.images()
        found = [
            item
            for item in images
            if device is None or device in (item.alias, item.path, os.path.basename(item.path))
        ]
        if len(found) == 1:
            return found[0]
        if not images:
            reason = f'it has no NVDIMM and no disk on a *{names.IMAGE_SUFFIX} file'
        else:
            which = 'name one with --device' if device is None else f'{device} is not one of them'
            reason = (
                f'it has {len(images)} pcow image(s) '
                f'({", ".join(item.path for item in images)}): {which}'
            )
        raise exception.DomainInvalid(domain=self.name, reason=reason)

    def snapshot_create(
        self,
        name: str,
        device: str | None = None,
        *,
        quiesce: bool = False,
        max_wait: int | None = None,
    ) -> None:
        """Freeze the active layer; a running guest is paused for that moment by QEMU, and one
        whose image is a disk goes on between two of its requests.

        :param max_wait: milliseconds to wait for requests of disks whose buffers are in the image;
            by default QEMU's, 100
        :param quiesce: have the guest's agent write out and freeze its file systems meanwhile
        :raises DomainInvalid: ``quiesce``, and the guest's agent does not answer, or cannot freeze
        :raises StillFrozen: the same, the snapshot was made, and the agent cannot thaw
        :raises NoRoom: the operator's limits have no room for what the guest can then write once
            more
        """
        names.check_new_snapshot_name(name)
        found, quiet = self.select(device), self._quiet() if quiesce else contextlib.nullcontext()
        if not self.active():
            with room.for_snapshot(found.path), quiet:
                image.snapshot_create(found.path, name)
        elif isinstance(found, disk_xml.Disk):
            with self._server(found) as server, quiet:
                server.snapshot_create(name)
        else:
            # its agent and its QEMU answer when they like, and others need the pool meanwhile
            with room.for_long_snapshot(found.path), quiet:
                limit = {} if max_wait is None else {'max-wait': max_wait}
                self.qmp('pcow-snapshot-create', id=self._backend(found), name=name, **limit)

    def snapshot_list(self, device: str | None = None) -> list[model.Snapshot]:
        return image.snapshot_list(self.select(device).path, force_share=self.active())

    def snapshot_revert(
        self, name: str, device: str | None = None, *, reset: bool = False, image_only: bool = False
    ) -> None:
        """Drop what was written since the snapshot.

        :param reset: restart the guest if it is active; its memory would change beneath it
            otherwise
        :param image_only: also to a snapshot of the whole VM, whose disks stay as they are
        :raises DomainInvalid: it is active and ``reset`` was not given, or the image is a disk; or
            disks would stay behind
        """
        names.check_snapshot_name(name)
        found = self.select(device)
        if not image_only and self.is_checkpoint(name):
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f'{name} is a checkpoint of the whole VM, whose RAM this would leave as it is: '
                    f'use pcowctl vm revert, or give --image-only'
                ),
            )
        if not image_only and self._snapshot_of_libvirt(name) is not None:
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f"{name} is a snapshot of the whole VM, whose disks this would leave as they "
                    f"are: use virsh snapshot-revert, or "
                    'give --image-only'
                ),
            )
        if not self.active():
            if self.saved():
                raise exception.DomainInvalid(
                    domain=self.name,
                    reason=(
                        'its RAM was saved, and would go on with what the image held then: start '
                        'it first (virsh start), or give the RAM up (virsh managedsave-remove)'
                    ),
                )
            image.snapshot_revert(found.path, name)
            return
        if isinstance(found, disk_xml.Disk):
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f'it is active, and {found.path} is a disk of it, which would change beneath '
                    f'it: shut it down first'
                ),
            )
        if not reset:
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    'it is active, and its memory would change beneath it: shut it down first, or '
                    'give --reset to restart it'
                ),
            )
        with self.paused():
            # QEMU resets the guest then
            self.qmp('pcow-snapshot-revert', id=self._backend(found), name=name)

    def snapshot_delete(self, name: str, device: str | None = None) -> int | None:
        """Delete a snapshot; through libvirt if it is one of the whole VM, with its part on the
        disks.

        :return: bytes given back to the pool; None if libvirt or nbdkit did it
        :raises DomainInvalid: it is a checkpoint
        """
        names.check_snapshot_name(name)
        found = self.select(device)
        if self.is_checkpoint(name):
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f'{name} is a checkpoint of the whole VM, of which this would delete a part: '
                    f'use pcowctl vm delete-checkpoint'
                ),
            )
        whole = self._snapshot_of_libvirt(name)
        if whole is not None:
            whole.delete()
            return None
        if not self.active():
            return image.snapshot_delete(found.path, name)
        if isinstance(found, disk_xml.Disk):
            with self._server(found) as server:
                server.snapshot_delete(name)
            return None
        try:
            reply = self.qmp('pcow-snapshot-delete', id=self._backend(found), name=name)
        except exception.QmpFailed as e:
            if '--unpin' not in str(e):
                raise
            # QEMU may not list the pool to see whether the images that were made on it still exist
            image.snapshot_unpin(found.path, name)
            reply = self.qmp('pcow-snapshot-delete', id=self._backend(found), name=name)
        return model.Reader(reply, 'pcow-snapshot-delete', libvirt_domain.QEMU).integer('freed', 0)

    def snapshot_rename(self, name: str, new_name: str, device: str | None = None) -> None:
        """Give a snapshot of the image another name.

        :raises DomainInvalid: it is one of the whole VM
        """
        names.check_snapshot_name(name)
        names.check_new_snapshot_name(new_name)
        found = self.select(device)
        if self._snapshot_of_libvirt(name) is not None:
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f'{name} is a snapshot of the whole VM, which libvirt knows by this name: it '
                    f'cannot be renamed'
                ),
            )
        if self.is_checkpoint(name):
            raise exception.DomainInvalid(
                domain=self.name,
                reason=f'{name} is a checkpoint of the whole VM: it cannot be renamed',
            )
        if not self.active():
            image.snapshot_rename(found.path, name, new_name)
        elif isinstance(found, disk_xml.Disk):
            with self._server(found) as server:
                server.snapshot_rename(name, new_name)
        else:
            self.qmp(
                'pcow-snapshot-rename',
                **{'id': self._backend(found), 'name': name, 'new-name': new_name},
            )

    def _quiet(self) -> contextlib.AbstractContextManager[None]:
        """The guest's file systems are frozen; thawed at the end whatever happens."""
        if not self.running():
            raise exception.DomainInvalid(
                domain=self.name,
                reason=('it does not run, so its agent cannot quiesce it: leave out --quiesce'),
            )
        return guest_agent.frozen(self.name, self._domain, libvirt_host.binding('libvirt'))

    def _snapshot_of_libvirt(self, name: str) -> Any:
        """libvirt's snapshot of that name (virDomainSnapshot), or None."""
        found = [
            snapshot for snapshot in self._domain.listAllSnapshots() if snapshot.getName() == name
        ]
        return found[0] if found else None

    @contextlib.contextmanager
    def _server(self, disk: disk_xml.Disk) -> Iterator[control_socket.Server]:
        """nbdkit, which serves the image of a disk while the domain is active."""
        server = control_socket.find(disk.path)
        if server is None:
            raise exception.DomainInvalid(
                domain=self.name,
                reason=(
                    f'nobody serves {disk.path}, its disk {disk.target}, or this user may not '
                    f'write to that: shut it down and start it again'
                ),
            )
        try:
            yield server
        finally:
            server.close()

    def _backend(self, nvdimm: libvirt_xml.Nvdimm) -> str:
        if nvdimm.backend_id is None:
            raise exception.DomainInvalid(
                domain=self.name, reason=f'libvirt gives no alias for {nvdimm.path}'
            )
        return nvdimm.backend_id
