# SPDX-License-Identifier: Apache-2.0
"""A domain whose memory is a virtio-pmem, the device of images on pools of class page-cache, by
whatever libvirt this machine has. That of Debian 12 knows no such device in QEMU's list.
"""

import contextlib
import os
from pathlib import Path
import signal
import time

from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import libvirt_xml
from tests.functional import libvirt_vm

SECONDS = 60
MODEL = libvirt_xml.MODELS[1]


class VirtioPmemTest(libvirt_vm.HostTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.guest = libvirt_vm.Guest(self.host, 'virtio-pmem', model=MODEL)
        self.addCleanup(self.guest.remove)

    def restart_libvirt(self) -> None:
        """It is ended by a signal, and its QEMUs stay."""
        daemon = int((self.host.directory / 'libvirtd.pid').read_text())
        os.kill(daemon, signal.SIGTERM)
        end = time.monotonic() + SECONDS
        with contextlib.suppress(FileNotFoundError):
            while 'Z' != Path(f'/proc/{daemon}/stat').read_text().rpartition(')')[2].split()[0]:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.05)
        self.host.daemon.start()

    def attach(self, name: str) -> None:
        path = self.host.place.image_path(name)
        image.create(str(path), 32 * units.MIB)
        device = libvirt_xml.Nvdimm(
            path=str(path), size=image.info(str(path)).virtual_size, model=MODEL
        )
        xml = self.host.directory / f'{name}.xml'
        xml.write_text(libvirt_xml.to_string(device.to_element()))
        self.host.virsh('attach-device', self.guest.name, xml, '--live')

    def front_ends(self) -> list[str]:
        return [info['durability'].get('front-end') for info in self.guest.qmp('query-pcow')]

    def test_its_life(self) -> None:
        self.guest.start()
        pid = self.guest.pid()
        self.assertEqual([MODEL], self.front_ends())
        self.guest.mark('before')
        self.host.virsh('snapshot-create-as', self.guest.name, 'first')
        self.guest.mark('after')
        self.attach('second')
        self.assertEqual([MODEL] * 2, self.front_ends())
        self.restart_libvirt()
        self.assertEqual('running', self.guest.state())
        self.assertEqual(pid, self.guest.pid())
        self.assertEqual('after', self.guest.next_report().mark)
        self.host.virsh('destroy', self.guest.name)
        self.host.virsh('snapshot-revert', self.guest.name, 'first', '--running')
        self.assertEqual('before', self.guest.next_report().mark)
        self.assertEqual([MODEL], self.front_ends())
