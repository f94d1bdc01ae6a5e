# SPDX-License-Identifier: Apache-2.0
"""What can be seen without persistent memory; the rest runs on emulated NVDIMMs in a VM
(tools/vm-test fsdax).
"""

import mmap
import os
import signal
import subprocess
import sys

import fixtures

from pcow_driver.common import exception
from pcow_driver.pmem import block_device
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import users
from pcow_driver.privileged import namespaces
from pcow_driver.provision import adopt
from pcow_driver.provision import durability
from pcow_driver.provision import ndctl
from pcow_driver.provision import plan
from pcow_driver.provision import provision
from tests.unit.pcow_driver import base


class RequestTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.configure(pools_path=str(self.directory))

    def _refused(self, error: type[Exception], **changes: object) -> str:
        wanted = {
            'name': 'p',
            'directory': str(self.directory / 'mnt'),
            'filesystem': 'xfs',
            'device': '/dev/null',
            **changes,
        }
        return str(self.assertRaises(error, provision.plan_create, provision.Request(**wanted)))  # type: ignore[arg-type]

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
        for name in ('privileged.filesystems.check_formattable', 'pmem.block_device.check_dax'):
            self.useFixture(fixtures.MonkeyPatch(f'pcow_driver.{name}', lambda *_args: None))
        self.assertIn(
            'shorter',
            self._refused(exception.UsageInvalid, directory=str(self.directory / ('ü' * 60))),
        )


class FilesystemTest(base.TestCase):
    def test_hugetlbfs_is_no_place_for_images(self) -> None:
        """As a mount of it was seen to behave: write(2) gives EINVAL there."""
        self.useFixture(
            fixtures.MonkeyPatch(
                'pcow_driver.pmem.filesystem.mounted', lambda _path: ('hugetlbfs', 'none')
            )
        )
        error = self.assertRaises(
            exception.UsageInvalid, adopt.plan_directory, 'p', str(self.directory / 'p')
        )
        self.assertIn('--memory --huge', str(error))

    def test_labels_are_cut_at_whole_letters(self) -> None:
        """Limits of file systems and of ndctl are bytes."""
        for kind, most in (('xfs', 12), ('ext4', 16)):
            for name in ('much larger', 'größeres Ding', 'üüüüüüüüüüüü', '\U0001f600' * 9):
                command = filesystem.make_command(kind, 'device', f'pcow-{name}')
                label = command[command.index('-L') + 1]
                self.assertLessEqual(len(label.encode()), most)
                self.assertTrue(
                    f'pcow-{name}'.startswith(label) and len(label.encode()) > most - 4, label
                )
        path = self.directory / 'device'
        for kind in filesystem.KINDS:
            with path.open('wb') as f:
                f.truncate(1 << 30)
            filesystem.run(filesystem.make_command(kind, str(path), 'pcow-größere Dinge'))

    def test_names_that_are_not_utf8(self) -> None:
        """Any user can have something mounted whose name is none: the kernel shows its bytes as
        they are.
        """
        mountinfo = self.directory / 'mountinfo'
        mountinfo.write_bytes(
            b'36 35 0:40 / /tmp/\xff rw - fuse fuse rw\n37 35 0:41 / /mnt/a\\040b rw - tmpfs '
            b'pcow-b rw\n'
        )
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.filesystem.MOUNTINFO', str(mountinfo))
        )
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
        self.assertTrue(block_device.is_blank(str(path)))
        for offset in (0, 4096, (8 << 20) - 1, (12 << 20) + 77, (19 << 20) + 5, (20 << 20) - 1):
            path.write_bytes(bytes(20 << 20))
            with path.open('r+b') as f:
                f.seek(offset)
                f.write(b'\x01')
            self.assertFalse(block_device.is_blank(str(path)), offset)

    def test_data_in_the_middle(self) -> None:
        """Of a large device pages all over it are looked at, and where file systems keep copies of
        their super blocks.
        """
        path = self.directory / 'device'
        size = 1 << 40
        for offset, length in (
            ((64 << 20) + 64, 4),
            (256 << 30, 8),
            ((128 << 20) + 1080, 2),
            (81 * (32 << 20) + 1080, 2),
            ((8 << 20) * 9 + 1024 + 56, 2),
            (700 << 30, 128 << 20),
        ):
            with path.open('wb') as f:
                f.truncate(size)
            self.assertTrue(block_device.is_blank(str(path)))
            with path.open('r+b') as f:
                f.seek(offset)
                f.write(b'\x01' * length)
            self.assertFalse(block_device.is_blank(str(path)), offset)

    def test_file_system_whose_super_block_was_wiped(self) -> None:
        path = self.directory / 'device'
        for command in (
            ('/sbin/mkfs.ext4', '-q', '-F', '-b', '4096'),
            ('/sbin/mkfs.ext4', '-q', '-F', '-b', '1024'),
            ('/sbin/mkfs.xfs', '-q', '-f'),
        ):
            with path.open('wb') as f:
                f.truncate(1 << 30)
            subprocess.run([*command, path], check=True)
            with path.open('r+b') as f:
                f.write(bytes(8 << 20))
                f.seek(-(1 << 20), os.SEEK_END)
                f.write(bytes(1 << 20))
            self.assertIsNone(block_device.signature(str(path)))
            self.assertFalse(block_device.is_blank(str(path)), command)

    def test_small(self) -> None:
        path = self.directory / 'device'
        path.write_bytes(bytes(5000))
        self.assertTrue(block_device.is_blank(str(path)))

    def test_signature(self) -> None:
        path = self.directory / 'device'
        path.write_bytes(bytes(20 << 20))
        self.assertIsNone(block_device.signature(str(path)))
        with path.open('r+b') as f:
            # blkid wants more of XFS; swap needs only its mark
            f.write(b'XFSB' + bytes(3) + b'\x10')
            f.seek(4086)
            f.write(b'SWAPSPACE2')
            f.seek(1024)
            f.write((1).to_bytes(4, 'little') + (100).to_bytes(4, 'little'))
        self.assertEqual('swap', block_device.signature(str(path)))


class UsersTest(base.TestCase):
    """With a character device that this process has, in the place of one of a namespace."""

    def setUp(self) -> None:
        super().setUp()
        self.dax = self.directory / 'bus/dax1.0/dax1.0'
        self.dax.mkdir(parents=True)
        (self.directory / 'bus/dax1.0/namespace').write_text('namespace1.0\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.users._BUS', self.directory / 'bus'))
        # nobody else's business: who else has it open changes nothing here
        (self.directory / 'proc').mkdir()
        self.useFixture(
            fixtures.MonkeyPatch('pcow_driver.pmem.users._PROC', self.directory / 'proc')
        )
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
        for function, arguments in (
            (namespaces.destroy, ()),
            (namespaces.reconfigure, (2 << 20, False)),
        ):
            self.assertRaises(exception.DeviceRefused, function, 'namespace1.0', *arguments)
        os.close(slave)
        namespaces.check_unused('namespace1.0')

    def test_mapped_only(self) -> None:
        self.is_device(os.stat('/dev/zero').st_rdev)
        namespaces.check_unused('namespace1.0')
        descriptor = os.open('/dev/zero', os.O_RDWR)
        with mmap.mmap(descriptor, 4096, flags=mmap.MAP_PRIVATE):
            os.close(descriptor)
            error = self.assertRaises(
                exception.DeviceRefused, namespaces.check_unused, 'namespace1.0'
            )
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
                error = self.assertRaises(
                    exception.DeviceRefused, users.check_unused, 'namespace1.0'
                )
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
        code = (
            'import signal\n'
            'from pcow_driver.common import interrupt, tool\n'
            'from pcow_driver.provision import plan\n'
            'interrupt.install()\n'
            'made = plan.Plan()\n'
            f'made.add("one", lambda: None, lambda: tool.run("/usr/bin/touch", "{marker}"))\n'
            'made.add("two", lambda: signal.raise_signal(signal.SIGINT))\n'
            'made.run()\n'
        )
        done = subprocess.run(
            [sys.executable, '-c', code], cwd=base.TOP, capture_output=True, check=False, timeout=60
        )
        self.assertEqual(-signal.SIGINT, done.returncode, str(done.stderr))
        self.assertTrue(marker.exists())

    def test_showing_changes_nothing(self) -> None:
        done: list[str] = []
        made = plan.Plan()
        made.add('one', lambda: done.append('1'))
        made.add_command(lambda: ('mkfs', 'a b'), lambda _command: done.append('2'))
        self.assertEqual(['one', "mkfs 'a b'"], list(made.lines()))
        self.assertEqual([], done)


class PromiseTest(base.TestCase):
    @staticmethod
    def _region(provider: str, domain: str) -> ndctl.Region:
        return ndctl.Region(
            dev='region0',
            provider=provider,
            size=1,
            available=0,
            dimms=('nmem0',),
            align=1,
            persistence_domain=domain,
            namespaces=(),
        )

    def test_power_loss_is_promised_only_where_it_is_kept(self) -> None:
        for persistence, region, kept in (
            ('volatile', None, False),
            ('page-cache', None, False),
            ('pmem', None, False),
            ('pmem', self._region('e820', 'unknown'), False),
            ('pmem', self._region('ramdax', 'memory_controller'), False),
            ('pmem', self._region('ACPI.NFIT', 'unknown'), False),
            ('pmem', self._region('ACPI.NFIT', 'memory_controller'), True),
            ('pmem', self._region('ACPI.NFIT', 'cpu_cache'), True),
            ('pmem', self._region('CXL', 'memory_controller'), True),
        ):
            self.assertEqual(
                kept,
                durability.of(persistence, region).survives.startswith('power loss'),
                f'{persistence} {region}',
            )

    def test_cxl_is_named(self) -> None:
        self.assertIn('CXL', durability.of('pmem', self._region('cxl_test', 'cpu_cache')).note)
