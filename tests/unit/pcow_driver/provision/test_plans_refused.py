# SPDX-License-Identifier: Apache-2.0
"""What must not be formatted, ended or written over, whatever is asked for, and who asks."""

from collections.abc import Callable
import os
from pathlib import Path
import subprocess

import fixtures

from pcow_driver.common import exception
from pcow_driver.pmem import block_device
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import namespaces
from pcow_driver.provision import provision
from tests.unit.pcow_driver import base


class RefusedCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.configure(pools_path=str(self.directory))

    def loop(self) -> str:
        """A block device of the kernel's that no file system maps: with data on it."""
        backing = self.directory / 'backing'
        backing.write_bytes(b'data' * (16 << 18))
        found = subprocess.run(
            ['losetup', '--show', '--find', backing], check=True, capture_output=True, text=True
        ).stdout.strip()
        self.addCleanup(subprocess.run, ['losetup', '--detach', found], check=False)
        return found


class WithoutDaxTest(RefusedCase):
    """mount -o dax=always fails there, when a new file system has destroyed everything."""

    def test_a_device_of_the_kernel(self) -> None:
        loop = self.loop()
        wanted = provision.Request(
            name='p',
            directory=str(self.directory / 'mnt'),
            filesystem='ext4',
            device=loop,
            force=True,
        )
        # of which --dry-run shows the steps
        for function, arguments in (
            (provision.plan_create, (wanted,)),
            (filesystems.make, ('ext4', loop, 'l', filesystems.ANYTHING)),
        ):
            error = self.assertRaises(exception.DeviceRefused, function, *arguments)
            self.assertIn('has no DAX', str(error))
        self.assertEqual(b'data' * (16 << 18), Path(loop).read_bytes())

    def test_what_the_kernel_says(self) -> None:
        """Of a partition, the device that it is on; what is made of others (device-mapper) has its
        own word.
        """
        number = os.stat('/dev/null').st_rdev
        links, disk = self.directory / 'dev', self.directory / 'disk'
        part = disk / 'part'
        for place in (links, disk / 'queue', part):
            place.mkdir(parents=True)
        (part / 'partition').write_text('1\n')
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.pmem.block_device.SYSFS', str(links)))
        self.useFixture(
            fixtures.MonkeyPatch(
                'pcow_driver.pmem.block_device.check_block_device', lambda _device: None
            )
        )
        link = links / f'{os.major(number)}:{os.minor(number)}'
        for target in (disk, part):
            link.symlink_to(target)
            (disk / 'queue/dax').unlink(missing_ok=True)
            self.assertRaises(exception.DeviceRefused, block_device.check_dax, '/dev/null')
            (disk / 'queue/dax').write_text('0\n')
            self.assertRaises(exception.DeviceRefused, block_device.check_dax, '/dev/null')
            (disk / 'queue/dax').write_text('1\n')
            block_device.check_dax('/dev/null')
            link.unlink()
        self.assertRaises(exception.DeviceRefused, block_device.check_dax, '/dev/null')


class NamespaceCase(RefusedCase):
    """A region with a DIMM and a namespace in mode fsdax, as sysfs shows them: the block device
    belongs to pfn1.0.
    """

    def setUp(self) -> None:
        super().setUp()
        self.devices = self.directory / 'devices'
        for name in ('region1/namespace1.0', 'pfn1.0/block', 'pfn1.1'):
            (self.devices / name).mkdir(parents=True)
        (self.devices / 'namespace1.0').symlink_to('region1/namespace1.0')
        (self.devices / 'region1/mapping0').write_text('nmem1,0,1073741824,0\n')
        (self.devices / 'namespace1.0/uuid').write_text('f7b40d1b-2b86-4a7a-8d3d-1d0a3b9c8e01\n')
        (self.devices / 'pfn1.0/namespace').write_text('namespace1.0\n')
        (self.devices / 'pfn1.1/namespace').write_text('\n')  # the seed of the next one
        for name in ('privileged.namespaces._DEVICES', 'pmem.users._BUS'):
            self.useFixture(fixtures.MonkeyPatch(f'pcow_driver.{name}', self.devices))
        self.ran = self.directory / 'ran'
        self.script(
            'ndctl',
            f'#!/bin/sh\ncase $1 in read-labels) cp {self.directory}/labels "$3" ;; '
            f'create-namespace) echo \'{{"dev":"namespace1.0"}}\' ;; *) echo "$*" >>{self.ran} ;; '
            f'esac\n',
        )
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )

    def refused(self, said: str, function: Callable[..., object], *arguments: object) -> None:
        error = self.assertRaises(exception.DeviceRefused, function, *arguments)
        self.assertIn(said, str(error))
        self.assertFalse(self.ran.exists(), error)

    def done(self, said: str) -> None:
        self.assertIn(said, self.ran.read_text())
        self.ran.unlink()


class LabelsTest(NamespaceCase):
    def test_something_is_in_them(self) -> None:
        labels = self.directory / 'labels'
        labels.write_bytes(bytes(4096) + b'NAMESPACE_INDEX\0')
        self.refused('nmem1', namespaces.init_labels, ['nmem1'], False)
        namespaces.init_labels(['nmem1'], True)
        self.done('init-labels --force nmem1')
        for empty in (bytes(4096), b'\xff' * 4096):
            labels.write_bytes(empty)
            namespaces.init_labels(['nmem1'], False)
            self.done('init-labels nmem1')

    def test_that_cannot_be_read(self) -> None:
        # there is no file of them
        self.assertRaises(exception.ToolFailed, namespaces.init_labels, ['nmem1'], False)
        self.assertFalse(self.ran.exists())

    def test_region_that_is_active(self) -> None:
        """Its namespaces may be in use, and would be lost under their users."""
        (self.directory / 'labels').write_bytes(bytes(4096))
        (self.devices / 'region1/driver').symlink_to(self.directory)
        for overwrite in (False, True):
            self.refused(
                'ndctl disable-region region1',
                namespaces.init_labels,
                ['nmem0', 'nmem1'],
                overwrite,
            )
        (self.directory / 'labels').write_bytes(bytes(4096))
        namespaces.init_labels(['nmem0'], False)
        self.done('init-labels nmem0')


class EndTest(NamespaceCase):
    def setUp(self) -> None:
        super().setUp()
        self.device = self.loop()
        subprocess.run(['/sbin/mkfs.ext4', '-q', '-F', self.device], check=True)
        (self.devices / 'pfn1.0/block' / os.path.basename(self.device)).mkdir()
        self.useFixture(fixtures.MonkeyPatch('pcow_driver.privileged.namespaces._created', {}))

    def test_wiped_is_what_was_meant(self) -> None:
        self.refused(
            'another file system',
            filesystems.wipe,
            self.device,
            '0b5e2c7e-8a67-4c62-a2c4-6a1f0f5a7d10',
        )
        self.refused('another file system', filesystems.wipe, self.device, '')
        uuid = filesystems.uuid(self.device)
        self.assertTrue(uuid)
        filesystems.wipe(self.device, uuid)
        self.assertIsNone(filesystems.signature(self.device))
        filesystems.wipe(self.device, uuid)  # as after a kill
        subprocess.run(['/sbin/mkswap', '-q', self.device], check=True)
        self.refused('another file system', filesystems.wipe, self.device, uuid)

    def test_namespace_that_carries_something(self) -> None:
        self.refused('carries ext4', namespaces.destroy, 'namespace1.0')
        filesystems.wipe(self.device, filesystems.uuid(self.device))
        namespaces.destroy('namespace1.0')
        self.done('destroy-namespace --force namespace1.0')

    def test_namespace_whose_content_nobody_can_see(self) -> None:
        (self.devices / 'pfn1.0/block' / os.path.basename(self.device)).rmdir()
        self.refused('no block device', namespaces.destroy, 'namespace1.0')

    def test_namespace_that_was_just_made(self) -> None:
        """What is taken back when a step fails may carry anything: what lay there before, or half a
        file system.
        """
        namespaces.create('region1', None, 2 << 20, 'p')
        namespaces.destroy('namespace1.0')
        self.done('destroy-namespace --force namespace1.0')
        self.refused('carries ext4', namespaces.destroy, 'namespace1.0')
        namespaces.create('region1', None, 2 << 20, 'p')
        # another by now
        (self.devices / 'namespace1.0/uuid').write_text('e0c3b1ac-5a50-4c3c-9c8c-6c6f0b7a2d02\n')
        self.refused('carries ext4', namespaces.destroy, 'namespace1.0')

    def test_in_use(self) -> None:
        """In mode fsdax too, whose block device is not that of the namespace itself."""
        holder = os.open(self.device, os.O_RDONLY | os.O_EXCL)
        self.addCleanup(os.close, holder)
        for function, arguments in (
            (namespaces.check_unused, ('namespace1.0',)),
            (namespaces.disable_region, ('region1',)),
            (namespaces.reconfigure, ('namespace1.0', 2 << 20, True)),
            (namespaces.destroy, ('namespace1.0',)),
        ):
            self.refused('in use', function, *arguments)
