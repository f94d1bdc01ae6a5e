# SPDX-License-Identifier: Apache-2.0
"""etc/libvirt/bin/qemu-img with real disks and images, called as libvirt calls it: two of each, and
what goes wrong on the way.
"""

import os
from pathlib import Path
import shutil
import subprocess
from unittest import mock

import fixtures

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend
from tests.functional import vm_state
from tests.unit.pcow_driver import base

program = base.load_script(images.TOP / 'etc/libvirt/bin/qemu-img')


class LibvirtQemuImgTest(images.ImageTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.disks = [self.directory / f'disk{n}.qcow2' for n in range(2)]
        self.images = [self.directory / f'vm{n}.pcow' for n in range(2)]
        for disk, image in zip(self.disks, self.images, strict=True):
            vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', disk, '1M')
            vm_state.run('pcow-img', 'create', '-q', image, test_qemu_backend.SIZE)
        self.define(self.disks, self.images)
        directory = str(Path(images.program('pcow-img')).parent)
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', os.pathsep.join((directory, os.environ['PATH'])))
        )

    def define(
        self, disks: list[Path], memories: list[Path], *, name: str = 'web1', snapshot: str = ''
    ) -> None:
        """A domain, or what libvirt keeps of it with a snapshot."""
        domains, snapshots = self.directory / 'domains', self.directory / 'snapshots'
        for directory in (domains, snapshots / name):
            directory.mkdir(parents=True, exist_ok=True)
        devices = [
            f"<disk type='file' device='disk'><source file='{disk}'/></disk>" for disk in disks
        ]
        # of each model that images can be
        devices += [
            f"<memory model='{model}'><source><path>{image}</path></source></memory>"
            for model, image in zip(('nvdimm', 'virtio-pmem'), memories, strict=False)
        ]
        domain = f"<domain><name>{name}</name><devices>{''.join(devices)}</devices></domain>"
        if snapshot:
            (snapshots / name / f'{snapshot}.xml').write_text(
                f'<domainsnapshot><name>{snapshot}</name>{domain}</domainsnapshot>'
            )
        else:
            (domains / f'{name}.xml').write_text(domain)
        self.useFixture(fixtures.MockPatchObject(program, 'DOMAINS', str(domains)))
        self.useFixture(fixtures.MockPatchObject(program, 'SNAPSHOTS', str(snapshots)))

    def take(self) -> Path:
        """A snapshot of the domain, as libvirt does it, and another disk."""
        self.fill(1)
        self.assertEqual([], self.call('-c', 's'))
        self.define(self.disks, self.images, snapshot='s')
        self.fill(2)
        more = self.directory / 'more.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', more, '1M')
        return more

    def call(self, option: str, name: str) -> list[str]:
        """For one disk after the other, also after one has failed, as libvirt does for some
        operations; what was said.
        """
        said = []
        for disk in self.disks:
            try:
                self.assertTrue(program.serve(['snapshot', option, name, str(disk)]))
            except program.Refused as e:
                said.append(str(e))
        return said

    def fill(self, value: int) -> None:
        for disk, image in zip(self.disks, self.images, strict=True):
            vm_state.run('qemu-io', '-f', 'qcow2', '-c', f'write -q -P {value} 0 64k', disk)
            vm_state.run('pcow-io', '-c', f'write -q -P {value} 0 64k', image)

    def assert_holds(self, value: int) -> None:
        for disk, image in zip(self.disks, self.images, strict=True):
            self.assertTrue(vm_state.disk_holds(disk, value), disk)
            vm_state.run('pcow-io', '-c', f'read -q -P {value} 0 64k', image)

    def assert_names(self, *names: str) -> None:
        for disk, image in zip(self.disks, self.images, strict=True):
            self.assertEqual(list(names), vm_state.disk_names(disk))
            self.assertEqual(list(names), vm_state.image_names(image))

    def test_all_of_it(self) -> None:
        self.fill(1)
        self.assertEqual([], self.call('-c', 's'))
        self.fill(2)
        self.assertEqual([], self.call('-a', 's'))
        self.assert_holds(1)
        self.assert_names('s')
        self.assertEqual([], self.call('-d', 's'))
        self.assert_names()

    def test_a_name_that_is_the_id_of_another(self) -> None:
        self.fill(1)
        self.assertEqual([], self.call('-c', 'first'))
        self.fill(2)
        self.assertEqual([], self.call('-c', '1'))
        self.fill(3)
        self.assertEqual([], self.call('-a', '1'))
        self.assert_holds(2)
        self.assertEqual([], self.call('-d', '1'))
        self.assert_names('first')
        self.assertEqual([], self.call('-a', 'first'))
        self.assert_holds(1)

    def test_an_image_stands_on_one(self) -> None:
        """Nothing is deleted, although libvirt goes on with the next disk."""
        self.call('-c', 's')
        child = self.directory / 'child.pcow'
        vm_state.run(
            'pcow-img', 'create', '-q', '-b', self.images[1].name, '-o', 'base_snapshot=s', child
        )
        refused, then = self.call('-d', 's')
        self.assertIn(child.name, refused)
        self.assertIn("still has the snapshot 's'", then)
        self.assert_names('s')
        child.unlink()
        self.assertEqual([], self.call('-d', 's'))
        self.assert_names()

    def test_create_that_fails(self) -> None:
        self.disks[0].rename(self.directory / 'away')
        self.assertEqual(2, len(self.call('-c', 's')))
        (self.directory / 'away').rename(self.disks[0])
        self.assert_names()

    def test_create_that_takes_too_long(self) -> None:
        real = program.run

        def run(*command: str) -> str:
            if command[0].endswith('qemu-img') and '-c' in command:
                raise subprocess.TimeoutExpired(command, 1)
            return str(real(*command))

        with mock.patch.object(program, 'run', run):
            self.assertRaises(
                subprocess.TimeoutExpired,
                program.serve,
                ['snapshot', '-c', 's', str(self.disks[0])],
            )
        self.assert_names()

    def test_revert_that_cannot_be(self) -> None:
        self.fill(1)
        self.call('-c', 's')
        self.fill(2)
        # as if they were of different times
        with mock.patch.object(program, 'MOST_APART', -1):
            refused, then = self.call('-a', 's')
        self.assertIn('do not belong together', refused)
        self.assertIn("was not reverted to 's'", then)
        vm_state.run('pcow-img', 'snapshot', '-d', 's', self.images[1])
        refused, then = self.call('-a', 's')
        self.assertIn("has no snapshot 's', so the disks are not reverted either", refused)
        self.assert_holds(2)

    def test_revert_that_ends_halfway(self) -> None:
        self.fill(3)
        self.call('-c', 'other')
        self.fill(1)
        self.call('-c', 's')
        self.fill(2)
        self.assertTrue(program.serve(['snapshot', '-a', 's', str(self.disks[0])]))
        # the second disk is not reverted yet, nor are the images: nobody runs that
        done = subprocess.run(
            [
                images.program('qemu-system-x86_64'),
                '-machine',
                'q35,nvdimm=on',
                '-accel',
                'qtest',
                '-m',
                '128M,slots=2,maxmem=8G',
                '-nodefaults',
                '-display',
                'none',
                *test_qemu_backend.backend(self.images[0]),
                *vm_state.carrier_arguments(self.disks[0]),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=qemu.START_SECONDS,
            check=False,
        )
        self.assertEqual(1, done.returncode)
        self.assertIn('being reverted to a snapshot when QEMU ended', done.stderr)
        for option, name in (('-a', 'other'), ('-c', 'new'), ('-d', 's'), ('-d', 'other')):
            self.assertIn('a revert ended halfway', self.call(option, name)[0])
        self.assertEqual([], self.call('-a', 's'))
        self.assert_holds(1)
        self.assert_names('other', 's')

    def test_a_disk_that_may_have_been_reverted(self) -> None:
        """Killed by the limit of time, or a late error: nothing runs on that disk beside the memory
        of later.
        """
        self.take()
        real = program.run
        for error, disk, late in (
            (subprocess.TimeoutExpired('qemu-img', 600), self.disks[0], True),
            (program.Refused('Input/output error'), self.disks[0], False),
            (program.Refused('No space left on device'), self.disks[1], True),
        ):

            def run(
                *command: str, error: Exception = error, disk: Path = disk, late: bool = late
            ) -> str:
                fails = (
                    command[0].endswith('/qemu-img')
                    and command[-1] == str(disk)
                    and '-a' in command
                )
                said = str(real(*command)) if late or not fails else ''
                if fails:
                    raise error
                return said

            self.fill(2)
            with mock.patch.object(program, 'run', run):
                (said,) = self.call('-a', 's')
            for text in (str(error), str(disk), 'give that virsh snapshot-revert again'):
                self.assertIn(text, said)
            for image in self.images:
                (mark,) = vm_state.image_names(image)
                self.assertTrue(mark.startswith('.loading-'), mark)
            self.assertIn('a revert ended halfway', self.call('-d', 's')[0])
            self.assertEqual([], self.call('-a', 's'))
            self.assert_holds(1)
            self.assert_names('s')

    def test_a_disk_in_the_middle_fails(self) -> None:
        """libvirt goes on with the next one: nothing is finished without it."""
        self.disks.append(self.take())
        self.define(self.disks, self.images)
        vm_state.run('qemu-img', 'snapshot', '-c', 's', self.disks[-1])
        self.define(self.disks, self.images, snapshot='s')
        real = program.run

        def run(*command: str) -> str:
            if command[-1] == str(self.disks[1]) and '-a' in command:
                raise program.Refused('Input/output error')
            return str(real(*command))

        with mock.patch.object(program, 'run', run):
            self.assertEqual(1, len(self.call('-a', 's')))
        self.assertIn('a revert ended halfway', self.call('-c', 'new')[0])
        self.assertEqual([], self.call('-a', 's'))
        for disk, image in zip(self.disks, self.images, strict=False):
            self.assertTrue(vm_state.disk_holds(disk, 1), disk)
            vm_state.run('pcow-io', '-c', 'read -q -P 1 0 64k', image)

    def test_images_that_cannot_be_marked(self) -> None:
        """No disk was touched: all is as it was."""
        self.take()
        real = program.run

        def run(*command: str) -> str:
            if '--rename' in command and command[-1] == str(self.images[1]):
                raise subprocess.TimeoutExpired(command, 600)
            return str(real(*command))

        with mock.patch.object(program, 'run', run):
            self.assertRaises(
                subprocess.TimeoutExpired,
                program.serve,
                ['snapshot', '-a', 's', str(self.disks[0])],
            )
        self.assert_holds(2)
        self.assert_names('s')

    def test_a_disk_without_it(self) -> None:
        """It was there when the snapshot was taken: the others and the images are not taken back
        without it.
        """
        self.take()
        for lost in self.disks:
            vm_state.run('qemu-img', 'snapshot', '-d', 's', lost)
            for said in self.call('-a', 's'):
                self.assertIn(f"{lost} has no snapshot 's', so nothing was reverted", said)
            self.assert_holds(2)
            self.assertEqual(['s'], vm_state.image_names(self.images[0]))
            vm_state.run('qemu-img', 'snapshot', '-c', 's', lost)
        vm_state.run('qemu-img', 'snapshot', '-d', 's', self.disks[0])
        self.assertEqual(1, len(self.call('-d', 's')))
        self.assert_names()

    def test_a_disk_that_came_since(self) -> None:
        """libvirt goes through the disks that the domain had then."""
        more = self.take()
        for disks in ([*self.disks, more], [more, *self.disks]):
            self.fill(2)
            self.define(disks, self.images)
            self.assertEqual([], self.call('-a', 's'))
            self.assert_holds(1)
            self.assert_names('s')
        self.assertEqual([], self.call('-d', 's'))
        self.assert_names()

    def test_a_disk_that_came_since_and_what_libvirt_kept_is_gone(self) -> None:
        """By hand only: whether the disk came later or lost its part cannot be told."""
        more = self.take()
        self.define([more, *self.disks], self.images)
        (self.directory / 'snapshots' / 'web1' / 's.xml').unlink()
        for said in self.call('-a', 's'):
            self.assertIn(f"{more} has no snapshot 's', so nothing was reverted", said)
        self.assert_holds(2)
        self.assertEqual([], self.call('-d', 's'))
        self.assert_names()

    def test_disks_and_images_that_went_since(self) -> None:
        self.take()
        for disks, memories in (
            (self.disks[:1], self.images),
            (self.disks[1:], self.images[:1]),
            (self.disks, []),
        ):
            self.fill(2)
            self.define(disks, memories)
            self.assertEqual([], self.call('-a', 's'))
            self.assert_holds(1)
            self.assert_names('s')
        self.images.pop().unlink()
        self.assertEqual([], self.call('-d', 's'))
        self.assertEqual([], vm_state.image_names(self.images[0]))
        self.assertEqual([[], []], [vm_state.disk_names(disk) for disk in self.disks])

    def test_a_disk_that_another_domain_uses_now(self) -> None:
        self.take()
        with qemu.Qemu(self.directory, *vm_state.carrier_arguments(self.disks[1])) as other:
            for said in self.call('-a', 's'):
                self.assertIn(str(self.disks[1]), said)
                self.assertIn('lock', said)
            self.assertEqual(['s'], vm_state.image_names(self.images[0]))
            self.assertTrue(vm_state.disk_holds(self.disks[0], 2))
            other.qmp('quit')
            other.process.wait()
        self.assertEqual([], self.call('-a', 's'))
        self.assert_holds(1)

    def test_a_snapshot_of_two_domains(self) -> None:
        """libvirt does not say for which one it runs qemu-img."""
        self.take()
        self.define(self.disks, self.images[:1], name='web2')
        for said in (*self.call('-c', 't'), *self.call('-a', 't')):
            self.assertIn('of web1 and of web2', said)
        # one that only the first one has
        self.assertEqual([], self.call('-a', 's'))
        self.define(self.disks, self.images[:1], name='web2', snapshot='s')
        for said in self.call('-d', 's'):
            self.assertIn('of web1 and of web2', said)
        self.assert_holds(1)
        self.assert_names('s')

    def test_qemu_finishes_a_revert(self) -> None:
        """One disk, one image; the image was not reverted when everything ended."""
        disk, image = self.disks[0], self.images[0]
        self.define([disk], [image])
        self.disks, self.images = [disk], [image]
        self.fill(1)
        self.call('-c', 's')
        self.fill(2)
        real = program.run

        def run(*command: str) -> str:
            if '-a' in command and command[0].endswith('pcow-img'):
                raise SystemExit(9)
            return str(real(*command))

        with mock.patch.object(program, 'run', run):
            self.assertRaises(SystemExit, self.call, '-a', 's')
        self.assertTrue(vm_state.disk_holds(disk, 1))
        with vm_state.Vm(
            self.directory, *test_qemu_backend.backend(image), *vm_state.carrier_arguments(disk)
        ) as vm:
            self.assertEqual((['s'], ['s']), vm.trees())
            vm.quit()
        self.assert_holds(1)

    def test_real_program_is_there(self) -> None:
        self.assertEqual(
            os.path.realpath(shutil.which('qemu-img') or ''),
            os.path.realpath(program.real_qemu_img()),
        )
