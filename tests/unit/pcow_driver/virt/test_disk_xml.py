# SPDX-License-Identifier: Apache-2.0
import dataclasses
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.unit.pcow_driver import base

UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
DISK = disk_xml.Disk(path='/pool/a & <b>.pcow', size=66 * units.MIB)


class DiskTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.domain = domain_xml.Domain(name='vm', memory=units.GIB, disks=[DISK], uuid=UUID)

    def _root(self, **changes: object) -> ET.Element:
        return ET.fromstring(dataclasses.replace(self.domain, **changes).to_xml())  # type: ignore[arg-type]

    def test_round_trip(self) -> None:
        self.assertEqual([DISK], disk_xml.disks(self.domain.to_xml()))
        self.assertEqual([], libvirt_xml.nvdimms(self.domain.to_xml()))
        self.assertEqual([], disk_xml.disks('<domain/>'))

    def test_where_it_is_served(self) -> None:
        root = self._root(uuid=UUID.upper())
        host = root.find("devices/disk[@type='network']/source[@protocol='nbd']/host")
        assert host is not None
        self.assertEqual(
            f'/run/pcow/domains/{UUID}-vda/export/socket',
            host.get('socket'),
            'as the server has it',
        )
        self.assertLess(len(host.get('socket', '')), 108)  # sun_path

    def test_a_guest_on_a_disk_that_fails_is_paused(self) -> None:
        driver = self._root().find('devices/disk/driver')
        assert driver is not None
        self.assertEqual(('raw', 'stop'), (driver.get('type'), driver.get('error_policy')))

    def test_firmware_boots_it(self) -> None:
        root = self._root()
        for name in ('os/kernel', 'os/cmdline', 'devices/memory', 'maxMemory', 'cpu'):
            self.assertIsNone(root.find(name), name)
        boot = root.find('os')
        assert boot is not None
        self.assertIsNone(boot.get('firmware'))
        self.assertEqual('efi', self._root(firmware='efi').findall('os')[0].get('firmware'))

    def test_what_a_boot_loader_shows(self) -> None:
        for firmware, serial in (('bios', 'yes'), ('efi', None)):
            root = self._root(firmware=firmware)
            self.assertEqual(['off'], [one.get('state') for one in root.findall('features/smm')])
            found = [one.get('useserial') for one in root.findall('os/bios')]
            self.assertEqual([serial] if serial else [], found)

    def test_refuses_to_build(self) -> None:
        for disk in (
            dataclasses.replace(DISK, path='vm.pcow'),
            dataclasses.replace(DISK, path='/pool/vm.qcow2'),
            dataclasses.replace(DISK, size=0),
            dataclasses.replace(DISK, size=units.MIB),
            dataclasses.replace(DISK, target='../../x'),
            dataclasses.replace(DISK, target='vda/..'),
            dataclasses.replace(DISK, target=''),
        ):
            self.assertRaises(exception.XmlInvalid, self._root, disks=[disk])
        self.assertRaises(exception.XmlInvalid, self._root, uuid=None)
        self.assertRaises(exception.XmlInvalid, self._root, uuid=f'../{UUID}')
        self.assertRaises(exception.XmlInvalid, self._root, firmware='coreboot')
        self.assertRaises(exception.XmlInvalid, self._root, disks=[])

    def test_refuses_to_parse(self) -> None:
        xml = self.domain.to_xml()
        for old, new in (
            ('target="vda" image', 'target="../x" image'),
            ('image="/pool', 'image="pool'),
            ('.pcow" size', '" size'),
            ('size="69206016"', 'size="²"'),
            ('</domain>', ''),
        ):
            self.assertNotEqual(xml, xml.replace(old, new))
            self.assertRaises(exception.XmlInvalid, disk_xml.disks, xml.replace(old, new))
