# SPDX-License-Identifier: Apache-2.0
"""Who serves the disks of a domain, as the libvirt hook has it done; with a real nbdkit."""

from __future__ import annotations

import os
from pathlib import Path
import pwd
import shutil
import signal
import stat
import time
from unittest import mock
import xml.etree.ElementTree as ET

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import users
from pcow_driver.export import nbdkit_unit
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.virt import disk_server
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain_xml
from pcow_driver.virt import libvirt_xml
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.export import test_nbdkit_unit

UUID, OTHER = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6', '0d4f5c8e-2b61-4a0e-8f0b-6a1d2c3e4f50'
NOBODY = pwd.getpwnam('nobody')


class ServerTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = os.environ.get('PCOW_BIN_DIR') or str(base.TOP / 'build/bin')
        self.useFixture(fixtures.EnvironmentVariable('PATH', f'{programs}:{os.environ["PATH"]}'))
        self.place = self.directory / 'run'
        self.useFixture(fixtures.MockPatchObject(disk_xml, 'DIRECTORY', str(self.place)))
        self.path = str(self.directory / 'vm.pcow')
        device.create_file(self.path, 8 * units.MIB)
        self.xml = self.domain(UUID)

    def domain(self, uuid: str, path: str = '') -> str:
        disk = disk_xml.Disk(path=path or self.path, size=10 * units.MIB)
        return domain_xml.Domain(name='vm', memory=units.GIB, disks=[disk], uuid=uuid).to_xml()

    def make_pool(self, owner: pwd.struct_passwd | None = None) -> Path:
        """A directory with the image, to which others may get."""
        if os.geteuid():
            self.skipTest('root alone becomes another user')
        # that of this test, and the one of all temporary files of it
        for above in (self.directory, self.directory.parent):
            above.chmod(above.stat().st_mode | stat.S_IXOTH)
        pool = self.directory / 'pool'
        pool.mkdir()
        shutil.copy(self.path, pool / 'vm.pcow')
        if owner is not None:
            self.give(pool, owner.pw_uid, owner.pw_gid)
        return pool

    def give(self, pool: Path, uid: int, gid: int) -> None:
        for name in (pool, pool / 'vm.pcow'):
            os.chown(name, uid, gid)

    def serve(self, xml: str) -> None:
        self.addCleanup(disk_server.unserve, xml)
        disk_server.serve(xml, os.getegid())

    def io(self, command: str, uuid: str = UUID) -> str:
        socket = disk_xml.socket_path(uuid, 'vda')
        program = tool.find_system('qemu-io', 'qemu-utils')
        return tool.run(program, '-f', 'raw', '-c', command, f'nbd+unix:///?socket={socket}')

    def test_the_data_and_not_the_info_block(self) -> None:
        window = device.window(self.path)
        self.serve(self.xml)
        self.io('read -P 0 0 8M')
        self.assertRaises(exception.ToolFailed, self.io, 'read 8M 4k')
        self.io('write -P 7 0 4k')
        disk_server.unserve(self.xml)
        self.assertEqual([], os.listdir(self.place))
        program = Path(tool.find('pcow_img')).with_name('pcow-io')
        tool.run(str(program), '-c', f'read -P 7 {window.offset} 4k', self.path)
        self.assertEqual(window, device.window(self.path))  # a guest could have it as memory now
        disk_server.unserve(self.xml)

    def test_label_where_selinux_runs(self) -> None:
        selinux = self.directory / 'selinux'
        name = b'system_u:object_r:pcow_disk_t:s0\0'
        self.useFixture(fixtures.MockPatchObject(disk_server, '_SELINUX_ENABLED', str(selinux)))
        with mock.patch.object(os, 'setxattr', side_effect=OSError) as setxattr:
            self.serve(self.xml)
            setxattr.assert_not_called()
            selinux.mkdir()
            self.serve(self.xml)
            setxattr.assert_called_once_with(str(self.place), 'security.selinux', name)

    def test_a_second_domain_ends_nothing_of_the_first(self) -> None:
        self.serve(self.xml)
        other = self.domain(OTHER)
        error = self.assertRaises(exception.ToolFailed, self.serve, other)
        self.assertIn(f'{self.path} is open for writing elsewhere', str(error))
        disk_server.unserve(other)  # libvirt says that it has ended
        self.io('write -P 7 0 4k')

    def test_what_a_kill_leaves_is_in_nobodys_way(self) -> None:
        self.serve(self.xml)
        self.io('write -P 7 0 4k')
        export = Path(disk_xml.socket_path(UUID, 'vda')).parent
        os.kill(int((export / 'nbdkit.pid').read_text()), signal.SIGKILL)
        self.serve(self.xml)
        self.io('read -P 7 0 4k')

    def test_a_killed_one_comes_back_for_the_same_qemu(self) -> None:
        """Where systemd starts it."""
        asked = str(self.directory / 'asked')
        self.useFixture(fixtures.MockPatchObject(nbdkit_unit, 'SOCKET', asked))
        self.addCleanup(test_nbdkit_unit.Systemd(asked).close)
        self.serve(self.xml)
        socket = Path(disk_xml.socket_path(UUID, 'vda'))
        self.io('write -P 7 0 4k')
        os.kill(pid := int((socket.parent / 'nbdkit.pid').read_text()), signal.SIGKILL)
        end = time.monotonic() + 60
        while (
            self._pid(socket.parent) in ('', str(pid))
            or stat.S_IMODE(socket.stat().st_mode) != 0o666
        ):
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        self.io('read -P 7 0 4k')
        disk_server.unserve(self.xml)
        self.assertEqual([], os.listdir(self.place))

    @staticmethod
    def _pid(export: Path) -> str:
        try:
            return (export / 'nbdkit.pid').read_text().strip()
        except FileNotFoundError:
            return ''

    def test_a_domain_that_was_copied(self) -> None:
        xml = self.xml.replace(f'<uuid>{UUID}', f'<uuid>{OTHER}')
        error = self.assertRaises(exception.XmlInvalid, self.serve, xml)
        self.assertIn(f'--uuid {OTHER}', str(error))
        self.assertFalse(self.place.exists())

    def test_an_image_that_is_not_there(self) -> None:
        xml = self.domain(UUID, str(self.directory / 'none.pcow'))
        self.assertRaises(exception.ImageNotFound, self.serve, xml)

    def test_an_image_that_is_no_device(self) -> None:
        image.create(str(self.directory / 'plain.pcow'), 8 * units.MIB)
        xml = self.domain(UUID, str(self.directory / 'plain.pcow'))
        self.assertRaises(exception.DeviceInvalid, self.serve, xml)

    def test_a_running_guest_does_not_come(self) -> None:
        error = self.assertRaises(exception.DomainInvalid, disk_server.check_stays, self.xml)
        self.assertIn('pcowctl image send', str(error))
        disk_server.check_stays('<domain/>')

    def test_as_the_user_whose_image_it_is(self) -> None:
        pool = self.make_pool(NOBODY)
        path = str(pool / 'vm.pcow')
        self.serve(self.domain(UUID, path))
        place = Path(disk_xml.socket_path(UUID, 'vda')).parents[1]
        self.assertEqual(
            (NOBODY.pw_uid, os.getegid(), 0o710),
            (place.stat().st_uid, place.stat().st_gid, stat.S_IMODE(place.stat().st_mode)),
        )
        pid = int((place / 'export/nbdkit.pid').read_text())
        self.assertEqual(NOBODY.pw_uid, os.stat(f'/proc/{pid}').st_uid)
        self.io('write -P 7 0 4k')
        disk_server.unserve(self.domain(UUID, path))
        self.assertEqual([], os.listdir(self.place))
        self.assertEqual(['vm.pcow'], os.listdir(pool))

    def test_an_image_that_was_given_to_somebody_else(self) -> None:
        """What the first one serves is ended as he who started it."""
        pool = self.make_pool()
        xml = self.domain(UUID, str(pool / 'vm.pcow'))
        self.serve(xml)
        place = Path(disk_xml.socket_path(UUID, 'vda')).parents[1]
        self.give(pool, NOBODY.pw_uid, NOBODY.pw_gid)
        disk_server.serve(xml, os.getegid())
        self.assertEqual(NOBODY.pw_uid, place.stat().st_uid)
        self.give(pool, 0, 0)
        disk_server.unserve(xml)
        self.assertEqual([], os.listdir(self.place))

    def test_a_link_and_a_place_where_others_may_exchange_it(self) -> None:
        link = self.directory / 'link.pcow'
        link.symlink_to(self.path)
        error = self.assertRaises(exception.PathRefused, self.serve, self.domain(UUID, str(link)))
        self.assertIn('name the image itself', str(error))
        if os.geteuid() == 0:
            self.directory.chmod(0o777)
            self.assertRaises(exception.PathRefused, self.serve, self.xml)

    def test_links_in_place_of_the_directories_of_domains(self) -> None:
        """Of one who has put them there before root came."""
        if os.geteuid():
            self.skipTest('of root')
        private, service = self.directory / 'private', self.directory / 'service'
        (private / f'{UUID}-vda').mkdir(parents=True)
        service.mkdir()
        (service / 'run').symlink_to(private)
        for owner, place in ((0, service / 'run'), (65534, service / 'domains')):
            os.chown(service, owner, owner)
            with fixtures.MockPatchObject(disk_xml, 'DIRECTORY', str(place)):
                xml = self.domain(UUID)
                self.assertRaises(exception.PathRefused, disk_server.serve, xml, 65534)
                if owner == 0:
                    self.assertRaises(exception.ExportFailed, disk_server.unserve, xml)
        status = (private / f'{UUID}-vda').stat()
        self.assertEqual((0, 0o755), (status.st_gid, stat.S_IMODE(status.st_mode)))
        self.assertEqual(['run'], os.listdir(service))

    def test_an_image_that_was_resized(self) -> None:
        """A guest that has it as memory later finds all of it."""
        window = device.window(self.path)
        image.resize(self.path, window.offset + 16 * units.MIB)
        self.serve(self.xml)
        self.io('write -P 7 12M 4k')
        disk_server.unserve(self.xml)
        self.assertEqual(16 * units.MIB, device.window(self.path).size)
        self.assertEqual(16 * units.MIB, device._look(self.path)[1])

    def test_below_an_overlay(self) -> None:
        """Of an external snapshot: ``virsh snapshot-create --disk-only``."""
        root = libvirt_xml.parse(self.xml)
        (disk,) = root.findall('devices/disk')
        base_source = disk.findall('source')[0]
        disk.remove(base_source)
        overlay = ET.SubElement(disk, 'source', file='/images/overlay')
        ET.SubElement(disk, 'backingStore', type='network').append(base_source)
        self.serve(ET.tostring(root, encoding='unicode'))
        self.io('read -P 0 0 4k')
        disk.remove(disk.findall('backingStore')[0])
        xml = ET.tostring(root, encoding='unicode')
        self.assertEqual('/images/overlay', overlay.get('file'))
        error = self.assertRaises(exception.XmlInvalid, disk_server.serve, xml, os.getegid())
        self.assertIn('virsh blockcommit', str(error))

    def test_what_cannot_be_ended_keeps_no_other_one(self) -> None:
        self.serve(self.xml)
        other = self.place / f'{UUID}-vdb'
        (other / 'export').mkdir(parents=True)
        (other / 'kept').touch()
        self.addCleanup(shutil.rmtree, other, ignore_errors=True)
        error = self.assertRaises(exception.ExportFailed, disk_server.unserve, self.xml)
        self.assertIn(str(other), str(error))
        self.assertEqual([other.name], os.listdir(self.place))
        shutil.rmtree(other)


class UsersTest(base.TestCase):
    def test_what_it_raises_is_told(self) -> None:
        if os.geteuid():
            self.skipTest('root alone becomes another user')

        def fail() -> None:
            raise exception.PcowError(reason=f'said by {os.getuid()}')

        error = self.assertRaises(exception.ToolFailed, users.run_as, NOBODY.pw_uid, fail)
        self.assertEqual(f'said by {NOBODY.pw_uid}', str(error))
        error = self.assertRaises(exception.ToolFailed, users.run_as, 0x7FFFFFF0, fail)
        self.assertIn('knows no user', str(error))
        self.assertRaises(exception.PcowError, users.run_as, 0, fail)
