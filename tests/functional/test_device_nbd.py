# SPDX-License-Identifier: Apache-2.0
"""pcow_driver.pools.device and pcow_driver.export.nbd with the real pcow-img, pcow-io, nbdkit,
nbdfuse and qemu-img.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.export import nbd
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import settings as settings_module
from tests.functional import linux_guest
from tests.functional.test_pcowctl import BIN

MIB = 1 << 20
OFFSET = 2 * MIB
TMPFS = '/dev/shm'


class TestCase(unittest.TestCase):
    def setUp(self) -> None:
        self.assertTrue((BIN / 'pcow-img').exists(), f'{BIN} has no pcow-img: run tools/build')
        self.directory = Path(tempfile.mkdtemp(prefix='pcow-test-', dir=TMPFS))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        conf.CONF([], default_config_files=[])
        options = {
            'pcow_img': BIN / 'pcow-img',
            'pcow_io': BIN / 'pcow-io',
            'nbdkit_plugin': BIN / 'nbdkit-pcow-plugin.so',
            'state_path': self.directory / 'state',
            'conversion_dir': self.directory,
        }
        for option, value in options.items():
            conf.CONF.set_override(option, str(value), 'pcow')
            self.addCleanup(conf.CONF.clear_override, option, 'pcow')
        self.pool = pool_module.make('p', str(self.directory / 'pool'))

    def io(self, path: str, *commands: str) -> None:
        words = [word for command in commands for word in ('-c', command)]
        done = subprocess.run(
            [BIN / 'pcow-io', *words, path], capture_output=True, text=True, check=False
        )
        self.assertEqual(0, done.returncode, done)

    def files(self) -> list[str]:
        return sorted(name for name in os.listdir(self.pool.path) if name != names.LOCK)


class DeviceTest(TestCase):
    def test_empty(self) -> None:
        path = device.create(self.pool, 'volume', 64 * MIB)
        self.assertEqual(device.Window(OFFSET, 64 * MIB), device.window(path))
        self.assertEqual(66 * MIB, image.info(path).virtual_size)
        self.assertEqual([names.MARKER, 'volume.pcow'], self.files())
        raw = self.directory / 'raw'
        image.convert(path, image.FORMAT, str(raw), 'raw')
        content = raw.read_bytes()
        block = content[info_block.BLOCK_OFFSET : info_block.BLOCK_OFFSET + info_block.BLOCK_SIZE]
        self.assertEqual(info_block.InfoBlock(OFFSET, 64 * MIB), info_block.parse(block))
        self.assertFalse(any(content.replace(block, b'')))

    def test_grow(self) -> None:
        path = device.create(self.pool, 'volume', 4 * MIB)
        self.io(path, f'write -P 7 {OFFSET} 4M')
        device.grow(path, 4 * MIB)
        device.grow(path, 32 * MIB)
        self.assertEqual(device.Window(OFFSET, 32 * MIB), device.window(path))
        self.io(path, f'read -P 7 {OFFSET} 4M', f'read -P 0 {OFFSET + 4 * MIB} 28M')
        for size in (16 * MIB, 33 * MIB + 1, 0):
            self.assertRaises(exception.InvalidSize, device.grow, path, size)

    def test_grow_that_was_interrupted(self) -> None:
        path = device.create(self.pool, 'volume', 4 * MIB)
        image.resize(path, 34 * MIB)
        self.assertEqual(4 * MIB, device._look(path)[1])  # what the guest finds
        device.grow(path, 32 * MIB)
        self.assertEqual(32 * MIB, device._look(path)[1])
        self.assertEqual(
            (34 * MIB, device.Window(OFFSET, 32 * MIB)),
            (image.info(path).virtual_size, device.window(path)),
        )

    def test_on_a_snapshot_and_larger(self) -> None:
        path = device.create(self.pool, 'volume', 8 * MIB)
        self.io(path, f'write -P 1 {OFFSET} 1M')
        image.snapshot_create(path, 's')
        self.io(path, f'write -P 2 {OFFSET} 1M')
        same = device.create_on(self.pool, 'same', 'volume', base_snapshot='s')
        larger = device.create_on(
            self.pool, 'larger', 'volume', base_snapshot='s', data_size=16 * MIB
        )
        for made, size in ((same, 8 * MIB), (larger, 16 * MIB)):
            self.assertEqual(device.Window(OFFSET, size), device.window(made))
            self.io(made, f'read -P 1 {OFFSET} 1M')
        self.assertRaises(
            exception.InvalidSize,
            device.create_on,
            self.pool,
            'small',
            'volume',
            base_snapshot='s',
            data_size=4 * MIB,
        )
        self.assertRaises(exception.ImageNotFound, device.create_on, self.pool, 'none', 'missing')
        self.assertRaises(
            exception.ImageExists, device.create_on, self.pool, 'same', 'volume', base_snapshot='s'
        )
        self.assertEqual([names.MARKER, 'larger.pcow', 'same.pcow', 'volume.pcow'], self.files())

    def test_on_one_that_is_written_to(self) -> None:
        path = device.create(self.pool, 'volume', 8 * MIB)
        image.snapshot_create(path, 's')
        writer = subprocess.Popen(
            [BIN / 'pcow-io', path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(writer.communicate, 'quit\n', timeout=60)
        assert writer.stdin and writer.stdout
        writer.stdin.write('length\n')
        writer.stdin.flush()
        writer.stdout.readline()
        self.assertEqual(device.Window(OFFSET, 8 * MIB), device.window(path, force_share=True))
        device.create_on(self.pool, 'child', 'volume', base_snapshot='s')
        self.assertRaises(exception.ToolFailed, device.grow, path, 16 * MIB)

    def test_no_device(self) -> None:
        path = self.pool.create_image('plain', size=8 * MIB)
        with self.assertRaisesRegex(exception.DeviceInvalid, 'no DAX info block'):
            device.window(path)

    def test_a_block_that_promises_too_much(self) -> None:
        path = device.create(self.pool, 'volume', 8 * MIB)
        device.write_info_block(path, 1 << 30)
        with self.assertRaisesRegex(exception.DeviceInvalid, 'promises more'):
            device.window(path)

    def test_the_limits_of_the_pool_hold(self) -> None:
        pool = dataclasses.replace(self.pool, settings=settings_module.Settings(draining=True))
        self.assertRaises(exception.PoolDraining, device.create, pool, 'volume', 8 * MIB)
        self.assertEqual([names.MARKER], self.files())


class NbdTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.path = device.create(self.pool, 'volume', 32 * MIB)
        self.window = device.window(self.path)
        self.raw = self.directory / 'raw'
        self.raw.write_bytes(random.Random(1).randbytes(3 * MIB + 4097))
        os.truncate(self.raw, 32 * MIB)

    def qemu_img(self, *args: object) -> str:
        return subprocess.run(
            ['qemu-img', *map(str, args)], capture_output=True, text=True, check=True
        ).stdout

    def exports_left(self) -> list[str]:
        left = [str(path) for path in self.directory.glob('pcow-nbd-*')]
        processes = subprocess.run(
            ['pgrep', '-af', f'nbd.*{self.directory}'], capture_output=True, text=True, check=False
        ).stdout
        return left + processes.splitlines()

    def test_qemu_img_writes_and_reads(self) -> None:
        with nbd.serve(self.path, window=self.window) as uri:
            self.qemu_img('convert', '-n', '-f', 'raw', '-O', 'raw', self.raw, uri)
            extents = json.loads(self.qemu_img('map', '--output=json', '-f', 'raw', uri))
            self.assertEqual(32 * MIB, sum(extent['length'] for extent in extents))
            self.assertTrue(extents[-1]['zero'] and extents[-1]['length'] > 28 * MIB, extents)
        self.assertEqual([], self.exports_left())
        self.assertEqual(self.window, device.window(self.path))
        self.assertEqual(0, image.check(self.path).corruptions)
        with nbd.serve(self.path, window=self.window, read_only=True) as uri:
            self.qemu_img('compare', '-f', 'raw', '-F', 'raw', self.raw, uri)
            with self.assertRaises(subprocess.CalledProcessError):
                self.qemu_img('convert', '-n', '-f', 'raw', '-O', 'raw', self.raw, uri)
        self.assertLess(image.info(self.path).actual_size, 6 * MIB)

    def test_a_snapshot_while_somebody_writes(self) -> None:
        with nbd.serve(self.path, window=self.window) as uri:
            self.qemu_img('convert', '-n', '-f', 'raw', '-O', 'raw', self.raw, uri)
        image.snapshot_create(self.path, 's')
        with nbd.as_file(self.path, window=self.window) as file:
            with open(file, 'r+b') as stream:
                stream.seek(MIB)
                stream.write(b'changed')
                os.fsync(stream.fileno())
            with nbd.as_file(self.path, window=self.window, snapshot='s') as before:
                self.assertEqual(self.raw.read_bytes(), Path(before).read_bytes())
            with self.assertRaises(exception.ToolFailed) as context, nbd.serve(self.path):
                pass
            self.assertIn('is in use', str(context.exception))
        self.assertEqual([], self.exports_left())
        with nbd.as_file(self.path, window=self.window, read_only=True) as after:
            content = Path(after).read_bytes()
            self.assertEqual((32 * MIB, b'changed'), (len(content), content[MIB : MIB + 7]))

    def test_trim_gives_space_back(self) -> None:
        with nbd.serve(self.path, window=self.window) as uri:
            self.qemu_img('convert', '-n', '-f', 'raw', '-O', 'raw', self.raw, uri)
        full = image.info(self.path).actual_size
        with nbd.serve(self.path, window=self.window) as uri:
            subprocess.run(
                ['qemu-io', '-f', 'raw', '-d', 'unmap', '-c', 'discard 0 32M', uri],
                check=True,
                capture_output=True,
            )
        self.assertLess(image.info(self.path).actual_size, full - 2 * MIB)

    def test_what_a_dead_process_left_is_ended(self) -> None:
        directory = str(self.directory / 'export')
        nbd.start(directory, self.path, window=self.window)
        file = nbd.mount(directory)
        self.assertEqual(32 * MIB, os.path.getsize(file))
        nbd.start(directory, self.path)
        self.addCleanup(nbd.stop, directory)
        self.assertEqual(34 * MIB, os.path.getsize(nbd.mount(directory)))
        os.kill(int(Path(directory, 'nbdkit.pid').read_text()), signal.SIGKILL)
        nbd.stop(directory)
        nbd.stop(directory)
        self.assertFalse(os.path.exists(directory))

    def test_what_shows_the_file_was_killed(self) -> None:
        """Its mount stays, and everything under that fails."""
        directory = str(self.directory / 'export')
        for _time in range(2):
            nbd.start(directory, self.path, window=self.window)
            file = nbd.mount(directory)
            descriptor = os.open(file, os.O_RDONLY)
            os.kill(int(Path(directory, 'nbdfuse.pid').read_text()), signal.SIGKILL)
            with self.assertRaises(OSError):
                while os.lstat(os.path.dirname(file)):
                    time.sleep(0.05)
            nbd.stop(directory)
            with contextlib.suppress(OSError):  # it tells of the death, too
                os.close(descriptor)
            self.assertFalse(os.path.lexists(directory))
        self.assertEqual([], self.exports_left())

    def test_what_cannot_be_taken_away(self) -> None:
        directory = self.directory / 'export'
        (directory / 'socket' / 'x').mkdir(parents=True)
        with self.assertRaisesRegex(exception.ExportFailed, 'socket'):
            nbd.stop(str(directory))
        self.assertEqual([], self.exports_left())

    def test_ended_as_soon_as_it_is_served(self) -> None:
        """A daemon's parent ends before the daemon has said who it is; each that nobody ended would
        keep the image.
        """
        directory = str(self.directory / 'export')
        for _ in range(20):
            nbd.start(directory, self.path)
            nbd.stop(directory)
        self.assertEqual([], self.exports_left())

    def test_what_is_served_for_a_process_ends_when_that_is_killed(self) -> None:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with nbd.serve(self.path, window=self.window):
                    (directory,) = self.directory.glob('pcow-nbd-*/export')
                    os.write(writer, Path(directory, 'nbdkit.pid').read_bytes())
                    signal.pause()
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader) as stream:
            served = int(stream.readline())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deadline = time.monotonic() + 10
        while Path(f'/proc/{served}').exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertFalse(Path(f'/proc/{served}').exists())
        self.assertFalse(image.check(self.path).corruptions)  # and nobody holds it

    def test_file_of_a_killed_process_is_collected(self) -> None:
        """Its server, its mount and its directory go with the next conversion; not while somebody
        uses the file.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with nbd.as_file(self.path) as file:
                    os.write(writer, os.fsencode(file) + b'\n')
                    signal.pause()
            finally:
                os._exit(1)
        os.close(writer)
        with open(reader) as stream:
            file = stream.readline().rstrip()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        self.addCleanup(
            subprocess.run,
            ['fusermount3', '-q', '-u', os.path.dirname(file)],
            check=False,
            stderr=subprocess.DEVNULL,
        )
        for path in self.directory.glob('pcow-nbd-*'):
            for one in (path, path / 'export'):
                os.utime(one, (time.time() - 7200,) * 2)
        with open(file, 'rb'):
            nbd.collect()
            self.assertTrue(os.path.exists(file))
        nbd.collect()
        self.assertEqual([], list(self.directory.glob('pcow-nbd-*')))
        self.assertFalse(image.check(self.path).corruptions)  # and nobody holds it

    def test_a_file_in_use_stays(self) -> None:
        directory = str(self.directory / 'export')
        nbd.start(directory, self.path)
        self.addCleanup(nbd.stop, directory)
        with open(nbd.mount(directory), 'rb'):
            with self.assertRaises(exception.ExportFailed):
                nbd.stop(directory)
        nbd.stop(directory)
        self.assertEqual([], self.exports_left())

    def test_other_directories_are_left_alone(self) -> None:
        for directory in (self.directory, self.raw):
            for function in (nbd.stop, lambda directory: nbd.start(directory, self.path)):
                with self.assertRaisesRegex(exception.ExportFailed, 'no directory of an export'):
                    function(str(directory))
        self.assertTrue(self.raw.exists())

    def test_errors(self) -> None:
        with (
            self.assertRaises(exception.ImageNotFound),
            nbd.serve(str(self.directory / 'none.pcow')),
        ):
            pass
        self.raw.write_bytes(b'no image' * 1024)
        with self.assertRaises(exception.ToolFailed), nbd.serve(str(self.raw)):
            pass
        with (
            self.assertRaises(exception.ToolFailed) as context,
            nbd.serve(self.path, snapshot='none'),
        ):
            pass
        self.assertIn("'none'", str(context.exception))
        self.assertEqual([], self.exports_left())


class GuestTest(TestCase):
    """One device, by turns an NVDIMM and an ordinary disk of a guest that knows no NVDIMMs."""

    def test_nvdimm_and_disk(self) -> None:
        kernel = linux_guest.Kernel()
        self.addCleanup(kernel.close)
        path = Path(self.pool.image_path('volume'))
        tree = self.directory / 'tree'
        tree.mkdir()
        (tree / 'file').write_text('made outside')
        self.assertEqual(OFFSET, linux_guest.make_file_system(self.directory, tree, path, '24M'))
        with nbd.serve(str(path), window=device.window(str(path))) as uri:
            disk = (
                '-blockdev',
                f'nbd,node-name=volume,server.type=unix,server.path={uri.partition("=")[2]}',
                '-device',
                'virtio-blk-pci,drive=volume',
            )
            with linux_guest.LinuxGuest(kernel, self.directory, *disk) as guest:
                self.assertIn('no-pmem', guest.run('ls /dev/pmem0 2>/dev/null || echo no-pmem'))
                guest.run('mount -t ext4 /dev/vda /mnt')
                self.assertIn('made outside', guest.run('cat /mnt/file'))
                guest.run('echo on the disk >/mnt/second && sync && umount /mnt')
                guest.quit()
        nvdimm = (
            '-object',
            f'memory-backend-file,id=mem0,mem-path={path},share=on',
            '-device',
            'nvdimm,memdev=mem0,id=nv0',
        )
        with linux_guest.LinuxGuest(kernel, self.directory, *nvdimm) as guest:
            guest.run('mount -t ext4 -o dax=always /dev/pmem0 /mnt')
            self.assertIn('dax=always', guest.run('grep /mnt /proc/mounts'))
            self.assertIn('on the disk', guest.run('cat /mnt/second'))
            self.assertIn(
                str(device.window(str(path), force_share=True).size // 512),
                guest.run('cat /sys/block/pmem0/size'),
            )
            guest.quit()
        self.assertEqual(0, image.check(str(path)).corruptions)
