# SPDX-License-Identifier: Apache-2.0
"""The root of a server as an ordinary disk (``pcow:bus=virtio``), for a guest that knows no
persistent memory: firmware boots from it.

The image is the same as for one in persistent memory. nbdkit serves it to QEMU; the libvirt hook
starts and ends that with the domain (:mod:`pcow_driver.virt.disk_server`), so nothing here has to.
"""

from __future__ import annotations

from typing import Any

from lxml import etree
from nova.virt.libvirt import config as vconfig

from nova_pcow.servers import disk
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_xml


class RootDisk(disk.NbdDisk):
    """The disk that Nova would have given the server, at its place and on its bus."""

    def __init__(self, nova_disk: vconfig.LibvirtConfigGuestDisk, uuid: str, path: str) -> None:
        """
        :param uuid: of the server, which is that of its domain
        :param path: of the image
        """
        target = str(nova_disk.target_dev)
        super().__init__(nova_disk, disk_xml.socket_path(uuid, target))
        self.image_path, self.target = path, target
        # whatever images_type and disk_cachemodes say: the guest's flush counts
        self.driver_name, self.driver_format = 'qemu', 'raw'
        self.driver_cache, self.driver_io, self.driver_discard = 'writeback', None, 'unmap'
        self.source_path = None
        # of images_type rbd, and of disks that Nova encrypts
        self.source_name = self.auth_username = None
        self.auth_secret_type = self.auth_secret_uuid = None
        self.ephemeral_encryption = None

    def format_dom(self) -> Any:
        element = super().format_dom()
        driver = element.find('driver')
        for name, value in disk_xml.ERROR_POLICY.items():
            driver.set(name, value)
        return element


class Metadata(vconfig.LibvirtConfigObject):
    """What the hook and ``pcowctl snapshot --domain`` read."""

    def __init__(self, disks: list[disk_xml.Disk]) -> None:
        super().__init__(root_name='disks')
        self._disks = disks

    def format_dom(self) -> Any:
        return etree.fromstring(libvirt_xml.to_string(disk_xml.metadata(self._disks)))


def add_metadata(guest: Any, size: int) -> None:
    """Tell in the configuration of a guest which image its root is.

    :param guest: LibvirtConfigGuest
    :param size: virtual size of the image in bytes
    """
    disks = [
        disk_xml.Disk(path=item.image_path, size=size, target=item.target)
        for item in guest.devices
        if isinstance(item, RootDisk)
    ]
    if disks:
        guest.metadata.append(Metadata(disks))
