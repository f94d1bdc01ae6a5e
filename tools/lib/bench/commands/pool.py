# SPDX-License-Identifier: Apache-2.0
"""What it costs to make, delete and list images beside few and beside many others, through
pcow_driver.
"""

import argparse
from collections.abc import Callable
import contextlib
import os
from pathlib import Path
import statistics
import tempfile
import time
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tools.lib.bench import machine
from tools.lib.bench import plot
from tools.lib.bench import table

HELP = 'make, delete and list images in a pool of few and of many'
_SIZE = 4 * units.MIB
_HEAD = 256 << 10  # all data of an empty image are in it
_SETTLED = 2.1  # seconds after which pcow-img remembers what does not change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--pool',
        default='/dev/shm',  # noqa: S108 - the directory made there is the run's own
        metavar='DIR',
        help='directory for it (default: /dev/shm)',
    )
    parser.add_argument('--few', type=int, default=10, help='images (default: 10)')
    parser.add_argument('--many', type=int, default=5000, help='images (default: 5000)')
    parser.add_argument('--times', type=int, default=15, help='of which the median counts')


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not 2 <= options.few <= options.many or options.times < 1:
        raise exception.UsageInvalid(reason='--few is at least 2 and not above --many; --times 1')
    with tempfile.TemporaryDirectory(prefix='pcow-bench-', dir=options.pool) as directory:
        pool = _make(Path(directory))
        few = _measure(pool, options.few, options.times)
        many = _measure(pool, options.many, options.times)
    rows = [
        {'name': name, 'few_ns': few[name], 'many_ns': many[name], 'ratio': many[name] / few[name]}
        for name in few
    ]
    return {'rows': rows, 'few': options.few, 'many': options.many, 'machine': machine.describe()}


def _make(directory: Path) -> pool_module.Pool:
    (directory / 'pool').mkdir()
    conf.CONF([], project='pcow', default_config_files=[])
    for option, value in (('state_path', directory / 'state'), ('conversion_dir', directory)):
        conf.CONF.set_override(option, str(value), group='pcow')
    registry.PoolRegistry().create('p', str(directory / 'pool'))
    return registry.PoolRegistry().set('p', overcommit=10000.0)


def _fill(pool: pool_module.Pool, count: int) -> None:
    """With copies of one image up to so many."""
    if not os.path.lexists(pool.image_path('first')):
        device.create(pool, 'first', _SIZE)
    path = pool.existing_path('first')
    head, size = Path(path).open('rb').read(_HEAD), os.stat(path).st_size
    for number in range(1, count):
        with (
            contextlib.suppress(FileExistsError),
            open(pool.image_path(f'copy-{number}'), 'xb', buffering=0) as file,
        ):
            for at in range(0, len(head), 4096):
                if any(head[at : at + 4096]):
                    os.pwrite(file.fileno(), head[at : at + 4096], at)
            file.truncate(size)


def _measure(pool: pool_module.Pool, count: int, times: int) -> dict[str, float]:
    """Nanoseconds; of what is there for a while already, as images are."""
    _fill(pool, count)
    time.sleep(_SETTLED)
    pool.listed()
    return {
        'create': _median(times, lambda number: device.create(pool, f'new-{number}', _SIZE)),
        'delete': _median(times, lambda number: trash.delete_image(pool, f'new-{number}')),
        'list': _median(times, lambda _: pool.listed()),
    }


def _median(times: int, operation: Callable[[int], object]) -> float:
    found = []
    for number in range(times):
        begun = time.perf_counter_ns()
        operation(number)
        found.append(time.perf_counter_ns() - begun)
    return statistics.median(found)


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows: list[tuple[str, ...]] = [
        (
            row['name'],
            table.time_text(row['few_ns']),
            table.time_text(row['many_ns']),
            table.ratio_text(row['ratio']),
        )
        for row in result['rows']
    ]
    columns = ('what', f'{result["few"]:,} images', f'{result["many"]:,} images', 'ratio')
    return [table.Table('One image in a pool of few and of many', columns, rows)]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
