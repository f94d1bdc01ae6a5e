# SPDX-License-Identifier: Apache-2.0
"""What must not be formatted, ended or written over, whatever is asked for, and who asks."""

import os
from pathlib import Path
import subprocess

import fixtures

from pcow_driver import exception
from pcow_driver import privileged
from pcow_driver.pmem import device
from pcow_driver.pmem import provision
from pcow_driver.privileged import filesystems
from tests.unit.pcow_driver import base


class RefusedCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        privileged.context.set_client_mode(False)
        self.addCleanup(privileged.context.set_client_mode, True)
        self.configure(pools_path=str(self.directory))

    def loop(self) -> str:
        """A block device of the kernel's that no file system maps: with data on it."""
        backing = self.directory / 'backing'
        backing.write_bytes(b'data' * (16 << 18))
        found = subprocess.run(['losetup', '--show', '--find', backing], check=True, capture_output=True, text=True).stdout.strip()
        self.addCleanup(subprocess.run, ['losetup', '--detach', found], check=False)
        return found


class WithoutDaxTest(RefusedCase):
    """mount -o dax=always fails there, when a new file system has destroyed everything."""

    def test_a_device_of_the_kernel(self) -> None:
        loop = self.loop()
        wanted = provision.Request(name='p', directory=str(self.directory / 'mnt'), filesystem='ext4', device=loop, force=True)
        for function, arguments in ((provision.plan_create, (wanted,)),         # of which --dry-run shows the steps
                                    (filesystems.make, ('ext4', loop, 'l', filesystems.ANYTHING))):
            error = self.assertRaises(exception.DeviceRefused, function, *arguments)
            self.assertIn('has no DAX', str(error))
        self.assertEqual(b'data' * (16 << 18), Path(loop).read_bytes())

    def test_what_the_kernel_says(self) -> None:
        """Of a partition, the device that it is on; what is made of others (device-mapper) has its own word."""
        number = os.stat('/dev/null').st_rdev
        links, disk = self.directory / 'dev', self.directory / 'disk'
        part = disk / 'part'
        for place in (links, disk / 'queue', part):
            place.mkdir(parents=True)
        (part / 'partition').write_text('1\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.device.SYSFS', str(links)))
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.device.check_block_device', lambda _device: None))
        link = links / f'{os.major(number)}:{os.minor(number)}'
        for target in (disk, part):
            link.symlink_to(target)
            (disk / 'queue/dax').unlink(missing_ok=True)
            self.assertRaises(exception.DeviceRefused, device.check_dax, '/dev/null')
            (disk / 'queue/dax').write_text('0\n')
            self.assertRaises(exception.DeviceRefused, device.check_dax, '/dev/null')
            (disk / 'queue/dax').write_text('1\n')
            device.check_dax('/dev/null')
            link.unlink()
        self.assertRaises(exception.DeviceRefused, device.check_dax, '/dev/null')
