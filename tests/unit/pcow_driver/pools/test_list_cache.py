# SPDX-License-Identifier: Apache-2.0
"""What pcow-img remembers of the images of a pool is what it would find if it looked: by random
work, with its file damaged, and with those killed who write it.

PCOW_TEST_SEED is the seed of the random work.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import random
import subprocess
import threading
import time
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import list_cache
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tests.unit.pcow_driver import base

MIB = units.MIB
SEED = int(os.environ.get('PCOW_TEST_SEED', '1'))
IMAGES = 40
ROUNDS = 5
BOOT_ID = '/proc/sys/kernel/random/boot_id'
SETTLED = 2.1  # seconds after which what does not change is remembered


def fail(*codes: int) -> Callable[..., Any]:
    """image.info() whose calls end with these codes, and the later ones as they do."""
    real = image.info
    left = list(codes)

    def info(*args: Any, **kw: Any) -> Any:
        if left and (code := left.pop(0)):
            raise exception.ToolFailed(tool='pcow-img', exit_code=code, message='no')
        return real(*args, **kw)

    return info


class ListCacheTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(
            pcow_img=str(self.programs / 'pcow-img'), pcow_io=str(self.programs / 'pcow-io')
        )
        directory = self.directory / 'p'
        directory.mkdir()
        # where stores through a mapping change no time
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=512m', 'none', directory], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', directory], check=True)
        registry.PoolRegistry().create('p', str(directory))
        self.pool = registry.PoolRegistry().set('p', overcommit=10000.0)
        for number in range(IMAGES):
            device.create(self.pool, f'v{number}', 4 * MIB)
        found = list_cache.path(self.pool.uuid)
        assert found is not None
        self.cache = Path(found)

    def settle(self) -> None:
        """What is there now is remembered."""
        time.sleep(SETTLED)
        self.pool.listed()
        self.assertTrue(self.cache.exists())

    def check_like_a_look(self) -> None:
        """All figures are those that a look at each image gives; those of one that is open change
        of themselves, as blocks are allocated ahead.
        """
        deadline = time.monotonic() + 5
        while wrong := self.differences():
            self.assertLess(time.monotonic(), deadline, wrong)

    def differences(self) -> list[object]:
        cache = str(self.cache)
        total, seen = image.total(self.pool.path), image.list_directory(self.pool.path)
        listed, sums = (
            image.list_directory(self.pool.path, cache=cache),
            image.total(self.pool.path, cache=cache),
        )
        wrong: list[object] = [
            (name, seen.get(name), listed.get(name))
            for name in sorted({*seen, *listed})
            if seen.get(name) != listed.get(name)
        ]
        return wrong + ([] if total == sums else [total, sums])

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[subprocess.Popen[str]]:
        """As QEMU has it: stores go through a mapping."""
        with subprocess.Popen(
            [self.programs / 'pcow-io', self.pool.existing_path(name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            self.say(process, 'read 0 4k')
            yield process
            assert process.stdin is not None
            process.stdin.close()

    def say(self, process: subprocess.Popen[str], command: str) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f'{command}\nread 0 4k\n')
        process.stdin.flush()
        while 'read 4096' not in (line := process.stdout.readline()):
            self.assertTrue(line, command)

    def random_step(self, chance: random.Random, number: int) -> None:
        one = chance.choice([item for item in self.pool.listed() if item.summary])
        assert one.summary is not None
        at = chance.randrange(0, one.summary.virtual_size - MIB, 4096)
        steps: tuple[Callable[[], object], ...] = (
            lambda: device.create(self.pool, f'n{number}', chance.choice((2, 4, 8)) * MIB),
            lambda: trash.delete_image(self.pool, one.name),
            lambda: image.snapshot_create(one.path, f's{number}'),
            lambda: [
                trash.delete_snapshot(self.pool, one.name, snapshot.name)
                for snapshot in image.snapshot_list(one.path)[:1]
            ],
            lambda: device.extend(self.pool, one.name, 16 * MIB),
            lambda: self.pool.create_image(f'c{number}', base=one.name),
            lambda: tool.run(tool.find('pcow_io'), '-c', f'write -q -P 90 {at} 1M', one.path),
            lambda: clone.rename(self.pool, one.name, f'r{number}'),
        )
        chance.choice(steps)()

    def test_random_work(self) -> None:
        chance = random.Random(SEED)
        for round_ in range(ROUNDS):
            self.settle()
            for step in range(8):
                with contextlib.suppress(exception.ToolFailed, exception.ImageInUse):
                    self.random_step(chance, 100 * round_ + step)
                self.check_like_a_look()

    def test_open_for_long(self) -> None:
        """Nothing tells when a guest has stored, or made a snapshot: it is looked at each time."""
        with self.opened('v0') as process, self.opened('v1') as another:
            self.settle()
            time.sleep(SETTLED)
            for number in range(3):
                self.say(process, f'write -P {number + 1} 0 4M')
                self.check_like_a_look()
                self.say(process, f'snapshot create s{number}')
                self.check_like_a_look()
            another.kill()
        self.settle()
        self.check_like_a_look()

    def test_change_without_a_trace(self) -> None:
        """Neither the length nor the blocks show that there is one more snapshot."""
        image.snapshot_create(self.pool.existing_path('v1'), 's')
        image.snapshot_delete(self.pool.existing_path('v1'), 's')
        self.settle()
        before = os.stat(self.pool.existing_path('v1'))
        with self.opened('v1') as process:
            self.say(process, 'snapshot create t')
            self.check_like_a_look()
        self.check_like_a_look()
        after = os.stat(self.pool.existing_path('v1'))
        self.assertEqual((before.st_size, before.st_blocks), (after.st_size, after.st_blocks))

    def test_files_opened(self) -> None:
        """None of those that have not changed."""
        self.settle()
        device.create(self.pool, 'new', 4 * MIB)
        with self.opened('v3'), base.count_opened(self.pool.path) as opened:
            self.pool.account()
        self.assertEqual({'new.pcow': 1, 'v3.pcow': 1}, opened)
        with base.count_opened(self.pool.path) as opened:
            trash.delete_image(self.pool, 'v5')
        self.assertEqual(
            {'new.pcow', 'v3.pcow', 'v5.pcow', '.pcow-pool', '.pcow-lock'}, set(opened)
        )

    def test_damaged(self) -> None:
        self.settle()
        good = self.cache.read_bytes()
        chance = random.Random(SEED)
        for _ in range(30):
            bad = bytearray(good)
            match chance.randrange(3):
                case 0:
                    bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
                case 1:
                    del bad[chance.randrange(len(bad)) :]
                case 2:
                    at = chance.randrange(len(bad))
                    bad[at : at + 4096] = bytes(len(bad[at : at + 4096]))
            self.cache.write_bytes(bad)
            self.check_like_a_look()
        for make in (
            lambda: os.mkfifo(self.cache),
            lambda: os.symlink(self.directory / 'elsewhere', self.cache),
            lambda: self.cache.write_bytes(b''),
            self.cache.mkdir,
        ):
            self.cache.unlink(missing_ok=True)
            make()
            self.check_like_a_look()
        self.assertFalse((self.directory / 'elsewhere').exists())

    def test_link_in_place_of_the_directory(self) -> None:
        """Who may write to the state directory has root write nowhere else."""
        self.settle()
        elsewhere = self.directory / 'elsewhere'
        self.cache.parent.rename(elsewhere)
        for path in elsewhere.iterdir():
            path.unlink()
        self.cache.parent.symlink_to(elsewhere)
        self.check_like_a_look()
        self.pool.account()
        self.assertEqual([], os.listdir(elsewhere))

    def test_full_state_directory(self) -> None:
        self.settle()
        self.cache.unlink()
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=4k', 'none', self.cache.parent], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', self.cache.parent], check=True)
        self.check_like_a_look()
        self.assertLessEqual(set(os.listdir(self.cache.parent)), {f'{self.cache.name}.bases'})

    def test_killed(self) -> None:
        """Who writes it, at any moment; what he left is no obstacle to the next."""
        self.settle()
        chance = random.Random(SEED)
        command = [
            str(self.programs / 'pcow-img'),
            *('list', '--total', '--cache', str(self.cache), self.pool.path),
        ]
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        takes = time.monotonic() - started
        for _ in range(60):
            self.cache.unlink(missing_ok=True)
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            time.sleep(chance.random() * 2 * takes)
            process.kill()
            process.wait()
            self.check_like_a_look()
        self.cache.unlink(missing_ok=True)
        Path(f'{self.cache}.new').write_bytes(b'left')
        self.settle()
        self.assertFalse(os.path.lexists(f'{self.cache}.new'))

    def test_at_once(self) -> None:
        """Lists beside each other, while images come and go."""
        self.settle()
        failed: list[BaseException] = []
        over = threading.Event()

        def look() -> None:
            try:
                while not over.is_set():
                    if self.cache.exists() and random.random() < 0.3:
                        self.cache.unlink(missing_ok=True)
                    names = {item.name for item in self.pool.listed() if item.summary}
                    self.assertLessEqual({'v0', 'v1', 'v2'}, names)
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(15):
            device.create(self.pool, f'n{number}', 4 * MIB)
            trash.delete_image(self.pool, f'v{number + 3}')
            trash.delete_image(self.pool, f'n{number}')
        over.set()
        for thread in threads:
            thread.join()
        self.assertEqual([], failed)
        self.check_like_a_look()

    def test_copied_pool(self) -> None:
        """With the same uuid, and other files."""
        self.settle()
        copy = self.directory / 'p' / 'copy'
        copy.mkdir()
        files = list(Path(self.pool.path).glob('*.pcow'))
        subprocess.run(['cp', '-a', '--sparse=always', *files, copy], check=True)
        image.snapshot_create(str(copy / 'v1.pcow'), 's')
        self.assertEqual(
            image.list_directory(str(copy)), image.list_directory(str(copy), cache=str(self.cache))
        )
        self.check_like_a_look()

    def test_not_where_hosts_may_share(self) -> None:
        """Of a file system that is not known to have one kernel nothing is remembered."""
        overlay = self.directory / 'overlay'
        for name in ('', 'upper', 'work', 'merged'):
            (overlay / name).mkdir()
        options = f'lowerdir={self.pool.path},upperdir={overlay}/upper,workdir={overlay}/work'
        mounted = subprocess.run(
            ['mount', '-t', 'overlay', '-o', options, 'none', overlay / 'merged'], check=False
        )
        if mounted.returncode:
            self.skipTest('no overlay can be mounted')
        self.addCleanup(subprocess.run, ['umount', '-l', overlay / 'merged'], check=True)
        time.sleep(SETTLED)
        other = self.directory / 'other'
        found = image.list_directory(str(overlay / 'merged'), cache=str(other))
        self.assertEqual(IMAGES, len(found))
        self.assertFalse(other.exists())

    def test_state_that_cannot_be_written(self) -> None:
        self.settle()
        os.chmod(self.cache.parent, 0o500)
        self.addCleanup(os.chmod, self.cache.parent, 0o700)
        program = [str(self.programs / 'pcow-img'), 'list', '--total', '--output=json']
        command = [*program, '--cache', str(self.cache), self.pool.path]
        os.chmod(self.directory, 0o755)
        os.chmod(self.pool.path, 0o755)
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        self.assertEqual('', result.stderr)
        self.assertEqual(IMAGES, json.loads(result.stdout)['images'])

    def test_what_somebody_else_says(self) -> None:
        """Of what another user has written there, or can write, nothing is believed."""
        self.settle()
        good = self.cache.read_bytes()
        for owner, mode in ((65534, 0o600), (0, 0o660), (0, 0o606), (0, 0o600)):
            self.cache.unlink(missing_ok=True)
            self.cache.write_bytes(good)
            self.cache.chmod(mode)
            os.chown(self.cache, owner, 0)
            with (
                self.subTest(owner=owner, mode=oct(mode)),
                base.count_opened(self.pool.path) as opened,
            ):
                self.pool.account()
            believed = (owner, mode) == (0, 0o600)
            self.assertEqual(0 if believed else IMAGES, sum(opened.values()))

    def test_another_start_of_the_host(self) -> None:
        """After a crash the time of a file may be that of before, and what is in it not."""
        self.settle()
        other = self.directory / 'boot_id'
        other.write_text('00000000-0000-0000-0000-000000000000\n')
        later = self.directory / 'pcow-img'
        later.write_text(
            f'#!/bin/sh\nexec unshare -m sh -c \'mount --bind {other} {BOOT_ID} &&\n'
            f'exec {self.programs}/pcow-img "$@"\' pcow-img "$@"\n'
        )
        later.chmod(0o755)
        this = self.programs / 'pcow-img'
        for program, expected in ((later, IMAGES), (later, 0), (this, IMAGES), (this, 0)):
            self.configure(pcow_img=str(program))
            with base.count_opened(self.pool.path) as opened:
                self.pool.account()
            self.assertEqual(expected, sum(opened.values()))

    def test_new_file_of_somebody_else(self) -> None:
        """Who has it open writes to no file that is believed."""
        self.settle()
        new = Path(f'{self.cache}.new')
        new.write_bytes(b'')
        os.chown(new, 65534, 65534)
        self.cache.unlink()
        with new.open('ab') as his:
            self.pool.listed()
            his.write(b'mine')
        self.assertFalse(os.path.lexists(new))
        self.assertNotIn(b'mine', self.cache.read_bytes())

    def test_look_that_fails(self) -> None:
        """An image that cannot be read just now is no damaged one, of which nobody could tell what
        stands on it.
        """
        rounds = [(0,) * failing + (code,) for code in (-9, 1) for failing in range(4)]
        rounds += [(1, 1), (1, -9), (1, 1, -9), (1, -9, -9)]
        for number, codes in enumerate(rounds):
            self.pool.create_image(f'child{number}', base=f'v{number}')
            with Path(self.pool.existing_path(f'child{number}')).open('r+b') as file:
                file.write(bytes(4096))
            with (
                self.subTest(codes=codes),
                mock.patch.object(image, 'info', fail(*codes)),
                contextlib.suppress(exception.PcowError),
            ):
                trash.delete_image(self.pool, f'v{number}')
            self.assertTrue(os.path.exists(self.pool.image_path(f'v{number}')), codes)

    def test_goes_with_its_pool(self) -> None:
        self.settle()
        registry.PoolRegistry().remove('p', forget=True)
        self.assertEqual([], os.listdir(self.cache.parent))

    def test_modes(self) -> None:
        """For whom the state directory is; nobody else learns what is in a pool."""
        self.settle()
        directory = self.cache.parent.stat()
        for path in (self.cache, Path(f'{self.cache}.bases')):
            self.assertEqual(0o600, path.stat().st_mode & 0o777)
        self.assertEqual(
            (self.directory / 'state').stat().st_mode & 0o777, directory.st_mode & 0o777
        )
