# SPDX-License-Identifier: Apache-2.0
"""savevm, loadvm and delvm of a VM with a pcow image while QEMU is killed."""

import collections
import os
import random
import re
import subprocess
import time

from testtools import content

from tests.functional import images
from tests.functional import vm_snapshot_case
from tests.functional import vm_state


class KillTest(vm_snapshot_case.VmSnapshotTestCase):
    """kill -9 at a random moment of saving, loading or deleting, under load: everything is as
    before, or as after, the disk too.

    PCOW_KILL_ROUNDS=N does it N times and prints what became of them.
    """

    ROUNDS = int(os.environ.get('PCOW_KILL_ROUNDS', '24'))
    PAGES = 32  # that are compared; the load is behind them
    MOST = 5  # snapshots at a time
    # of qcow2: a count that is too high, or a cluster that is nobody else's and does not say so,
    # which costs a copy
    HARMLESS = re.compile(
        r'ERROR OFLAG_COPIED.*( refcount=([2-9]|\d\d)|entry=(?!8)[0-9a-f]+ refcount=1)'
    )

    def setUp(self) -> None:
        super().setUp()
        seed = os.environ.get('PCOW_KILL_SEED', str(random.SystemRandom().randrange(1 << 32)))
        self.addDetail('seed', content.text_content(seed))
        self.random = random.Random(seed)
        self.values: dict[str, int] = {}  # of each snapshot: what every page holds
        self.now = 0  # the same of the present
        self.seconds: dict[str, float] = {}
        self.marks = 0
        self.outcomes: collections.Counter[str] = collections.Counter()

    def offset(self, page: int) -> int:
        return page * (vm_snapshot_case.SIZE // 2 // self.PAGES) // 4096 * 4096

    def change(self, vm: vm_state.Vm) -> None:
        self.now = self.random.randrange(1, 256)
        for page in range(self.PAGES):
            vm.write(vm.address('nv0') + self.offset(page), bytes([self.now]) * 64)
        vm.write(vm_state.RAM, bytes([self.now]))
        vm.write_disk(self.now)

    def present(self, vm: vm_state.Vm) -> int:
        """What the pages hold; all the same, or it is broken."""
        values = {vm.read(vm.address('nv0') + self.offset(page), 64) for page in range(self.PAGES)}
        self.assertEqual(1, len(values), values)
        (value,) = values
        self.assertEqual(1, len(set(value)))
        return value[0]

    def check_snapshots(self) -> None:
        for name, value in self.values.items():
            reads = [
                item
                for page in range(self.PAGES)
                for item in ('-c', f'read -q -P {value} {self.offset(page)} 64')
            ]
            vm_state.run('pcow-io', '-U', '-s', name, *reads, self.image)

    def measure(self) -> None:
        """How long each takes here and now."""
        with self.start() as vm:
            for command in ('save', 'load', 'delete'):
                begun = time.monotonic()
                self.assertEqual('', getattr(vm, command)('measured'))
                self.seconds[command] = time.monotonic() - begun
            vm.quit()

    def test_kill(self) -> None:
        self.measure()
        before = after = dict(self.values)
        possible = {0}
        command = ''
        for number in range(self.ROUNDS + 1):
            with self.start() as vm:
                names, disks = vm.trees()
                self.assertEqual(names, disks, number)
                self.assertIn(names, (sorted(before), sorted(after)), number)
                self.values = before if names == sorted(before) else after
                present = self.present(vm)
                self.assertIn(present, possible, number)
                self.assertTrue(
                    vm_state.disk_holds(self.carrier, present), (number, command, present)
                )
                self.check_snapshots()
                if command:
                    happened = present != self.now if command == 'load' else self.values == after
                    self.outcomes[f'{command} {"done" if happened else "not done"}'] += 1
                if number == self.ROUNDS:
                    break
                if self.values:
                    name = self.random.choice(sorted(self.values))
                    self.assertEqual('', vm.load(name))
                    self.assertEqual(self.values[name], self.present(vm))
                    self.assertEqual(bytes([self.values[name]]), vm.read(vm_state.RAM, 1))
                    vm.qmp('cont')
                self.change(vm)
                choices = ['save'] * (len(self.values) < self.MOST) + ['load', 'delete'] * bool(
                    self.values
                )
                command = self.random.choice(choices)
                name = (
                    f's{number}' if command == 'save' else self.random.choice(sorted(self.values))
                )
                before, after = dict(self.values), dict(self.values)
                possible = {self.now}
                if command == 'save':
                    after[name] = self.now
                elif command == 'load':
                    possible.add(self.values[name])
                else:
                    del after[name]
                behind = vm_snapshot_case.SIZE // 2
                # from before the command to after its end
                moment = self.random.uniform(0, 1.5 * self.seconds[command])
                with vm_state.under_load(vm, (vm.address('nv0') + behind,), behind):
                    vm_state.interrupt(vm, command, name, moment)
            self.marks += any(
                name.startswith(('.incomplete-', '.loading-'))
                for name in vm_state.image_names(self.image)
            )
            self.assert_no_damage()
        counts = ', '.join(f'{count} {outcome}' for outcome, count in sorted(self.outcomes.items()))
        self.assertEqual(self.ROUNDS, self.outcomes.total())
        said = (
            f'{self.ROUNDS} times killed: {counts}; {self.marks} left the mark that the next QEMU '
            f'works off'
        )
        self.addDetail('kills', content.text_content(said))
        if 'PCOW_KILL_ROUNDS' in os.environ:
            print(said, flush=True)

    def assert_no_damage(self) -> None:
        """Space may have leaked, which the next writer takes back; nothing else.

        Of qcow2 less is asked, as QEMU itself gives no more: the counts of clusters may be too
        high, never too low.
        """
        self.assertIn(
            self.run_check(images.program('pcow-img'), 'check', self.image).returncode, (0, 3)
        )
        done = self.run_check('qemu-img', 'check', '-f', 'qcow2', self.carrier)
        if done.returncode not in (0, 3):
            lines = [
                line
                for line in done.stdout.splitlines() + done.stderr.splitlines()
                if line.startswith('ERROR')
            ]
            self.assertEqual([], [line for line in lines if not self.HARMLESS.match(line)])

    def run_check(self, *words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=images.TIMEOUT,
        )
