# SPDX-License-Identifier: Apache-2.0
"""A pcow image as an ordinary disk of a libvirt domain, for a guest that knows no persistent
memory: builder and parser.

nbdkit serves the data area of the image, without the info block in front of it, at a socket of the
domain; QEMU shows that as a disk. Firmware boots from it. What the guest has flushed is durable.
:mod:`pcow_driver.virt.disk_server` does that by what the domain says of its images in its
``<metadata>``.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import os
import re
from typing import Any
import uuid as uuidlib
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.export import nbdkit
from pcow_driver.virt import libvirt_xml

# How a guest sees an image: as a memory device, or as a disk on virtio.
PMEM, VIRTIO = BUSES = ('pmem', 'virtio')

NAMESPACE = 'urn:pcow:domain-disks'  # the hook has it as well
DIRECTORY = '/run/pcow/domains'  # root's, and gone when the host starts again
EXPORT = 'export'  # in the directory of a disk

# Requests of the guest wait for nbdkit, which its unit starts again; libvirt knows this since 9.2.
RECONNECT_SECONDS = 60
# A guest whose disk fails is paused and can go on, rather than see its file system break.
ERROR_POLICY = {'error_policy': 'stop', 'rerror_policy': 'stop'}
_TARGET = re.compile(r'[a-z]{2,8}')
_LIST, _ITEM = f'{{{NAMESPACE}}}disks', f'{{{NAMESPACE}}}disk'
ET.register_namespace('pcow-disks', NAMESPACE)


def check_uuid(text: str) -> str:
    """The UUID of a domain as libvirt writes it.

    :raises XmlInvalid:
    """
    try:
        return str(uuidlib.UUID(text))
    except ValueError:
        raise exception.XmlInvalid(reason=f'{text!r} is no UUID of a domain') from None


def socket_path(uuid: str, target: str) -> str:
    """Where a disk of a domain is served: its own place, as two domains may name one image.

    :raises XmlInvalid:
    """
    return os.path.join(DIRECTORY, f'{check_uuid(uuid)}-{target}', EXPORT, nbdkit.SOCKET)


def add_socket(source: Any, socket: str) -> None:
    """Have a ``<source protocol='nbd'>`` name a socket, to which QEMU connects again.

    :param source: element of xml.etree or of lxml
    """
    for tag, attributes in (
        ('host', {'transport': 'unix', 'socket': socket}),
        ('reconnect', {'delay': str(RECONNECT_SECONDS)}),
    ):
        source.append(source.makeelement(tag, attributes))


@dataclasses.dataclass(frozen=True)
class Disk:
    """One disk of a domain, on an image."""

    path: str
    size: int  # bytes, info block included: the virtual size of the image
    target: str = 'vda'

    @property
    def alias(self) -> str:
        """By which people name it; QEMU's is another one."""
        return self.target

    def check(self) -> None:
        """:raises XmlInvalid: the hook would not serve it"""
        if not os.path.isabs(self.path) or not self.path.endswith(names.IMAGE_SUFFIX):
            raise exception.XmlInvalid(
                reason=f'{self.path} is not the absolute path of a *{names.IMAGE_SUFFIX} file'
            )
        if self.size <= 0 or self.size % units.SLAB_SIZE:
            raise exception.XmlInvalid(
                reason=f'the size {self.size} of {self.path} is not a multiple of 2 MiB'
            )
        if not _TARGET.fullmatch(self.target):
            raise exception.XmlInvalid(reason=f'the target {self.target!r} is no name of a disk')

    def to_element(self, uuid: str) -> ET.Element:
        """:param uuid: of the domain
        :raises XmlInvalid:
        """
        self.check()
        disk = ET.Element('disk', type='network', device='disk')
        driver = {'name': 'qemu', 'type': 'raw', 'discard': 'unmap', **ERROR_POLICY}
        ET.SubElement(disk, 'driver', driver)
        add_socket(ET.SubElement(disk, 'source', protocol='nbd'), socket_path(uuid, self.target))
        ET.SubElement(disk, 'target', dev=self.target, bus=VIRTIO)
        return disk


def metadata(found: Sequence[Disk]) -> ET.Element:
    """What goes into the ``<metadata>`` of a domain, for the hook and for :func:`disks`.

    :raises XmlInvalid:
    """
    element = ET.Element(_LIST)
    for item in found:
        item.check()
        ET.SubElement(element, _ITEM, target=item.target, image=item.path, size=str(item.size))
    return element


def disks(domain_xml: str) -> list[Disk]:
    """The disks of a domain that are pcow images.

    :raises XmlInvalid:
    """
    found = []
    for item in libvirt_xml.parse(domain_xml).findall(f'metadata/{_LIST}/{_ITEM}'):
        size = item.get('size', '')
        disk = Disk(
            path=item.get('image', ''),
            size=int(size) if size.isascii() and size.isdigit() else 0,
            target=item.get('target', ''),
        )
        disk.check()
        found.append(disk)
    return found
