# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a VM while QEMU is killed: all images are as before, or as after."""

import collections
import os
import random
import subprocess
import time

from testtools import content

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import vm_state


class KillTest(checkpoint_case.CheckpointTestCase):
    """kill -9 at a random moment of taking, reverting to or deleting one, under load.

    PCOW_KILL_ROUNDS=N does it N times and prints what became of them.
    """

    ROUNDS = int(os.environ.get('PCOW_KILL_ROUNDS', '24'))
    PAGES = 16  # of each image that are compared; the load is behind them
    MOST = 5  # checkpoints at a time

    def setUp(self) -> None:
        super().setUp()
        seed = os.environ.get('PCOW_KILL_SEED', str(random.SystemRandom().randrange(1 << 32)))
        self.addDetail('seed', content.text_content(seed))
        self.random = random.Random(seed)
        self.values: dict[str, int] = {}  # of each checkpoint: what every page holds
        self.seconds: dict[str, float] = {}
        self.marks = 0
        self.outcomes: collections.Counter[str] = collections.Counter()

    def pages(self, vm: checkpoint_case.Vm) -> dict[str, list[int]]:
        """Addresses by image."""
        step = checkpoint_case.SIZE // 2 // self.PAGES // 4096 * 4096
        return {
            'mem0': [vm.address('nv0') + page * step for page in range(self.PAGES)],
            'ram0': [vm_state.RAM + page * step for page in range(self.PAGES)],
        }

    def change(self, vm: checkpoint_case.Vm) -> int:
        value = self.random.randrange(1, 256)
        for addresses in self.pages(vm).values():
            for address in addresses:
                vm.write(address, bytes([value]) * 64)
        return value

    def present(self, vm: checkpoint_case.Vm, image: str) -> int:
        """What the pages of an image hold; all the same, or it is broken."""
        values = {vm.read(address, 64) for address in self.pages(vm)[image]}
        self.assertEqual(1, len(values), f'{image}: {values}')
        (value,) = values
        self.assertEqual(1, len(set(value)), f'{image}: {value!r}')
        return value[0]

    def measure(self) -> None:
        """How long each takes here and now; the first time it is more."""
        with self.start() as vm:
            for _ in range(3):
                for command in ('save', 'load', 'delete'):
                    begun = time.monotonic()
                    self.assertEqual('', getattr(vm, command)('measured'))
                    self.seconds[command] = time.monotonic() - begun
            vm.quit()

    def check_all(self, vm: checkpoint_case.Vm, names: set[str]) -> None:
        """Each checkpoint is whole: the VM is at it."""
        self.assertEqual(dict.fromkeys(('mem0', 'ram0'), sorted(names)), vm.parts())
        for name in sorted(names):
            self.assertEqual('', vm.load(name))
            for image in ('mem0', 'ram0'):
                self.assertEqual(self.values[name], self.present(vm, image), f'{name} {image}')

    def test_kill(self) -> None:
        self.measure()
        command, now, possible = '', 0, {0}
        before: set[str] = set()
        after: set[str] = set()
        for number in range(self.ROUNDS + 1):
            with self.start() as vm:
                names = set(vm.checkpoints())
                self.assertIn(names, (before, after), f'{number}')
                present = self.present(vm, 'mem0')
                self.assertIn(present, possible, f'{number}')
                if command:
                    done = present != now if command == 'load' else names == after != before
                    self.outcomes[f'{command} {"done" if done else "not done"}'] += 1
                self.check_all(vm, names)
                if number == self.ROUNDS:
                    break
                now = self.change(vm)
                choices = ['save'] * (len(names) < self.MOST) + ['load', 'delete'] * bool(names)
                command = self.random.choice(choices)
                name = f's{number}' if command == 'save' else self.random.choice(sorted(names))
                before, after, possible = set(names), set(names), {now}
                if command == 'save':
                    after.add(name)
                    self.values[name] = now
                elif command == 'load':
                    possible.add(self.values[name])
                else:
                    after.remove(name)
                behind = checkpoint_case.SIZE // 2
                starts = (vm.address('nv0') + behind, vm_state.RAM + behind)
                # from before the command to after its end
                moment = self.random.uniform(0, 6 * self.seconds[command] + 0.01)
                with vm_state.under_load(vm, starts, behind):
                    vm_state.interrupt(vm, command, name, moment)
            self.marks += any(name.startswith('.') for name in vm_state.image_names(self.ram))
            for path in (self.image, self.ram):
                done_check = subprocess.run(
                    [images.program('pcow-img'), 'check', path],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    timeout=images.TIMEOUT,
                )
                # space may have leaked, which the next writer takes back; nothing else
                self.assertIn(done_check.returncode, (0, 3), str(done_check.stdout))
        counts = ', '.join(f'{count} {outcome}' for outcome, count in sorted(self.outcomes.items()))
        said = (
            f'{self.ROUNDS} times killed: {counts}; {self.marks} left the mark that the next QEMU '
            f'works off'
        )
        self.assertEqual(self.ROUNDS, self.outcomes.total())
        self.addDetail('kills', content.text_content(said))
        if 'PCOW_KILL_ROUNDS' in os.environ:
            print(said, flush=True)
