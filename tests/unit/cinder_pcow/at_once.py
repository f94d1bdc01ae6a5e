# SPDX-License-Identifier: Apache-2.0
"""A program: many operations of the real driver at once, by green threads or by those of the
system.

Something stands still if the hub of the green threads does not come round, or no operation ends;
then the program ends with the stacks of all threads. At quiet points, in the midst and at the end,
what the scheduler is told, what the pool says of itself and what its file system has must agree.
Its arguments are a directory, ``green`` or ``native``, a seed, how long it goes on in seconds, and
how many quiet points there are: none, if others work beside it.
"""

import sys

if sys.argv[2] == 'green':
    import eventlet

    eventlet.monkey_patch()

import collections
from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from pathlib import Path
import random
import threading
import time
from typing import Any

from cinder import exception as cinder_exception

from cinder_pcow import driver
from pcow_driver.common import exception as pcow_exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.pools import registry
from tests.unit import accounts
from tests.unit import standing_qemu
from tests.unit import watchdog
from tests.unit.cinder_pcow import records
from tests.unit.pcow_driver import base

DIRECTORY, MODE, SEED, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
QUIET_POINTS = int(sys.argv[5])
WORKERS = 8
# seconds in which the hub comes round, on a machine that is busy
STANDS_STILL = 10
NO_OPERATION_ENDS = 60
# What Cinder hears of a guest that does not answer, and of when two operations on one volume meet:
# it keeps them apart by the status of the volume.
REFUSALS = (
    cinder_exception.VolumeIsBusy,
    cinder_exception.SnapshotIsBusy,
    cinder_exception.VolumeBackendAPIException,
)


class Volumes:
    """What there is, as Cinder's records of it."""

    def __init__(self, made: driver.PcowDriver) -> None:
        self.driver = made
        self.volumes: list[Any] = []
        self.snapshots: list[Any] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.watchdog = watchdog.Watchdog(STANDS_STILL, NO_OPERATION_ENDS)
        self.standing = records.volume()  # of a guest whose QEMU does not answer

    def create(self, chance: random.Random) -> None:
        volume = records.volume()
        self.driver.create_volume(volume)
        self.volumes.append(volume)

    def clone(self, chance: random.Random) -> None:
        volume = records.volume()
        self.driver.create_cloned_volume(volume, chance.choice(self.volumes))
        self.volumes.append(volume)

    def snapshot(self, chance: random.Random) -> None:
        snapshot = records.snapshot_of(chance.choice(self.volumes))
        self.driver.create_snapshot(snapshot)
        self.snapshots.append(snapshot)

    def ask_standing(self, chance: random.Random) -> None:
        """It keeps nobody else from anything."""
        if chance.random() < 0.5:
            self.driver.create_snapshot(records.snapshot_of(self.standing))
        else:
            self.driver.create_cloned_volume(records.volume(), self.standing)
        raise AssertionError('a QEMU that stands has answered')

    @contextlib.contextmanager
    def one_stands(self) -> Iterator[None]:
        self.driver.create_volume(self.standing)
        path = registry.PoolRegistry().get('one').image_path(self.standing.name)
        qemu = standing_qemu.StandingQemu(path)
        standing_qemu.install(qemu)
        try:
            with base.opened(path, Path(tool.find('pcow_io'))):
                yield
        finally:
            qemu.go_on()
            self.driver.delete_volume(self.standing)

    def from_snapshot(self, chance: random.Random) -> None:
        volume = records.volume()
        self.driver.create_volume_from_snapshot(volume, chance.choice(self.snapshots))
        self.volumes.append(volume)

    def delete(self, chance: random.Random) -> None:
        volume = self.volumes.pop(chance.randrange(len(self.volumes)))
        self.snapshots = [one for one in self.snapshots if one.volume is not volume]
        try:
            self.driver.delete_volume(volume)
        except REFUSALS:
            self.volumes.append(volume)
            raise

    def delete_snapshot(self, chance: random.Random) -> None:
        snapshot = self.snapshots.pop(chance.randrange(len(self.snapshots)))
        self.driver.delete_snapshot(snapshot)

    def write(self, chance: random.Random) -> None:
        """As a guest does."""
        path = registry.PoolRegistry().get('one').image_path(chance.choice(self.volumes).name)
        offset, length = (8 + chance.randrange(8)) << 20, chance.randrange(1, 2048) << 10
        with contextlib.suppress(pcow_exception.ToolFailed):  # it is deleted, or in use
            tool.run(tool.find('pcow_io'), '--no-map', '-c', f'write -q {offset} {length}', path)

    def stats(self, chance: random.Random) -> None:
        self.driver.get_volume_stats(refresh=True)

    def work(self, seed: int, until: float) -> None:
        chance = random.Random(seed)
        operations: list[Callable[[random.Random], None]] = [
            self.create,
            self.clone,
            self.snapshot,
            self.delete,
            self.delete_snapshot,
            self.stats,
            self.write,
            self.ask_standing,
            *[self.from_snapshot] * 6,
        ]
        while time.monotonic() < until:
            operation = chance.choice(
                operations if len(self.volumes) < 16 else [self.delete, self.delete_snapshot]
            )
            with contextlib.suppress(IndexError, ValueError):  # there is nothing of the kind
                try:
                    operation(chance)
                    self.done[operation.__name__] += 1
                except REFUSALS as e:
                    self.refused[f'{operation.__name__}: {type(e).__name__}'] += 1
                self.watchdog.alive()


def differences(volumes: Volumes) -> list[str]:
    """What the scheduler, the pool and the file system say otherwise of one thing."""
    pool = registry.PoolRegistry().get('one')
    (told,) = volumes.driver.get_volume_stats(refresh=True)['pools']
    account, found = pool.account(), accounts.differences(pool)
    print(
        f'{MODE}: {len(volumes.volumes)} volumes, {told["total_volumes"]} images, '
        f'{told["total_capacity_gb"]} GiB, free {told["free_capacity_gb"]}, '
        f'provisioned {told["provisioned_capacity_gb"]}'
    )
    for key, size in (
        ('total_capacity_gb', account.total),
        ('free_capacity_gb', account.free),
        ('provisioned_capacity_gb', account.provisioned + account.fixed * account.overcommit),
    ):
        if abs(told[key] - size / units.GIB) > 0.0051:  # it is rounded
            found.append(f'{key}: {told[key]}, not {size / units.GIB}')
    return found


def work(volumes: Volumes, number: int) -> list[BaseException]:
    """What has failed until the next quiet point."""
    until = time.monotonic() + SECONDS / max(QUIET_POINTS, 1)
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            volumes.work(seed, until)
        except BaseException as e:
            failed.append(e)
            raise

    threads = [
        threading.Thread(target=run, args=((SEED * 100 + number) * WORKERS + worker,))
        for worker in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def main() -> None:
    volumes = Volumes(records.make_driver(DIRECTORY, libvirt_timeout=1))
    failed: list[object] = []
    with volumes.watchdog.watching():
        with volumes.one_stands():
            for number in range(max(QUIET_POINTS, 1)):
                failed += work(volumes, number)
                failed += differences(volumes) if QUIET_POINTS else []
        for volume in volumes.volumes:
            volumes.driver.delete_volume(volume)
            volumes.watchdog.alive()
        volumes.volumes.clear()
        failed += differences(volumes) if QUIET_POINTS else []
    print(
        f'{MODE}: {sum(volumes.done.values())} done {dict(volumes.done)}, '
        f'{sum(volumes.refused.values())} refused '
        f'{dict(volumes.refused)}'
    )
    print(*failed, sep='\n')
    sys.exit(1 if failed else 0)


main()
