# SPDX-License-Identifier: Apache-2.0
"""A running QEMU, and another one on a snapshot of its image: fork, export and delete while both go
on.
"""

import json
from pathlib import Path
import shutil

from tests.functional import images
from tests.functional import qemu
from tests.functional import test_qemu_backend
from tests.functional.images import MIB
from tests.functional.test_qemu_backend import backend
from tests.functional.test_qemu_backend import tool


class ForkTest(test_qemu_backend.QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        tool('pcow-img', 'create', '-q', self.image, test_qemu_backend.SIZE)
        self.fork = self.directory / 'fork.pcow'
        # each has sockets of its own
        self.other = self.directory / 'other'
        self.other.mkdir()

    def snapshot(self, vm: qemu.Qemu, name: str) -> None:
        vm.qmp('pcow-snapshot-create', id='mem0', name=name)

    def exported(self, name: str, image_format: str = 'raw') -> Path:
        target = self.directory / f'export.{image_format}'
        tool('pcow-img', 'convert', '-l', name, '-O', image_format, self.image, target)
        if image_format != 'raw':
            raw = self.directory / 'export.raw'
            tool('pcow-img', 'convert', '-f', image_format, '-O', 'raw', target, raw)
            return raw
        return target

    def test_parent_and_child_run_together(self) -> None:
        with qemu.Qemu(self.directory, *backend(self.image)) as parent:
            at = parent.address('nv0')
            parent.write(at, b'common')
            parent.write(at + 9 * MIB, b'older')
            self.snapshot(parent, 'before')
            parent.write(at + 9 * MIB, b'newer')
            self.snapshot(parent, 'point')
            parent.write(at, b'parent')
            tool(
                'pcow-img', 'create', '-q', '-b', self.image, '-o', 'base_snapshot=point', self.fork
            )
            with qemu.Qemu(self.other, *backend(self.fork)) as child:
                there = child.address('nv0')
                self.assertEqual(
                    (b'common', b'newer'), (child.read(there, 6), child.read(there + 9 * MIB, 5))
                )
                child.write(there, b'child!')
                self.assertEqual(b'parent', parent.read(at, 6))
                # everything a parent may do below and beside its child
                parent.write(at + 9 * MIB, b'newest')
                self.snapshot(parent, 'after')
                parent.qmp('pcow-snapshot-delete', id='mem0', name='before')
                parent.qmp('stop')
                parent.qmp('pcow-snapshot-revert', id='mem0', name='after')
                parent.qmp('pcow-snapshot-delete', id='mem0', name='after')
                parent.qmp('cont')
                message = parent.qmp_error('pcow-snapshot-delete', id='mem0', name='point')
                self.assertIn("1 image stands on snapshot 'point': 'fork.pcow'", message)
                (info,) = parent.qmp('query-pcow')
                (point,) = info['snapshots']
                self.assertTrue(point['pinned'])
                self.assertEqual(point['data-size'] + point['shared-size'], point['data-size'])
                # what the child has not looked at yet, and what it has
                self.assertEqual(
                    (b'child!', b'newer'), (child.read(there, 6), child.read(there + 9 * MIB, 5))
                )
                child.write(there + 9 * MIB + 4096, b'copied')
                self.assertEqual(b'newer', child.read(there + 9 * MIB, 5))
                child.quit()
            self.assertEqual(
                (b'parent', b'newest'), (parent.read(at, 6), parent.read(at + 9 * MIB, 6))
            )
            self.fork.unlink()
            self.assertGreater(
                parent.qmp('pcow-snapshot-delete', id='mem0', name='point')['freed'], 0
            )
            self.assertEqual(
                (b'parent', b'newest'), (parent.read(at, 6), parent.read(at + 9 * MIB, 6))
            )
            parent.quit()
        tool('pcow-img', 'check', self.image)

    def test_export_of_a_running_vm(self) -> None:
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            at = vm.address('nv0')
            vm.write(at + MIB, b'then')
            self.snapshot(vm, 'then')
            for image_format in ('raw', 'qcow2', 'pcow'):
                vm.write(at + MIB, b'now!')
                content = self.exported('then', image_format).read_bytes()
                self.assertEqual(b'then', content[MIB : MIB + 4])
                self.assertFalse(any(content[2 * MIB :]))
            vm.qmp('pcow-snapshot-delete', id='mem0', name='then')
            self.assertEqual(b'now!', vm.read(at + MIB, 4))
            vm.quit()
        tool('pcow-img', 'check', self.image)

    def test_copy_on_read(self) -> None:
        tool('pcow-io', '-c', 'write -P 0x41 8M 64k', self.image)
        tool('pcow-img', 'snapshot', '-c', 's', self.image)
        tool('pcow-img', 'amend', '-o', 'copy_on_read=on', self.image)
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            at = vm.address('nv0')
            self.assertEqual(bytes(4), vm.read(at, 4))
            self.assertEqual(0, vm.qmp('query-pcow')[0]['data-size'])
            self.assertEqual(b'AAAA', vm.read(at + 8 * MIB, 4))
            self.assertEqual(images.SLAB, vm.qmp('query-pcow')[0]['data-size'])
            vm.quit()

    def test_killed_in_the_middle_of_everything(self) -> None:
        """Whatever the parent was doing: its child's snapshot is whole."""
        with qemu.Qemu(self.directory, *backend(self.image)) as parent:
            at = parent.address('nv0')
            parent.write(at, b'point')
            self.snapshot(parent, 'point')
            tool(
                'pcow-img', 'create', '-q', '-b', self.image, '-o', 'base_snapshot=point', self.fork
            )
            parent.write(at, b'other')
            self.snapshot(parent, 'another')
            parent.process.kill()
        with qemu.Qemu(self.other, *backend(self.fork)) as child:
            self.assertEqual(b'point', child.read(child.address('nv0'), 5))
            names = [
                entry['name']
                for entry in json.loads(
                    tool('pcow-img', 'snapshot', '-l', '--output=json', self.image)
                )
            ]
            self.assertEqual(['point', 'another'], names)
            child.quit()
        shutil.rmtree(self.other)
