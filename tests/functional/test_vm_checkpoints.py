# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a VM whose RAM is an image, in the real QEMU, without a guest and without a disk.

With libvirt and a guest: test_virsh_checkpoints.py.
"""

import json
import time

from tests.functional import checkpoint_case
from tests.functional import images
from tests.functional import test_qemu_backend
from tests.functional import vm_state

_MAGIC = b'pcow-vm\0'


class TreeTest(checkpoint_case.CheckpointTestCase):
    def test_memory_and_ram_go_together(self) -> None:
        with self.start() as vm:
            for text in (b'one', b'two'):
                self.write(vm, text)
                self.assertEqual('', vm.save(text.decode()))
                self.assertEqual('running', vm.status())
            self.write(vm, b'lost')
            self.assertEqual('', vm.load('one'))
            self.assertEqual('running', vm.status())
            self.assert_reads(vm, b'one')
            self.write(vm, b'branch')
            self.assertEqual('', vm.save('branch'))
            found = vm.checkpoints()
            self.assertEqual(
                {'one': None, 'two': 'one', 'branch': 'one'},
                {name: entry.get('parent') for name, entry in found.items()},
            )
            self.assertEqual(['branch'], [name for name in found if found[name]['current']])
            for text in (b'two', b'branch', b'one', b'two'):
                self.assertEqual('', vm.load(text.decode()))
                self.assert_reads(vm, text)
            self.assertEqual('', vm.delete('one'))
            self.assertEqual({'mem0': ['branch', 'two'], 'ram0': ['branch', 'two']}, vm.parts())
            self.assertEqual('', vm.load('branch'))
            self.assert_reads(vm, b'branch')
            self.assertEqual('', vm.delete('branch') + vm.delete('two'))
            self.assertEqual({'mem0': [], 'ram0': []}, vm.parts())
            vm.quit()
        self.assert_files_clean()

    def test_after_the_end_of_qemu(self) -> None:
        """An orderly one, and kill -9: the checkpoint is what a VM goes on from that has not begun
        to run.
        """
        with self.start() as vm:
            self.write(vm, b'saved')
            self.assertEqual('', vm.save('s'))
            self.write(vm, b'after')
            vm.quit()
        for _ in range(2):
            with self.start('-S') as vm:
                self.assertEqual('', vm.load('s'))
                self.assertEqual('prelaunch', vm.status())
                self.assert_reads(vm, b'saved')
                vm.qmp('cont')
                self.write(vm, b'again')
                vm.process.kill()
        with self.start() as vm:  # what it had begun to use is given back
            vm.quit()
        self.assert_files_clean()

    def test_sizes(self) -> None:
        with self.start() as vm:
            vm.write(vm_state.RAM, b'\x5a' * 8 * images.MIB)
            vm.write(vm.address('nv0'), b'\xa5' * 4 * images.MIB)
            created = vm.qmp('pcow-checkpoint-create', name='full')
            self.assertGreater(created['pause'], 0)
            self.assertGreaterEqual(created['durable'], created['pause'])
            (found,) = vm.qmp('query-pcow-checkpoints')
            self.assertEqual(created['state-size'], found['state-size'])
            # the devices, and nothing of the memory
            self.assertLess(found['state-size'], images.MIB)
            self.assertGreaterEqual(found['data-size'], 12 * images.MIB)
            self.assertEqual(found['state-size'], self._state_bytes())
            freed = vm.qmp('pcow-checkpoint-delete', name='full')['freed']
            self.assertGreater(freed, 0)
            vm.quit()

    def _state_bytes(self) -> int:
        listed = vm_state.run('pcow-img', 'snapshot', '-l', '-U', '--output=json', self.ram)
        return int(json.loads(listed)[0]['vm-state-size'])

    def test_a_paused_vm_stays_paused(self) -> None:
        with self.start() as vm:
            vm.qmp('stop')
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            self.assertEqual('paused', vm.status())
            self.write(vm, b'two')
            self.assertEqual('', vm.load('one'))
            self.assertEqual('paused', vm.status())
            self.assert_reads(vm, b'one')
            vm.quit()


class FailureTest(checkpoint_case.CheckpointTestCase):
    """Halfway, and while something else happens."""

    def test_revert_that_fails_is_tried_again(self) -> None:
        """A device that the state is of has gone meanwhile."""
        with self.start(
            '-device', 'qemu-xhci,id=usb', '-device', 'usb-tablet,id=tablet,bus=usb.0,port=1'
        ) as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            self.write(vm, b'two')
            vm.qmp('device_del', id='tablet')
            vm.wait_event('DEVICE_DELETED')
            said = vm.load('one')
            self.assertIn('the VM is paused', said)
            self.assertEqual(['one'], list(vm.checkpoints()))
            self.assertIn('failed halfway', vm.save('x'))
            vm.qmp('device_add', driver='usb-tablet', id='tablet', bus='usb.0', port='1')
            self.assertEqual('', vm.load('one'))
            self.assert_reads(vm, b'one')
            vm.qmp('cont')
            self.assertEqual('running', vm.status())
            self.assertEqual({'mem0': ['one'], 'ram0': ['one']}, vm.parts())
            vm.quit()
        self.assert_files_clean()

    def test_fork_that_fails_is_tried_again(self) -> None:
        """The child lacks a device, and gets it; nobody takes a checkpoint of the half of it."""
        usb = ('-device', 'qemu-xhci,id=usb')
        tablet = {'driver': 'usb-tablet', 'id': 'tablet', 'bus': 'usb.0', 'port': '1'}
        with self.start(*usb) as vm:
            vm.qmp('device_add', **tablet)
            self.write(vm, b'warm')
            self.assertEqual('', vm.save('warm'))
            vm.quit()
        with self.fork('warm', 1, *usb) as vm:
            self.assertIn('the VM is paused', vm.qmp_error('pcow-checkpoint-revert'))
            self.assertIn('failed halfway', vm.save('half'))
            vm.qmp('device_add', **tablet)
            vm.qmp('pcow-checkpoint-revert')
            vm.qmp('cont')
            self.assert_reads(vm, b'warm')
            self.assertEqual('', vm.save('own'))
            vm.quit()

    def test_much_other_ram(self) -> None:
        """It keeps one from being taken, and none from being seen, left and deleted."""
        more = ('-object', 'memory-backend-ram,id=more,size=128M')
        with self.start(*more) as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            vm.qmp('device_add', driver='pc-dimm', id='dimm', memdev='more')
            self.assertIn('is no pcow image', vm.save('two'))
            self.assertEqual(['one'], list(vm.checkpoints()))
            self.assertEqual('', vm.delete('one'))
            vm.quit()

    def test_qemu_ends_meanwhile(self) -> None:
        """SIGTERM while the checkpoint is taken: there is none, or a whole one."""
        for delay in (0, 0.001, 0.003, 0.01):
            with self.start() as vm:
                self.write(vm, b'then')
                vm.begin_qmp('pcow-checkpoint-create', name=f's{delay}')
                time.sleep(delay)
                vm.process.terminate()
                self.assertEqual(0, vm.process.wait(60))
            with self.start('-S') as vm:
                for name in vm.checkpoints():
                    self.assertEqual('', vm.load(name))
                    self.assert_reads(vm, b'then')
                vm.quit()
        self.assert_files_clean()

    def test_capabilities_of_migrations(self) -> None:
        with self.start() as vm:
            for state in (True, False):
                vm.qmp(
                    'migrate-set-capabilities',
                    capabilities=[{'capability': 'multifd', 'state': state}],
                )
                said = vm.save('one')
                self.assertEqual(state, 'multifd' in said, said)
            vm.quit()


class RefusalTest(checkpoint_case.CheckpointTestCase):
    """In words, and nothing has changed."""

    def test_names(self) -> None:
        with self.start() as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            vm.qmp('pcow-snapshot-create', id='mem0', name='image')
            vm.qmp('pcow-snapshot-create', id='ram0', name='alone')
            before = vm.parts()
            for name, words in (
                ('one', "has a snapshot 'one' already"),
                ('image', "has a snapshot 'image' already"),
                ('n' * 128, 'at most 127 bytes'),
                ('.checkpoint-1.2-x', 'mark an unfinished one'),
                ('.loading-checkpoint-1', 'mark an unfinished one'),
            ):
                self.assertIn(words, vm.save(name))
            for name, words in (
                ('none', "no checkpoint 'none'"),
                ('alone', 'and no checkpoint of the VM'),
                ('.deleting-1', 'is a checkpoint that is unfinished'),
            ):
                for said in (vm.load(name), vm.delete(name)):
                    self.assertIn(words, said)
            self.assertEqual(before, vm.parts())
            self.assertEqual('running', vm.status())
            self.assert_reads(vm, b'one')
            vm.quit()

    def test_disk_that_would_stay_behind(self) -> None:
        disk = self.directory / 'disk.qcow2'
        vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', disk, '1M')
        with self.start(*vm_state.carrier_arguments(disk)) as vm:
            self.assertIn("disk 'disk0' can be written to", vm.save('one'))
            vm.quit()
        with self.start(*vm_state.carrier_arguments(disk, ',read-only=on')) as vm:
            self.assertEqual('', vm.save('one'))
            self.assertEqual('', vm.load('one'))
            vm.quit()

    def test_ram_is_no_image(self) -> None:
        with vm_state.Vm(self.directory, *test_qemu_backend.backend(self.image)) as vm:
            for command in ('create', 'revert', 'delete'):
                self.assertIn(
                    'the RAM of the VM is no pcow image',
                    vm.qmp_error(f'pcow-checkpoint-{command}', name='one'),
                )
            vm.quit()

    def test_part_is_gone(self) -> None:
        with self.start() as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            self.write(vm, b'two')
            vm.qmp('pcow-snapshot-delete', id='mem0', name='one')
            self.assertIn('has lost its part', vm.load('one'))
            self.assert_reads(vm, b'two')
            self.assertEqual('running', vm.status())
            self.assertEqual('', vm.delete('one'))
            vm.quit()
        self.assert_files_clean()

    def test_part_has_another_name(self) -> None:
        """What it is found by is its date."""
        with self.start() as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            self.write(vm, b'two')
            vm.qmp('pcow-snapshot-rename', id='mem0', name='one', new_name='uno')
            self.assertEqual('', vm.load('one'))
            self.assert_reads(vm, b'one')
            self.assertEqual('', vm.delete('one'))
            self.assertEqual({'mem0': [], 'ram0': []}, vm.parts())
            vm.quit()

    def test_other_images(self) -> None:
        with self.start() as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            vm.quit()
        kept = self.image.rename(self.directory / 'kept.pcow')
        vm_state.run('pcow-img', 'create', '-q', self.image, checkpoint_case.SIZE)
        with self.start('-S') as vm:
            self.assertIn('another pcow image', vm.load('one'))
            vm.quit()
        kept.rename(self.image)
        with vm_state.Vm(self.directory, *self._ram()) as vm:
            self.assertIn(
                'the VM had 2 pcow image(s)', vm.qmp_error('pcow-checkpoint-revert', name='one')
            )
            vm.quit()
        more = self.directory / 'more.pcow'
        vm_state.run('pcow-img', 'create', '-q', more, checkpoint_case.SIZE)
        with self.start(
            '-object',
            f'memory-backend-file,id=mem1,mem-path={more},share=on',
            '-device',
            'nvdimm,memdev=mem1,id=nv1',
        ) as vm:
            self.assertIn('was not part of the VM', vm.load('one'))
            vm.quit()

    def _ram(self) -> tuple[str, ...]:
        return (
            '-object',
            f'memory-backend-file,id=ram0,mem-path={self.ram},share=on,'
            f'size={checkpoint_case.RAM_SIZE}',
            '-machine',
            'memory-backend=ram0',
        )

    def test_damaged_state(self) -> None:
        with self.start() as vm:
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            self.write(vm, b'two')
            vm.quit()
        content = self.ram.read_bytes()
        begin = content.index(_MAGIC)
        for offset in (0, 9, 12, 16, 40, 70, 200, 60000):
            with self.ram.open('r+b') as file:
                file.seek(begin + offset)
                file.write(bytes([content[begin + offset] ^ 0x40]))
            with self.start('-S') as vm:
                self.assertIn(
                    'is damaged, or not that of a checkpoint', vm.load('one'), f'{offset}'
                )
                self.assertEqual('prelaunch', vm.status())
                vm.quit()
            with self.ram.open('r+b') as file:
                file.seek(begin + offset)
                file.write(content[begin + offset : begin + offset + 1])
        with self.start('-S') as vm:
            self.assertEqual('', vm.load('one'))
            self.assert_reads(vm, b'one')
            vm.quit()


class ForkTest(checkpoint_case.CheckpointTestCase):
    """Another QEMU goes on from a checkpoint, on images that stand on it."""

    def test_children_of_a_running_vm(self) -> None:
        with self.start() as parent:
            self.write(parent, b'warm')
            parent.write(parent.address('nv0') + 32 * images.MIB, b'\x5a' * images.MIB)
            self.assertEqual('', parent.save('warm'))
            self.write(parent, b'gone')
            with self.fork('warm', 1) as one, self.fork('warm', 2) as two:
                for child in (one, two):
                    child.qmp('pcow-checkpoint-revert')
                    self.assertEqual('prelaunch', child.status())
                    self.assert_reads(child, b'warm')
                    child.qmp('cont')
                self.write(one, b'one.')
                self.write(two, b'two.')
                self.assert_reads(parent, b'gone')
                self.assert_reads(one, b'one.')
                # it is pinned
                self.assertIn('stand', parent.delete('warm'))
                self.assertEqual('', parent.load('warm'))
                self.assert_reads(parent, b'warm')
                self.assert_reads(two, b'two.')
                # children have checkpoints of their own
                self.assertEqual('', one.save('own'))
                self.write(one, b'more')
                self.assertEqual('', one.load('own'))
                self.assert_reads(one, b'one.')
                for vm in (one, two, parent):
                    vm.quit()
        for number in (1, 2):
            for image in (self.image, self.ram):
                vm_state.run('pcow-img', 'check', self.of(image, number))
        self.assert_files_clean()

    def test_refused(self) -> None:
        with self.start() as parent:
            self.write(parent, b'warm')
            self.assertEqual('', parent.save('warm'))
            parent.qmp('pcow-snapshot-create', id='mem0', name='other')
            self.assertIn('the VM has run', parent.qmp_error('pcow-checkpoint-revert'))
            parent.quit()
        with self.start('-S') as vm:
            self.assertIn('does not stand on a checkpoint', vm.qmp_error('pcow-checkpoint-revert'))
            vm.quit()
        with self.fork('warm', 1) as child:
            child.qmp('pcow-checkpoint-revert')
            child.qmp('cont')
            self.assertIn('the VM has run', child.qmp_error('pcow-checkpoint-revert'))
            self.write(child, b'used')
            child.quit()
        with self.child(1) as child:
            self.assertIn('is not empty', child.qmp_error('pcow-checkpoint-revert'))
            child.quit()
        # of another moment, and of no part at all
        image = self.of(self.image, 1)
        for words in ('another snapshot', 'does not stand on a snapshot'):
            image.unlink()
            if words == 'another snapshot':
                self.make(image, self.image, 'other')
            else:
                vm_state.run('pcow-img', 'create', '-q', image, checkpoint_case.SIZE)
            with self.child(1) as child:
                self.assertIn(words, child.qmp_error('pcow-checkpoint-revert'))
                self.assertEqual('prelaunch', child.status())
                child.quit()
