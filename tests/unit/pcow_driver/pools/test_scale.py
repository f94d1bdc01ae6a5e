# SPDX-License-Identifier: Apache-2.0
"""P7: what is done to one image of a pool does not cost more programs in a pool of many, and all of
them are listed by one.
"""

import collections
from collections.abc import Callable
import os
from pathlib import Path
import subprocess
import time
from typing import Any

import fixtures

from pcow_driver.common import locks
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import capacity
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from pcow_driver.templates import template_cache
from tests.unit.pcow_driver import base

MANY = int(os.environ.get('PCOW_TEST_IMAGES', '1000'))
# seconds of processors for 5,000 images; it takes 0.4, and took minutes
LISTED_IN = 4
SETTLED = 2.1  # seconds after which what does not change is remembered


class ScaleTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(programs / 'pcow-io'))
        directory = self.directory / 'p'
        directory.mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256m', 'none', directory], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', directory], check=True)
        registry.PoolRegistry().create('p', str(directory))
        self.pool = registry.PoolRegistry().set('p', overcommit=10000.0)

    def fill(self, count: int) -> None:
        """With copies of one image, which stands on nothing."""
        if not os.path.lexists(path := self.pool.image_path('one')):
            device.create(self.pool, 'one', 4 * units.MIB)
        with open(path, 'rb') as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(256 << 10)
        pages = [
            (offset, page)
            for offset in range(0, len(start), 4096)
            if any(page := start[offset : offset + 4096])
        ]
        there = len(os.listdir(self.pool.path))
        for number in range(there, there + count):
            copy = os.open(
                os.path.join(self.pool.path, f'copy-{number}.pcow'),
                os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                0o600,
            )
            for offset, page in pages:
                os.pwrite(copy, page, offset)
            os.truncate(copy, size)
            os.close(copy)

    def counted(self, operation: Callable[[], object]) -> int:
        """How many programs it runs."""
        runs = 0
        run = tool.run

        def count(path: str, *args: str, **options: Any) -> str:
            nonlocal runs
            runs += 1
            return run(path, *args, **options)

        with fixtures.MonkeyPatch('pcow_driver.common.tool.run', count):
            operation()
        return runs

    def all_counts(self, pool: pool_module.Pool) -> list[int]:
        path = device.create(pool, 'base', 4 * units.MIB)
        image.snapshot_create(path, 's')
        return [
            self.counted(operation)
            for operation in (
                lambda: device.create(pool, 'empty', 4 * units.MIB),
                lambda: device.create_on(pool, 'child', 'base', base_snapshot='s'),
                lambda: trash.delete_snapshot(pool, 'base', 's'),  # marked
                lambda: trash.delete_image(pool, 'base'),  # kept for its child
                lambda: trash.delete_image(pool, 'empty'),
                lambda: trash.delete_image(pool, 'child'),  # the base goes, too
                lambda: pool.listed(),
                lambda: capacity.usage(pool, with_shared=False),
                lambda: template_cache.TemplateCache(pool).entries(),
            )
        ]

    def test_programs(self) -> None:
        before = self.all_counts(self.pool)
        self.fill(MANY)
        self.assertEqual(MANY + 1, len(self.pool.listed()))
        self.assertEqual(before, self.all_counts(self.pool))
        self.assertLess(max(before), 30)

    def all_opened(self) -> list[collections.Counter[str]]:
        """Which files of the pool are opened, and how often."""
        time.sleep(SETTLED)
        self.pool.listed()
        found = []
        for operation in (
            lambda: device.create(self.pool, 'new', 4 * units.MIB),
            lambda: trash.delete_image(self.pool, 'new'),
            lambda: device.create_on(self.pool, 'new', 'base', base_snapshot='s'),
            lambda: trash.delete_image(self.pool, 'new'),
            lambda: self.pool.account(),
            lambda: self.pool.listed(),
        ):
            with base.count_opened(self.pool.path) as opened:
                operation()
            found.append(opened)
        return found

    def test_files_opened(self) -> None:
        """Those of no neighbour."""
        image.snapshot_create(device.create(self.pool, 'base', 4 * units.MIB), 's')
        self.fill(20)
        few = self.all_opened()
        self.fill(MANY)
        self.assertEqual(MANY + 22, len(self.pool.listed()))
        for before, opened in zip(few, self.all_opened(), strict=True):
            self.assertLessEqual(opened.total(), before.total(), opened)
            self.assertEqual([], [name for name in opened if name.startswith('copy')])
        self.assertEqual([], os.listdir(os.path.join(locks.state_path(), 'locks')))

    def test_list_of_5000(self) -> None:
        self.fill(4999)
        before = os.times()
        self.assertEqual(5000, len(self.pool.listed()))
        self.assertLess(sum(os.times()[:4]) - sum(before[:4]), LISTED_IN)
