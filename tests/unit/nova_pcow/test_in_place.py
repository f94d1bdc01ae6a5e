# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

from typing import Any
from unittest import mock

from nova_pcow.snapshots import in_place
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.virt import libvirt_xml
from tests.unit.nova_pcow import checkpoints
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'


class _Name:
    def __init__(self, name: str) -> None:
        self._name = name

    def getName(self) -> str:  # noqa: N802 - as libvirt has it
        return self._name


class _Domain:
    """What is asked of a virDomain that is off."""

    def __init__(self, xml: str) -> None:
        self.xml, self.snapshots, self.active = xml, list[_Name](), False
        self.saved = False

    def UUIDString(self) -> str:  # noqa: N802
        return _UUID

    def name(self) -> str:
        return 'instance-00000001'

    def isActive(self) -> bool:  # noqa: N802
        return self.active

    def hasManagedSaveImage(self, _flags: int) -> bool:  # noqa: N802
        return self.saved

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        return self.xml

    def listAllSnapshots(self) -> list[_Name]:  # noqa: N802
        return self.snapshots


class _Connection:
    def __init__(self, found: _Domain) -> None:
        self._found = found

    def listAllDomains(self) -> list[_Domain]:  # noqa: N802
        return [self._found]

    def lookupByName(self, _name: str) -> _Domain:  # noqa: N802
        return self._found


class ServerTest(base.TestCase):
    """A server that is off, with real images in a pool."""

    def setUp(self) -> None:
        super().setUp()
        self.pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        self.paths = [
            device.create(self.pool, f'server-{_UUID}-{role}', 8 * units.MIB)
            for role in ('root', 'data0')
        ]
        devices = ''.join(
            libvirt_xml.Nvdimm(path=path, size=10 * units.MIB, alias=f'ua-pcow-{number}').to_xml()
            for number, path in enumerate(self.paths)
        )
        self.domain = _Domain(f'<domain><devices>{devices}</devices></domain>')
        self.server = self.find(_UUID)

    def find(self, name: str) -> in_place.Server:
        connection: Any = _Connection(self.domain)
        return in_place.Server(connection, name)

    def write(self, byte: int) -> None:
        for path in self.paths:
            tool.run(tool.find('pcow_io'), '-c', f'write -q -P {byte} 4M 64k', path)

    def check(self, byte: int) -> None:
        for path in self.paths:
            tool.run(tool.find('pcow_io'), '-r', '-c', f'read -q -P {byte} 4M 64k', path)

    def refused(self, words: str, name: str = 'before') -> None:
        error = self.assertRaises(in_place.ServerRefused, self.server.revert, name)
        self.assertIn(words, str(error))
        self.check(0x22)

    def changed(self) -> None:
        self.write(0x11)
        self.server.snapshot('before')
        self.write(0x22)

    def test_name_of_a_tenants(self) -> None:
        nova = f'<instance xmlns="{libvirt_xml.NOVA_NAMESPACE}"><name>web1</name></instance>'
        self.domain.xml = self.domain.xml.replace(
            '<domain>', f'<domain><metadata>{nova}</metadata>'
        )
        error = self.assertRaises(in_place.ServerRefused, self.find, 'web1')
        self.assertIn(f'give the ID ({_UUID})', str(error))
        error = self.assertRaises(in_place.ServerRefused, self.find, 'web2')
        self.assertIn('no domain of this host has this ID', str(error))

    def test_revert(self) -> None:
        self.changed()
        self.assertEqual(['ua-pcow-0', 'ua-pcow-1'], self.server.revert('before'))
        self.check(0x11)
        self.write(0x33)
        self.server.revert('before')  # as often as one likes
        self.check(0x11)

    def test_size_of_the_flavor_is_kept(self) -> None:
        self.changed()
        device.grow(self.paths[0], 16 * units.MIB)
        self.server.revert('before')
        self.check(0x11)
        self.assertEqual([16, 8], [device.window(path).size // units.MIB for path in self.paths])

    def test_size_is_kept_by_a_revert_that_was_killed(self) -> None:
        """Behind the revert, before the image grew again: libvirt knows the size that the server
        has.
        """
        self.changed()
        device.grow(self.paths[0], 16 * units.MIB)
        self.domain.xml = self.domain.xml.replace(
            f"<size unit='KiB'>{10 << 10}</size>", f"<size unit='KiB'>{18 << 10}</size>", 1
        )
        self.domain.xml = self.domain.xml.replace(
            f'<size unit="KiB">{10 << 10}</size>', f'<size unit="KiB">{18 << 10}</size>', 1
        )
        server = self.find(_UUID)
        with mock.patch.object(device, 'grow', side_effect=KeyboardInterrupt):
            self.assertRaises(KeyboardInterrupt, server.revert, 'before')
        self.assertEqual(8, device.window(self.paths[0]).size // units.MIB)
        server.revert('before')
        self.check(0x11)
        self.assertEqual([16, 8], [device.window(path).size // units.MIB for path in self.paths])

    def test_guest_that_destroyed_its_info_block(self) -> None:
        self.changed()
        tool.run(tool.find('pcow_io'), '-c', 'write -q -P 0 0 8k', self.paths[0])
        self.server.revert('before')
        self.assertEqual(8 * units.MIB, device.window(self.paths[0]).size)

    def test_one_image_alone(self) -> None:
        image.snapshot_create(self.paths[1], 'one')
        self.assertEqual(['ua-pcow-1'], self.server.revert('one'))

    def test_name_that_is_taken(self) -> None:
        image.snapshot_create(self.paths[1], 'one')
        error = self.assertRaises(in_place.ServerRefused, self.server.snapshot, 'one')
        self.assertIn('choose another name', str(error))
        self.assertEqual([], image.snapshot_list(self.paths[0]))

    def test_snapshot_that_fails_half_way(self) -> None:
        tool.run(tool.find('pcow_io'), '-c', 'write -q 0 4k', self.paths[1])
        with open(self.paths[1], 'r+b') as f:
            f.write(bytes(8192))  # no header
        server = self.server
        self.assertRaises(exception.PcowError, server.snapshot, 'one')
        self.assertEqual([], image.snapshot_list(self.paths[0]))

    def test_refused(self) -> None:
        self.changed()
        self.refused('it has no snapshot other; there are: before', 'other')
        self.refused("names that begin with 'nova-'", 'nova-resize')
        self.domain.snapshots.append(_Name('nova-suspended'))
        self.refused('it is suspended')
        self.domain.snapshots.clear()
        self.domain.saved = True  # a root that is a disk
        self.refused('it is suspended')
        self.domain.saved = False
        self.domain.snapshots.clear()
        image.snapshot_create(self.paths[1], 'nova-resize-7')
        self.refused('a resize waits for its end')
        image.snapshot_delete(self.paths[1], 'nova-resize-7')
        image.snapshot_create(self.paths[1], 'nova-sent')
        self.refused('it was copied to another host')
        image.snapshot_delete(self.paths[1], 'nova-sent')
        self.domain.xml = self.domain.xml.replace(
            '<devices>', '<devices><disk><source file="/x/disk.rescue"/></disk>'
        )
        self.refused('rescue mode')

    def test_checkpoint(self) -> None:
        """Its RAM would stay what it is."""
        made, loading = self.useFixture(checkpoints.Checkpoints()), '.loading-checkpoint-1.2-3'
        self.changed()
        ram = self.pool.create_image(f'server-{_UUID}-ram', size=2 * units.MIB)
        for path in (*self.paths, ram):
            image.snapshot_create(path, checkpoints.WARM)
        root = libvirt_xml.parse(self.domain.xml)
        libvirt_xml.add_ram(root, ram)
        self.domain.xml = libvirt_xml.to_string(root)
        self.refused('use pcowctl vm revert', checkpoints.WARM)
        image.snapshot_create(ram, 'nova-suspended')
        self.refused('it is suspended')
        image.snapshot_delete(ram, 'nova-suspended')
        made.names.add(loading)
        program = tool.find('pcow_img')
        tool.run(program, 'snapshot', '--rename', checkpoints.WARM, loading, ram)
        self.refused('was being reverted to a checkpoint')
        image.snapshot_delete(ram, loading)
        self.server.revert('before')

    def test_running(self) -> None:
        self.changed()
        self.domain.active = True
        self.refused('give --reset to restart it')

    def test_other_domains(self) -> None:
        error = self.assertRaises(in_place.ServerRefused, self.find, 'instance-00000002')
        self.assertIn('no domain of this host', str(error))
        self.domain.xml = '<domain><devices/></domain>'
        error = self.assertRaises(in_place.ServerRefused, self.find, 'instance-00000001')
        self.assertIn('no persistent memory of its own', str(error))
