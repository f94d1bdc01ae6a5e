# SPDX-License-Identifier: Apache-2.0
"""Whatever makes an image or enlarges one keeps to what the operator decided for the pool; pool and
images are real.
"""

import os
from pathlib import Path
import subprocess
import sys
import threading

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import fork
from pcow_driver.images import image
from pcow_driver.pools import provisioned
from pcow_driver.pools import registry
from pcow_driver.pools import room
from pcow_driver.templates import template
from tests.unit.pcow_driver import base

MIB = units.MIB


class RoomTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.config = self.directory / 'pcow.conf'
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {programs}/pcow-img\n'
        )
        self.pools = registry.PoolRegistry()
        (self.directory / 'p').mkdir()
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=1g', 'none', self.directory / 'p'], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', self.directory / 'p'], check=True)
        self.pool = self.pools.create('p', str(self.directory / 'p'))
        self.path = self.pool.create_image('vm', size=8 * MIB)
        image.snapshot_create(self.path, 's')
        self.source = self.directory / 'source.raw'
        self.source.write_bytes(b'data'.ljust(2 * MIB))

    def leave(self, size: int) -> None:
        """Let no more than one image of this virtual size be provisioned."""
        now = self.pool.account()
        wanted = now.provisioned + provisioned.whole_size(size) + 4096
        self.pool = self.pools.set('p', overcommit=wanted / (now.total - now.fixed))

    def drain(self) -> None:
        self.pool = self.pools.set('p', draining=True)

    def resize(self, size: int, *args: str) -> str:
        """What pcowctl says of it."""
        done = subprocess.run(
            [
                sys.executable,
                '-m',
                'pcow_driver.cli.app',
                '--config-file',
                str(self.config),
                'image',
                'resize',
                *args,
                'p/vm',
                str(size),
            ],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr

    def test_fork(self) -> None:
        self.leave(6 * MIB)
        self.assertRaises(exception.NoRoom, fork.fork, self.path, 's', 'fork')
        self.assertEqual(['vm.pcow'], self.pool.entries())
        self.leave(8 * MIB)
        fork.fork(self.path, 's', 'fork')
        self.drain()
        self.assertRaises(exception.PoolDraining, fork.fork, self.path, 's', 'another')
        self.assertEqual(['fork.pcow', 'vm.pcow'], self.pool.entries())

    def test_fork_of_a_snapshot_of_another_size(self) -> None:
        image.resize(self.path, 16 * MIB)
        self.leave(8 * MIB)
        fork.fork(self.path, 's', 'fork')

    def test_fork_where_no_pool_is_known(self) -> None:
        self.drain()
        self.pools.remove('p', forget=True)
        fork.fork(self.path, 's', 'fork')

    def test_template(self) -> None:
        self.drain()
        self.assertRaises(
            exception.PoolDraining, template.build, self.pool, 't', '/no/such/file', 'raw'
        )
        self.pool = self.pools.set('p', draining=False)
        self.leave(0)
        self.assertRaises(exception.NoRoom, template.build, self.pool, 't', str(self.source), 'raw')
        self.leave(8 * MIB)
        template.build(self.pool, 't', str(self.source), 'raw')  # promises nothing

    def test_export_into_the_pool(self) -> None:
        self.drain()
        target = self.pool.image_path('t')
        self.assertRaises(exception.PoolDraining, fork.export, self.path, target, 'pcow')
        self.assertEqual(['vm.pcow'], self.pool.entries())
        fork.export(self.path, str(self.directory / 't.pcow'), 'pcow')

    def test_what_is_given_up_for_a_moment(self) -> None:
        entered = threading.Event()

        def reserve() -> None:
            with self.pool.lock():
                entered.set()

        other = threading.Thread(target=reserve)
        with room.kept(self.path):
            other.start()
            self.assertFalse(entered.wait(0.3))
        other.join()
        self.assertTrue(entered.is_set())
        self.pools.remove('p', forget=True)
        with room.kept(self.path):  # of no pool that is known
            pass

    def test_resize(self) -> None:
        self.leave(8 * MIB)
        self.assertIn('provisioned', self.resize(18 * MIB))
        self.assertEqual('', self.resize(16 * MIB))
        self.assertEqual(16 * MIB, image.info(self.path).virtual_size)
        self.drain()
        self.assertIn('takes nothing new', self.resize(18 * MIB))
        self.assertEqual('', self.resize(8 * MIB, '--shrink'))
        self.assertEqual(8 * MIB, image.info(self.path).virtual_size)
