# SPDX-License-Identifier: Apache-2.0
"""The libvirt elements of a pcow image, built and parsed: ``<memory model='nvdimm'>`` or
``'virtio-pmem'``, and what makes one the guest's RAM.
"""

from __future__ import annotations

import dataclasses
import os
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import units

MIN_LABEL_SIZE = 128 * units.KIB
# What a guest flushes is durable on an nvdimm if its pool is class pmem, on virtio-pmem also if it
# is class page-cache.
MODELS = ('nvdimm', 'virtio-pmem')
QEMU_NAMESPACE = 'http://libvirt.org/schemas/domain/qemu/1.0'
# libvirt has no element for it; the hook (etc/libvirt/hooks/qemu.d/pcow) reads this one.
_RAM_NAMESPACE = 'urn:pcow:domain'
PROTECTION_NAMESPACE = 'urn:pcow:protection'  # of pcow_driver.fixation
NOVA_NAMESPACE = 'http://openstack.org/xmlns/libvirt/nova/1.1'  # of the domains of Nova
DAMAGE_NAMESPACE = 'urn:pcow:damage'  # of pcow_driver.virt.notices
_RAM = f'{{{_RAM_NAMESPACE}}}ram'
ET.register_namespace('pcow', _RAM_NAMESPACE)
# Powers of 1000 and 1024 that libvirt accepts in unit=; a size without a unit is in KiB.
_UNITS = {
    'b': 1,
    'bytes': 1,
    'KB': 1000,
    'k': 1 << 10,
    'KiB': 1 << 10,
    'MB': 1000**2,
    'M': 1 << 20,
    'MiB': 1 << 20,
    'GB': 1000**3,
    'G': 1 << 30,
    'GiB': 1 << 30,
    'TB': 1000**4,
    'T': 1 << 40,
    'TiB': 1 << 40,
}


def add_size(parent: ET.Element, tag: str, size: int) -> ET.Element:
    """Append ``<tag unit='KiB'>``; ``size`` is in bytes, a multiple of 1024."""
    if size <= 0 or size % units.KIB:
        raise exception.InvalidSize(size=size, reason=f'libvirt counts <{tag}> in KiB')
    element = ET.SubElement(parent, tag, unit='KiB')
    element.text = str(size // units.KIB)
    return element


def read_size(element: ET.Element | None, what: str) -> int:
    """Bytes of a size element.

    :raises XmlInvalid: it is missing or not a size
    """
    if element is None:
        raise exception.XmlInvalid(reason=f'{what} is missing')
    unit = element.get('unit', 'KiB')
    text = (element.text or '').strip()
    if unit not in _UNITS or not (text.isascii() and text.isdigit()):
        raise exception.XmlInvalid(reason=f'{what} is {text!r} {unit}')
    return int(text) * _UNITS[unit]


def parse(xml: str) -> ET.Element:
    """The root element of a document.

    :raises XmlInvalid:
    """
    try:
        return ET.fromstring(xml)
    except ET.ParseError as e:
        raise exception.XmlInvalid(reason=str(e)) from None


def to_string(element: ET.Element) -> str:
    ET.indent(element)
    return ET.tostring(element, encoding='unicode') + '\n'


@dataclasses.dataclass(frozen=True)
class Nvdimm:
    """One NVDIMM or virtio-pmem device of a domain, backed by a file.

    access='shared' is always written: without it the guest's stores are private to QEMU and lost.
    """

    path: str
    size: int  # bytes, label area included: the virtual size of the image
    node: int | None = 0  # guest NUMA node
    # at the end of the image; with one, ndctl in the guest makes the namespace
    label_size: int | None = None
    align_size: int | None = units.SLAB_SIZE
    pmem: bool = False  # <pmem/>: QEMU must write with libpmem
    readonly: bool = False
    alias: str | None = None  # 'ua-...' if chosen by the user
    shared: bool = True  # as parsed; never False in what is built
    # virtio-pmem has neither node, label, alignment, <pmem/> nor <readonly/>
    model: str = MODELS[0]

    @property
    def backend_id(self) -> str | None:
        """Id of QEMU's memory backend object, which the QMP commands want; known when
        the alias is.
        """
        return f'mem{self.alias}' if self.alias else None

    def check(self) -> None:
        """:raises XmlInvalid: QEMU would not take it"""
        if not os.path.isabs(self.path):
            raise exception.XmlInvalid(reason=f'the image path {self.path} is not absolute')
        if self.size <= 0 or self.size % units.SLAB_SIZE:
            raise exception.XmlInvalid(
                reason=f'the size {self.size} of {self.path} is not a multiple of 2 MiB'
            )
        if self.label_size is not None and not MIN_LABEL_SIZE <= self.label_size < self.size:
            raise exception.XmlInvalid(
                reason=f'a label area of {self.label_size} bytes is not between 128 KiB and the '
                f'image'
            )
        if self.model not in MODELS or (
            self.model != 'nvdimm' and (self.label_size is not None or self.pmem or self.readonly)
        ):
            raise exception.XmlInvalid(
                reason=f'{self.path}: model {self.model} is unknown or has no label, <pmem/> or '
                f'<readonly/>'
            )
        if not self.shared:
            raise exception.XmlInvalid(
                reason=f"{self.path} needs access='shared': what the guest stores would be lost"
            )

    def to_element(self) -> ET.Element:
        """:raises XmlInvalid: QEMU would not take it"""
        self.check()
        memory = ET.Element('memory', model=self.model, access='shared')
        source = ET.SubElement(memory, 'source')
        ET.SubElement(source, 'path').text = self.path
        if self.align_size is not None and self.model == 'nvdimm':
            add_size(source, 'alignsize', self.align_size)
        if self.pmem:
            ET.SubElement(source, 'pmem')
        target = ET.SubElement(memory, 'target')
        add_size(target, 'size', self.size)
        if self.node is not None and self.model == 'nvdimm':
            ET.SubElement(target, 'node').text = str(self.node)
        if self.label_size is not None:
            add_size(ET.SubElement(target, 'label'), 'size', self.label_size)
        if self.readonly:
            ET.SubElement(target, 'readonly')
        if self.alias is not None:
            ET.SubElement(memory, 'alias', name=self.alias)
        return memory

    def to_xml(self) -> str:
        """For ``virsh attach-device`` and Domain.attachDevice."""
        return to_string(self.to_element())

    @classmethod
    def from_element(cls, memory: ET.Element) -> Nvdimm:
        """:raises XmlInvalid: not a device of the kind that :meth:`to_element` writes"""
        model = memory.get('model', '')
        if memory.tag != 'memory' or model not in MODELS:
            raise exception.XmlInvalid(reason='not a <memory model="nvdimm"> element')
        path = memory.findtext('source/path')
        if not path:
            raise exception.XmlInvalid(reason='an nvdimm has no source path')
        align, label, node = (
            memory.find(name) for name in ('source/alignsize', 'target/label/size', 'target/node')
        )
        node_text = None if node is None else (node.text or '').strip()
        if node_text is not None and not (node_text.isascii() and node_text.isdigit()):
            raise exception.XmlInvalid(reason=f'the NUMA node of {path} is {node_text!r}')
        alias = memory.find('alias')
        return cls(
            path=path,
            size=read_size(memory.find('target/size'), f'the size of {path}'),
            node=None if node_text is None else int(node_text),
            label_size=None if label is None else read_size(label, f'the label size of {path}'),
            align_size=None if align is None else read_size(align, f'the alignment of {path}'),
            pmem=memory.find('source/pmem') is not None,
            readonly=memory.find('target/readonly') is not None,
            alias=None if alias is None else alias.get('name'),
            shared=memory.get('access') == 'shared',
            model=model,
        )


def nvdimms(domain_xml: str) -> list[Nvdimm]:
    """All file-backed NVDIMMs and virtio-pmem devices of a domain, pcow or not.

    :raises XmlInvalid:
    """
    return [
        Nvdimm.from_element(element)
        for element in parse(domain_xml).findall('devices/memory')
        if element.get('model') in MODELS
    ]


def ram_metadata(path: str) -> ET.Element:
    """What the ``<metadata>`` of a domain says whose RAM is an image.

    :raises XmlInvalid:
    """
    if not os.path.isabs(path):
        raise exception.XmlInvalid(reason=f'the image path {path} is not absolute')
    return ET.Element(_RAM, path=path)


def with_metadata(domain_xml: str, namespace: str, element: str) -> str:
    """A definition with this element in its metadata, in place of one of this namespace.

    :param element: without namespace
    :raises XmlInvalid:
    """
    root, added = parse(domain_xml), parse(element)
    metadata = root.find('metadata')
    if metadata is None:
        metadata = ET.SubElement(root, 'metadata')
    for item in metadata.findall(f'{{{namespace}}}*'):
        metadata.remove(item)
    added.tag = f'{{{namespace}}}{added.tag}'
    metadata.append(added)
    return to_string(root)


def add_ram(domain: ET.Element, path: str) -> None:
    """Have an image be the guest's RAM.

    libvirt has QEMU make a file for the RAM then, shared and in a directory of the run; the hook
    puts a link to the image in its place.

    :param path: of the image, whose virtual size is the RAM
    :raises XmlInvalid:
    """
    element = ram_metadata(path)
    metadata = domain.find('metadata')
    if metadata is None:
        metadata = ET.SubElement(domain, 'metadata')
    metadata.append(element)
    backing = ET.SubElement(domain, 'memoryBacking')
    ET.SubElement(backing, 'source', type='file')
    ET.SubElement(backing, 'access', mode='shared')


def find_ram(domain: ET.Element) -> ET.Element | None:
    """What :func:`add_ram` made; its attribute ``path`` is that of the image."""
    return domain.find(f'metadata/{_RAM}')


def ram(domain_xml: str) -> str | None:
    """Path of the image that is the guest's RAM; None: it is none.

    :raises XmlInvalid:
    """
    element = find_ram(parse(domain_xml))
    return None if element is None else element.get('path')


def images(domain_xml: str) -> list[str]:
    """Paths of all files that :func:`nvdimms` and :func:`ram` name.

    :raises XmlInvalid:
    """
    found = ram(domain_xml)
    return [nvdimm.path for nvdimm in nvdimms(domain_xml)] + ([found] if found else [])


def user(domain_xml: str) -> int | None:
    """As whom libvirt runs the QEMU of a domain that is active; None: it does not tell.

    :raises XmlInvalid:
    """
    label = parse(domain_xml).findtext("seclabel[@model='dac']/label", '')
    uid = label.partition(':')[0].removeprefix('+')
    return int(uid) if uid.isascii() and uid.isdigit() else None


def has_agent_channel(domain_xml: str) -> bool:
    """Whether a domain has one, on which an agent in its guest may answer.

    :raises XmlInvalid:
    """
    return _agent_channel(domain_xml) is not None


def has_agent(domain_xml: str) -> bool:
    """Whether a running domain's guest has its agent's channel open; also if libvirt tells nothing
    of that.

    :raises XmlInvalid:
    """
    found = _agent_channel(domain_xml)
    return found is not None and found.get('state') != 'disconnected'


def _agent_channel(domain_xml: str) -> ET.Element | None:
    return parse(domain_xml).find("devices/channel/target[@name='org.qemu.guest_agent.0']")
