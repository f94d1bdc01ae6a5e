# SPDX-License-Identifier: Apache-2.0
"""The XML of a domain that goes on from a checkpoint of another one.

Its devices have to be those of the parent, with the same addresses, as the state of them is loaded.
What names the machine to others is new, or is not allowed.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
import itertools
import uuid as uuidlib
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.virt import domain_xml as domain_xml_module
from pcow_driver.virt import libvirt_xml

_QEMU = f'{{{libvirt_xml.QEMU_NAMESPACE}}}'
_PROTECTION = f'{{{libvirt_xml.PROTECTION_NAMESPACE}}}protect'
# What two machines cannot both have, by where it is in <devices>.
_SHARED = {
    'vsock': 'a vsock',
    'hostdev': 'a device of the host',
    'shmem': 'shared memory',
    "graphics/listen[@type='socket']": 'a screen on a socket',
    "rng/backend[@model='egd']": 'a source of random numbers on a socket',
    "tpm/backend[@type='external']": 'a TPM of another program',
}


def has_generation_id(domain_xml: str) -> bool:
    """Whether its guest is told when it goes on from a moment that was there before.

    :raises XmlInvalid:
    """
    return libvirt_xml.parse(domain_xml).find('genid') is not None


def check(domain_xml: str, images: Collection[str]) -> None:
    """Before anything is made for a fork.

    :param images: paths of those that the parent's guest stores to
    :raises DomainInvalid: it has what two machines cannot both have
    :raises XmlInvalid:
    """
    root = libvirt_xml.parse(domain_xml)
    _refuse_shared(root)
    _refuse_files(root, images)


def fork(domain_xml: str, name: str, images: Mapping[str, str]) -> str:
    """The XML of a domain ``name`` on other images.

    :param domain_xml: of the parent, as it is defined
    :param images: path of the child's image, by that of the parent's
    :raises DomainInvalid: as :func:`check`
    :raises XmlInvalid:
    """
    check(domain_xml, images)
    root = libvirt_xml.parse(domain_xml)
    for tag, text in (('name', name), ('uuid', str(uuidlib.uuid4()))):
        element = root.find(tag)
        if element is None:
            element = ET.SubElement(root, tag)
        element.text = text
    generation = root.find('genid')
    if generation is not None:
        generation.text = str(uuidlib.uuid4())
    for metadata in root.iterfind('metadata'):
        for element in metadata.findall(_PROTECTION):
            metadata.remove(element)  # whether a fork outlives the host is for its owner to say
    _replace_images(root, images)
    _open_consoles(root)
    return libvirt_xml.to_string(root)


def _refuse_shared(root: ET.Element) -> None:
    parent = root.findtext('name') or ''
    for interface in root.iterfind('devices/interface'):
        kind = interface.get('type')
        if kind != 'user':
            mac = interface.find('mac')
            address = '' if mac is None else f' {mac.get("address")}'
            raise exception.DomainInvalid(
                domain=parent,
                reason=(
                    f'its interface{address} of type {kind} would be there twice, with one '
                    f'address, as the guest keeps what it had: take it away before the checkpoint '
                    f'(virsh detach-interface), and give each fork one of its own'
                ),
            )
    for path, what in _SHARED.items():
        if root.find(f'devices/{path}') is not None:
            raise exception.DomainInvalid(
                domain=parent, reason=f'it has {what}, which a fork cannot have as well'
            )
    for disk in root.iterfind('devices/disk'):
        if disk.get('device', 'disk') == 'disk' and disk.find('readonly') is None:
            raise exception.DomainInvalid(
                domain=parent, reason='it has a disk that it may write to, which a fork would share'
            )


def _refuse_files(root: ET.Element, images: Collection[str]) -> None:
    """What the child would store to, and its parent as well."""
    parent = root.findtext('name') or ''
    for memory in root.iterfind('devices/memory'):
        path = memory.findtext('source/path')
        if path and path not in images and memory.find('target/readonly') is None:
            raise exception.DomainInvalid(
                domain=parent,
                reason=f'its memory device on {path} is no pcow image, so a fork would share it',
            )
    ram = libvirt_xml.find_ram(root)
    if ram is not None and ram.get('path') not in images:
        raise exception.DomainInvalid(
            domain=parent,
            reason='it was defined with other RAM since it was started: start it anew',
        )
    own = [element for element in root if str(element.tag).startswith(_QEMU)]
    words = [argument.get('value') for element in own for argument in element]
    if [element.tag for element in own] not in ([], [f'{_QEMU}commandline']) or (
        own and tuple(words) != domain_xml_module.ACCEPT_VOLATILE
    ):
        raise exception.DomainInvalid(
            domain=parent,
            reason=(
                'its XML has words for QEMU alone (qemu:commandline and the like), which may name '
                'files and sockets that a fork cannot have as well'
            ),
        )


def _replace_images(root: ET.Element, images: Mapping[str, str]) -> None:
    for source in root.iterfind('devices/memory/source/path'):
        source.text = images.get(source.text or '', source.text)
    ram = libvirt_xml.find_ram(root)
    if ram is not None:
        ram.set('path', images[ram.get('path', '')])


def _open_consoles(root: ET.Element) -> None:
    """A file or a socket of the parent's is not the child's: each gets a terminal of its own."""
    consoles = [root.findall(f'devices/{kind}') for kind in ('serial', 'console', 'parallel')]
    channels = root.findall('devices/channel')
    files = [item for item in channels if item.get('type') not in ('unix', 'spicevmc')]
    for device in itertools.chain(*consoles, files):
        device.set('type', 'pty')
        for tag in ('source', 'log', 'protocol'):
            for child in device.findall(tag):
                device.remove(child)
    for channel in channels:
        for child in channel.findall('source'):
            channel.remove(child)
