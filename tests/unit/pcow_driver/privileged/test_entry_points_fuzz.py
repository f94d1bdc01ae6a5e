# SPDX-License-Identifier: Apache-2.0
"""Hostile trees against what root does below the pools: links, FIFOs, sockets, mounts, and renames
in a loop by another process.

PCOW_FUZZ_SECONDS makes it longer.
"""

from __future__ import annotations

import os
from pathlib import Path
import random
import subprocess
import sys
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.export import nbd
from pcow_driver.privileged import filesystems
from tests.unit.pcow_driver import base

SECONDS = float(os.environ.get('PCOW_FUZZ_SECONDS', '3'))

# As nobody, in a directory of its own: what is there is exchanged for links and back, all the time.
_ATTACKER = """
import os, random, sys
place, outside = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.chdir(place)
print(flush=True)
names = ['p', 'q', 'pools', 'export', 'control', '.x.control']
while True:
    name, other = random.choice(names), random.choice(names)
    try:
        match random.randrange(8):
            case 0:
                os.symlink(random.choice([outside, f'{outside}/victim', '/', '..', other]), name)
            case 1: os.mkdir(name)
            case 2: os.mkfifo(name)
            case 3: os.rename(name, other)
            case 4: os.unlink(name)
            case 5: os.rmdir(name)
            case 6: os.symlink(f'{outside}/.victim.control', f'{name}/control')
            case 7: open(f'{name}/nbdkit.pid', 'x').write('1')
    except OSError:
        pass
"""


class FuzzTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.outside = self.directory / 'outside'
        self.outside.mkdir()
        for name in ('victim', '.victim.control', 't.pcow'):
            (self.outside / name).write_text('precious')
        self.place = self.directory / 'place'
        self.place.mkdir()
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        self.configure(pools_path=str(self.place))
        self.addCleanup(self.unmount)

    def unmount(self) -> None:
        for line in reversed(Path('/proc/self/mountinfo').read_text().splitlines()):
            if line.split()[4].startswith(f'{self.directory}/'):
                subprocess.run(['umount', '-l', line.split()[4]], check=False)

    def state(self) -> list[tuple[Any, ...]]:
        """Of all that is not the attacker's."""
        found = []
        for path in (self.outside, *sorted(self.outside.iterdir())):
            status = path.lstat()
            found.append(
                (
                    path.name,
                    status.st_ino,
                    status.st_uid,
                    status.st_gid,
                    status.st_mode,
                    status.st_size,
                    status.st_dev,
                )
            )
        return found

    def call(self, chosen: random.Random) -> None:
        path = str(
            self.place.joinpath(*chosen.choices(('p', 'q', 'pools', 'x'), k=chosen.randint(1, 3)))
        )
        function, *arguments = chosen.choice(
            (
                (filesystems.make_directory, path),
                (filesystems.remove_directory, path),
                (filesystems.mount_memory, 'p', 1 << 20, path, False),
                (filesystems.unmount, path),
                (filesystems.grow, path),
                (filesystems.resize_memory, path, 2 << 20),
                (filesystems.give, path, 65534, 65534),
                (filesystems.set_extent_hint, path),
                (nbd.stop, path),
                (nbd.stop, str(self.place / 'export')),
                (immutable.is_set, path),
            )
        )
        try:
            function(*arguments)
        except (exception.PcowError, OSError):
            pass

    def run_for(self, seconds: float) -> int:
        chosen, calls, end = random.Random(), 0, time.monotonic() + seconds
        before = self.state()
        while time.monotonic() < end:
            self.call(chosen)
            calls += 1
        self.assertEqual(before, self.state())
        for line in Path('/proc/self/mountinfo').read_text().splitlines():
            self.assertFalse(line.split()[4].startswith(str(self.outside)), line)
        return calls

    def attack(self) -> subprocess.Popen[bytes]:
        attacker = subprocess.Popen(
            [sys.executable, '-c', _ATTACKER, self.place, self.outside], stdout=subprocess.PIPE
        )
        assert attacker.stdout is not None
        attacker.stdout.readline()
        self.addCleanup(attacker.stdout.close)
        self.addCleanup(attacker.wait)
        self.addCleanup(attacker.kill)
        return attacker

    def test_directory_of_the_attacker(self) -> None:
        """Nothing is ever done in it."""
        os.chown(self.place, 65534, 65534)
        self.attack()
        self.assertGreater(self.run_for(SECONDS), 10)
        self.assertNotIn(f' {self.place}/', Path('/proc/self/mountinfo').read_text())
        for path in self.place.iterdir():
            self.assertEqual(65534, path.lstat().st_uid, str(path))

    def test_directory_that_anybody_may_write_to(self) -> None:
        """With the sticky bit: what is root's there stays root's, and only that is used."""
        self.place.chmod(0o1777)
        self.attack()
        self.assertGreater(self.run_for(SECONDS), 10)
        self.assertFalse(any(immutable.is_set(str(path)) for path in self.outside.iterdir()))
