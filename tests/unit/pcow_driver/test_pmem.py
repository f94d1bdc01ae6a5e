# SPDX-License-Identifier: Apache-2.0
"""What can be seen without persistent memory; the rest runs on emulated NVDIMMs in a VM (tools/vm-test fsdax)."""

from collections.abc import Iterator
import contextlib
import mmap
import os
from pathlib import Path
import signal
import subprocess
import sys

import fixtures

from pcow_driver import exception
from pcow_driver import privileged
from pcow_driver import registry
from pcow_driver.cli import app
from pcow_driver.pmem import device
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pmem import ndctl
from pcow_driver.pmem import plan
from pcow_driver.pmem import promise
from pcow_driver.pmem import provision
from pcow_driver.privileged import namespaces
from tests.unit.pcow_driver import base


class RequestTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        privileged.context.set_client_mode(False)
        self.addCleanup(privileged.context.set_client_mode, True)
        self.configure(pools_path=str(self.directory))

    def _refused(self, error: type[Exception], **changes: object) -> str:
        wanted = {'name': 'p', 'directory': str(self.directory / 'mnt'), 'filesystem': 'xfs', 'device': '/dev/null', **changes}
        return str(self.assertRaises(error, provision.plan_create, provision.Request(**wanted)))     # type: ignore[arg-type]

    def test_refused(self) -> None:
        self.assertIn('not a block device', self._refused(exception.DeviceRefused))
        self._refused(exception.DeviceRefused, device='/dev/does-not-exist')
        self._refused(exception.UsageInvalid, device=None)
        self._refused(exception.UsageInvalid, region='region0')
        self._refused(exception.UsageInvalid, filesystem='btrfs')
        self._refused(exception.UsageInvalid, align=4096)
        self._refused(exception.UsageInvalid, directory='relative')
        self._refused(exception.InvalidName, name='../x')
        self.assertIn('mounted there', self._refused(exception.DeviceRefused, directory='/proc'))
        self.assertIn('not empty', self._refused(exception.DeviceRefused, directory='/etc'))
        self.assertIn('pools_path', self._refused(exception.UsageInvalid, directory='/etc/pool'))

    def test_directory_whose_unit_could_not_be_written(self) -> None:
        """Each byte that is no ASCII letter takes four in the name of a unit."""
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.privileged.filesystems.check_formattable', lambda *_args: None))
        self.assertIn('shorter', self._refused(exception.UsageInvalid, directory=str(self.directory / ('ü' * 60))))


class FilesystemTest(base.TestCase):
    def test_hugetlbfs_is_no_place_for_images(self) -> None:
        """As a mount of it was seen to behave: write(2) gives EINVAL there."""
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.filesystem.mounted', lambda _path: ('hugetlbfs', 'none')))
        error = self.assertRaises(exception.UsageInvalid, provision.plan_directory, 'p', str(self.directory / 'p'))
        self.assertIn('--memory --huge', str(error))

    def test_labels_are_cut_at_whole_letters(self) -> None:
        """Limits of file systems and of ndctl are bytes."""
        for kind, most in (('xfs', 12), ('ext4', 16)):
            for name in ('much larger', 'größeres Ding', 'üüüüüüüüüüüü', '\U0001f600' * 9):
                command = filesystem.make_command(kind, 'device', f'pcow-{name}')
                label = command[command.index('-L') + 1]
                self.assertLessEqual(len(label.encode()), most)
                self.assertTrue(f'pcow-{name}'.startswith(label) and len(label.encode()) > most - 4, label)
        path = self.directory / 'device'
        for kind in filesystem.KINDS:
            with path.open('wb') as f:
                f.truncate(1 << 30)
            filesystem.run(filesystem.make_command(kind, str(path), 'pcow-größere Dinge'))

    def test_names_that_are_not_utf8(self) -> None:
        """Any user can have something mounted whose name is none: the kernel shows its bytes as they are."""
        mountinfo = self.directory / 'mountinfo'
        mountinfo.write_bytes(b'36 35 0:40 / /tmp/\xff rw - fuse fuse rw\n37 35 0:41 / /mnt/a\\040b rw - tmpfs pcow-b rw\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.filesystem.MOUNTINFO', str(mountinfo)))
        self.assertEqual(('tmpfs', 'pcow-b'), filesystem.mounted('/mnt/a b'))
        self.assertEqual(('fuse', 'fuse'), filesystem.mounted(os.fsdecode(b'/tmp/\xff')))

    def test_small(self) -> None:
        filesystem.check_size('ext4', 64 << 20)
        filesystem.check_size('xfs', 600 << 20)
        error = self.assertRaises(exception.UsageInvalid, filesystem.check_size, 'xfs', 512 << 20)
        self.assertIn('--fs ext4', str(error))


class DeviceTest(base.TestCase):
    def test_blank(self) -> None:
        path = self.directory / 'device'
        path.write_bytes(bytes(20 << 20))
        self.assertTrue(device.is_blank(str(path)))
        for offset in (0, 4096, (8 << 20) - 1, (12 << 20) + 77, (19 << 20) + 5, (20 << 20) - 1):
            path.write_bytes(bytes(20 << 20))
            with path.open('r+b') as f:
                f.seek(offset)
                f.write(b'\x01')
            self.assertFalse(device.is_blank(str(path)), offset)

    def test_data_in_the_middle(self) -> None:
        """Of a large device pages all over it are looked at, and where file systems keep copies of their super blocks."""
        path = self.directory / 'device'
        size = 1 << 40
        for offset, length in (((64 << 20) + 64, 4), (256 << 30, 8), ((128 << 20) + 1080, 2), (81 * (32 << 20) + 1080, 2),
                               ((8 << 20) * 9 + 1024 + 56, 2), (700 << 30, 128 << 20)):
            with path.open('wb') as f:
                f.truncate(size)
            self.assertTrue(device.is_blank(str(path)))
            with path.open('r+b') as f:
                f.seek(offset)
                f.write(b'\x01' * length)
            self.assertFalse(device.is_blank(str(path)), offset)

    def test_file_system_whose_super_block_was_wiped(self) -> None:
        path = self.directory / 'device'
        for command in (('/sbin/mkfs.ext4', '-q', '-F', '-b', '4096'), ('/sbin/mkfs.ext4', '-q', '-F', '-b', '1024'),
                        ('/sbin/mkfs.xfs', '-q', '-f')):
            with path.open('wb') as f:
                f.truncate(1 << 30)
            subprocess.run([*command, path], check=True)
            with path.open('r+b') as f:
                f.write(bytes(8 << 20))
                f.seek(-(1 << 20), os.SEEK_END)
                f.write(bytes(1 << 20))
            self.assertIsNone(device.signature(str(path)))
            self.assertFalse(device.is_blank(str(path)), command)

    def test_small(self) -> None:
        path = self.directory / 'device'
        path.write_bytes(bytes(5000))
        self.assertTrue(device.is_blank(str(path)))

    def test_signature(self) -> None:
        path = self.directory / 'device'
        path.write_bytes(bytes(20 << 20))
        self.assertIsNone(device.signature(str(path)))
        with path.open('r+b') as f:
            f.write(b'XFSB' + bytes(3) + b'\x10')       # blkid wants more of XFS; swap needs only its mark
            f.seek(4086)
            f.write(b'SWAPSPACE2')
            f.seek(1024)
            f.write((1).to_bytes(4, 'little') + (100).to_bytes(4, 'little'))
        self.assertEqual('swap', device.signature(str(path)))


class UsersTest(base.TestCase):
    """With a character device that this process has, in the place of one of a namespace."""

    def setUp(self) -> None:
        super().setUp()
        privileged.context.set_client_mode(False)
        self.addCleanup(privileged.context.set_client_mode, True)
        self.dax = self.directory / 'bus/dax1.0/dax1.0'
        self.dax.mkdir(parents=True)
        (self.directory / 'bus/dax1.0/namespace').write_text('namespace1.0\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.users._BUS', self.directory / 'bus'))
        (self.directory / 'proc').mkdir()      # nobody else's business: who else has it open changes nothing here
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.users._PROC', self.directory / 'proc'))
        self.can_see(os.getpid())

    def is_device(self, number: int) -> None:
        (self.dax / 'dev').write_text(f'{os.major(number)}:{os.minor(number)}\n')

    def can_see(self, pid: int) -> None:
        (self.directory / f'proc/{pid}').symlink_to(f'/proc/{pid}')

    def test_open(self) -> None:
        master, slave = os.openpty()
        self.addCleanup(os.close, master)
        self.is_device(os.fstat(slave).st_rdev)
        error = self.assertRaises(exception.DeviceRefused, namespaces.check_unused, 'namespace1.0')
        self.assertIn(f'/dev/dax1.0 is in use by process {os.getpid()} (', str(error))
        namespaces.check_unused('namespace1.1')
        for function, arguments in ((namespaces.destroy, ()), (namespaces.reconfigure, (2 << 20, False))):
            self.assertRaises(exception.DeviceRefused, function, 'namespace1.0', *arguments)
        os.close(slave)
        namespaces.check_unused('namespace1.0')

    def test_mapped_only(self) -> None:
        self.is_device(os.stat('/dev/zero').st_rdev)
        namespaces.check_unused('namespace1.0')
        descriptor = os.open('/dev/zero', os.O_RDWR)
        with mmap.mmap(descriptor, 4096, flags=mmap.MAP_PRIVATE):
            os.close(descriptor)
            error = self.assertRaises(exception.DeviceRefused, namespaces.check_unused, 'namespace1.0')
        self.assertIn(str(os.getpid()), str(error))

    def test_process_that_cannot_be_looked_at(self) -> None:
        """Nobody knows whether it has the device."""
        self.is_device(os.makedev(250, 77))
        with subprocess.Popen(['sleep', '60']) as other:
            self.can_see(other.pid)
            namespaces.check_unused('namespace1.0')
            for directory in (self.directory, self.directory.parent):
                directory.chmod(0o755)
            os.seteuid(65534)
            try:
                error = self.assertRaises(exception.DeviceRefused, namespaces.check_unused, 'namespace1.0')
            finally:
                os.seteuid(0)
                other.kill()
        self.assertIn('do this as root', str(error))

    def test_memory_of_the_host(self) -> None:
        self.is_device(os.makedev(250, 77))
        (self.directory / 'kmem').mkdir()
        (self.dax / 'driver').symlink_to(self.directory / 'kmem')
        error = self.assertRaises(exception.DeviceRefused, namespaces.check_unused, 'namespace1.0')
        self.assertIn('daxctl reconfigure-device', str(error))


class PlanTest(base.TestCase):
    def test_steps_are_undone_newest_first(self) -> None:
        done: list[str] = []
        made = plan.Plan()
        made.add('one', lambda: done.append('1'), lambda: done.append('-1'))
        made.add('two', lambda: done.append('2'))
        made.add('three', lambda: done.append('3'), lambda: done.append('-3'))

        def fail() -> None:
            raise exception.ProbeFailed(path='p', reason='r')

        made.add('four', fail, lambda: done.append('-4'))
        said: list[str] = []
        self.assertRaises(exception.ProbeFailed, made.run, said.append)
        self.assertEqual(['1', '2', '3', '-3', '-1'], done)
        self.assertEqual(['one', 'two', 'three', 'four'], said)

    def test_an_undo_that_fails_does_not_stop_the_others(self) -> None:
        done: list[str] = []
        made = plan.Plan()

        def fail() -> None:
            raise exception.ProbeFailed(path='p', reason='r')

        made.add('one', lambda: None, lambda: done.append('-1'))
        made.add('two', lambda: None, fail)
        made.add('three', fail)
        self.assertRaises(exception.ProbeFailed, made.run, lambda _line: None)
        self.assertEqual(['-1'], done)

    def test_undone_after_an_interrupt(self) -> None:
        """A step that undoes runs programs, which nothing new may do after one."""
        marker = self.directory / 'undone'
        code = ('import signal\n'
                'from pcow_driver import interrupt, tool\n'
                'from pcow_driver.pmem import plan\n'
                'interrupt.install()\n'
                'made = plan.Plan()\n'
                f'made.add("one", lambda: None, lambda: tool.run("/usr/bin/touch", "{marker}"))\n'
                'made.add("two", lambda: signal.raise_signal(signal.SIGINT))\n'
                'made.run()\n')
        done = subprocess.run([sys.executable, '-c', code], cwd=base.TOP, capture_output=True, check=False, timeout=60)
        self.assertEqual(-signal.SIGINT, done.returncode, str(done.stderr))
        self.assertTrue(marker.exists())

    def test_showing_changes_nothing(self) -> None:
        done: list[str] = []
        made = plan.Plan()
        made.add('one', lambda: done.append('1'))
        made.add_command(lambda: ('mkfs', 'a b'), lambda _command: done.append('2'))
        self.assertEqual(['one', "mkfs 'a b'"], list(made.lines()))
        self.assertEqual([], done)


class MountUnitTest(base.TestCase):
    def test_names(self) -> None:
        # As printed by systemd-escape --path --suffix=mount (systemd 252).
        for path, name in (('/var/lib/pcow/pools/fast', 'var-lib-pcow-pools-fast.mount'), ('/', '-.mount'),
                           ('/mnt/a-b', 'mnt-a\\x2db.mount'), ('/mnt//x/', 'mnt-x.mount'), ('/.a/.b', '\\x2ea-.b.mount'),
                           ('/mnt/ü ', 'mnt-\\xc3\\xbc\\x20.mount')):
            self.assertEqual(name, mount_unit.unit_name(path))

    def test_of_somebody_else(self) -> None:
        """A unit that an administrator wrote is neither replaced nor deleted."""
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory)))
        path, link = (Path(one) for one in mount_unit.paths('/mnt/p'))
        path.write_text('[Mount]\nWhat=LABEL=data\n')
        self.assertFalse(mount_unit.installed('/mnt/p'))
        for function, arguments in ((mount_unit.install, (mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''),)),
                                    (mount_unit.uninstall, ())):
            error = self.assertRaises(exception.DeviceRefused, function, '/mnt/p', *arguments)
            self.assertIn(str(path), str(error))
        self.assertEqual('[Mount]\nWhat=LABEL=data\n', path.read_text())
        path.unlink()
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=x', '/mnt/p', 'xfs', ''))
        mount_unit.install('/mnt/p', mount_unit.text('p', 'UUID=y', '/mnt/p', 'xfs', ''))
        self.assertIn('UUID=y', path.read_text())
        self.assertTrue(mount_unit.installed('/mnt/p'))
        mount_unit.uninstall('/mnt/p')
        self.assertFalse(path.exists() or os.path.lexists(link))

    def test_percent_is_doubled(self) -> None:
        self.assertIn('Where=/mnt/50%%\n', mount_unit.text('p', 'UUID=x', '/mnt/50%', 'xfs', 'dax=always'))

    def test_example_in_etc(self) -> None:
        """What etc/ shows, for pools that are made by hand, is what pcowctl writes."""
        where = '/var/lib/pcow/pools/fast'
        example = base.TOP / 'etc/systemd/system' / mount_unit.unit_name(where)
        self.assertEqual(example.read_text(), mount_unit.text(
            'fast', 'UUID=6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6', where, 'xfs', filesystem.MOUNT_OPTIONS))


class PromiseTest(base.TestCase):
    @staticmethod
    def _region(provider: str, domain: str) -> ndctl.Region:
        return ndctl.Region(dev='region0', provider=provider, size=1, available=0, dimms=('nmem0',), align=1,
                            persistence_domain=domain, namespaces=())

    def test_power_loss_is_promised_only_where_it_is_kept(self) -> None:
        for persistence, region, kept in (
                ('volatile', None, False), ('page-cache', None, False), ('pmem', None, False),
                ('pmem', self._region('e820', 'unknown'), False), ('pmem', self._region('ramdax', 'memory_controller'), False),
                ('pmem', self._region('ACPI.NFIT', 'unknown'), False),
                ('pmem', self._region('ACPI.NFIT', 'memory_controller'), True),
                ('pmem', self._region('ACPI.NFIT', 'cpu_cache'), True), ('pmem', self._region('CXL', 'memory_controller'), True)):
            self.assertEqual(kept, promise.of(persistence, region).survives.startswith('power loss'), f'{persistence} {region}')

    def test_cxl_is_named(self) -> None:
        self.assertIn('CXL', promise.of('pmem', self._region('cxl_test', 'cpu_cache')).note)


class DestroyTest(base.TestCase):
    """With a real mount."""

    def setUp(self) -> None:
        super().setUp()
        privileged.context.set_client_mode(False)
        self.addCleanup(privileged.context.set_client_mode, True)
        self.configure(pools_path=str(self.directory), pcow_img=str(
            Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin')) / 'pcow-img'))
        self.path = self.directory / 'quick'
        self.addCleanup(subprocess.run, ['umount', '-q', self.path], check=False)
        provision.plan_memory('quick', str(self.path), 32 << 20).run()
        self.pools = registry.PoolRegistry()

    def test_name_that_is_not_ascii(self) -> None:
        path = self.directory / 'grö ße'
        self.addCleanup(subprocess.run, ['umount', '-q', path], check=False)
        provision.plan_memory('größe', str(path), 32 << 20).run()
        self.assertEqual('tmpfs', filesystem.mounted(str(path))[0])
        provision.plan_destroy('größe').run()
        self.assertFalse(path.is_mount())

    def test_not_mounted(self) -> None:
        """An unmounted pool looks empty; whoever forgets it should know."""
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.mount_unit.DIRECTORY', str(self.directory / 'units')))
        mount_unit.install(str(self.path), mount_unit.text('quick', 'x', str(self.path), 'xfs', 'noatime'))
        subprocess.run(['umount', self.path], check=True)
        error = self.assertRaises(exception.PoolInvalid, provision.plan_remove, 'quick', forget=False)
        self.assertIn('systemctl start', str(error))
        provision.plan_remove('quick', forget=True).run()
        self.assertEqual([], self.pools.list())

    def test_busy(self) -> None:
        """Somebody uses something in it: it stays what it was."""
        before = self.pools.set('quick', overcommit=2.5, draining=True)
        with self.use():
            self.assertRaises(exception.ToolFailed, provision.plan_destroy('quick').run)
        self.assertTrue(self.path.is_mount())
        self.assertEqual(before, self.pools.get('quick'))
        provision.plan_destroy('quick').run()
        self.assertFalse(self.path.is_mount())
        self.assertEqual([], self.pools.list())

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            yield
        finally:
            os.close(descriptor)

    def test_name_that_was_taken_meanwhile(self) -> None:
        """What cannot be put back is told, and the mistake that came first is what counts."""
        plan_of_it = provision.plan_destroy('quick')
        unmount = next(step for step in plan_of_it.steps if step.show().startswith('umount'))

        def take_name() -> None:
            self.pools.create('quick', str(self.directory / 'new'))

        plan_of_it.steps.insert(plan_of_it.steps.index(unmount), plan.Step(lambda: 'meanwhile', take_name))
        with self.use():
            self.assertRaises(exception.ToolFailed, plan_of_it.run)
        self.assertEqual(str(self.directory / 'new'), self.pools.entry('quick').path)
        self.assertTrue(self.path.is_mount())


class DryRunTest(base.TestCase):
    """What is shown is not done; what would be refused is refused."""

    def setUp(self) -> None:
        super().setUp()
        self.pools = registry.PoolRegistry()
        self.pools.create('p', str(self.directory / 'p'))

    def ctl(self, *words: str) -> int:
        (self.directory / 'pcow.conf').write_text(f'[pcow]\nstate_path = {self.directory / "state"}\n')
        return app.main(['--config-file', str(self.directory / 'pcow.conf'), *words])

    def test_remove(self) -> None:
        for how in ((), ('--forget',)):
            self.assertEqual(0, self.ctl('pool', 'remove', 'p', '--dry-run', *how))
            self.assertEqual('p', self.pools.get('p').name)
        (line,) = provision.plan_remove('p', forget=False).lines()
        self.assertIn('.pcow-pool', line)
        (self.directory / 'p/vm.pcow').touch()
        self.assertRaises(exception.PoolNotEmpty, provision.plan_remove, 'p', forget=False)
        self.assertRaises(SystemExit, self.ctl, 'pool', 'remove', 'p', '--forget', '--destroy')      # argparse
        self.assertEqual(0, self.ctl('pool', 'remove', 'p', '--forget'))
        self.assertEqual([], self.pools.list())

    def test_import(self) -> None:
        self.pools.remove('p', forget=True)
        self.assertEqual(0, self.ctl('pool', 'import', '--dry-run', str(self.directory / 'p')))
        self.assertEqual([], self.pools.list())
        self.assertRaises(exception.PoolInvalid, provision.plan_import, str(self.directory), None)
        self.pools.import_(str(self.directory / 'p'))
        self.assertRaises(exception.PoolExists, provision.plan_import, str(self.directory / 'p'), None)

    def test_create(self) -> None:
        for words in ((str(self.directory / 'q'),), ('/mnt/pcow-test-dry', '--memory', '--size', '32M')):
            self.assertEqual(0, self.ctl('pool', 'create', 'q', *words, '--dry-run'))
        self.assertEqual(['p'], [entry.name for entry in self.pools.list()])
        self.assertFalse((self.directory / 'q').exists() or os.path.exists('/mnt/pcow-test-dry'))
