# SPDX-License-Identifier: Apache-2.0
"""Plans of pools that exist, with real mounts in DRAM: what is refused, shown only, undone, and
done again after a kill.
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import subprocess

import fixtures

from pcow_driver.cli import app
from pcow_driver.common import exception
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import registry
from pcow_driver.provision import adopt
from pcow_driver.provision import dismantle
from pcow_driver.provision import plan
from pcow_driver.provision import provision
from tests.unit.pcow_driver import base


class DestroyTest(base.TestCase):
    """With a real mount."""

    def setUp(self) -> None:
        super().setUp()
        self.configure(
            pools_path=str(self.directory),
            pcow_img=str(Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin')) / 'pcow-img'),
        )
        self.path = self.directory / 'quick'
        self.addCleanup(subprocess.run, ['umount', '-q', self.path], check=False)
        provision.plan_memory('quick', str(self.path), 32 << 20).run()
        self.pools = registry.PoolRegistry()

    def test_name_that_is_not_ascii(self) -> None:
        path = self.directory / 'grö ße'
        self.addCleanup(subprocess.run, ['umount', '-q', path], check=False)
        provision.plan_memory('größe', str(path), 32 << 20).run()
        self.assertEqual('tmpfs', filesystem.mounted(str(path))[0])
        dismantle.plan_destroy('größe').run()
        self.assertFalse(path.is_mount())

    def test_not_mounted(self) -> None:
        """An unmounted pool looks empty; whoever forgets it should know."""
        self.useFixture(
            fixtures.MonkeyPatch(
                'pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory / 'units')
            )
        )
        mount_unit.install(
            str(self.path), mount_unit.text('quick', 'x', str(self.path), 'xfs', 'noatime')
        )
        subprocess.run(['umount', self.path], check=True)
        error = self.assertRaises(
            exception.PoolInvalid, dismantle.plan_remove, 'quick', forget=False
        )
        self.assertIn('systemctl start', str(error))
        dismantle.plan_remove('quick', forget=True).run()
        self.assertEqual([], self.pools.list())

    def test_busy(self) -> None:
        """Somebody uses something in it: it stays what it was."""
        before = self.pools.set('quick', overcommit=2.5, draining=True)
        with self.use():
            self.assertRaises(exception.ToolFailed, dismantle.plan_destroy('quick').run)
        self.assertTrue(self.path.is_mount())
        self.assertEqual(before, self.pools.get('quick'))
        dismantle.plan_destroy('quick').run()
        self.assertFalse(self.path.is_mount())
        self.assertEqual([], self.pools.list())

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            yield
        finally:
            os.close(descriptor)

    def test_name_is_not_free_before_the_end(self) -> None:
        """Nobody takes it for another pool meanwhile, so that it can be put back."""
        plan_of_it = dismantle.plan_destroy('quick')
        unmount = next(step for step in plan_of_it.steps if step.show().startswith('umount'))
        refused: list[bool] = []

        def take_name() -> None:
            self.assertRaises(
                exception.PoolExists, self.pools.create, 'quick', str(self.directory / 'new')
            )
            refused.append(True)

        plan_of_it.steps.insert(
            plan_of_it.steps.index(unmount), plan.Step(lambda: 'meanwhile', take_name)
        )
        with self.use():
            self.assertRaises(exception.ToolFailed, plan_of_it.run)
        self.assertEqual(([True], str(self.path)), (refused, self.pools.get('quick').path))

    def test_killed_after_each_step(self) -> None:
        """The same command goes on with what is left; without it nobody takes the pool for a usable
        one.
        """
        steps = len(dismantle.plan_destroy('quick').steps)
        for done in range(1, steps):
            for step in dismantle.plan_destroy('quick').steps[:done]:
                step.do()
            self.assertRaises(exception.PoolInvalid, self.pools.get, 'quick')
            error = self.assertRaises(
                exception.PoolInvalid, dismantle.plan_remove, 'quick', forget=False
            )
            self.assertIn('--destroy quick', str(error))
            dismantle.plan_destroy('quick').run()
            self.assertFalse(self.path.is_mount())
            self.assertRaises(exception.PoolNotFound, self.pools.entry, 'quick')
            provision.plan_memory('quick', str(self.path), 32 << 20).run()

    def test_killed_and_something_else_is_there_by_now(self) -> None:
        for step in dismantle.plan_destroy('quick').steps[:2]:
            step.do()
        subprocess.run(['mount', '-t', 'tmpfs', 'other', self.path], check=True)
        self.assertIn(
            'not what the pool was on',
            str(self.assertRaises(exception.PoolInvalid, dismantle.plan_destroy, 'quick')),
        )
        subprocess.run(['umount', self.path], check=True)
        subprocess.run(['mount', '-t', 'tmpfs', 'pcow-quick', self.path], check=True)
        (self.path / 'vm.pcow').touch()
        self.assertRaises(exception.PoolNotEmpty, dismantle.plan_destroy, 'quick')

    def test_mounted_elsewhere_as_well(self) -> None:
        """Unmounting it here would not end it, and its device would not be free."""
        elsewhere = self.directory / 'elsewhere'
        elsewhere.mkdir()
        subprocess.run(['mount', '--bind', self.path, elsewhere], check=True)
        self.addCleanup(subprocess.run, ['umount', '-q', elsewhere], check=False)
        error = self.assertRaises(exception.PoolInvalid, dismantle.plan_destroy, 'quick')
        self.assertIn(f'{elsewhere} as well', str(error))
        self.assertEqual('quick', self.pools.get('quick').name)


class DryRunTest(base.TestCase):
    """What is shown is not done; what would be refused is refused."""

    def setUp(self) -> None:
        super().setUp()
        self.pools = registry.PoolRegistry()
        self.pools.create('p', str(self.directory / 'p'))

    def ctl(self, *words: str) -> int:
        (self.directory / 'pcow.conf').write_text(
            f'[pcow]\nstate_path = {self.directory / "state"}\n'
        )
        return app.main(['--config-file', str(self.directory / 'pcow.conf'), *words])

    def test_remove(self) -> None:
        for how in ((), ('--forget',)):
            self.assertEqual(0, self.ctl('pool', 'remove', 'p', '--dry-run', *how))
            self.assertEqual('p', self.pools.get('p').name)
        (line,) = dismantle.plan_remove('p', forget=False).lines()
        self.assertIn('.pcow-pool', line)
        (self.directory / 'p/vm.pcow').touch()
        self.assertRaises(exception.PoolNotEmpty, dismantle.plan_remove, 'p', forget=False)
        # argparse
        self.assertRaises(SystemExit, self.ctl, 'pool', 'remove', 'p', '--forget', '--destroy')
        self.assertEqual(0, self.ctl('pool', 'remove', 'p', '--forget'))
        self.assertEqual([], self.pools.list())

    def test_set_and_drain(self) -> None:
        before = self.pools.get('p')
        self.assertEqual(0, self.ctl('pool', 'set', 'p', '--overcommit', '2', '--dry-run'))
        # below critical
        self.assertEqual(1, self.ctl('pool', 'set', 'p', '--low', '2', '--dry-run'))
        self.assertEqual(1, self.ctl('pool', 'set', 'nosuch', '--low', '50', '--dry-run'))
        self.assertEqual(0, self.ctl('pool', 'drain', 'p', '--dry-run'))
        self.assertEqual(before, self.pools.get('p'))
        self.assertEqual(0, self.ctl('pool', 'set', 'p', '--overcommit', '2'))
        self.assertEqual(2.0, self.pools.get('p').settings.overcommit)

    def test_import(self) -> None:
        self.pools.remove('p', forget=True)
        self.assertEqual(0, self.ctl('pool', 'import', '--dry-run', str(self.directory / 'p')))
        self.assertEqual([], self.pools.list())
        self.assertRaises(exception.PoolInvalid, adopt.plan_import, str(self.directory), None)
        self.pools.import_(str(self.directory / 'p'))
        self.assertRaises(exception.PoolInvalid, adopt.plan_import, str(self.directory / 'p'), None)
        self.pools.create('q', str(self.directory / 'q'))
        self.pools.remove('p', forget=True)
        self.assertRaises(exception.PoolExists, adopt.plan_import, str(self.directory / 'p'), 'q')
        # no pool is there
        self.assertRaises(exception.PoolInvalid, adopt.plan_import, str(self.directory), 'new')

    def test_create(self) -> None:
        for words in (
            (str(self.directory / 'q'),),
            ('/mnt/pcow-test-dry', '--memory', '--size', '32M'),
        ):
            self.assertEqual(0, self.ctl('pool', 'create', 'q', *words, '--dry-run'))
        self.assertEqual(['p'], [entry.name for entry in self.pools.list()])
        self.assertFalse((self.directory / 'q').exists() or os.path.exists('/mnt/pcow-test-dry'))
        # it is one
        self.assertEqual(1, self.ctl('pool', 'create', 'q', str(self.directory / 'p'), '--dry-run'))
