# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a VM that reads from a slow disk: it stands for that no longer than was said."""

from __future__ import annotations

import time
from typing import Any

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import virtio
from tests.functional import vm_state

_SLOT = 6
_LIMIT = 0.1  # seconds, unless told otherwise
_LATENCY = 1.2  # of the disk
_NS = 10**9
# seconds; much less than what must not be waited for, much more than a busy machine needs
_MUCH = 0.35
_REFUSED = 'the VM has run on, and nothing was changed'


class SlowDiskTest(checkpoint_case.CheckpointTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.vm = self.start(
            '-blockdev',
            f'null-co,node-name=slow,size={images.MIB},latency-ns={int(_LATENCY * _NS)},'
            'read-only=on,read-zeroes=on',
            *('-device', f'virtio-blk-pci,drive=slow,addr={_SLOT}'),
        )
        self.vm.__enter__()
        self.addCleanup(self.vm.__exit__, None, None, None)
        self.block = virtio.Block(self.vm, _SLOT)
        self.write(self.vm, b'first')

    def ask(self) -> float:
        """Something of the disk: when it was asked."""
        self.vm.write(vm_state.RAM, b'asked for')
        self.block.post_input(0, [(vm_state.RAM, 4096)])
        self.block.notify()
        time.sleep(0.02)
        return time.monotonic()

    def answered(self, asked: float) -> None:
        self.block.wait()
        self.assertGreater(time.monotonic(), asked + _LATENCY - _MUCH)
        self.assertEqual(0, self.block.status())
        self.assertEqual(bytes(16), self.vm.read(vm_state.RAM, 16))

    def create(self, name: str, **more: int) -> dict[str, Any]:
        return dict(self.vm.qmp('pcow-checkpoint-create', name=name, **more))

    def test_a_checkpoint(self) -> None:
        """It is refused, and the guest runs on; or it waits while the guest runs."""
        asked = self.ask()
        begun = time.monotonic()
        self.assertIn(_REFUSED, self.vm.save('refused'))
        self.assertLess(time.monotonic() - begun, 2 * _LIMIT + _MUCH)
        self.assertFalse(self.block.served())
        self.assertEqual('running', self.vm.status())
        self.assertEqual({'mem0': [], 'ram0': []}, self.vm.parts())
        self.assertLess(self.create('waited', max_wait=20000)['pause'] / _NS, _MUCH)
        self.answered(asked)
        self.assertEqual({'mem0': ['waited'], 'ram0': ['waited']}, self.vm.parts())

    def test_a_disk_that_is_never_idle_in_time(self) -> None:
        """The VM stands for the rest of it."""
        asked = self.ask()
        pause = self.create('stood', max_wait=int(_LATENCY * 800))['pause'] / _NS
        self.answered(asked)
        self.assertGreater(pause, _LATENCY * 0.05)
        self.assertLess(pause, _LATENCY * 0.8)
        self.vm.write(vm_state.RAM, b'later')
        self.assertEqual('', self.vm.load('stood'))
        self.assertEqual(bytes(16), self.vm.read(vm_state.RAM, 16))

    def test_a_revert(self) -> None:
        self.assertEqual('', self.vm.save('first'))
        self.write(self.vm, b'later')
        asked = self.ask()
        begun = time.monotonic()
        self.assertIn(_REFUSED, self.vm.load('first'))
        self.assertLess(time.monotonic() - begun, _LIMIT + _MUCH)
        self.assertEqual('running', self.vm.status())
        self.answered(asked)
        self.assertEqual({'mem0': ['first'], 'ram0': ['first']}, self.vm.parts())
        self.ask()
        self.vm.qmp('pcow-checkpoint-revert', name='first', max_wait=20000)
        self.assert_reads(self.vm, b'first')
