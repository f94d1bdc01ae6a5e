# SPDX-License-Identifier: Apache-2.0
"""What the tests of protected VMs share: pcowctl as root's services call it, and the loop of
pcow-protect.service.
"""

from collections.abc import Callable
from pathlib import Path
import signal
import subprocess
import sys
import time
from typing import Any

from pcow_driver.common import exception
from tests.functional import libvirt_vm
from tests.functional import test_virsh_checkpoints

SECONDS = 60


class FixationTestCase(test_virsh_checkpoints.CheckpointTestCase):
    def pcowctl(self, *words: str) -> Any:
        """What it prints as JSON."""
        return self.host.place.pcowctl_json(*words)

    def fails(self, *words: str) -> str:
        with self.assertRaises(exception.ToolFailed) as caught:
            self.host.place.pcowctl(*words)
        return str(caught.exception)

    def protected(self, name: str, *words: str, **options: Any) -> libvirt_vm.Guest:
        guest = self.guest(name, ram=True, **options)
        self.host.place.pcowctl('vm', 'protect', guest.name, *words)
        self.addCleanup(self.host.place.pcowctl, 'vm', 'protect', guest.name, '--remove')
        guest.start()
        return guest

    def row(self, guest: libvirt_vm.Guest) -> dict[str, Any]:
        (found,) = (
            row for row in self.pcowctl('vm', 'protect', '--list') if row['name'] == guest.name
        )
        return dict(found)

    def names(self, guest: libvirt_vm.Guest) -> list[str]:
        """Of its checkpoints; its NVDIMM may have what was unsaved besides."""
        return [str(one['name']) for one in self.pcowctl('vm', 'tree', guest.name)]

    def wait(self, until: Callable[[], object]) -> None:
        end = time.monotonic() + SECONDS
        while not until():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.1)

    def watch(self) -> subprocess.Popen[str]:
        """The loop, as pcow-protect.service runs it."""
        return self.begin_watch(Path(sys.prefix) / 'bin/pcowctl', log='watch.log')

    def begin_watch(self, *program: str | Path, log: str) -> subprocess.Popen[str]:
        """
        :param program: pcowctl
        :param log: name of the file that gets what it says
        """
        output = (self.host.directory / log).open('a')
        self.addCleanup(output.close)
        process = subprocess.Popen(
            [*program, '--config-file', self.host.place.config, 'host', 'watch'],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            self.assertEqual(0, process.wait(SECONDS))
