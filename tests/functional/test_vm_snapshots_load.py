# SPDX-License-Identifier: Apache-2.0
"""loadvm with pcow images: the disks go where the images go, and a load that failed halfway is not
forgotten.
"""

from collections.abc import Iterator
import contextlib
import subprocess
import time

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend
from tests.functional import vm_snapshot_case
from tests.functional import vm_state


class NameTest(vm_snapshot_case.VmSnapshotTestCase):
    def test_name_that_is_the_id_of_another(self) -> None:
        """qcow2 gives the first snapshot the ID 1."""
        with self.start() as vm:
            for value, name in ((1, 'first'), (2, '1'), (3, 'last')):
                self.write(vm, name.encode())
                vm.write_disk(value)
                self.assertEqual('', vm.save(name))
            for by_hmp in (False, True):
                for value, name in ((2, '1'), (1, 'first'), (3, 'last')):
                    self.assertEqual('', vm.hmp(f'loadvm {name}') if by_hmp else vm.load(name))
                    self.assert_reads(vm, name.encode())
                    self.assertTrue(vm_state.disk_holds(self.carrier, value), name)
            self.assertEqual('', vm.delete('1'))
            self.assertEqual((['first', 'last'], ['first', 'last']), vm.trees())
            vm.quit()
        self.assert_files_clean()

    def test_names_that_qemu_chooses(self) -> None:
        """They tell the second; the next one in it is refused, and the one before stays."""
        with self.start() as vm:
            refused = ''
            saved = 0
            end = time.monotonic() + images.TIMEOUT
            while not refused and time.monotonic() < end:
                refused = vm.hmp('savevm')
                saved += not refused
                self.assertEqual(saved, len(set(vm.names())))
            self.assertRegex(refused, "has a snapshot 'vm-[0-9]+' already")
            names, disks = vm.trees()
            self.assertEqual(names, disks)
            self.assertEqual(saved, len(names))
            for name in names:
                self.assertEqual('', vm.load(name))
            vm.quit()
        self.assert_files_clean()


class FailedLoadTest(vm_snapshot_case.VmSnapshotTestCase):
    """Until the snapshot is loaded again, or the VM runs, disks and image count as of two times."""

    MOST = 40  # writes of a load, of which one fails

    def setUp(self) -> None:
        super().setUp()
        with self.start() as vm:
            self.assertEqual('', vm.save('other'))
            vm.quit()

    @contextlib.contextmanager
    def failed_halfway(self) -> Iterator[vm_state.Vm]:
        for number in range(1, self.MOST):
            self.save_and_go_on()
            with self.start_faulty(number) as vm:
                if vm.load('s') and self.marks(vm):
                    yield vm
                    vm.quit()
                    return
        raise AssertionError('no write that fails stops a load halfway')

    def move_to_disk(self) -> None:
        """The image to ext4, which refuses stores to the pages of an immutable file; tmpfs does
        not.
        """
        disk, place = self.directory / 'disk', self.directory / 'pool'
        subprocess.run(['mkfs.ext4', '-q', '-E', 'lazy_itable_init=0', disk, '256M'], check=True)
        place.mkdir()
        subprocess.run(['mount', '-o', 'loop', disk, place], check=True)
        self.addCleanup(subprocess.run, ['umount', place], check=True)
        subprocess.run(['cp', '--sparse=always', self.image, place], check=True)
        self.image = place / self.image.name
        self.options = '-global', 'nvdimm.pcow-volatile=on'

    def marks(self, vm: vm_state.Vm) -> list[str]:
        return [name for name in vm.names() if name.startswith('.loading-')]

    def test_other_commands_leave_it(self) -> None:
        with self.failed_halfway() as vm:
            marks = self.marks(vm)
            for command in ('savevm new', 'savevm', 'delvm s', 'delvm other', 'loadvm other'):
                message = vm.hmp(command)
                for words in ("a load of the snapshot 's' failed halfway", str(self.image), 'cont'):
                    self.assertIn(words, message)
            self.assertIn('failed halfway', vm.save('new'))
            for name in ('create', 'revert'):  # of the image alone: the next QEMU would undo it
                self.assertIn(
                    'failed halfway', vm.qmp_error(f'pcow-snapshot-{name}', id='mem0', name='other')
                )
            self.assertIn('failed halfway', vm.delete('nowhere'))
            other = self.directory / 'other.pcow'
            vm_state.run('pcow-img', 'create', '-q', other, vm_snapshot_case.SIZE)
            vm.qmp(
                'object-add',
                **{
                    'qom-type': 'memory-backend-file',
                    'id': 'more',
                    'mem-path': str(other),
                    'size': vm_snapshot_case.SIZE,
                    'share': True,
                },
            )
            vm.qmp('object-del', id='more')
            self.assertEqual(marks, self.marks(vm))
            self.assertEqual(['other', 's'], sorted(vm.disk_names()))
        with self.start() as vm:
            self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
            self.assertTrue(vm_state.disk_holds(self.carrier, 1))
            self.assertEqual((['other', 's'], ['other', 's']), vm.trees())
            vm.quit()

    def test_again(self) -> None:
        with self.failed_halfway() as vm:
            self.assertEqual('', vm.load('s'))
            self.assert_reads(vm, b'then')
            self.assertTrue(vm_state.disk_holds(self.carrier, 1))
            self.assertEqual((['other', 's'], ['other', 's']), vm.trees())
            vm.qmp('cont')
            self.assertEqual('', vm.save('new'))
            self.assertEqual('', vm.delete('s'))
            self.assertEqual((['new', 'other'], ['new', 'other']), vm.trees())
        vm_state.run('pcow-img', 'check', self.image)

    def test_goes_on_as_it_is(self) -> None:
        with self.failed_halfway() as vm:
            vm.qmp('cont')
            self.assertEqual((['other', 's'], ['other', 's']), vm.trees())
            self.assertEqual('', vm.save('new'))

    def test_a_mark_that_cannot_be_taken_away(self) -> None:
        """The VM, and with it the guest's RAM, stays for another try."""
        self.move_to_disk()
        self.addCleanup(
            subprocess.run, ['chattr', '-i', self.image], check=False, stderr=subprocess.DEVNULL
        )
        with self.failed_halfway() as vm:
            marks = self.marks(vm)
            vm.write(vm_state.RAM, b'kept')
            subprocess.run(['chattr', '+i', self.image], check=True)
            # Only a store to a page that is written back asks the file system whether it may.
            subprocess.run(['sync', self.image], check=True)
            self.assertIn(str(self.image), vm.qmp_error('cont'))
            self.assertNotEqual('running', vm.status())
            self.assertEqual(marks, self.marks(vm))
            subprocess.run(['chattr', '-i', self.image], check=True)
            vm.qmp('cont')
            self.assertEqual('running', vm.status())
            self.assertEqual(b'kept', vm.read(vm_state.RAM, 4))
            self.assertEqual((['other', 's'], ['other', 's']), vm.trees())


class DiskTest(vm_snapshot_case.VmSnapshotTestCase):
    """What a disk cannot do is refused before image or disks are touched."""

    def refused_load(self, vm: vm_state.Vm, *words: str) -> None:
        message = vm.hmp('loadvm s')
        for word in ('nothing was changed', *words):
            self.assertIn(word, message)
        self.assertEqual((['s'], ['s']), vm.trees())
        vm.qmp('cont')

    def test_part_of_another_time(self) -> None:
        second = self.directory / 'second.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', second, '1M')
        more = (
            '-blockdev',
            f'driver=qcow2,node-name=disk1,file.driver=file,file.filename={second}',
            '-device',
            'virtio-blk-pci,drive=disk1',
        )
        with self.start(*more) as vm:
            self.write(vm, b'then')
            vm.write_disk(1)
            self.assertEqual('', vm.hmp('savevm s'))
            self.write(vm, b'now.')
            vm.write_disk(2)
            self.assertEqual('', vm.hmp('loadvm s'))
            self.assert_reads(vm, b'then')
            vm.write_disk(2)
            self.write(vm, b'now.')
            vm.quit()
        for words in (('-d', 's'), ('-c', 's')):
            vm_state.run('qemu-img', 'snapshot', *words, second)
        vm_state.run('qemu-io', '-f', 'qcow2', '-c', 'write -q -P 7 0 64k', second)
        with self.start(*more) as vm:
            self.refused_load(vm, "disk 'disk1'", 'another time')
            self.assert_reads_image(vm, b'now.')
            for path, value in ((self.carrier, 2), (second, 7)):
                self.assertTrue(vm_state.disk_holds(path, value))
            # without that disk, as snapshot-load can be told
            self.assertEqual('', vm.load('s'))
            self.assert_reads_image(vm, b'then')
            self.assertTrue(vm_state.disk_holds(second, 7))
            vm.quit()

    def assert_reads_image(self, vm: vm_state.Vm, text: bytes) -> None:
        self.assertEqual(text, vm.read(vm.address('nv0'), len(text)))

    def test_dirty_bitmaps(self) -> None:
        self.save_and_go_on()
        with self.start() as vm:
            vm.qmp('block-dirty-bitmap-add', node='disk0', name='changes')
            self.refused_load(vm, "disk 'disk0'", 'dirty bitmaps')
            self.assert_reads_image(vm, b'now.')
            vm.qmp('block-dirty-bitmap-remove', node='disk0', name='changes')
            self.assertEqual('', vm.load('s'))
            self.assert_reads_image(vm, b'then')
            vm.quit()

    def test_a_revert_that_cannot_be_finished(self) -> None:
        """Whoever starts the VM is told of which image, and the ways out."""
        self.save_and_go_on()
        with self.start() as vm:
            (found,) = vm.snapshots()
            mark = f'.loading-{found["date-sec"]}.{found["date-nsec"]:09}-1'
            vm.quit()
        vm_state.run('pcow-img', 'snapshot', '--rename', 's', mark, self.image)
        vm_state.run('qemu-img', 'bitmap', '--add', '-f', 'qcow2', self.carrier, 'changes')
        message = qemu.refused(
            *test_qemu_backend.backend(self.image), *vm_state.carrier_arguments(self.carrier)
        )
        for words in (
            str(self.image),
            mark,
            'cannot be finished',
            'pcow-img snapshot --rename',
            "disk 'disk0'",
            'dirty bitmaps',
        ):
            self.assertIn(words, message)
        vm_state.run('qemu-img', 'bitmap', '--remove', '-f', 'qcow2', self.carrier, 'changes')
        with self.start() as vm:
            self.assertEqual((['s'], ['s']), vm.trees())
            self.assert_reads_image(vm, b'then')
            self.assertTrue(vm_state.disk_holds(self.carrier, 1))
            vm.quit()
