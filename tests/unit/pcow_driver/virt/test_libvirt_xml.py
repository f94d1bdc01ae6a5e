# SPDX-License-Identifier: Apache-2.0
import dataclasses
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.unit.pcow_driver import base

PLAIN = libvirt_xml.Nvdimm(path='/pool/vm.pcow', size=66 * units.MIB)
FULL = libvirt_xml.Nvdimm(
    path='/pool/a & <b>.pcow',
    size=4 * units.GIB,
    node=1,
    label_size=128 * units.KIB,
    align_size=units.GIB,
    pmem=True,
    readonly=True,
    alias='ua-root',
)

# As libvirt 9.0 gives it back for a running domain.
FROM_LIBVIRT = """<domain type='qemu' id='1'><name>x</name><devices>
 <memory model='dimm'><target><size unit='KiB'>524288</size><node>0</node></target></memory>
 <memory model='nvdimm' access='shared'>
  <source><path>/pool/vm.pcow</path><alignsize unit='KiB'>2048</alignsize></source>
  <target><size unit='KiB'>67584</size><node>0</node></target>
  <alias name='nvdimm0'/><address type='dimm' slot='0' base='0x100000000'/>
 </memory></devices></domain>"""


class NvdimmTest(base.TestCase):
    def test_round_trip(self) -> None:
        for nvdimm in (PLAIN, FULL, dataclasses.replace(PLAIN, node=None, align_size=None)):
            self.assertEqual(
                nvdimm, libvirt_xml.Nvdimm.from_element(ET.fromstring(nvdimm.to_xml()))
            )

    def test_is_always_shared(self) -> None:
        self.assertEqual('shared', PLAIN.to_element().get('access'))
        self.assertRaises(exception.XmlInvalid, dataclasses.replace(PLAIN, shared=False).to_element)

    def test_from_libvirt(self) -> None:
        (found,) = libvirt_xml.nvdimms(FROM_LIBVIRT)
        self.assertEqual(dataclasses.replace(PLAIN, alias='nvdimm0'), found)
        self.assertEqual('memnvdimm0', found.backend_id)
        self.assertIsNone(PLAIN.backend_id)

    def test_private_mapping_is_noticed(self) -> None:
        (found,) = libvirt_xml.nvdimms(FROM_LIBVIRT.replace(" access='shared'", ''))
        self.assertFalse(found.shared)

    def test_units(self) -> None:
        for text, size in (
            ("unit='MiB'>66", 66 << 20),
            ("unit='b'>4096", 4096),
            ("unit='GB'>1", 10**9),
            (">64", 64 << 10),
        ):
            (found,) = libvirt_xml.nvdimms(FROM_LIBVIRT.replace("unit='KiB'>67584", text))
            self.assertEqual(size, found.size)

    def test_refuses_to_build(self) -> None:
        for change in (
            {'path': 'vm.pcow'},
            {'size': 0},
            {'size': 3 * units.MIB},
            {'label_size': 4096},
            {'label_size': 66 * units.MIB},
        ):
            self.assertRaises(exception.XmlInvalid, dataclasses.replace(PLAIN, **change).to_xml)

    def test_refuses_to_parse(self) -> None:
        for old, new in (
            ("unit='KiB'>67584", "unit='ells'>67584"),
            ('67584', '-1'),
            ('67584', '²'),
            ('<node>0', '<node>x'),
            ('<path>/pool/vm.pcow</path>', ''),
            ('</domain>', ''),
        ):
            self.assertRaises(
                exception.XmlInvalid, libvirt_xml.nvdimms, FROM_LIBVIRT.replace(old, new)
            )


class DomainTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.domain = domain_xml.Domain(
            name='vm', memory=units.GIB, nvdimms=[PLAIN], kernel='/boot/vmlinuz'
        )

    def _root(self, **changes: object) -> ET.Element:
        return ET.fromstring(dataclasses.replace(self.domain, **changes).to_xml())  # type: ignore[arg-type]

    def test_what_an_nvdimm_needs(self) -> None:
        root = self._root(vcpus=2)
        self.assertIsNotNone(root.find('features/acpi'))
        self.assertEqual('1048576', root.findtext('memory'))
        maximum = root.find('maxMemory')
        assert maximum is not None
        self.assertEqual('16', maximum.get('slots'))
        self.assertEqual((64 << 20) + (1 << 20) + 66 * 1024, int(maximum.text or ''))
        cell = root.find('cpu/numa/cell')
        assert cell is not None
        self.assertEqual(
            {'id': '0', 'cpus': '0-1', 'memory': '1048576', 'unit': 'KiB'}, cell.attrib
        )
        self.assertEqual([PLAIN], libvirt_xml.nvdimms(ET.tostring(root, encoding='unicode')))

    def test_defaults_bring_no_disk_and_no_network(self) -> None:
        root = self._root()
        self.assertIsNone(root.find('devices/disk'))
        self.assertIsNone(root.find('devices/interface'))
        self.assertIsNone(root.find('devices/emulator'))
        self.assertIsNone(root.find('os/initrd'))
        console = root.find('devices/console')
        assert console is not None
        self.assertEqual('pty', console.get('type'))

    def test_no_timer_wakes_a_guest_that_does_nothing(self) -> None:
        (timer,) = self.domain.to_element().findall('clock/timer')
        self.assertEqual({'name': 'hpet', 'present': 'no'}, timer.attrib)

    def test_options(self) -> None:
        root = self._root(
            type='qemu',
            emulator='/opt/qemu',
            initrd='/boot/i',
            cmdline='a "b" <c>',
            serial_file='/tmp/log',
            carrier_disk='/pool/state.qcow2',
            network='user',
            uuid='6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27',
        )
        self.assertEqual('qemu', root.get('type'))
        self.assertEqual(
            ['/opt/qemu', '/boot/i', 'a "b" <c>'],
            [root.findtext(name) for name in ('devices/emulator', 'os/initrd', 'os/cmdline')],
        )
        for path, attribute, value in (
            ('devices/serial/source', 'path', '/tmp/log'),
            ('devices/disk/driver', 'type', 'qcow2'),
            ('devices/disk/source', 'file', '/pool/state.qcow2'),
            ('devices/interface', 'type', 'user'),
        ):
            element = root.find(path)
            assert element is not None
            self.assertEqual(value, element.get(attribute))

    def test_a_seed_takes_the_next_name(self) -> None:
        seed = {'seed': '/seeds/web1.iso'}
        disk = disk_xml.Disk(path='/pool/vm.pcow', size=66 * units.MIB)
        uuid = '6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27'
        for name, changes in (
            ('vda', seed),
            ('vdb', seed | {'carrier_disk': '/pool/state.qcow2'}),
            ('vdb', seed | {'nvdimms': (), 'kernel': None, 'disks': [disk], 'uuid': uuid}),
        ):
            (found,) = [
                one
                for one in self._root(**changes).findall('devices/disk')
                if one.find('readonly') is not None
            ]
            target = found.find('target')
            assert target is not None
            self.assertEqual({'dev': name, 'bus': 'virtio'}, target.attrib)

    def test_what_the_guest_reports_free_goes_back_to_the_host(self) -> None:
        for ram, attributes in (
            (None, {'model': 'virtio', 'freePageReporting': 'on'}),
            # it would stay in the image
            ('/pool/vm-ram.pcow', {'model': 'none'}),
        ):
            (balloon,) = self._root(ram=ram).findall('devices/memballoon')
            self.assertEqual(attributes, balloon.attrib)

    def test_ram_on_an_image(self) -> None:
        """What libvirt 9.0 takes: the file for the RAM is its own choice."""
        root = self._root(ram='/pool/a & <b>-ram.pcow')
        text = ET.tostring(root, encoding='unicode')
        self.assertEqual('/pool/a & <b>-ram.pcow', libvirt_xml.ram(text))
        self.assertEqual([PLAIN.path, '/pool/a & <b>-ram.pcow'], libvirt_xml.images(text))
        for path, attributes in (('source', {'type': 'file'}), ('access', {'mode': 'shared'})):
            element = root.find(f'memoryBacking/{path}')
            assert element is not None
            self.assertEqual(attributes, element.attrib)
        self.assertIsNone(libvirt_xml.ram(FROM_LIBVIRT))

    def test_refuses(self) -> None:
        changes: tuple[dict[str, object], ...] = (
            {'name': ''},
            {'name': 'a/b'},
            {'type': 'xen'},
            {'network': 'bridge'},
            {'vcpus': 0},
            {'memory': 1 << 20},
            {'memory': units.GIB + 1},
            {'nvdimms': []},
            {'kernel': 'vmlinuz'},
            {'initrd': './i'},
            {'seed': 'seed.iso'},
            {'ram': 'vm-ram.pcow'},
            {'ram': '/pool/vm-ram.pcow', 'memory': units.GIB + units.MIB},
        )
        for change in changes:
            self.assertRaises(exception.XmlInvalid, self._root, **change)
