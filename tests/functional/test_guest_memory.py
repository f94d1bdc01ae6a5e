# SPDX-License-Identifier: Apache-2.0
"""What a domain that pcowctl prints takes of the host's memory: it boots with 96 MiB, with the page
map of its root in the image, and gives back what its guest does not use.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import time

from pcow_driver.common import units
from pcow_driver.virt import boot
from pcow_driver.virt import domain_xml
from tests.functional import domain_case
from tools.lib.bench import smaps
from tools.lib.quickstart import guest

BOOT_SECONDS = 180
REPORT_SECONDS = 60  # the guest reports two seconds after it has freed
MODULES = ('virtio_pci', 'virtio_balloon')
SMALL, MEMORY, FILLED = (count * units.MIB for count in (96, 256, 90))


class GuestMemoryTest(domain_case.DomainTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.guest, _cache = guest.prepare(self.run_, None, None, None, modules=MODULES)
        self.start_daemon()

    @contextlib.contextmanager
    def boot(self, memory: int, *options: str) -> Iterator[domain_case.Console]:
        name = self.define(
            *('guest', '--kernel', str(self.guest.kernel), '--initrd', str(self.guest.initrd)),
            *options,
            memory=str(memory),
        )
        self.virsh('start', name)
        with domain_case.Console(self.virsh('dumpxml', name)) as console:
            console.expect(rb'/dev/pmem0 / ext4 .*dax=always.*\s+pcow-guest: ready', BOOT_SECONDS)
            console.expect(rb'pcow-guest# ', BOOT_SECONDS)
            console.take_commands()
            yield console

    def test_96_mib(self) -> None:
        """By default nothing is set aside for devices that do not reach the NVDIMM."""
        self.make_image(self.guest.image, 'qcow2', page_map='pmem')
        with self.boot(SMALL) as console:
            self.assertIn('swiotlb=noforce', console.run('cat /proc/cmdline'))
            text = console.run('grep -c processor /proc/cpuinfo; head -n 1 /proc/meminfo')
            self.assertRegex(text, r'^1\nMemTotal: +\d+ kB$')
            self.assertLess(int(text.split()[-2]) * units.KIB, SMALL)
            console.run('find / -xdev -type f | wc -l; perl -e "print 1"')

    def ram(self) -> int:
        """Bytes that the host has given for the guest's RAM."""
        found = smaps.pss(
            self.process(self.names[-1]), lambda _name, size: 'ram' if size == MEMORY else 'other'
        )
        return found['ram']

    def test_what_is_free_goes_back(self) -> None:
        self.make_image(self.guest.image, 'qcow2')
        words = (
            f'{domain_xml.DEFAULT_CMDLINE} {boot.memory_options(MEMORY)} '
            f'pcow.modules={",".join(MODULES)}'
        )
        with self.boot(MEMORY, '--cmdline', words) as console:
            console.run(f'head -c {FILLED} /dev/urandom >/tmp/filled')
            full = self.ram()
            self.assertGreater(full, FILLED)
            console.run('rm /tmp/filled')
            end = time.monotonic() + REPORT_SECONDS
            while self.ram() > full - FILLED // 2:
                self.assertLess(time.monotonic(), end, 'the host gets nothing back')
                time.sleep(0.2)
