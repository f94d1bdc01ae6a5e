# SPDX-License-Identifier: Apache-2.0
"""The host goes down while the pool of a protected VM is full to the last block, through libvirt:
the guest itself checks its memory when it goes on.
"""

import contextlib
import os
from pathlib import Path
import time

from pcow_driver.common import exception
from pcow_driver.common import units
from tests.functional import fixation_case
from tests.functional import libvirt_vm
from tests.functional import long

PAUSED = 12.0  # seconds


class FullPoolTest(fixation_case.FixationTestCase):
    pool_size = 512 * units.MIB

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(self.empty)

    def empty(self) -> None:
        """Without what guests of other tests have stored, and what has filled it."""
        for path in self.host.full.iterdir():
            if path.suffix == '.pcow' and path != self.host.base:
                path.unlink()
        self.filler.unlink(missing_ok=True)

    @property
    def filler(self) -> Path:
        return self.host.full / 'filler'

    def fill(self, seconds: float) -> None:
        """:param seconds: of a guest that is paused PAUSED, in which QEMU gives back what it has
        prepared for it
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self.filler.open('ab', buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 20)):
                    pass
            time.sleep(0.1)
        self.assertEqual(0, os.statvfs(self.host.full).f_bavail)

    def wait_for_room(self, guest: libvirt_vm.Guest) -> None:
        self.wait(
            lambda: all(
                info['spare'] == info['spare-wanted'] > 0 for info in guest.qmp('query-pcow')
            )
        )

    def waits(self, guest: libvirt_vm.Guest) -> bool:
        """For space, with whatever it does."""
        guest.reports()
        time.sleep(2)
        return not guest.reports()

    @long.only_long  # the other one has this in it, and test_vm_last_moment without libvirt
    def test_the_host_goes_down(self) -> None:
        self.goes_down('full', waits=False)

    def test_the_guest_waits(self) -> None:
        self.goes_down('waits', waits=True)

    def goes_down(self, name: str, *, waits: bool) -> None:
        guest = self.protected(name, '--interval', 'off')
        loop = self.watch()
        self.wait_for_room(guest)
        guest.mark('kept')
        if waits:  # each store is to a page that the checkpoint keeps
            self.host.virsh('suspend', guest.name)
            self.vm('checkpoint', guest.name, 'before')
            self.wait_for_room(guest)
        self.fill(PAUSED if waits else 2)
        if waits:
            self.host.virsh('resume', guest.name)
            self.assertTrue(self.waits(guest))
        (done,) = self.pcowctl('host', 'fixate')
        self.assertEqual('', done['problem'])
        self.assertEqual('shut off', guest.state())
        self.end(loop)
        self.filler.unlink()
        (back,) = self.pcowctl('host', 'recover')
        self.assertEqual(done['checkpoint'], back['checkpoint'])
        self.assert_goes_on(guest, 'kept')
        self.host.virsh('destroy', guest.name)

    @long.only_long
    def test_without_what_is_kept(self) -> None:
        """The loop is what has QEMU keep it: without it the VM runs on, and nothing is lost."""
        guest = self.protected('without', '--interval', 'off')
        guest.mark('kept')
        self.host.virsh('suspend', guest.name)
        self.fill(PAUSED)
        with self.assertRaises(exception.ToolFailed) as caught:
            self.pcowctl('host', 'fixate')
        self.assertIn('is not fixated', str(caught.exception))
        self.assertIn('No space left', str(caught.exception))
        self.filler.unlink()
        self.host.virsh('resume', guest.name)
        self.assert_goes_on(guest, 'kept')
        self.host.virsh('destroy', guest.name)
