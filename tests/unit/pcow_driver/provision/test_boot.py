# SPDX-License-Identifier: Apache-2.0
"""Whether pools are there again after a boot: units, and those that are missing."""

import dataclasses
import os
from pathlib import Path

import fixtures

from pcow_driver.common import exception
from pcow_driver.common.finding import ADVICE
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import registry
from pcow_driver.provision import adopt
from pcow_driver.provision import boot
from pcow_driver.provision import diagnosis
from tests.unit.pcow_driver import base


class MountUnitTest(base.TestCase):
    def test_names(self) -> None:
        # As printed by systemd-escape --path --suffix=mount (systemd 252).
        for path, name in (
            ('/var/lib/pcow/pools/fast', 'var-lib-pcow-pools-fast.mount'),
            ('/', '-.mount'),
            ('/mnt/a-b', 'mnt-a\\x2db.mount'),
            ('/mnt//x/', 'mnt-x.mount'),
            ('/.a/.b', '\\x2ea-.b.mount'),
            ('/mnt/ü ', 'mnt-\\xc3\\xbc\\x20.mount'),
        ):
            self.assertEqual(name, mount_unit.unit_name(path))

    def test_of_somebody_else(self) -> None:
        """A unit that an administrator wrote is neither replaced nor deleted."""
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory))
        )
        path, link = (Path(one) for one in mount_unit.paths('/mnt/p'))
        path.write_text('[Mount]\nWhat=LABEL=data\n')
        self.assertFalse(mount_unit.installed('/mnt/p'))
        for function, arguments in (
            (mount_unit.install, (mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''),)),
            (mount_unit.uninstall, ()),
        ):
            error = self.assertRaises(exception.DeviceRefused, function, '/mnt/p', *arguments)
            self.assertIn(str(path), str(error))
        self.assertEqual('[Mount]\nWhat=LABEL=data\n', path.read_text())
        path.unlink()
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''))
        link.unlink()  # as a kill between the two leaves it
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''))
        self.assertEqual(0o644, path.stat().st_mode & 0o777)
        self.assertTrue(mount_unit.installed('/mnt/p') and link.is_symlink())
        mount_unit.uninstall('/mnt/p')
        self.assertFalse(path.exists() or os.path.lexists(link))
        self.assertIsNone(mount_unit.what('/mnt/p'))

    def test_of_another_pool(self) -> None:
        """Which would not be mounted any more."""
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory))
        )
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''))
        self.assertEqual('UUID=x', mount_unit.what('/mnt/p'))
        error = self.assertRaises(
            exception.DeviceRefused,
            mount_unit.install,
            '/mnt/p',
            mount_unit.text('q', 'UUID=y', '/mnt/p', 'xfs', ''),
        )
        self.assertIn('rm ', str(error))
        self.assertRaises(exception.DeviceRefused, mount_unit.check_free, '/mnt/p')
        self.assertEqual('UUID=x', mount_unit.what('/mnt/p'))
        mount_unit.check_free('/mnt/other')

    def test_at_boot(self) -> None:
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory))
        )
        fstab = self.directory / 'fstab'
        fstab.write_text('# UUID=1 /mnt/p xfs\nUUID=2 /mnt/a\\040b\txfs dax=always 0 0\n\nbroken\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.FSTAB', str(fstab)))
        self.assertFalse(mount_unit.mounted_at_boot('/mnt/p'))
        self.assertTrue(mount_unit.mounted_at_boot('/mnt/a b'))
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''))
        self.assertTrue(mount_unit.mounted_at_boot('/mnt/p'))
        Path(mount_unit.paths('/mnt/p')[1]).unlink()
        self.assertFalse(mount_unit.mounted_at_boot('/mnt/p'))
        # whoever wrote it enabled it as he likes
        Path(mount_unit.paths('/mnt/q')[0]).write_text('[Mount]\n')
        self.assertTrue(mount_unit.mounted_at_boot('/mnt/q'))

    def test_percent_is_doubled(self) -> None:
        self.assertIn(
            'Where=/mnt/50%%\n', mount_unit.text('p', 'UUID=x', '/mnt/50%', 'xfs', 'dax=always')
        )

    def test_example_in_etc(self) -> None:
        """What etc/ shows, for pools that are made by hand, is what pcowctl writes."""
        where = '/var/lib/pcow/pools/fast'
        example = base.TOP / 'etc/systemd/system' / mount_unit.unit_name(where)
        self.assertEqual(
            example.read_text(),
            mount_unit.text(
                'fast',
                'UUID=6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6',
                where,
                'xfs',
                filesystem.MOUNT_OPTIONS,
            ),
        )


class BootTest(base.TestCase):
    """A pool on persistent memory whose unit is missing, as a create that was killed before leaves
    it.
    """

    def setUp(self) -> None:
        super().setUp()
        self.configure(pools_path=str(self.directory / 'pools'))
        for name in ('units', 'pools/p', 'pools/q'):
            (self.directory / name).mkdir(parents=True)
        self.path = str(self.directory / 'pools/p')
        self.mounts = {
            self.path: filesystem.Mount(
                '259:0', self.path, 'xfs', '/dev/pmem0', 'rw,attr2,dax=always'
            )
        }
        self.done: list[str] = []
        for name, value in (
            ('pmem.mount_unit.DIRECTORY', str(self.directory / 'units')),
            ('pmem.mount_unit.FSTAB', '/dev/null'),
            ('pmem.filesystem.mount_at', self.mounts.get),
            ('provision.boot._systemd_runs', lambda: False),
            ('privileged.filesystems.uuid', lambda _device: 'u-1'),
            ('privileged.filesystems.set_extent_hint', self.done.append),
        ):
            self.useFixture(fixtures.MonkeyPatch(f'pcow_driver.{name}', value))
        self.pools = registry.PoolRegistry()

    def test_create(self) -> None:
        adopt.plan_directory('p', self.path).run()
        self.assertEqual(('UUID=u-1', [self.path]), (mount_unit.what(self.path), self.done))
        self.assertTrue(mount_unit.mounted_at_boot(self.path))
        self.assertEqual('p', self.pools.get('p').name)

    def test_import(self) -> None:
        """Also of a pool that is known."""
        self.pools.create('p', self.path)
        (line,) = adopt.plan_import(self.path, None).lines()
        self.assertIn('mounts it at boot', line)
        adopt.plan_import(self.path, None).run()
        self.assertEqual('UUID=u-1', mount_unit.what(self.path))
        self.assertRaises(exception.PoolInvalid, adopt.plan_import, self.path, None)
        mount_unit.uninstall(self.path)
        self.pools.remove('p', forget=True)
        adopt.plan_import(self.path, 'new').run()
        self.assertEqual(
            ('UUID=u-1', 'new'), (mount_unit.what(self.path), self.pools.get('new').name)
        )

    def test_moved(self) -> None:
        """The old unit goes, and that of another pool stays."""
        self.pools.create('p', self.path)
        before = self.pools.set('p', reserve=7)
        adopt.plan_import(self.path, None).run()
        new = str(self.directory / 'pools/q')
        os.rename(f'{self.path}/.pcow-pool', f'{new}/.pcow-pool')
        self.mounts[new] = dataclasses.replace(self.mounts.pop(self.path), at=new)
        adopt.plan_import(new, None).run()
        self.assertEqual((None, 'UUID=u-1'), (mount_unit.what(self.path), mount_unit.what(new)))
        self.assertEqual(dataclasses.replace(before, path=new), self.pools.get('p'))

    def test_doctor(self) -> None:
        found = self.pools.create('p', self.path)
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.filesystem.mount_point', lambda _path: self.path)
        )
        (finding,) = diagnosis.check_boot(found)
        self.assertEqual(ADVICE, finding.status)
        self.assertIn(f'pool import {self.path}', finding.advice)
        (finding,) = diagnosis.check_boot(self.pools.create('below', f'{self.path}/below'))
        self.assertIn('fstab', finding.advice)
        adopt.plan_import(self.path, None).run()
        self.assertEqual([], list(diagnosis.check_boot(found)))

    def test_what_is_left_alone(self) -> None:
        """Ordinary file systems, those without DAX, and those that somebody sees to."""
        plain = self.mounts[self.path]
        for changed in (
            dataclasses.replace(plain, source='/dev/sda1'),
            dataclasses.replace(plain, options='rw,attr2'),
            dataclasses.replace(plain, kind='btrfs'),
        ):
            self.mounts[self.path] = changed
            self.assertIsNone(boot.not_mounted_at_boot(self.path))
        self.mounts[self.path] = plain
        self.assertIsNotNone(boot.not_mounted_at_boot(self.path))
        Path(mount_unit.paths(self.path)[0]).write_text('[Mount]\n')
        self.assertIsNone(boot.not_mounted_at_boot(self.path))
