# SPDX-License-Identifier: Apache-2.0
"""What root does with ``pcowctl`` in a pool of a service that was taken over: images, templates and
their sources are exchanged for links, FIFOs, directories and other images, all the time.

PCOW_FUZZ_SECONDS makes it longer.
"""

from __future__ import annotations

import collections
import hashlib
import io
import os
from pathlib import Path
import random
import subprocess
import sys
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import units
from pcow_driver.copies import fork
from pcow_driver.copies import transfer
from pcow_driver.health import garbage
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.templates import template
from tests.unit.pcow_driver import base

SECONDS = float(os.environ.get('PCOW_FUZZ_SECONDS', '8'))
CALLS = 30
NOBODY = 65534
MIB = units.MIB
NAMES = ('t', 'u', 'v', 'w')
SECRET = b'precious' * 512

# As nobody, who owns the pool: images change places, and what is root's is linked to in theirs.
_ATTACKER = """
import os, random, sys, time
outside, pool, store = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.chdir(pool)
own = {f'{name}.pcow': f'{store}/{name}' for name in 'tuvw'} | {'raw': f'{store}/raw'}
names = [*own, 'x.pcow', '.trash']
targets = [f'{outside}/root.pcow', f'{outside}/template.pcow', f'{outside}/secret', outside, '..']

def put(source, make, name):
    try:
        make(source, 'new')
        os.rename('new', name)
    except OSError:  # a directory has the name
        for remove, at in ((os.unlink, 'new'), (os.rmdir, name)):
            try:
                remove(at)
            except OSError:
                pass

def put_all():
    for name, source in own.items():
        put(source, os.link, name)

put_all()
print(flush=True)
while True:
    name, other = random.choice(names), random.choice(names)
    try:
        match random.randrange(12):
            case 0 | 1: put(random.choice(targets), os.symlink, name)
            case 2: os.link(random.choice(targets), name)
            case 3: os.mkfifo(name)
            case 4: os.rename(name, other)
            case 5: os.mkdir(name)
            case 6: os.rmdir(name)
            case 7: os.unlink(name)
            case _: put_all()
    except OSError:
        pass
    time.sleep(random.choice((0, 0, 0.001, 0.003, 0.01)))
"""


class FuzzTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(programs / 'pcow-io'))
        self.outside, self.store = self.directory / 'outside', self.directory / 'store'
        self.place = self.directory / 'pool'
        for path in (self.outside, self.store, self.place):
            path.mkdir()
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        (self.outside / 'secret').write_bytes(SECRET)
        for name in ('root', 'template'):
            self.make(programs, self.outside / f'{name}.pcow', seal=name == 'template')
        for name in NAMES:
            self.make(programs, self.store / name, seal=name == 't')
        (self.store / 'raw').write_bytes(bytes(64 << 10) + b'raw' * 1000)
        for path in self.outside.iterdir():
            path.chmod(0o600)
        for path in (self.place, self.store, *self.store.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        registry.PoolRegistry().create('p', str(self.place))
        self.pool = registry.PoolRegistry().get('p')
        self.done: collections.Counter[str] = collections.Counter()
        self.addCleanup(
            subprocess.run, ['chattr', '-R', '-f', '-i', str(self.directory)], check=False
        )

    @staticmethod
    def make(programs: Path, path: Path, *, seal: bool) -> None:
        image.create(str(path), 4 * MIB)
        subprocess.run(
            [programs / 'pcow-io', '-c', 'write -P 0x53 0 64k', path],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        image.snapshot_create(str(path), 's')
        if seal:
            image.seal(str(path), checksums=True)

    @staticmethod
    def state(top: Path) -> list[tuple[Any, ...]]:
        """All of it but who has read it when."""
        found = []
        for path in sorted(top.rglob('*')):
            status = path.lstat()
            found.append(
                (
                    path.relative_to(top),
                    status.st_ino,
                    status.st_uid,
                    status.st_mode,
                    status.st_size,
                    os.listxattr(path, follow_symlinks=False),
                    immutable.is_set(str(path)),
                    hashlib.sha256(path.read_bytes()).hexdigest(),
                )
            )
        return found

    def attack(self) -> None:
        attacker = subprocess.Popen(
            [sys.executable, '-c', _ATTACKER, self.outside, self.place, self.store],
            stdout=subprocess.PIPE,
        )
        assert attacker.stdout is not None
        attacker.stdout.readline()
        self.addCleanup(attacker.stdout.close)
        self.addCleanup(attacker.wait)
        self.addCleanup(attacker.kill)

    def path(self, name: str) -> str:
        if os.path.realpath(self.pool.image_path(name)).startswith(f'{self.outside}/'):
            self.done['links to what is not theirs:'] += 1
        return self.pool.existing_path(name)

    def send(self, name: str) -> None:
        """No byte of root's comes out of it."""
        with (self.directory / 'sent').open('w+b') as stream:
            try:
                transfer.send(self.path(name), stream)
            finally:
                stream.seek(0)
                self.assertNotIn(SECRET[:64], stream.read())

    def receive(self, name: str) -> None:
        with (self.directory / 'whole').open('w+b') as stream:
            transfer.send(str(self.outside / 'template.pcow'), stream)
            stream.seek(0)
            transfer.receive(self.pool, name, io.BytesIO(stream.read()))

    def collect(self) -> None:
        for finding in garbage.find(self.pool, None):
            garbage.delete(self.pool, finding)

    def build(self, name: str) -> None:
        template.build(self.pool, name, str(self.place / 'raw'), 'raw')
        self.assertNotIn(SECRET[:64], (self.place / f'{name}.pcow').read_bytes())

    def call(self, chosen: random.Random) -> None:
        name, other = chosen.choice(NAMES), chosen.choice(NAMES)
        pool = self.pool
        calls = {
            'list': lambda: pool.listed(),
            'templates': lambda: pool.templates(),
            'account': lambda: pool.account(),
            'create': lambda: pool.create_image(name, size=4 * MIB),
            'create on': lambda: pool.create_image(name, base=other),
            'delete': lambda: pool.delete_image(name),
            'delete by force': lambda: pool.delete_image(name, force=True),
            'delete a template': lambda: pool.delete_template(name),
            'delete an orphan': lambda: pool.delete_orphan(name),
            'snapshot': lambda: image.snapshot_create(self.path(name), 'n'),
            'revert': lambda: image.snapshot_revert(self.path(name), 's'),
            'delete a snapshot': lambda: image.snapshot_delete(self.path(name), 's'),
            'seal': lambda: image.seal(self.path(name), checksums=True),
            'unseal': lambda: image.unseal(self.path(name)),
            'resize': lambda: image.resize(self.path(name), 6 * MIB),
            'rebase': lambda: image.rebase(self.path(name), None),
            'check': lambda: image.check(self.path(name), repair=True, accept_loss=True),
            'checksum': lambda: image.checksum(self.path(name), 's'),
            'fork': lambda: fork.fork(self.path(name), 's', other),
            'protect': lambda: template.protect(pool, pool.image_path(name)),
            'build': lambda: self.build(name),
            'send': lambda: self.send(name),
            'receive': lambda: self.receive(name),
            'discard': lambda: transfer.discard(pool, name),
            'garbage': self.collect,
            'scrub': lambda: scrub.scrub(pool, tell=lambda _name, _result: None),
        }
        what = chosen.choice(list(calls))
        try:
            calls[what]()
            self.done[what] += 1
        except (exception.PcowError, OSError) as e:
            self.done[f'{what}: {type(e).__name__}'] += 1

    def test_pool_of_the_attacker(self) -> None:
        chosen, calls, end = random.Random(), 0, time.monotonic() + SECONDS
        before = self.state(self.outside)
        self.attack()
        while time.monotonic() < end or calls < CALLS:
            self.call(chosen)
            calls += 1
        self.assertEqual(before, self.state(self.outside))
        self.assertTrue(any(':' not in what for what in self.done), self.done)
        self.assertIn('links to what is not theirs:', self.done)
        print(dict(self.done))
        for path in self.place.rglob('*'):
            if path.is_file() and not path.is_symlink():
                self.assertNotIn(SECRET[:64], path.read_bytes(), str(path))
