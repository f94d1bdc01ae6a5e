# SPDX-License-Identifier: Apache-2.0
"""Volumes as disks of servers without persistent memory, with the real nbdkit and qemu-io."""

import os
from pathlib import Path
import types
from typing import Any
from unittest import mock

from lxml import etree
from nova import exception as nova_exception
from nova import privsep as nova_privsep
from nova.virt.libvirt import config as vconfig

from nova_pcow import conf as nova_conf
from nova_pcow.servers import config
from nova_pcow.servers import confinement
from nova_pcow.servers import disk
from nova_pcow.servers import volume
from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from tests.unit.nova_pcow import base

ID = '0b3f1f3a-6c0e-4d0f-8a3b-54b8a1c1d2e3'
_SERVER = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
_CAPABILITIES = (
    '<capabilities><host><secmodel><model>{}</model><doi>0</doi></secmodel></host></capabilities>'
)
_DISK = {'type': 'disk', 'dev': 'vdb', 'bus': 'virtio'}


def _instance(**extra_specs: str) -> Any:
    return types.SimpleNamespace(
        uuid=_SERVER,
        flavor=types.SimpleNamespace(name='f', root_gb=0, extra_specs=extra_specs),
        system_metadata={},
    )


class DiskTest(base.ServersTestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        conf.CONF.set_override('nbdkit_plugin', str(programs / 'nbdkit-pcow-plugin.so'), 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'nbdkit_plugin', 'pcow')
        self.path = device.create(self.pool, f'volume-{ID}', 8 * units.MIB)
        self.connection: dict[str, Any] = {
            'driver_volume_type': 'pcow',
            'serial': ID,
            'data': {'volume_id': ID, 'device_path': self.path, 'access_mode': 'rw'},
        }
        host = mock.Mock(find_secret=mock.Mock(return_value=None))
        self.capabilities = host.get_connection.return_value.getCapabilities
        self.capabilities.return_value = _CAPABILITIES.format('none')
        self.driver = volume.PcowVolumeDriver(host)
        self.addCleanup(disk.stop, ID)

    def connected(self) -> str:
        """The XML of the disk."""
        self.driver.connect_volume(self.connection, _instance())
        return str(self.driver.get_config(self.connection, _DISK).to_xml())

    def io(self, command: str) -> str:
        return tool.run(tool.find('pcow_io'), '--no-map', '-c', command, self.path)

    def test_data(self) -> None:
        """Of the device, without the info block; durable when it is disconnected, and nobody else
        writes meanwhile.
        """
        xml = self.connected()
        source = etree.fromstring(xml).find('source')
        self.assertEqual(
            ('network', 'nbd'), (etree.fromstring(xml).get('type'), source.get('protocol'))
        )
        self.assertEqual(
            ('unix', None), (source.find('host').get('transport'), source.find('host').get('name'))
        )
        uri = f'nbd+unix:///?socket={source.find("host").get("socket")}'
        said = tool.run(
            tool.find_system('qemu-io', 'qemu-utils'),
            '-f',
            'raw',
            '-c',
            'write -P 7 0 1M',
            '-c',
            'length',
            uri,
        )
        self.assertIn('8 MiB', said)
        self.assertRaises(exception.ToolFailed, self.io, f'write -P 1 {2 * units.MIB} 1M')
        self.driver.disconnect_volume(self.connection, _instance())
        self.assertNotIn('failed', self.io(f'read -P 7 {2 * units.MIB} 1M'))
        self.assertEqual([], os.listdir(Path(locks.state_path(), 'disks')))

    def test_connected_again(self) -> None:
        """As a hard reboot does after a host that ended without a word."""
        self.assertEqual(self.connected(), self.connected())

    def test_what_nova_reads_back(self) -> None:
        """To detach it from a running server, Nova gives libvirt what it has read: without help
        that has no socket.
        """
        xml = self.connected()
        found = vconfig.LibvirtConfigGuestDisk()
        found.parse_str(xml)
        wanted, seen = (etree.fromstring(text) for text in (xml, disk.complete(found, ID).to_xml()))
        for place in ('source/host', 'target', 'alias', 'serial'):
            self.assertEqual(
                etree.tostring(wanted.find(place)).strip(), etree.tostring(seen.find(place)).strip()
            )

    def test_other_disks_stay_what_they_are(self) -> None:
        found = vconfig.LibvirtConfigGuestDisk()
        self.assertIs(found, disk.complete(found, ID))

    def test_persistent_memory_stays_what_it_was(self) -> None:
        instance = _instance(**{'pcow:root': 'true'})
        self.connected()
        self.driver.disconnect_volume(self.connection, instance)
        self.driver.connect_volume(self.connection, instance)
        self.assertIsInstance(self.driver.get_config(self.connection, _DISK), config.MemoryDevice)
        self.assertEqual([], os.listdir(Path(locks.state_path(), 'disks')))

    def test_damaged(self) -> None:
        os.truncate(self.path, 4096)
        self.assertRaisesRegex(nova_exception.InvalidVolume, 'volume-', self.connected)

    def test_larger_than_the_volume(self) -> None:
        """As memory and as a disk: whose QEMU it was before could write that."""
        self.connection['data']['size'] = 8 * units.MIB
        self.connected()
        self.driver.disconnect_volume(self.connection, _instance())
        image.resize(self.path, 64 * units.MIB)
        memory = _instance(**{'pcow:root': 'true'})
        for call in (
            self.connected,
            lambda: self.driver.connect_volume(self.connection, memory),
            lambda: self.driver.get_config(self.connection, _DISK),
        ):
            error = self.assertRaises(nova_exception.InvalidVolume, call)
            self.assertIn(f'{self.path} says that it holds 62 MiB of data', str(error))
            self.assertIn(f'the volume {ID} gives 8 MiB', str(error))

    def test_foreign_path(self) -> None:
        self.connection['data']['device_path'] = '/etc/passwd'
        self.assertRaisesRegex(nova_exception.InvalidVolume, 'no image in a pool', self.connected)

    def test_group_that_is_not_there(self) -> None:
        nova_conf.CONF.set_override('qemu_group', 'no-such-group', 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'qemu_group', 'nova_pcow')
        self.assertRaisesRegex(nova_exception.InvalidVolume, 'no-such-group', self.connected)
        self.assertEqual([], os.listdir(Path(locks.state_path(), 'disks')))

    def test_group(self) -> None:
        nova_conf.CONF.set_override('qemu_group', 'nogroup', 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'qemu_group', 'nova_pcow')
        socket = etree.fromstring(self.connected()).find('source/host').get('socket')
        self.assertEqual(
            (0o660, 0o710),
            tuple(os.stat(path).st_mode & 0o777 for path in (socket, os.path.dirname(socket))),
        )

    def test_while_nbdkit_is_away_the_guest_waits(self) -> None:
        self.assertEqual(
            '60', etree.fromstring(self.connected()).find('source/reconnect').get('delay')
        )

    def _confined(self, instance: Any, hook: str = '#!/bin/sh\necho "$@" >"$0.called"\n') -> Path:
        """What the hook was called with, on a host whose libvirt uses AppArmor."""
        self.capabilities.return_value = _CAPABILITIES.format('apparmor')
        path = self.directory / 'hook'
        path.write_text(hook)
        path.chmod(0o755)
        context = nova_privsep.sys_admin_pctxt
        for target, name, value in (
            (confinement, 'HOOK', str(path)),
            (context, 'client_mode', False),
        ):
            patcher = mock.patch.object(target, name, value)
            patcher.start()
            self.addCleanup(patcher.stop)
        self.driver.connect_volume(self.connection, instance)
        return path.with_name('hook.called')

    def test_nobody_but_the_server_s_qemu_may_connect(self) -> None:
        """This process, which AppArmor does not confine, is somebody else."""
        called = self._confined(_instance())
        socket = disk.socket_path(ID)
        self.assertEqual(f'--grant {socket} {_SERVER}\n', called.read_text())
        uri = f'nbd+unix:///?socket={socket}'
        error = self.assertRaises(
            exception.ToolFailed,
            tool.run,
            tool.find_system('qemu-io', 'qemu-utils'),
            '-f',
            'raw',
            '-c',
            'length',
            uri,
        )
        self.assertIn("can't open device", str(error))

    def test_a_volume_in_memory_comes_with_its_bases(self) -> None:
        called = self._confined(_instance(**{'pcow:root': 'true'}))
        self.assertEqual(f'--grant {self.path} {_SERVER}\n', called.read_text())

    def test_what_the_hook_says_is_told(self) -> None:
        error = self.assertRaises(
            nova_exception.InvalidVolume,
            self._confined,
            _instance(**{'pcow:root': 'true'}),
            '#!/bin/sh\necho "pcow: its base is another one" >&2; exit 1\n',
        )
        self.assertIn('its base is another one', str(error))
