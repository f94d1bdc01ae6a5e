# SPDX-License-Identifier: Apache-2.0
"""savevm, loadvm and delvm with pcow images in the real QEMU, without a guest: all of it or
nothing.

With libvirt and a guest: test_virsh_snapshots.py.
"""

import json
import subprocess

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend
from tests.functional import vm_snapshot_case
from tests.functional import vm_state

SIZE = vm_snapshot_case.SIZE


class TreeTest(vm_snapshot_case.VmSnapshotTestCase):
    def test_memory_and_ram_go_together(self) -> None:
        with self.start() as vm:
            vm.write(vm.address('nv0') + 16 * images.MIB, b'\xa5' * 8 * images.MIB)
            for text in (b'one', b'two'):
                self.write(vm, text)
                self.assertEqual('', vm.save(text.decode()))
                self.assertEqual('running', vm.status())
            self.write(vm, b'lost')
            self.assertEqual('', vm.load('one'))
            self.assert_reads(vm, b'one')
            self.write(vm, b'branch')
            self.assertEqual('', vm.hmp('savevm branch'))
            tree = {snapshot['name']: snapshot.get('parent-id') for snapshot in vm.snapshots()}
            ids = {snapshot['name']: snapshot['id'] for snapshot in vm.snapshots()}
            self.assertEqual({'one': None, 'two': ids['one'], 'branch': ids['one']}, tree)
            for text in (b'two', b'branch', b'one', b'two'):
                self.assertEqual('', vm.hmp(f'loadvm {text.decode()}'))
                self.assert_reads(vm, text)
            self.assertEqual('', vm.delete('one'))
            self.assertEqual((['branch', 'two'], ['branch', 'two']), vm.trees())
            self.assertEqual('', vm.load('branch'))
            self.assert_reads(vm, b'branch')
            self.assertEqual('', vm.hmp('delvm branch') + vm.hmp('delvm two'))
            self.assertEqual(([], []), vm.trees())
            vm.quit()
        self.assert_files_clean()

    def test_the_memory_is_not_in_the_vm_state(self) -> None:
        with self.start() as vm:
            for offset in range(0, SIZE, images.MIB):
                vm.write(vm.address('nv0') + offset, bytes(range(1, 129)) * (images.MIB // 128))
            self.assertEqual('', vm.save('full'))
            (node,) = [
                node for node in vm.qmp('query-named-block-nodes') if node['node-name'] == 'disk0'
            ]
            self.assertLess(node['image']['snapshots'][0]['vm-state-size'], 4 * images.MIB)
            ours, theirs = vm.snapshots()[0], node['image']['snapshots'][0]
            self.assertEqual(
                (theirs['date-sec'], theirs['date-nsec']), (ours['date-sec'], ours['date-nsec'])
            )
            vm.quit()

    def test_at_the_start(self) -> None:
        with self.start() as vm:
            self.write(vm, b'saved')
            self.assertEqual('', vm.save('s'))
            self.write(vm, b'after')
        with self.start('-loadvm', 's') as vm:
            self.assert_reads(vm, b'saved')
            vm.quit()

    def test_ram_of_the_guest_on_an_image(self) -> None:
        """RAM blocks are recognised by their backend: RAM itself may lie on an image, and does not
        travel either.
        """
        ram = self.directory / 'ram.pcow'
        vm_state.run('pcow-img', 'create', '-q', ram, '128M')
        more = (
            '-object',
            f'memory-backend-file,id=ram0,mem-path={ram},share=on,size=128M',
            '-machine',
            'memory-backend=ram0',
        )
        with self.start(*more) as vm:
            vm.write(vm_state.RAM, b'\x5a' * 8 * images.MIB)
            self.write(vm, b'one')
            self.assertEqual('', vm.save('one'))
            (node,) = [
                node for node in vm.qmp('query-named-block-nodes') if node['node-name'] == 'disk0'
            ]
            self.assertLess(node['image']['snapshots'][0]['vm-state-size'], images.MIB)
            self.write(vm, b'two')
            vm.write(vm_state.RAM + 4 * images.MIB, bytes(4096))
            self.assertEqual('', vm.load('one'))
            self.assert_reads(vm, b'one')
            self.assertEqual(b'\x5a' * 4096, vm.read(vm_state.RAM + 4 * images.MIB, 4096))
            self.assertEqual(
                [['one'], ['one']],
                [[s['name'] for s in info['snapshots']] for info in vm.qmp('query-pcow')],
            )
            self.assertEqual('', vm.delete('one'))
            vm.quit()
        with self.start(*more) as vm:
            self.assertEqual(b'one', vm.read(vm_state.RAM, 3))
            vm.quit()
        for path in (ram, self.image):
            vm_state.run('pcow-img', 'check', path)


class RefusalTest(vm_snapshot_case.VmSnapshotTestCase):
    def test_name_on_one_side_only(self) -> None:
        vm_state.run('qemu-img', 'snapshot', '-c', 'disk', self.carrier)
        with self.start() as vm:
            vm.qmp('pcow-snapshot-create', id='mem0', name='image')
            before = vm.trees()
            for name, what in (
                ('image', f"pcow image '{self.image}' has a snapshot 'image' already"),
                ('disk', "disk 'disk0' has a snapshot 'disk' already"),
            ):
                for message in (vm.save(name), vm.hmp(f'savevm {name}')):
                    self.assertIn(what, message)
                    self.assertIn('delete that one first', message)
            self.assertEqual(before, vm.trees())
            self.assertEqual('running', vm.status())
            self.assertEqual('', vm.save('new'))
            for message in (vm.save('new'), vm.hmp('savevm new')):
                self.assertIn("has a snapshot 'new' already", message)
            self.assertIn('at most 127 bytes', vm.save('n' * 128))
            self.assertIn('mark', vm.save('.incomplete-1.2-1'))
            for command, names in (
                ('create', {'name': '.loading-1.2-1'}),
                ('rename', {'name': 'new', 'new-name': '.loading-1'}),
            ):
                self.assertIn(
                    'choose another', vm.qmp_error(f'pcow-snapshot-{command}', id='mem0', **names)
                )
            vm.quit()
        self.assert_files_clean()

    def load_is_refused(self, vm: vm_state.Vm, name: str, *words: str) -> None:
        for message in (vm.load(name), vm.hmp(f'loadvm {name}')):
            for word in words:
                self.assertIn(word, message)
        self.assert_reads(vm, b'now')
        vm.qmp('cont')
        self.assertEqual('running', vm.status())

    def test_deleted_behind_our_back(self) -> None:
        with self.start() as vm:
            self.write(vm, b'then')
            self.assertEqual('', vm.save('s'))
            vm.qmp('pcow-snapshot-delete', id='mem0', name='s')
            self.write(vm, b'now')
            self.load_is_refused(vm, 's', str(self.image), "has no snapshot 's'")
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            self.load_is_refused(
                vm, 's', str(self.image), 'do not belong together', 'nothing was changed'
            )
            self.assertEqual((['s'], ['s']), vm.trees())
            self.assertEqual('', vm.delete('s'))
            self.assertEqual(([], []), vm.trees())
            vm.quit()

    def test_a_revert_that_was_interrupted(self) -> None:
        """With its disks it is finished; without them nobody runs what may be of two times, nor
        takes it into a VM that runs.
        """
        self.save_and_go_on()
        (found,) = json.loads(vm_state.run('qemu-img', 'info', '--output=json', self.carrier))[
            'snapshots'
        ]
        mark = f'.loading-{found["date-sec"]}.{found["date-nsec"]:09}-1'
        vm_state.run('pcow-img', 'snapshot', '--rename', 's', mark, self.image)
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
                *test_qemu_backend.backend(self.image),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=images.TIMEOUT,
            check=False,
        )
        self.assertEqual(1, done.returncode)
        self.assertIn('the VM was being reverted to a snapshot when QEMU ended', done.stderr)
        self.assertIn('1 of 1 disk(s)', done.stderr)
        other = self.directory / 'other.pcow'
        vm_state.run('pcow-img', 'create', '-q', other, SIZE)
        with self.start(image=other) as vm:
            message = vm.qmp_error(
                'object-add',
                **{
                    'qom-type': 'memory-backend-file',
                    'id': 'more',
                    'mem-path': str(self.image),
                    'size': SIZE,
                    'share': True,
                },
            )
            self.assertIn('was being reverted', message)
            self.assertTrue(vm_state.disk_holds(self.carrier, 2))
            self.assertEqual('running', vm.status())
            vm.quit()
        with self.start() as vm:
            self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
            self.assertTrue(vm_state.disk_holds(self.carrier, 1))
            self.assertEqual((['s'], ['s']), vm.trees())
            self.assertEqual('', vm.load('s'))
            self.assert_reads(vm, b'then')
            vm.quit()
        self.assert_files_clean()

    def test_another_image(self) -> None:
        """A copy of another VM's image, with a snapshot of the same name."""
        with self.start() as vm:
            self.write(vm, b'then')
            self.assertEqual('', vm.save('s'))
            vm.quit()
        other = self.directory / 'other.pcow'
        vm_state.run('pcow-img', 'create', '-q', other, SIZE)
        vm_state.run('pcow-img', 'snapshot', '-c', 's', other)
        with self.start(image=other) as vm:
            self.write(vm, b'now')
            self.load_is_refused(vm, 's', str(other), 'do not belong together')
            vm.quit()
        self.assertIn(
            'do not belong together',
            qemu.refused(
                *test_qemu_backend.backend(other),
                *vm_state.carrier_arguments(self.carrier),
                '-loadvm',
                's',
            ),
        )

    def test_an_image_stands_on_it(self) -> None:
        """The disk keeps its part as well: what the image refuses to delete is refused before the
        disk is touched.
        """
        child = self.directory / 'child.pcow'
        with self.start() as vm:
            self.write(vm, b'then')
            self.assertEqual('', vm.save('s'))
            vm.quit()
        vm_state.run('pcow-img', 'create', '-q', '-b', self.image, '-o', 'base_snapshot=s', child)
        with self.start() as vm:
            for message in (vm.delete('s'), vm.hmp('delvm s')):
                self.assertIn("on snapshot 's'", message)
                self.assertIn(child.name, message)
            self.assertEqual((['s'], ['s']), vm.trees())
            self.assertEqual('', vm.load('s'))
            self.assert_reads(vm, b'then')
            child.unlink()
            self.assertEqual('', vm.delete('s'))
            self.assertEqual(([], []), vm.trees())
            vm.quit()

    def test_disks_alone_and_a_file(self) -> None:
        overlay = self.directory / 'overlay.qcow2'
        with self.start() as vm:
            self.write(vm, b'now')
            messages = [
                vm.qmp_error(
                    'blockdev-snapshot-sync',
                    **{
                        'node-name': 'disk0',
                        'snapshot-file': str(overlay),
                        'snapshot-node-name': 'overlay',
                        'format': 'qcow2',
                    },
                ),
                vm.qmp_error('blockdev-snapshot-internal-sync', device='disk0', name='d'),
            ]
            for message in messages:
                self.assertIn(f"would leave out the pcow image '{self.image}'", message)
            message = vm.qmp_error('migrate', uri=f'file:{self.directory}/state')
            self.assertIn('cannot be migrated or saved to a file', message)
            self.assertEqual(([], []), vm.trees())
            self.assertEqual('running', vm.status())
            self.assert_reads(vm, b'now')
            vm.quit()
        self.assertFalse(overlay.exists())

    def test_overlay_from_before_the_vm_runs(self) -> None:
        """As libvirt makes them for disks that are <transient/>: nothing is left out."""
        arguments = {
            'node-name': 'disk0',
            'snapshot-file': str(self.directory / 'overlay.qcow2'),
            'snapshot-node-name': 'overlay',
            'format': 'qcow2',
        }
        with self.start('-S') as vm:
            vm.qmp('blockdev-snapshot-sync', **arguments)
            message = vm.qmp_error('blockdev-snapshot-internal-sync', device='overlay', name='d')
            self.assertIn('would leave out the pcow image', message)
            vm.qmp('cont')
            vm.qmp('stop')
            arguments.update(
                {
                    'node-name': 'overlay',
                    'snapshot-file': str(self.directory / 'more.qcow2'),
                    'snapshot-node-name': 'more',
                }
            )
            self.assertIn(
                'would leave out the pcow image',
                vm.qmp_error('blockdev-snapshot-sync', **arguments),
            )
            vm.qmp('system_reset')
            # once more, and it has run all the same
            self.assertEqual('prelaunch', vm.wait_status('prelaunch'))
            self.assertIn(
                'would leave out the pcow image',
                vm.qmp_error('blockdev-snapshot-sync', **arguments),
            )
            vm.quit()

    def test_state_of_another_vm(self) -> None:
        """What virsh restore does with a file that was saved without the image, or that somebody
        changed.
        """
        with self.start() as vm:
            self.write(vm, b'kept')
            vm.quit()
        with self.start('-incoming', 'defer') as vm:
            message = vm.qmp_error('migrate-incoming', uri=f'file:{self.directory}/state')
            self.assertIn('cannot be migrated or saved to a file', message)
            self.assertIn(str(self.image), message)
            vm.quit()
        with self.start() as vm:
            self.assertEqual(b'kept', vm.read(vm.address('nv0'), 4))
            vm.quit()

    def test_no_carrier(self) -> None:
        with vm_state.Vm(self.directory, *test_qemu_backend.backend(self.image)) as vm:
            self.assertIn('no block device can store vmstate', vm.hmp('savevm s'))
            self.assertEqual([], vm.names())
            self.assertEqual('running', vm.status())
            vm.quit()

    def test_read_only_carrier(self) -> None:
        with vm_state.Vm(
            self.directory,
            *test_qemu_backend.backend(self.image),
            *vm_state.carrier_arguments(self.carrier, ',read-only=on'),
        ) as vm:
            self.assertNotEqual('', vm.save('s'))
            self.assertEqual(([], []), vm.trees())
            self.assertEqual('running', vm.status())
            vm.quit()


class FaultTest(vm_snapshot_case.VmSnapshotTestCase):
    """The carrier fails once, at its N-th write, for every N until none strikes: then nothing is
    left of the snapshot.
    """

    # successes in a row that end a test: how many writes there are varies a little
    STREAK = 6

    def until_none_strikes(self, command: str, before: list[str], after: list[str]) -> None:
        failed = streak = number = 0
        while streak < self.STREAK:
            number += 1
            self.prepare(before)
            with self.start_faulty(number) as vm:
                self.write(vm, b'now')
                message = getattr(vm, command)('s')
                images_now, disks_now = vm.trees()
                self.assert_reads(vm, b'now')
                self.assertEqual('running', vm.status())
                vm.quit()
            streak = 0 if message else streak + 1
            failed += bool(message)
            # the last writes come when the channel of the state is closed: their error had no
            # words, and QEMU did not survive it
            self.assertNotIn('Operation not permitted', message)
            self.assertIn(images_now, (before, after) if message else (after,), (number, message))
            self.assertEqual(images_now, disks_now, (number, message))
            self.assertEqual(images_now, vm_state.image_names(self.image))
            self.assertEqual(images_now, vm_state.disk_names(self.carrier), (number, message))
            vm_state.run('pcow-img', 'check', self.image)
        self.assertGreaterEqual(failed, 2)

    def prepare(self, wanted: list[str]) -> None:
        """Both sides have the snapshots that are wanted, as QEMU makes them."""
        with self.start() as vm:
            for name in set(vm.names()) | set(vm.disk_names()):
                self.assertEqual('', vm.delete(name))
            self.write(vm, b'then')
            for name in wanted:
                self.assertEqual('', vm.save(name))
            vm.quit()

    def test_saving(self) -> None:
        self.until_none_strikes('save', [], ['s'])

    def test_deleting(self) -> None:
        self.until_none_strikes('delete', ['s'], [])

    def assert_together(self, vm: vm_state.Vm, number: int) -> bytes:
        text = vm.read(vm.address('nv0'), 4)
        self.assertTrue(
            vm_state.disk_holds(self.carrier, {b'then': 1, b'now.': 2}[text]), (number, text)
        )
        return text

    def test_loading(self) -> None:
        """Image and disk are of one time at the next start; who lets a VM run that could not be
        loaded finds what he has left.
        """
        outcomes = set()
        streak = number = 0
        while streak < self.STREAK:
            number += 1
            for goes_on in (False, True):
                self.save_and_go_on()
                with self.start_faulty(number) as vm:
                    message = vm.load('s')
                    self.assertEqual(not message, vm.status() == 'running', message)
                    if message and goes_on:
                        vm.qmp('cont')
                        self.assertEqual((['s'], ['s']), vm.trees(), number)
                        self.write(vm, b'late')
                    vm.quit()
                with self.start() as vm:
                    self.assertEqual((['s'], ['s']), vm.trees(), number)
                    if message and goes_on:
                        self.assertEqual(b'late', vm.read(vm.address('nv0'), 4), number)
                    else:
                        outcomes.add((bool(message), self.assert_together(vm, number)))
                    vm.quit()
                vm_state.run('pcow-img', 'check', self.image)
            streak = 0 if message else streak + 1
        self.assertIn((True, b'then'), outcomes)
        self.assertIn((False, b'then'), outcomes)


class FullPoolTest(vm_snapshot_case.VmSnapshotTestCase):
    def test_full_pool(self) -> None:
        """A snapshot is possible or refused in words, never by half; with more space everything is
        possible again.
        """
        pool = self.directory / 'pool'
        pool.mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=8m', 'pcow-test', pool], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', pool], check=True)
        image = pool / 'vm.pcow'
        vm_state.run('pcow-img', 'create', '-q', image, SIZE)
        with self.start(image=image) as vm:
            self.write(vm, b'then')
            for offset in range(4096, SIZE // 2, 4096):
                vm.write(vm.address('nv0') + offset, b'\xff' * 8)
            self.assertIn('No space left', vm.wait_event('PCOW_ERROR')['error'])
            for name in ('s1', 's2'):
                message = vm.save(name)
                self.assertRegex(message, '^$|No space left|full')
                expected = [] if message else [name]
                self.assertEqual((expected, expected), vm.trees())
                self.assertEqual('', vm.delete(name))
                self.assertEqual(([], []), vm.trees())
            self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
            subprocess.run(['mount', '-o', 'remount,size=128m', pool], check=True)
            self.assertEqual('', vm.save('s'))
            vm.write(vm.address('nv0'), b'late')
            self.assertEqual('', vm.load('s'))
            self.assertEqual(b'then', vm.read(vm.address('nv0'), 4))
            vm.quit()
        vm_state.run('pcow-img', 'check', image)
