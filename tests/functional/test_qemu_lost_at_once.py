# SPDX-License-Identifier: Apache-2.0
"""More memory is lost at once than QEMU can note: the VM is stopped, and QEMU goes on."""

from __future__ import annotations

import os
import re
import time
from unittest import mock

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend
from tests.functional import test_qemu_floods

_PAGE = 4096
_NOTED = 64  # reports (backends/pcow/report.c)
_MANY = 20_000  # in a burst that outruns the main loop, whatever that does meanwhile
_WORDS = 'more memory has been lost at once than can be noted'


class LostAtOnceTest(backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.fifo = self.directory / 'poison'
        os.mkfifo(self.fifo)
        environment = qemu.preload(self.directory, 'poison.c') | {'POISON': str(self.fifo)}
        self.enterContext(mock.patch.dict(os.environ, environment))
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)

    def lose(self, vm: qemu.Qemu, times: int) -> None:
        """As the kernel tells it, of 2 MiB of the image, over and over."""
        self.fifo.write_text(f'{self.memory(vm):x} {times}\n')
        end = self.fifo.with_name(f'{self.fifo.name}.end')
        limit = time.monotonic() + 60
        while not end.exists():
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.01)
        end.unlink()

    def memory(self, vm: qemu.Qemu) -> int:
        """Where QEMU has what the guest sees."""
        blocks = vm.qmp('human-monitor-command', command_line='info ramblock')
        found = re.search(r'mem0 .* (0x[0-9a-f]+)\s+r', blocks)
        assert found is not None, blocks
        return int(found[1], 16)

    def test_more_than_can_be_noted(self) -> None:
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            address = vm.address('nv0')
            for at in range(0, images.SLAB, _PAGE):
                vm.write(address + at, b'kept')
            self.lose(vm, _NOTED // 4)
            self.assertEqual('running', vm.wait_status('running'))
            for _ in range(2):
                self.lose(vm, _MANY)
                self.assertEqual('io-error', vm.wait_status('io-error'))
                vm.qmp('cont')
                # tmpfs keeps what it has said is lost
                self.assertEqual(b'kept', vm.read(address + images.SLAB - _PAGE, 4))
                self.assertEqual('running', vm.wait_status('running'))
            vm.quit()
            said = test_qemu_floods.stderr_of(vm)
        self.assertEqual(0, vm.process.returncode)
        self.assertIn(_WORDS, said)
