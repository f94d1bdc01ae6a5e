# SPDX-License-Identifier: Apache-2.0
"""With over-commit 1.0 every guest can fill its image, whatever else the pool has come to hold: by
random work on a small one.

PCOW_TEST_PROMISES is the number of pools, of which each has a seed of its own, from PCOW_TEST_SEED
on.
"""

from collections.abc import Iterator
import contextlib
import functools
import os
from pathlib import Path
import random
import subprocess

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.fixation import at_signal
from pcow_driver.images import image
from pcow_driver.pools import capacity
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import room
from pcow_driver.pools import staging
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash
from pcow_driver.templates import template
from pcow_driver.vm import checkpoint
from pcow_driver.vm import process
from pcow_driver.vm import state_room
from tests.unit.pcow_driver import base

MIB = units.MIB
POOLS, SEED = (
    int(os.environ.get('PCOW_TEST_PROMISES', '1')),
    int(os.environ.get('PCOW_TEST_SEED', '1')),
)
STEPS = 30


class ProvisionedTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(
            pcow_img=str(programs / 'pcow-img'),
            pcow_io=str(programs / 'pcow-io'),
            emulator=str(programs / 'qemu-system-x86_64'),
            libvirt_uri=f'test://{self.directory}/none',
        )
        self.made = 0
        self.has_qemu = (programs / 'qemu-system-x86_64').exists()

    def make_pool(self, name: str, *mkfs: str) -> pool_module.Pool:
        """On tmpfs, or the file system that a program makes."""
        directory = self.directory / name
        directory.mkdir()
        mount: list[str | Path] = ['-t', 'tmpfs', '-o', 'size=192m', 'none']
        if mkfs:
            disk = self.directory / f'{name}.disk'
            with disk.open('wb') as f:
                f.truncate(400 * MIB)
            subprocess.run([*mkfs, disk], check=True, capture_output=True)
            mount = ['-o', 'loop', disk]
        subprocess.run(['mount', *mount, directory], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', directory], check=True)
        self.own = self.used(str(directory))
        registry.PoolRegistry().create(name, str(directory))
        return registry.PoolRegistry().set(name, overcommit=1.0)

    @staticmethod
    def used(directory: str) -> int:
        """Bytes of a file system."""
        status = os.statvfs(directory)
        return (status.f_blocks - status.f_bavail) * status.f_frsize

    def new_name(self) -> str:
        self.made += 1
        return f'v{self.made}'

    def write(self, path: str, offset: int, length: int) -> None:
        tool.run(tool.find('pcow_io'), '--no-map', '-c', f'write -q -P 165 {offset} {length}', path)

    def step(self, pool: pool_module.Pool, chance: random.Random) -> None:
        fillable = [item for item in pool.images() if item.info and not item.info.sealed]
        if not fillable or chance.randrange(4) == 0:
            chance.choice((self.create, self.create, self.template, self.file))(pool, chance)
        else:
            chance.choice(
                (
                    self.store,
                    self.store,
                    self.store,
                    self.snapshot,
                    self.delete_snapshot,
                    self.from_snapshot,
                    self.clone,
                    self.delete,
                    self.extend,
                    *([self.checkpoint, self.spare] if self.has_qemu else []),
                )
            )(pool, chance, chance.choice(fillable))

    def create(self, pool: pool_module.Pool, chance: random.Random) -> None:
        device.create(pool, self.new_name(), chance.choice((4, 10, 20)) * MIB)

    def template(self, pool: pool_module.Pool, chance: random.Random) -> None:
        source = self.directory / 'source.raw'
        source.write_bytes(chance.randbytes(chance.choice((3, 9)) * MIB))
        template.build(pool, self.new_name(), str(source), 'raw')

    def file(self, pool: pool_module.Pool, _chance: random.Random) -> None:
        """Of an operator, who looks before."""
        account = pool.account()
        if account.limit is not None and account.limit - account.provisioned > 4 * MIB:
            Path(pool.path, f'file-{self.new_name()}').write_bytes(bytes(3 * MIB))

    def store(
        self, _pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        assert one.info is not None
        offset = chance.randrange(0, one.info.virtual_size, 4096)
        self.write(
            one.path,
            offset,
            min(chance.choice((1, 16, 500, 1500)) * 4096, one.info.virtual_size - offset),
        )

    def snapshot(
        self, _pool: pool_module.Pool, _chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        attached.snapshot_create(one.path, f's{self.new_name()}')

    def delete_snapshot(
        self, pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        if one.info and one.info.snapshots:
            trash.delete_snapshot(pool, one.name, chance.choice(one.info.snapshots).name)

    def from_snapshot(
        self, pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        if one.info and one.info.snapshots:
            snapshot = chance.choice(one.info.snapshots).name
            size = device.window(one.path, snapshot=snapshot).size
            clone.on_base(
                pool,
                one.name,
                pool,
                self.new_name(),
                size,
                max_chain=chance.choice((1, 16)),
                snapshot=snapshot,
            )

    def clone(
        self, pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        size = device.window(one.path).size
        clone.clone(
            [clone.Clone(pool, one.name, pool, self.new_name(), size)],
            max_chain=chance.choice((1, 16)),
        )

    def delete(
        self, pool: pool_module.Pool, _chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        trash.delete_image(pool, one.name)

    def extend(
        self, pool: pool_module.Pool, _chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        device.extend(pool, one.name, device.window(one.path).size + 2 * MIB)

    @contextlib.contextmanager
    def machine(self, one: pool_module.PoolImage) -> Iterator[process.Process]:
        """A VM, paused, whose RAM is the image."""
        directory = self.useFixture(fixtures.TempDir()).path
        spec = process.Spec(name='vm', ram=one.path, accelerator='tcg')
        with process.Process(spec, directory) as vm, vm.started(run=False):
            yield vm

    @contextlib.contextmanager
    def little(self, pool: pool_module.Pool, chance: random.Random) -> Iterator[None]:
        """At times no more is left meanwhile than such a thing may take."""
        account = pool.account()
        left = (account.limit or 0) - account.provisioned - chance.randrange(64) * MIB
        file = Path(pool.path, f'file-{self.new_name()}')
        if left > 0 and chance.randrange(4):
            file.write_bytes(bytes(left))
        try:
            yield
        finally:
            file.unlink(missing_ok=True)

    def checkpoint(
        self, pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        """With the state of its devices, which lies beyond what the guest can fill."""
        with self.little(pool, chance), self.machine(one) as vm:
            for _time in range(chance.choice((1, 3))):
                checkpoint.take(vm, f's{self.new_name()}')
                self.check_figures(pool)

    def spare(
        self, pool: pool_module.Pool, chance: random.Random, one: pool_module.PoolImage
    ) -> None:
        """What QEMU keeps for the last moment, and that moment."""
        with self.little(pool, chance), self.machine(one) as vm:
            spare = functools.partial(state_room.of_spare, vm)
            with room.for_more(one.path, beside=spare):  # else it is not protected
                pass
            at_signal.keep(vm, 'last-')
            self.check_figures(pool)
            self.assertEqual(
                [True], [one['spare'] == one['spare-wanted'] > 0 for one in vm.query()]
            )
            if chance.randrange(2):
                checkpoint.take(vm, f'last-{self.new_name()}', last=True)
                self.check_figures(pool)

    def check_figures(self, pool: pool_module.Pool) -> None:
        """They are those of the file system."""
        usage, status = capacity.usage(pool, with_shared=False), os.statvfs(pool.path)
        used = self.used(pool.path)
        self.assertEqual(used, usage.allocated + usage.others)
        self.assertEqual(used, usage.account.fixed + usage.account.held)
        self.assertLess(
            usage.others,
            MIB
            + self.own
            + sum(
                os.lstat(entry).st_blocks * 512
                for entry in os.scandir(pool.path)
                if not entry.name.endswith('.pcow')
            ),
        )
        room = status.f_bavail * status.f_frsize - usage.account.growth
        self.assertGreaterEqual(room, 0)
        self.assertEqual(room, (usage.limit or 0) - usage.provisioned)
        # what placement lets be claimed
        self.assertEqual(room, usage.total - usage.account.reserved_beside(claimed=0))

    def fill(self, pool: pool_module.Pool, chance: random.Random) -> None:
        """All guests write all that they can, once more where they have written already,
        in pieces.
        """
        items = [item for item in pool.listed() if item.summary and not item.summary.sealed]
        pieces = [
            (item.path, offset)
            for item in items
            if item.summary
            for offset in range(0, item.summary.virtual_size, 2 * MIB)
        ]
        chance.shuffle(pieces)
        for path, offset in pieces:
            self.write(path, offset, 2 * MIB)

    def test_random_work(self) -> None:
        for seed in range(SEED, SEED + POOLS):
            chance, done, refused = random.Random(seed), 0, 0
            pool = self.make_pool(f'p{seed}')
            for number in range(STEPS):
                try:
                    self.step(pool, chance)
                    done += 1
                except (exception.NoRoom, exception.NoSpace):
                    refused += 1
                except exception.ToolFailed as e:
                    self.assertNotIn('space', str(e), f'seed {seed}, step {number}')
                    refused += 1
                self.check_figures(pool)
            self.fill(pool, chance)
            self.assertGreater(done, STEPS // 4)
            for item in pool.listed():
                self.assertTrue(image.check(item.path).clean, f'seed {seed}: {item.path}')

    def on_file_system(self, *mkfs: str) -> None:
        """What it needs for the lists of blocks of its files, it takes from the same space."""
        for seed in range(SEED, SEED + max(POOLS // 2, 1)):
            chance, refused = random.Random(seed), 0
            pool = self.make_pool(f'p{seed}', *mkfs)
            for number in range(STEPS * (2 if os.environ.get('PCOW_TEST_LONG') else 1)):
                try:
                    self.step(pool, chance)
                except (exception.NoRoom, exception.NoSpace):
                    refused += 1
                except exception.ToolFailed as e:
                    self.assertNotIn('space', str(e), f'seed {seed}, step {number}')
            while True:  # to the last MiB that is promised
                try:
                    device.create(pool, self.new_name(), 4 * MIB)
                except exception.NoRoom:
                    break
            self.scatter(pool, chance)
            self.fill(pool, chance)

    def scatter(self, pool: pool_module.Pool, chance: random.Random) -> None:
        """Pages one by one, so that the file system has long lists of blocks."""
        for item in pool.listed():
            if item.summary and not item.summary.sealed:
                pages = range(0, item.summary.virtual_size, 8192)
                for offset in chance.sample(pages, min(len(pages), 100)):
                    self.write(item.path, offset, 4096)

    def test_ext4(self) -> None:
        self.on_file_system('/sbin/mkfs.ext4', '-q', '-F', '-b', '4096')

    def test_xfs(self) -> None:
        self.on_file_system('/sbin/mkfs.xfs', '-q', '-f')

    def test_template_and_volumes(self) -> None:
        """P6: what a template holds is not provisioned to volumes."""
        pool = self.make_pool('p')
        source = self.directory / 'source.raw'
        source.write_bytes(os.urandom(90 * MIB))
        template.build(pool, 't', str(source), 'raw')
        made = 0
        try:
            while True:
                device.create(pool, f'v{made}', 30 * MIB)
                made += 1
        except exception.NoRoom as e:
            self.assertIn('provisioned', str(e))
        self.assertEqual(2, made)
        self.fill(pool, random.Random(1))

    def test_template_over_what_is_promised(self) -> None:
        pool = self.make_pool('p')
        for number in range(4):
            device.create(pool, f'v{number}', 30 * MIB)
        source = self.directory / 'source.raw'
        source.write_bytes(os.urandom(90 * MIB))
        self.assertRaises(exception.NoRoom, template.build, pool, 't', str(source), 'raw')
        self.assertEqual(4, len(pool.listed()))

    def test_snapshot_of_a_full_image(self) -> None:
        """Its guest can write all of it once more."""
        pool = self.make_pool('p')
        path = device.create(pool, 'v', 120 * MIB)
        self.write(path, 0, 122 * MIB)
        self.assertRaises(exception.NoRoom, attached.snapshot_create, path, 's')
        registry.PoolRegistry().set('p', overcommit=0.0)
        attached.snapshot_create(path, 's')

    def test_what_is_being_made(self) -> None:
        pool = self.make_pool('p')
        with staging.building(pool, 'copy') as part:
            with pool.lock():
                pool.check_room(100 * MIB)
                staging.reserve(pool, 'copy', thin=102 * MIB)
            self.assertRaises(exception.NoRoom, device.create, pool, 'v', 90 * MIB)
            Path(part).write_bytes(bytes(50 * MIB))
            self.assertEqual(52 * MIB, pool.account().building)
            self.assertRaises(exception.NoRoom, device.create, pool, 'v', 90 * MIB)
        device.create(pool, 'v', 90 * MIB)

    def test_what_is_finished_counts_once(self) -> None:
        pool = self.make_pool('p')
        with staging.building(pool, 'copy') as part:
            with pool.lock():
                staging.reserve(pool, 'copy', thin=102 * MIB)
            image.create(part, 100 * MIB)
            with pool.lock():
                staging.finish(pool, 'copy', part)
            os.unlink(part)
            before = pool.account().provisioned
        self.assertEqual(before, pool.account().provisioned)

    def test_template_that_is_being_made(self) -> None:
        """What nobody can fill takes its space from the rest, as often as over-commit says: also
        before it is there.
        """
        self.make_pool('p')
        registry.PoolRegistry().set('p', overcommit=20.0)
        pool = registry.PoolRegistry().get('p')
        left = (pool.account().limit or 0) - pool.account().provisioned
        # and its metadata are too much
        size = (left - 20 * 60 * MIB) // units.SLAB_SIZE * units.SLAB_SIZE
        with staging.building(pool, 't') as part:
            with pool.lock():
                pool.check_room(0, fixed=60 * MIB)
                staging.reserve(pool, 't', fixed=60 * MIB)
            self.assertEqual(
                left - 20 * 60 * MIB, (pool.account().limit or 0) - pool.account().provisioned
            )
            self.assertRaises(exception.NoRoom, device.create, pool, 'v', size)
            Path(part).write_bytes(os.urandom(60 * MIB))
            pool.check_room(0)
        device.create(pool, 'v', size)

    def test_default(self) -> None:
        """There is a limit, and the message says it."""
        self.make_pool('p')
        registry.PoolRegistry().remove('p', forget=True)
        pool = registry.PoolRegistry().import_(str(self.directory / 'p'))
        pool.create_image('v', size=3 * units.GIB)
        error = self.assertRaises(exception.NoRoom, pool.create_image, 'w', size=units.GIB)
        self.assertIn('over-commit 20', str(error))

    def test_what_takes_most_is_in_the_log(self) -> None:
        """And not in the error: a user of a service need not hear of the images of others."""
        pool = self.make_pool('p')
        for name, size in (('small', 4 * MIB), ('sealed', 2 * MIB), ('forged', 2 * MIB)):
            pool.create_image(name, size=size)
        image.resize(pool.existing_path('sealed'), 16 * units.TIB)
        image.seal(pool.existing_path('sealed'))
        image.resize(pool.existing_path('forged'), 15 * units.TIB)
        for refused in (
            lambda: pool.create_image('w', size=2 * MIB),
            lambda: pool.check_snapshot_room('small.pcow'),
        ):
            with self.assertLogs('pcow_driver.pools.pool', 'WARNING') as log:
                error = self.assertRaises(exception.NoRoom, refused)
            self.assertRegex(log.output[0], r'most, 15 TiB, are for the image forged\.')
            self.assertNotIn('forged', str(error))
