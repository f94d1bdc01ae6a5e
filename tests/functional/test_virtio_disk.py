# SPDX-License-Identifier: Apache-2.0
"""A Debian image is a disk of a libvirt domain, from which BIOS boots, and then persistent memory
of another one, with what was written.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from pathlib import Path

from pcow_driver.virt import disk_xml
from tests.functional import domain_case
from tests.functional import libvirt_vm
from tools.lib.quickstart import debian_image

BOOT_SECONDS = 400  # of two kernels, one after the other


class VirtioDiskTest(domain_case.DomainTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.make_image(debian_image.prepare(self.cache), 'qcow2')
        self.start_daemon()

    def served(self, name: str) -> list[str]:
        """What is left of the disks of a domain."""
        uuid = self.virsh('domuuid', name).strip()
        place = Path(disk_xml.DIRECTORY)
        return [entry.name for entry in place.glob(f'{uuid}-*')] if place.exists() else []

    @contextlib.contextmanager
    def boot(self, name: str, number: int, root: str) -> Iterator[domain_case.Console]:
        self.virsh('start', name)
        with domain_case.Console(self.virsh('dumpxml', name)) as console:
            release = debian_image.release(debian_image.kernels()[0])
            console.expect(
                rb'pcow-guest: boot %d of %s on %s\b' % (number, release.encode(), root.encode()),
                BOOT_SECONDS,
            )
            console.expect(rb'pcow-ready\r?\n', domain_case.COMMAND_SECONDS)
            yield console

    def test_a_disk_and_then_memory(self) -> None:
        name = self.define('disk', '--bus', 'virtio')
        with self.boot(name, 1, '/dev/vda2 / ext4') as console:
            console.run('echo kept >/root/note; sync')
            self._snapshots(name)
            self._second_domain(name)
            console.run('echo later >>/root/note; sync')
            self.assertEqual('0', console.run('cat /sys/block/vda/ro'))
            console.send('mount -o remount,ro /; echo o >/proc/sysrq-trigger')
            self.wait_off(name)
        self.assertEqual([], self.served(name))
        self.virsh('undefine', name)
        name = self.define('memory')
        with self.boot(name, 2, '/dev/pmem0p2 / ext4') as console:
            self.assertEqual('kept\nlater', console.run('cat /root/note'))

    def _snapshots(self, name: str) -> None:
        """While the guest runs, by the domain."""
        snapshot = ('snapshot', '{}', '--domain', name)

        def ctl(verb: str, *words: str) -> str:
            return self.place.pcowctl(snapshot[0], verb, *snapshot[2:], *words)

        ctl('create', 'before')
        ctl('rename', 'before', 'first')
        self.assertIn('first', ctl('list', '-f', 'value', '-c', 'name'))
        with self.assertRaisesRegex(Exception, 'shut it down first'):
            ctl('revert', 'first')
        ctl('delete', 'first')
        self.assertNotIn('first', ctl('list', '-f', 'value', '-c', 'name'))

    def _second_domain(self, first: str) -> None:
        """It is refused, and the first one goes on."""
        second = self.define('second', '--bus', 'virtio')
        done = libvirt_vm.try_virsh(self.daemon.uri, 'start', second)
        self.assertNotEqual(0, done.returncode)
        self.assertIn(f'{self.image} is open for writing elsewhere', done.stderr)
        self.assertEqual([], self.served(second))
        self.assertEqual(1, len(self.served(first)))
