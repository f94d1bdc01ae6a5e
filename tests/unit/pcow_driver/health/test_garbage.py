# SPDX-License-Identifier: Apache-2.0
"""What "pcowctl pool garbage" finds and deletes; pool, images and libvirt (its test driver, with a
domain in a file) are real.
"""

import os
from pathlib import Path
import subprocess
import sys
import threading
import time

from pcow_driver.common import exception
from pcow_driver.common import workspace
from pcow_driver.health import garbage
from pcow_driver.pools import registry
from pcow_driver.virt import libvirt_host
from tests.unit import libvirt_node
from tests.unit.pcow_driver import base


def _crc8(data: bytes) -> int:
    crc = 0xFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ (0x07 if crc & 0x80 else 0)) & 0xFF
    return crc


class UnusedImageTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.node = self.directory / 'node.xml'
        self.name('/no/such.pcow')
        self.configure(pcow_img=str(programs / 'pcow-img'), libvirt_uri=f'test://{self.node}')
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    def name(self, path: str) -> None:
        """Let a domain of libvirt name this image."""
        self.node.write_text(libvirt_node.xml(path), encoding='utf-8')

    def make(self, name: str, *, age: float = 2 * 3600) -> str:
        path = self.pool.create_image(name, size=2 << 20)
        os.utime(path, (time.time() - age,) * 2)
        return path

    def find(self) -> list[garbage.Finding]:
        return garbage.find(self.pool, libvirt_host.all_images())

    def test_found_and_deleted(self) -> None:
        path = self.make('mine')
        self.assertEqual(
            [(garbage.Kind.UNUSED_IMAGE, path)], [(one.kind, one.path) for one in self.find()]
        )
        garbage.delete(self.pool, self.find()[0])
        self.assertEqual([], self.pool.entries())

    def test_leaks_are_given_back_unless_they_may_be_data(self) -> None:
        path = self.make('mine')
        self.name(path)
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        os.unlink(path)  # one without a mirror, which would mend what is done to it
        subprocess.run(
            [programs / 'pcow-img', 'create', '-q', '-o', 'mirror=off', path, '2M'], check=True
        )
        subprocess.run([programs / 'pcow-io', '-c', 'write -q 0 64k', path], check=True)
        word = (2 << 54 | 1 << 26).to_bytes(7, 'little')  # VM state, of the active layer
        with open(path, 'r+b') as file:  # owns file slab 20
            file.seek((64 << 10) + 20 * 8)
            file.write(word + bytes([_crc8(word)]))
        leaking = Path(path).read_bytes()
        self.assertEqual([garbage.Kind.LEAK], [one.kind for one in self.find()])
        garbage.delete(self.pool, self.find()[0])
        self.assertEqual([], self.find())
        Path(path).write_bytes(leaking)
        with open(path, 'r+b') as file:  # the bitmap of what was written
            file.seek((1 << 20) + 64)
            file.write(bytes(64))
        (found,) = self.find()
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.assertEqual([garbage.Kind.LEAK], [one.kind for one in self.find()])
        # and what was damaged since is not repaired by the way
        Path(path).write_bytes(leaking)
        with open(path, 'r+b') as file:
            file.seek(4096 + 40)  # the copy of the header
            file.write(b'x')
        damaged = Path(path).read_bytes()
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.assertEqual(damaged, Path(path).read_bytes())

    def test_what_belongs_to_cinder_and_nova(self) -> None:
        """A detached volume, and a server that waits elsewhere for its confirmation, are in no
        domain of this host.
        """
        self.make('volume-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27')
        self.make('server-6d0f2b5e-7c1a-4e39-9b54-0a1f6c3d8e27-root')
        self.assertEqual([], self.find())

    def test_young_one_may_be_for_a_domain_that_is_being_made(self) -> None:
        self.make('mine', age=60)
        self.assertEqual([], self.find())

    def test_pool_that_is_mounted_in_another_place_as_well(self) -> None:
        """A domain names the image by a path there."""
        path = self.make('mine')
        (found,) = self.find()
        elsewhere = self.directory / 'elsewhere.pcow'
        os.link(path, elsewhere)
        self.name(str(elsewhere))
        self.assertEqual([], self.find())
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)

    def test_ram_of_a_domain(self) -> None:
        path = self.make('vm-ram')
        self.assertEqual([path], [one.path for one in self.find()])
        self.node.write_text(libvirt_node.xml('/no/such.pcow', path), encoding='utf-8')
        self.assertEqual([], self.find())

    def test_needed_by_now(self) -> None:
        path = self.make('mine')
        (found,) = self.find()
        self.name(path)
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.node.unlink()  # nobody knows
        self.assertRaises(exception.LibvirtFailed, garbage.delete, self.pool, found)
        self.name('/no/such.pcow')
        os.utime(path)
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found)
        self.assertEqual(['mine.pcow'], self.pool.entries())


class RescueTest(base.TestCase):
    """What a repair has dropped is the operator's: told, and deleted if he says so."""

    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.pool.create_image('vm', size=2 << 20)
        self.files = [Path(self.pool.path, name) for name in ('vm.pcow.rescue', 'vm.pcow.rescue-2')]
        for path in self.files:
            path.write_bytes(bytes(4096))
            os.utime(path, (time.time() - 7200,) * 2)
        Path(self.pool.path, 'vm.pcow.rescues').touch()
        Path(self.pool.path, 'vm2.pcow.rescue').symlink_to(self.files[0])

    def find(self) -> list[garbage.Finding]:
        return garbage.find(self.pool, None)

    def test_told_and_deleted(self) -> None:
        found = self.find()
        self.assertEqual(
            [(garbage.Kind.RESCUE, str(path), 4096) for path in self.files],
            [(one.kind, one.path, one.size) for one in found],
        )
        self.assertNotIn('is gone', found[0].reason)
        with self.assertLogs('pcow_driver.pools.pool', 'WARNING') as log:
            self.pool.delete_image('vm')
        for path in self.files:
            self.assertTrue(path.exists())
            self.assertIn(str(path), log.output[0])
        found = self.find()
        self.assertIn('vm.pcow is gone', found[0].reason)
        garbage.delete(self.pool, found[0])
        self.assertEqual(found[1:], self.find())

    def test_of_a_repair_that_may_go_on(self) -> None:
        found = self.find()
        os.utime(self.files[0])
        self.assertRaises(exception.ImageInUse, garbage.delete, self.pool, found[0])
        self.assertTrue(self.files[0].exists())


_CONVERTS = """
import os, sys, time
from pcow_driver.common import conf, workspace
conf.CONF([], project='pcow', default_config_files=[])
conf.CONF.set_override('conversion_dir', sys.argv[1], group='pcow')
with workspace.directory('template') as directory:
    with open(os.path.join(directory, 'raw'), 'wb') as file:
        file.write(bytes(1 << 20))
    print(directory, flush=True)
    time.sleep(60)
"""


class WorkTest(base.TestCase):
    """What a conversion leaves that is killed."""

    def setUp(self) -> None:
        super().setUp()
        self.place = self.directory / 'conversion'
        self.place.mkdir()
        self.configure(
            conversion_dir=str(self.place),
            pcow_img=str(Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin')) / 'pcow-img'),
        )
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    @staticmethod
    def age(path: Path) -> None:
        for one in (*path.iterdir(), path):
            os.utime(one, (time.time() - 7200,) * 2)

    def start(self) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, '-c', _CONVERTS, str(self.place)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=base.TOP,
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        assert process.stdout is not None
        self.addCleanup(process.stdout.close)
        return process, Path(process.stdout.readline().strip())

    def test_found_and_deleted(self) -> None:
        process, path = self.start()
        self.assertEqual([], garbage.find(self.pool, None))
        self.assertRaises(exception.ImageInUse, workspace.discard, str(path))
        process.kill()
        process.wait()
        # a version that knows no lock may be at work
        self.assertEqual([], garbage.find(self.pool, None))
        self.age(path)
        (found,) = garbage.find(self.pool, None)
        self.assertEqual(
            (garbage.Kind.WORK, str(path), 1 << 20), (found.kind, found.path, found.size)
        )
        garbage.delete(self.pool, found)
        self.assertEqual([], list(self.place.iterdir()))

    def test_next_conversion_takes_it_away(self) -> None:
        """Not that of somebody who still works, nor what is not ours."""
        killed, left = self.start()
        killed.kill()
        killed.wait()
        _works, used = self.start()
        for path in (left, used):
            self.age(path)
        others = self.place / 'pcow-template-ofnobody'
        others.mkdir()
        os.chown(others, 65534, 65534)
        (self.place / 'pcow-template-link5678').symlink_to(self.directory)
        (self.place / 'pcow-template-x').mkdir()
        with workspace.directory('send') as mine:
            self.assertEqual(
                {
                    used,
                    others,
                    Path(mine),
                    self.place / 'pcow-template-link5678',
                    self.place / 'pcow-template-x',
                },
                set(self.place.iterdir()),
            )
        self.assertFalse(left.exists() or os.path.exists(mine))

    def test_two_at_once(self) -> None:
        """Whoever collects never takes one that is being made."""
        failed: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(200):
                    with workspace.directory('fetch') as directory:
                        Path(directory, 'file').touch()
            except BaseException as e:
                failed.append(e)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], failed)
        self.assertEqual([], list(self.place.iterdir()))
