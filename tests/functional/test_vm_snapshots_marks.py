# SPDX-License-Identifier: Apache-2.0
"""The names that tell of a snapshot being unfinished: who counts which disks, and whose disks
decide.
"""

from tests.functional import test_qemu_backend
from tests.functional import vm_snapshot_case
from tests.functional import vm_state


class MarkTestCase(vm_snapshot_case.VmSnapshotTestCase):
    KIND: str

    def setUp(self) -> None:
        super().setUp()
        self.save_and_go_on()
        with self.start() as vm:
            (found,) = vm.snapshots()
            vm.quit()
        self.mark = f'.{self.KIND}-{found["date-sec"]}.{found["date-nsec"]:09}-1'
        vm_state.run('pcow-img', 'snapshot', '--rename', 's', self.mark, self.image)
        self.plugged = {
            'qom-type': 'memory-backend-file',
            'id': 'mem0',
            'mem-path': str(self.image),
            'size': vm_snapshot_case.SIZE,
            'share': True,
        }

    def plug(self, vm: vm_state.Vm) -> None:
        vm.qmp('object-add', **self.plugged)

    def reset_stopped(self, vm: vm_state.Vm) -> None:
        """It looks as if it had never run."""
        vm.qmp('stop')
        vm.qmp('system_reset')
        self.assertEqual('prelaunch', vm.wait_status('prelaunch'))


class LoadingMarkTest(MarkTestCase):
    """A VM was killed while it was reverted, and its image is plugged into one that may have its
    disks.
    """

    KIND = 'loading'

    def assert_refused(self, vm: vm_state.Vm) -> None:
        message = vm.qmp_error('object-add', **self.plugged)
        for words in ('was being reverted', self.mark, str(self.image)):
            self.assertIn(words, message)

    def test_after_a_reset(self) -> None:
        """The disks of a VM that has run stay as they are."""
        with vm_state.Vm(self.directory, *vm_state.carrier_arguments(self.carrier)) as vm:
            vm.write_disk(3)
            self.reset_stopped(vm)
            self.assert_refused(vm)
            self.assertTrue(vm_state.disk_holds(self.carrier, 3))
            vm.qmp('cont')
            self.assertEqual('running', vm.status())
            vm.quit()
        self.assertEqual([self.mark], vm_state.image_names(self.image))

    def test_qemu_stays(self) -> None:
        """Without the disks the revert cannot be finished; that is an error of the command alone,
        also before the VM runs.
        """
        with vm_state.Vm(self.directory, '-S') as vm:
            self.assert_refused(vm)
            vm.qmp('cont')
            self.reset_stopped(vm)
            self.assert_refused(vm)
            vm.quit()


class ForeignMarkTest(MarkTestCase):
    """A VM was killed while it took or deleted a snapshot, and its image is plugged into another
    one.
    """

    KIND = 'incomplete'
    MOST = 100  # snapshots until the disk has to allocate

    def test_after_a_reset(self) -> None:
        carrier = self.directory / 'another.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', carrier, '1M')
        with vm_state.Vm(self.directory, *vm_state.carrier_arguments(carrier)) as vm:
            self.reset_stopped(vm)
            self.plug(vm)
            self.assertEqual([self.mark], vm.names())
            vm.quit()

    def test_the_disks_of_another_vm_do_not_decide(self) -> None:
        carrier = self.directory / 'another.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', carrier, '1M')
        with vm_state.Vm(self.directory, *vm_state.carrier_arguments(carrier)) as vm:
            self.plug(vm)
            self.assertEqual([self.mark], vm.names())
            self.assertEqual('', vm.save('another'))
            self.assertEqual('', vm.delete('another'))
            self.assertEqual([self.mark], vm.names())
            vm.quit()
            assert vm.process.stderr is not None
            said = vm.process.stderr.read()
        for words in (self.mark, str(self.image), 'another VM', 'pcow-img snapshot -d'):
            self.assertIn(words, said)
        with self.start() as vm:
            self.assertEqual((['s'], ['s']), vm.trees())
            self.assertEqual('', vm.load('s'))
            self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
            vm.quit()
        self.assert_files_clean()

    def test_own_marks_are_finished(self) -> None:
        """What this process leaves unfinished it takes back itself, in an image that was plugged as
        well.
        """
        with self.start_faulty_without_image() as vm:
            self.plug(vm)
            for number in range(self.MOST):
                if vm.save(f'n{number}'):
                    break
            self.assertEqual('', vm.save('last'))
            self.assertEqual(
                {self.mark, 'last', *(f'n{n}' for n in range(number))}, set(vm.names())
            )
            vm.quit()

    def start_faulty_without_image(self) -> vm_state.Vm:
        path = self.directory / 'rules'
        path.write_text('[inject-error]\nevent = "cluster_alloc"\nerrno = "28"\nonce = "on"\n')
        carrier = self.directory / 'another.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', carrier, '1M')
        return vm_state.Vm(
            self.directory,
            '-blockdev',
            f'driver=qcow2,node-name=disk0,file.driver=blkdebug,file.config={path},'
            f'file.image.driver=file,file.image.filename={carrier}',
            '-device',
            'virtio-blk-pci,drive=disk0,id=carrier',
        )


class CountTest(vm_snapshot_case.VmSnapshotTestCase):
    """A disk below a filter is one disk, whoever else uses it."""

    MOST = 40  # writes of a load, of which one fails

    def start_filtered(self, number: int) -> vm_state.Vm:
        faulty = self.faulty_disk(number)
        return vm_state.Vm(
            self.directory,
            *test_qemu_backend.backend(self.image),
            '-blockdev',
            faulty,
            '-object',
            'throttle-group,id=limits',
            '-blockdev',
            'driver=throttle,node-name=filter,throttle-group=limits,file=disk0',
            '-device',
            'virtio-blk-pci,drive=filter,id=carrier,share-rw=on',
        )

    def export(self, vm: vm_state.Vm) -> None:
        """A backup reads it, for one."""
        vm.qmp(
            'nbd-server-start',
            addr={'type': 'unix', 'data': {'path': str(self.directory / 'nbd.sock')}},
        )
        vm.qmp('block-export-add', **{'id': 'export', 'type': 'nbd', 'node-name': 'disk0'})

    def test_load_that_fails_halfway(self) -> None:
        for number in range(1, self.MOST):
            self.save_and_go_on()
            with self.start_filtered(number) as vm:
                self.export(vm)
                if not vm.load('s') or not (
                    marks := [name for name in vm.names() if name.startswith('.loading-')]
                ):
                    continue
                vm.process.kill()
                vm.process.wait()
            self.assertRegex(marks[0], r'-1$')
            with self.start() as vm:
                self.assertEqual((['s'], ['s']), vm.trees())
                self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
                self.assertTrue(vm_state.disk_holds(self.carrier, 1))
                vm.quit()
            return
        raise AssertionError('no write that fails stops a load halfway')
