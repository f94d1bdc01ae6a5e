# SPDX-License-Identifier: Apache-2.0
"""pcowctl image fork --live and image export --domain on a guest that libvirt runs, and that goes
on meanwhile.
"""

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.snapshots import trash
from tests.functional import images
from tests.functional import libvirt_vm
from tests.functional import test_virsh_snapshots


class TestForks(test_virsh_snapshots.VirshTestCase):
    def test_fork_and_export(self) -> None:
        guest = self.guest(carrier=False)
        pcowctl = self.host.place.pcowctl
        guest.mark('forked')
        pcowctl('image', 'fork', '--live', guest.name, 'the-fork')
        self.assert_goes_on(guest, 'forked')
        fork = guest.image.with_name('the-fork.pcow')
        self.assertEqual('fork-the-fork', image.info(str(fork), force_share=True).base_snapshot)
        guest.mark('later')
        target = self.host.directory / 'export.qcow2'
        pcowctl('image', 'export', '--domain', guest.name, '--format', 'qcow2', str(target))
        self.assert_goes_on(guest, 'later')
        # the snapshot that the export made for itself is gone, that of the fork stays
        self.assertEqual({'fork-the-fork': ''}, guest.image_tree())
        with self.assertRaisesRegex(
            exception.PcowError, r"1 image stands on snapshot 'fork-the-fork': 'the-fork\.pcow'"
        ):
            pcowctl('snapshot', 'delete', '--domain', guest.name, 'fork-the-fork')
        for path, image_format in ((fork, 'pcow'), (target, 'qcow2')):
            raw = self.host.directory / 'seen.raw'
            libvirt_vm.run(
                images.program('pcow-img'), 'convert', '-f', image_format, '-O', 'raw', path, raw
            )
            self.assertGreater(raw.stat().st_blocks, 0)
            raw.unlink()
        fork.unlink()
        pcowctl('snapshot', 'delete', '--domain', guest.name, 'fork-the-fork')
        self.assertEqual({}, guest.image_tree())
        self.assert_goes_on(guest, 'later')
        target.unlink()

    def test_killed_export(self) -> None:
        """The snapshot that it made of a running guest is found and deleted, and the
        guest goes on.
        """
        guest = self.guest(carrier=False)
        place = self.host.place
        guest.mark('exported')
        while not (left := self._kill_export(guest)):
            time.sleep(0.1)  # it was too fast
        found = [
            one
            for one in place.pcowctl_json('pool', 'garbage', place.pool_name)
            if one['kind'] == 'snapshot'
        ]
        # one that was killed before has left its mark alone
        self.assertEqual(1, sum(left in one['reason'] for one in found), found)
        place.pcowctl('pool', 'garbage', place.pool_name, '--delete', 'snapshot')
        self.assertEqual({}, guest.image_tree())
        self.assertFalse((guest.image.parent / trash.DIRECTORY).exists())
        self.assert_goes_on(guest, 'exported')

    def _kill_export(self, guest: libvirt_vm.Guest) -> str | None:
        """Name of the snapshot that it leaves; None if it had ended before."""
        target = self.host.directory / 'killed.raw'
        program = Path(sys.prefix) / 'bin' / 'pcowctl'
        process = subprocess.Popen(
            [
                program,
                '--config-file',
                self.host.place.config,
                'image',
                'export',
                '--domain',
                guest.name,
                '--format',
                'raw',
                target,
            ],
            start_new_session=True,
        )
        try:
            while process.poll() is None and not guest.image_tree():
                pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for path in self.host.directory.glob('*killed.raw*'):
                path.unlink()
        return next(iter(guest.image_tree()), None)
