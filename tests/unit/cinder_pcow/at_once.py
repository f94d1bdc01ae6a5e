# SPDX-License-Identifier: Apache-2.0
"""A program: many operations of the real driver at once, by green threads or by those of the
system.

Something stands still if the hub of the green threads does not come round, or no operation ends;
then the program ends with the stacks of all threads. Its arguments are a directory, ``green`` or
``native``, a seed, and how long it goes on in seconds.
"""

import sys

if sys.argv[2] == 'green':
    import eventlet

    eventlet.monkey_patch()

import collections
from collections.abc import Callable
import contextlib
import faulthandler
import os
import random
import threading
import time
import types
from typing import Any
import uuid

from cinder import exception as cinder_exception
from cinder.volume import configuration
from cinder.volume import driver as cinder_driver
from oslo_config import cfg

from cinder_pcow import driver
from pcow_driver.common import conf

DIRECTORY, MODE, SEED, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
WORKERS = 8
# seconds in which the hub comes round, on a machine that is busy
STANDS_STILL = 10
NO_OPERATION_ENDS = 60
GROUP, HOST = 'pcow-backend', f'host-{os.getpid()}@pcow-backend'
# What Cinder hears of when two operations on one volume meet: it keeps them apart by the status of
# the volume.
REFUSALS = (
    cinder_exception.VolumeIsBusy,
    cinder_exception.SnapshotIsBusy,
    cinder_exception.VolumeBackendAPIException,
)


def make_driver() -> driver.PcowDriver:
    cfg.CONF([], project='cinder', default_config_files=[])
    conf.register_opts(cfg.CONF)
    for name, value in {
        'state_path': os.path.join(DIRECTORY, 'state'),
        'conversion_dir': DIRECTORY,
        'libvirt_uri': f'test://{DIRECTORY}/none',
    }.items():
        cfg.CONF.set_override(name, value, 'pcow')
    made = driver.PcowDriver(
        host=HOST,
        configuration=configuration.Configuration(cinder_driver.volume_opts, config_group=GROUP),
    )
    made.do_setup(None)
    made.check_for_setup_error()
    return made


class Volumes:
    """What there is, as Cinder's records of it."""

    def __init__(self, made: driver.PcowDriver) -> None:
        self.driver = made
        self.volumes: list[Any] = []
        self.snapshots: list[Any] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.ended = time.monotonic()
        self.over = False

    def record(self) -> Any:
        identity = str(uuid.uuid4())
        return types.SimpleNamespace(
            id=identity,
            name=f'volume-{identity}',
            size=1,
            host=f'{HOST}#one',
            encryption_key_id=None,
            multiattach=False,
            volume_type_id=None,
            volume_type=None,
            migration_status=None,
            status='available',
        )

    def create(self, chance: random.Random) -> None:
        volume = self.record()
        self.driver.create_volume(volume)
        self.volumes.append(volume)

    def clone(self, chance: random.Random) -> None:
        volume = self.record()
        self.driver.create_cloned_volume(volume, chance.choice(self.volumes))
        self.volumes.append(volume)

    def snapshot(self, chance: random.Random) -> None:
        identity, volume = str(uuid.uuid4()), chance.choice(self.volumes)
        snapshot = types.SimpleNamespace(
            id=identity, name=f'_snapshot-{identity}', volume=volume, volume_id=volume.id
        )
        self.driver.create_snapshot(snapshot)
        self.snapshots.append(snapshot)

    def from_snapshot(self, chance: random.Random) -> None:
        volume = self.record()
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
                self.ended = time.monotonic()


def watch(volumes: Volumes) -> None:
    """The alarm is put off as long as this thread runs, and operations end."""
    while not volumes.over and time.monotonic() - volumes.ended < NO_OPERATION_ENDS:
        faulthandler.dump_traceback_later(STANDS_STILL, exit=True)
        time.sleep(0.05)
    if volumes.over:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    volumes = Volumes(make_driver())
    watcher = threading.Thread(target=watch, args=(volumes,))
    watcher.start()
    until = time.monotonic() + SECONDS
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            volumes.work(seed, until)
        except BaseException as e:
            failed.append(e)
            raise

    threads = [
        threading.Thread(target=run, args=(SEED * WORKERS + number,)) for number in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        for volume in volumes.volumes:
            volumes.driver.delete_volume(volume)
            volumes.ended = time.monotonic()
    finally:
        volumes.over = True
        watcher.join()
    print(
        f'{MODE}: {sum(volumes.done.values())} done {dict(volumes.done)}, '
        f'{sum(volumes.refused.values())} refused '
        f'{dict(volumes.refused)}'
    )
    sys.exit(1 if failed else 0)


main()
