# SPDX-License-Identifier: Apache-2.0
"""The XML of a fork: what is new in it, what stays, and what cannot be there twice."""

import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.virt import fork_xml
from pcow_driver.virt import libvirt_xml
from tests.unit.pcow_driver import base

_IMAGES = {'/pool/web1.pcow': '/pool/web2.pcow', '/pool/web1-ram.pcow': '/pool/web2-ram.pcow'}
_XML = """<domain type='kvm'><name>web1</name><uuid>5c8d2a5e-62b6-4a10-9b0d-5d1b3a1d6f00</uuid>
<metadata><ram xmlns='urn:pcow:domain' path='/pool/web1-ram.pcow'/></metadata>
<genid>43dc0cf8-809b-4adb-9bea-a9abb5f3d90e</genid><memory unit='KiB'>1048576</memory>
<devices>
<memory model='nvdimm' access='shared'><source><path>/pool/web1.pcow</path></source>
<target><size unit='KiB'>67584</size><node>0</node></target>
<address type='dimm' slot='0'/></memory>
<memory model='nvdimm' access='shared'><source><path>/pool/tools.pcow</path></source>
<target><size unit='KiB'>67584</size><node>0</node><readonly/></target></memory>
<serial type='file'><source path='/var/log/web1' append='on'/><log file='/var/log/w'/>
<target port='0'/></serial>
<channel type='unix'><source mode='bind' path='/run/web1.agent'/><target type='virtio'/></channel>
{more}</devices></domain>"""


class ForkXmlTest(base.TestCase):
    def fork(self, more: str = '') -> ET.Element:
        return ET.fromstring(fork_xml.fork(_XML.format(more=more), 'web2', _IMAGES))

    def test_what_is_new(self) -> None:
        root, parent = self.fork(), ET.fromstring(_XML.format(more=''))
        self.assertEqual('web2', root.findtext('name'))
        for tag in ('uuid', 'genid'):
            self.assertNotEqual(parent.findtext(tag), root.findtext(tag))
        self.assertEqual(
            ['/pool/web2.pcow', '/pool/tools.pcow'],
            [element.text for element in root.iterfind('devices/memory/source/path')],
        )
        xml = ET.tostring(root, encoding='unicode')
        self.assertEqual('/pool/web2-ram.pcow', libvirt_xml.ram(xml))
        self.assertNotIn('/var/log', xml)
        self.assertNotIn('/run/web1', xml)
        self.assertEqual('pty', root.find('devices/serial').get('type'))  # type: ignore[union-attr]

    def test_it_is_not_protected(self) -> None:
        policy = "<p:protect xmlns:p='urn:pcow:protection' interval='auto'/>"
        xml = _XML.format(more='').replace('</metadata>', f'{policy}</metadata>')
        forked = fork_xml.fork(xml, 'web2', _IMAGES)
        self.assertNotIn('protect', forked)
        self.assertEqual('/pool/web2-ram.pcow', libvirt_xml.ram(forked))

    def test_what_stays(self) -> None:
        """The state of the devices is loaded by their addresses."""
        root = self.fork()
        self.assertEqual('1048576', root.findtext('memory'))
        self.assertIsNotNone(root.find('devices/memory/address[@slot="0"]'))
        self.assertIsNotNone(root.find('devices/serial/target[@port="0"]'))

    def test_what_cannot_be_there_twice(self) -> None:
        for more, words in (
            ("<interface type='bridge'><mac address='52:54:00:00:00:01'/></interface>", '52:54'),
            ("<interface type='network'/>", 'type network'),
            ("<vsock model='virtio'/>", 'vsock'),
            ("<hostdev mode='subsystem' type='pci'/>", 'device of the host'),
            ("<shmem name='x'/>", 'shared memory'),
            ("<graphics type='vnc'><listen type='socket' socket='/s'/></graphics>", 'screen'),
            ("<rng model='virtio'><backend model='egd' type='unix'/></rng>", 'random numbers'),
            ("<tpm model='tpm-crb'><backend type='external'/></tpm>", 'TPM'),
            ("<disk type='file' device='disk'><source file='/d'/></disk>", 'disk'),
            ("<memory model='nvdimm'><source><path>/raw</path></source></memory>", '/raw'),
        ):
            error = self.assertRaises(exception.DomainInvalid, self.fork, more)
            self.assertIn(words, str(error))
            self.assertIn('web1', str(error))
        self.fork(
            "<interface type='user'/><graphics type='vnc' port='-1'/>"
            "<disk type='file' device='cdrom'><source file='/c'/></disk>"
            "<disk type='file' device='disk'><source file='/d'/><readonly/></disk>"
        )

    def test_files_that_the_guest_writes_to(self) -> None:
        root = self.fork(
            "<parallel type='file'><source path='/p'/></parallel>"
            "<channel type='file'><source path='/c'/><target type='virtio'/></channel>"
        )
        self.assertEqual('pty', root.find('devices/parallel').get('type'))  # type: ignore[union-attr]
        self.assertEqual(['unix', 'pty'], [c.get('type') for c in root.iterfind('devices/channel')])
        self.assertNotIn("path='/c'", ET.tostring(root, encoding='unicode').replace('"', "'"))

    def test_arguments_of_qemu(self) -> None:
        line = (
            "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>{}</q:commandline>"
        )
        allowed = line.format("<q:arg value='-global'/><q:arg value='nvdimm.pcow-volatile=on'/>")
        xml = _XML.format(more='').replace('</domain>', f'{allowed}</domain>')
        fork_xml.fork(xml, 'web2', _IMAGES)
        for more in (
            line.format("<q:arg value='-global'/><q:arg value='isa-serial.chardev=x'/>"),
            "<q:override xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/>",
        ):
            xml = _XML.format(more='').replace('</domain>', f'{more}</domain>')
            self.assertRaises(exception.DomainInvalid, fork_xml.fork, xml, 'web2', _IMAGES)
        other = line.format("<q:arg value='-chardev'/><q:arg value='file,id=x,path=/x'/>")
        xml = _XML.format(more='').replace('</domain>', f'{other}</domain>')
        error = self.assertRaises(exception.DomainInvalid, fork_xml.fork, xml, 'web2', _IMAGES)
        self.assertIn('qemu:commandline', str(error))

    def test_other_ram_than_it_runs_with(self) -> None:
        images = {'/pool/web1.pcow': '/pool/web2.pcow'}
        error = self.assertRaises(
            exception.DomainInvalid, fork_xml.fork, _XML.format(more=''), 'web2', images
        )
        self.assertIn('other RAM', str(error))

    def test_generation_id(self) -> None:
        xml = _XML.format(more='')
        self.assertTrue(fork_xml.has_generation_id(xml))
        self.assertFalse(fork_xml.has_generation_id(xml.replace('genid', 'other')))
