# SPDX-License-Identifier: Apache-2.0
"""Protected VMs whose host goes down again and again, and one whose QEMU is killed at any moment:
the guest counts generations of its RAM and of its persistent memory, and compares every byte.

PCOW_FIXATION_ROUNDS, PCOW_FIXATION_VMS and PCOW_KILL_ROUNDS have them do it so often.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from tests.functional import fixation_case
from tests.functional import images
from tests.functional import libvirt_vm
from tests.functional import long
from tests.functional import moments
from tools.lib.quickstart import orphans

REPORTS = 3  # of a guest that goes on
# The loop, on a host that does not wait ten minutes until it calls a VM one that runs
LOOP = """
import sys
from pcow_driver.cli import app
from pcow_driver.fixation import watch
watch._LONG = 0.0
watch._RETRY = 1.0
sys.exit(app.main(sys.argv[1:]))
"""


def from_environment(name: str, usual: int, with_long: int) -> int:
    return int(os.environ.get(name, with_long if long.LONG else usual))


class Generations:
    """What a guest says of its generations, with the time at which it was read."""

    def __init__(self, guest: libvirt_vm.Guest) -> None:
        self._guest = guest
        self._lock = threading.Lock()
        self._seen: list[tuple[float, int]] = []
        self._problem = ''
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._end.wait(0.005):
            self._read()

    def _read(self) -> None:
        with self._lock:
            try:
                reports = self._guest.reports()
            except AssertionError as e:
                self._problem = str(e)
                return
            now = time.time()
            for report in reports:
                if report.booted:
                    self._problem = 'it has booted'
                self._seen.append((now, report.generation))

    def check(self) -> None:
        if self._problem:
            raise AssertionError(f'{self._guest.name}: {self._problem}')

    def mark(self) -> tuple[int, int]:
        """How many there are, for :meth:`after`, and the last one."""
        self._read()
        return len(self._seen), self._seen[-1][1] if self._seen else 0

    def after(self, mark: int) -> list[tuple[float, int]]:
        self.check()
        with self._lock:
            return self._seen[mark:]

    def last_by(self, moment: float) -> int:
        """The last one that was read until then."""
        with self._lock:
            return [generation for when, generation in self._seen if when <= moment][-1]


class RoundsTestCase(fixation_case.FixationTestCase):
    @classmethod
    def setUpClass(cls) -> None:
        # how long a QEMU of libvirt is there after its end is up to the first process otherwise
        cls.enterClassContext(orphans.adopted())
        super().setUpClass()

    def loop(self) -> subprocess.Popen[str]:
        """As :meth:`watch`, without its patience."""
        return self.begin_watch(sys.executable, '-c', LOOP, log='loop.log')

    def follow(self, guest: libvirt_vm.Guest) -> Generations:
        guest.reports()
        found = Generations(guest)
        self.addCleanup(found.end)
        return found

    def goes_on(self, seen: Generations, mark: int) -> tuple[float, int]:
        """The first of the generations behind a mark; they count on from there."""
        self.wait(lambda: len(seen.after(mark)) >= REPORTS)
        found = seen.after(mark)
        generations = [generation for _when, generation in found]
        self.assertEqual(sorted(set(generations)), generations)
        return found[0]

    def record(self, guest: libvirt_vm.Guest) -> dict[str, Any]:
        """What the host knows of it; {}: nothing yet."""
        path = self.host.directory / 'pcow/protected' / f'{self.uuid(guest)}.json'
        with contextlib.suppress(FileNotFoundError):
            return dict(json.loads(path.read_text()))
        return {}

    @functools.lru_cache  # noqa: B019 - of a test
    def uuid(self, guest: libvirt_vm.Guest) -> str:
        return self.host.virsh('domuuid', guest.name).strip()

    def check_images(self, *guests: libvirt_vm.Guest) -> None:
        for guest in guests:
            self.host.virsh('destroy', guest.name)
            for path in (guest.image, guest.ram):
                libvirt_vm.run(images.program('pcow-img'), 'check', path)


class FixationRoundsTest(RoundsTestCase):
    """The host goes down and comes up, with all of its VMs."""

    VMS = from_environment('PCOW_FIXATION_VMS', 2, 8)
    ROUNDS = from_environment('PCOW_FIXATION_ROUNDS', 2, 50)

    def test_no_generation_is_lost(self) -> None:
        guests = [self.protected(f'vm{number}', '--interval', 'off') for number in range(self.VMS)]
        seen = {guest.name: self.follow(guest) for guest in guests}
        done: collections.Counter[str] = collections.Counter()
        for number in range(self.ROUNDS):
            way = (self.fixate, self.signal)[number % 2]
            for generations in seen.values():
                self.goes_on(generations, generations.mark()[0])
            way(guests)
            before = {name: generations.mark() for name, generations in seen.items()}
            back = self.pcowctl('host', 'recover')
            self.assertEqual({*seen}, {row['name'] for row in back if row['checkpoint']}, back)
            for name, (mark, last) in before.items():
                _when, first = self.goes_on(seen[name], mark)
                self.assertGreater(first, last, f'{name}, round {number}, {way.__name__}')
                done[way.__name__] += 1
        said = f'{self.ROUNDS} rounds of {self.VMS} VMs: ' + ', '.join(
            f'{count} by {way}' for way, count in sorted(done.items())
        )
        if long.LONG or 'PCOW_FIXATION_ROUNDS' in os.environ:
            print(f'{said}; no generation lost', flush=True)
        self.check_images(*guests)

    def fixate(self, guests: list[libvirt_vm.Guest]) -> None:
        done = self.pcowctl('host', 'fixate')
        self.assertEqual(
            {guest.name: '' for guest in guests}, {row['name']: row['problem'] for row in done}
        )

    def signal(self, guests: list[libvirt_vm.Guest]) -> None:
        """A host without pcow-fixate.service whose libvirtd has crashed: each QEMU gets SIGTERM,
        and nobody knows why it has ended. There is no loop: who had it go on has told QEMU to keep
        the last moment.
        """
        pids = [guest.pid() for guest in guests]
        daemon = int((self.host.directory / 'libvirtd.pid').read_text())
        os.kill(daemon, signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        self.wait(lambda: not any(Path(f'/proc/{pid}').exists() for pid in pids))
        self.host.daemon.start()


class KilledTest(RoundsTestCase):
    """kill -9 of a QEMU with automatic checkpoints: while it runs, takes one, goes back to one, or
    has just been started to go on; and of the loop.
    """

    ROUNDS = from_environment('PCOW_KILL_ROUNDS', 2, 60)

    def setUp(self) -> None:
        super().setUp()
        seed = os.environ.get('PCOW_KILL_SEED', str(random.SystemRandom().randrange(1 << 32)))
        self.seed = seed
        self.random = random.Random(seed)
        self.done: collections.Counter[str] = collections.Counter()

    def test_never_older_than_the_last_checkpoint(self) -> None:
        self.killed = self.protected('killed', '--interval', '1s')
        self.seen = self.follow(self.killed)
        self.process = self.loop()
        self.least: dict[str, int] = {}  # generation that a checkpoint has, or a younger one
        self.wait(lambda: self.seen.after(0))
        self.note_newer_than(self.seen.after(0)[0][0])
        ways = (self.while_it_runs, self.while_one_is_taken, self.while_it_reverts, self.at_start)
        for number in range(self.ROUNDS):
            way = ways[number] if number < len(ways) else self.random.choice(ways)
            if self.random.random() < 0.2:
                self.process.kill()
                self.process.wait()
                self.done['with the loop'] += 1
            time.sleep(self.random.uniform(0, 1.5))
            least = way(number)
            mark, _last = self.seen.mark()
            self.have_loop()
            when, first = self.goes_on_at_last(mark)
            self.assertGreaterEqual(
                first, least, f'round {number}, {way.__name__}, seed {self.seed}'
            )
            self.done[way.__name__] += 1
            self.note_newer_than(when)
            for name in self.names(self.killed):
                if name.startswith('mine'):
                    self.killed.qmp('pcow-checkpoint-delete', name=name)
            if long.LONG and number % 10 == 9:
                print(f'{number + 1}: {dict(self.done)}', flush=True)
        self.end(self.process)
        said = f'{self.ROUNDS} times killed: ' + ', '.join(
            f'{count} {way}' for way, count in sorted(self.done.items())
        )
        if long.LONG or 'PCOW_KILL_ROUNDS' in os.environ:
            print(said, flush=True)
        self.check_images(self.killed)

    # ---- ways; each returns the generation that it may not fall behind

    def while_it_runs(self, _number: int) -> int:
        least = self.least_now()
        self.kill_now()
        return least

    def while_one_is_taken(self, number: int) -> int:
        return self.kill_during('pcow-checkpoint-create', f'mine{number}', self.least_now())

    def while_it_reverts(self, number: int) -> int:
        name, (_count, least) = f'mine{number}', self.seen.mark()
        self.killed.qmp('pcow-checkpoint-create', name=name)
        time.sleep(self.random.uniform(0, 0.5))
        return self.kill_during('pcow-checkpoint-revert', name, least)

    def at_start(self, _number: int) -> int:
        """Killed, and once more when it has been started to go on."""
        least, pid = self.least_now(), self.kill_now()
        self.have_loop()
        self.wait(lambda: self.pid() not in (0, pid))
        time.sleep(self.random.uniform(0, 0.6))
        self.kill_now()
        return least

    def kill_during(self, command: str, name: str, least: int) -> int:
        request = json.dumps({'execute': command, 'arguments': {'name': name}})
        process = subprocess.Popen(
            [
                *('virsh', '-q', '-c', self.host.daemon.uri, 'qemu-monitor-command'),
                *(self.killed.name, request),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(self.random.uniform(0.01, 0.12))
        self.kill_now()
        process.wait()
        return least

    # ----

    def pid(self) -> int:
        """0: it has none."""
        with contextlib.suppress(OSError, ValueError):
            return self.killed.pid()
        return 0

    def kill_now(self) -> int:
        pid = self.pid()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not Path(f'/proc/{pid}').exists())
        return pid

    def have_loop(self) -> None:
        if self.process.poll() is not None:
            self.process = self.loop()

    def goes_on_at_last(self, mark: int) -> tuple[float, int]:
        """One that was killed again and again needs to be told to."""

        def runs() -> bool:
            if self.record(self.killed).get('state') == 'failed':
                self.assertIn('ended soon each time', self.record(self.killed)['reason'])
                self.pcowctl('host', 'recover', '--failed')
                self.done['told to go on'] += 1
            return bool(self.seen.after(mark))

        self.wait(runs)
        return self.goes_on(self.seen, mark)

    def last_durable(self) -> str:
        record = self.record(self.killed)
        return str(record['checkpoint']) if record.get('state') == 'runs' else ''

    def least_now(self) -> int:
        """Of the last one that is known to be durable."""
        name = self.last_durable()
        return self.least.get(name) or self.seen.last_by(moments.moment_of(name))

    def note_newer_than(self, when: float) -> None:
        """Wait for a checkpoint of what runs since then."""
        self.wait(lambda: moments.moment_of(self.last_durable()) > when)
        name = self.last_durable()
        self.least[name] = self.seen.last_by(moments.moment_of(name))
