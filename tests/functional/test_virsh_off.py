# SPDX-License-Identifier: Apache-2.0
"""Unmodified virsh and a real libvirtd on domains that are off: whatever their disks are, and
whatever was changed since.

What a guest sees of such snapshots is in test_virsh_snapshots.py, what can go wrong on the way in
test_libvirt_qemu_img.py.
"""

import os
from pathlib import Path
import subprocess
import unittest
import uuid

from tests.functional import images
from tests.functional import vm_state
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid>
<memory unit='MiB'>128</memory><maxMemory slots='4' unit='GiB'>1</maxMemory>
<cpu><numa><cell id='0' cpus='0' memory='128' unit='MiB'/></numa></cpu>
  <os><type arch='x86_64' machine='q35'>hvm</type></os>
<devices><emulator>{emulator}</emulator>{devices}</devices></domain>"""
DISK = """<disk type='{type}' device='disk'><driver name='qemu' type='qcow2'/><source {source}/>
<target dev='vd{letter}' bus='virtio'/></disk>"""
MEMORY = """<memory model='nvdimm' access='shared'><source><path>{path}</path></source>
<target><size unit='MiB'>64</size><node>0</node>
  <label><size unit='KiB'>128</size></label></target></memory>"""


class VirshOffTest(unittest.TestCase):
    run_of_all: state.Run
    daemon: libvirtd.Libvirtd
    process: subprocess.Popen[bytes]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        teardown.reap()
        cls.run_of_all = state.Run.create()
        cls.addClassCleanup(teardown.tear_down, cls.run_of_all)
        cls.daemon = libvirtd.Libvirtd(cls.run_of_all.directory)
        cls.process = cls.daemon.start()

    def setUp(self) -> None:
        super().setUp()
        self.name = self.id().rpartition('.')[2]
        self.directory = self.run_of_all.directory / self.name
        self.directory.mkdir()
        self.disks = [self.directory / 'volumes' / f'disk{n}.qcow2' for n in range(3)]
        self.image = self.directory / 'vm.pcow'
        self.disks[0].parent.mkdir()
        for disk in self.disks:
            vm_state.run('qemu-img', 'create', '-q', '-f', 'qcow2', disk, '1M')
        vm_state.run('pcow-img', 'create', '-q', self.image, '64M')
        self.uuid = uuid.uuid4()
        self.addCleanup(self.virsh, 'undefine', self.name, '--snapshots-metadata')

    def virsh(self, *words: object) -> str:
        done = subprocess.run(
            ('virsh', '-q', '-c', self.daemon.uri, *map(str, words)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=images.TIMEOUT,
            env=os.environ | {'LC_ALL': 'C'},
            check=False,
        )
        self.assertEqual(0, done.returncode, f'{words}: {done.stderr}')
        return done.stdout

    def define(self, *disks: Path, volumes: bool = False, memory: bool = True) -> None:
        """Each disk keeps its letter, by which libvirt puts them in order."""
        devices = [
            DISK.format(
                type='volume' if volumes else 'file',
                letter='abc'[self.disks.index(disk)],
                source=f"pool='fast' volume='{disk.name}'" if volumes else f"file='{disk}'",
            )
            for disk in disks
        ]
        devices += [MEMORY.format(path=self.image)] if memory else []
        path = self.directory / 'domain.xml'
        path.write_text(
            XML.format(
                name=self.name,
                uuid=self.uuid,
                emulator=images.program('qemu-system-x86_64'),
                devices=''.join(devices),
            )
        )
        self.virsh('define', path)

    def fill(self, value: int) -> None:
        for disk in self.disks:
            vm_state.run('qemu-io', '-f', 'qcow2', '-c', f'write -q -P {value} 0 64k', disk)
        vm_state.run('pcow-io', '-c', f'write -q -P {value} 0 64k', self.image)

    def assert_hold(self, *values: int) -> None:
        """Each of the disks, and as the last one the image."""
        for disk, value in zip(self.disks, values, strict=False):
            self.assertTrue(vm_state.disk_holds(disk, value), disk)
        vm_state.run('pcow-io', '-c', f'read -q -P {values[-1]} 0 64k', self.image)

    def assert_names(self, *names: str) -> None:
        self.assertEqual(list(names), vm_state.image_names(self.image))
        for disk in self.disks:
            self.assertLessEqual(set(vm_state.disk_names(disk)), set(names))

    def test_an_image_stands_on_one(self) -> None:
        """libvirt takes no notice of a delete that is refused; the rest goes by hand when the other
        image is gone.
        """
        self.define(*self.disks)
        self.virsh('snapshot-create-as', self.name, 's')
        child = self.directory / 'child.pcow'
        vm_state.run(
            'pcow-img', 'create', '-q', '-b', self.image.name, '-o', 'base_snapshot=s', child
        )
        self.virsh('snapshot-delete', self.name, 's')
        self.assertEqual('', self.virsh('snapshot-list', self.name, '--name').strip())
        self.assert_names('s')
        child.unlink()
        for disk in self.disks:
            self.assertEqual(['s'], vm_state.disk_names(disk))
            # in the namespace in which libvirt's files are those of this libvirtd
            path = f"PATH={os.path.dirname(images.program('pcow-img'))}:/usr/bin"
            vm_state.run(
                'nsenter',
                '-t',
                self.process.pid,
                '-m',
                'env',
                path,
                images.TOP / 'etc/libvirt/bin/qemu-img',
                'snapshot',
                '-d',
                's',
                disk,
            )
            self.assertEqual([], vm_state.disk_names(disk))
        self.assert_names()

    def test_volumes(self) -> None:
        """Disks that are named by storage pool and volume."""
        self.virsh('pool-create-as', 'fast', 'dir', '--target', self.disks[0].parent)
        self.define(*self.disks, volumes=True)
        self.fill(1)
        self.virsh('snapshot-create-as', self.name, 's')
        self.assert_names('s')
        self.fill(2)
        self.virsh('snapshot-revert', self.name, 's')
        self.assert_hold(1, 1, 1, 1)
        self.assert_names('s')
        self.virsh('snapshot-delete', self.name, 's')
        self.assert_names()

    def changed(self, before: list[Path], after: list[Path], *, memory: bool = True) -> None:
        """A snapshot with some disks, and back to it from a definition with others."""
        self.define(*before)
        self.fill(1)
        self.virsh('snapshot-create-as', self.name, 's')
        self.define(*after, memory=memory)
        for _ in range(2):
            self.fill(2)
            self.virsh('snapshot-revert', self.name, 's')
            self.assert_hold(*(1 if disk in before else 2 for disk in self.disks), 1)
            self.assert_names('s')
            # libvirt has taken back the definition as well
            self.define(*after, memory=memory)
        self.virsh('snapshot-delete', self.name, 's')
        self.assert_names()

    def test_a_disk_came_last(self) -> None:
        self.changed(self.disks[:2], self.disks)

    def test_a_disk_came_first(self) -> None:
        self.changed(self.disks[1:], self.disks)

    def test_the_first_disk_went(self) -> None:
        self.changed(self.disks, self.disks[1:])

    def test_the_last_disk_went(self) -> None:
        self.changed(self.disks, self.disks[:2])

    def test_the_image_went(self) -> None:
        self.changed(self.disks, self.disks, memory=False)
