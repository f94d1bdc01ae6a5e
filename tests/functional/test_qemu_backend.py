# SPDX-License-Identifier: Apache-2.0
"""The memory backend inside the real QEMU: options, QMP, snapshots, a full pool. What a guest does
is in test_main_job.py.
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import platform
import re
import shutil
import struct
import subprocess
import tempfile

import testtools

from tests.functional import images
from tests.functional import qemu

SIZE = 64 * images.MIB
_RAM = 128 * images.MIB  # of qemu.Qemu
_DUMPED = 64 * images.MIB
_PT_LOAD = 1
DEVICE = ('-device', 'nvdimm,memdev=mem0,id=nv0')


def backend(path: Path, more: str = '') -> tuple[str, ...]:
    return ('-object', f'memory-backend-file,id=mem0,mem-path={path},share=on{more}', *DEVICE)


def tool(name: str, *arguments: object) -> str:
    return subprocess.run(
        [images.program(name), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=images.TIMEOUT,
        check=True,
    ).stdout


def default_engine() -> str:
    """Of an image in DRAM, without KVM."""
    release = tuple(int(number) for number in re.findall(r'\d+', platform.release())[:2])
    return 'minor' if release >= (5, 19) else 'signal'


def segments(core: bytes) -> Iterator[tuple[int, bytes]]:
    """Guest address and content of the memory in a dump (ELF64, see elf(5))."""
    (program_headers,) = struct.unpack_from('<Q', core, 32)
    size, count = struct.unpack_from('<HH', core, 54)
    for number in range(count):
        kind, _flags, offset, _virtual, physical, in_file = struct.unpack_from(
            '<IIQQQQ', core, program_headers + number * size
        )
        if kind == _PT_LOAD:
            yield physical, core[offset : offset + in_file]


class QemuTestCase(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(
            tempfile.mkdtemp(prefix='pcow-test-', dir=os.environ.get('PCOW_TEST_DIR', '/dev/shm'))
        )
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)
        self.image = self.directory / 'vm.pcow'

    def overlay(self) -> None:
        """An image on a base that is full of 0x5a."""
        base = self.directory / 'base.pcow'
        tool('pcow-img', 'create', '-q', base, SIZE)
        tool('pcow-io', '-c', f'write -q -P 0x5a 0 {SIZE}', base)
        tool('pcow-img', 'seal', base)
        tool('pcow-img', 'create', '-q', '-b', base, self.image)


class MemoryTest(QemuTestCase):
    def test_stores_go_to_the_image_and_not_to_its_base(self) -> None:
        self.overlay()
        before = images.digest(self.directory / 'base.pcow')
        for engine in ('signal', 'minor', 'auto'):
            with qemu.Qemu(
                self.directory, *backend(self.image, f',prealloc=on,pcow-engine={engine}')
            ) as vm:
                address = vm.address('nv0')
                self.assertEqual(0, address % images.SLAB)
                self.assertEqual(b'\x5a' * 64, vm.read(address + 5000, 64))
                vm.write(address + 4090, f'over a border, {engine}'.encode())
                (info,) = vm.qmp('query-pcow')
                self.assertEqual(engine if engine == 'signal' else default_engine(), info['engine'])
                self.assertEqual(
                    ['vm.pcow', 'base.pcow'], [Path(name).name for name in info['chain']]
                )
                # prealloc, which libvirt always asks for, must not copy the base
                self.assertLess(info['data-size'], images.MIB)
                vm.quit()
            tool('pcow-img', 'check', self.image)
            text = tool('pcow-io', '-r', '-c', 'read -v 4090 32', self.image)
            self.assertIn('over a border'[:10], text)
        self.assertEqual(before, images.digest(self.directory / 'base.pcow'))

    def test_dump(self) -> None:
        """The kernel loads from RAM that is an image: from slabs that nobody has touched yet, and
        beside scattered stores.
        """
        base = self.directory / 'base.pcow'
        tool('pcow-img', 'create', '-q', base, _RAM)
        tool('pcow-io', '-c', f'write -q -P 0x5a {_DUMPED} {images.SLAB}', base)
        tool('pcow-img', 'seal', base)
        for copy_on_read in ('off', 'on'):
            self.image.unlink(missing_ok=True)
            tool(
                'pcow-img',
                'create',
                '-q',
                '-o',
                f'copy_on_read={copy_on_read}',
                '-b',
                base,
                self.image,
            )
            core = self.directory / 'core'
            with qemu.Qemu(
                self.directory,
                '-object',
                f'memory-backend-file,id=mem0,mem-path={self.image},share=on,size={_RAM}',
                '-machine',
                'memory-backend=mem0',
            ) as vm:
                for cluster in range(40):  # of a guest that does not fill what it begins
                    vm.write(_DUMPED + 4 * images.SLAB + cluster * 3 * 65536, b'sparse')
                for cluster in (3, 9, 20, 26):
                    vm.write(_DUMPED + images.SLAB + cluster * 65536, b'own')
                vm.qmp(
                    'dump-guest-memory',
                    paging=False,
                    protocol=f'file:{core}',
                    begin=_DUMPED,
                    length=2 * images.SLAB,
                )
                vm.quit()
            ((address, content),) = segments(core.read_bytes())
            self.assertEqual((_DUMPED, 2 * images.SLAB), (address, len(content)))
            expected = bytearray(b'\x5a' * images.SLAB + bytes(images.SLAB))
            for cluster in (3, 9, 20, 26):
                expected[images.SLAB + cluster * 65536 : images.SLAB + cluster * 65536 + 3] = b'own'
            self.assertEqual(bytes(expected), content)
            tool('pcow-img', 'check', self.image)

    def test_dump_beside_snapshots(self) -> None:
        """It loads in a thread that is not held while the pages change their owner."""
        tool('pcow-img', 'create', '-q', self.image, _RAM)
        pipe = self.directory / 'core'
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        with qemu.Qemu(
            self.directory,
            '-object',
            f'memory-backend-file,id=mem0,mem-path={self.image},share=on,size={_RAM}',
            '-machine',
            'memory-backend=mem0',
        ) as vm:
            vm.qmp('pcow-snapshot-create', id='mem0', name='s')
            vm.qmp('dump-guest-memory', paging=False, protocol=f'file:{pipe}', detach=True)
            for command, arguments in (
                ('create', {'name': 't'}),
                ('revert', {'name': 's'}),
                ('delete', {'name': 's'}),
            ):
                self.assertIn(
                    'is being dumped',
                    vm.qmp_error(f'pcow-snapshot-{command}', id='mem0', **arguments),
                )
            while vm.qmp('query-dump')['status'] == 'active':
                with contextlib.suppress(BlockingIOError):
                    while os.read(reader, 1 << 20):
                        pass
            self.assertEqual('completed', vm.qmp('query-dump')['status'])
            vm.qmp('pcow-snapshot-create', id='mem0', name='t')
            vm.quit()
        tool('pcow-img', 'check', self.image)

    def test_killed_and_started_again(self) -> None:
        tool('pcow-img', 'create', '-q', self.image, SIZE)
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            vm.write(vm.address('nv0') + images.MIB, b'stays')
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            self.assertEqual(b'stays', vm.read(vm.address('nv0') + images.MIB, 5))
            vm.quit()
        tool('pcow-img', 'check', self.image)


class SnapshotTest(QemuTestCase):
    def rename_error(self, vm: qemu.Qemu, name: str, new_name: str) -> str:
        return vm.qmp_error(
            'pcow-snapshot-rename', **{'id': 'mem0', 'name': name, 'new-name': new_name}
        )

    def test_live_create_revert_delete(self) -> None:
        self.overlay()
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            address = vm.address('nv0')
            vm.write(address, b'one')
            self.assertGreater(vm.qmp('pcow-snapshot-create', id='mem0', name='first')['pause'], 0)
            vm.write(address, b'two')
            vm.write(address + 9 * images.MIB, b'two')
            self.assertIn('first', vm.qmp_error('pcow-snapshot-create', id='mem0', name='first'))
            self.assertEqual('running', vm.qmp('query-status')['status'])
            vm.qmp_error('pcow-snapshot-revert', id='mem0', name='first')
            self.assertEqual(b'two', vm.read(address, 3))
            vm.qmp('stop')
            self.assertIn(
                'nowhere', vm.qmp_error('pcow-snapshot-revert', id='mem0', name='nowhere')
            )
            vm.qmp('pcow-snapshot-revert', id='mem0', name='first')
            self.assertEqual(b'one', vm.read(address, 3))
            self.assertEqual(b'\x5a' * 3, vm.read(address + 9 * images.MIB, 3))
            vm.qmp('cont')
            vm.write(address, b'six')
            vm.qmp('pcow-snapshot-create', id='mem0', name='second')
            self.assertIn("'second' already", self.rename_error(vm, 'first', 'second'))
            self.assertIn("no snapshot 'third'", self.rename_error(vm, 'third', 'fourth'))
            self.assertIn('cannot be the name', self.rename_error(vm, 'first', ''))
            vm.qmp('pcow-snapshot-rename', **{'id': 'mem0', 'name': 'first', 'new-name': 'erster'})
            self.assertEqual('running', vm.qmp('query-status')['status'])
            (info,) = vm.qmp('query-pcow')
            self.assertEqual(
                ['erster', 'second'], [snapshot['name'] for snapshot in info['snapshots']]
            )
            vm.qmp('pcow-snapshot-delete', id='mem0', name='second')
            vm.qmp('pcow-snapshot-delete', id='mem0', name='erster')
            self.assertEqual(b'six', vm.read(address, 3))
            (info,) = vm.qmp('query-pcow')
            self.assertEqual([], info['snapshots'])
            vm.qmp_error('pcow-snapshot-create', id='other', name='x')
            vm.quit()
        tool('pcow-img', 'check', self.image)


class RefusalTest(QemuTestCase):
    def setUp(self) -> None:
        super().setUp()
        tool('pcow-img', 'create', '-q', self.image, SIZE)

    def assert_refused(self, expected: str, *arguments: str) -> None:
        before = images.digest(self.image)
        message = qemu.refused(*arguments)
        self.assertIn(expected, message)
        self.assertIn(self.image.name, message)
        self.assertEqual(before, images.digest(self.image))

    def test_options(self) -> None:
        name = f'memory-backend-file,id=mem0,mem-path={self.image}'
        self.assert_refused('share=on', '-object', f'{name},share=off', *DEVICE)
        self.assert_refused('size', '-object', f'{name},share=on,size=32M', *DEVICE)
        self.assert_refused('offset', '-object', f'{name},share=on,offset=4096', *DEVICE)

    def test_second_writer(self) -> None:
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            self.assertIn('in use', qemu.refused(*backend(self.image)))
            vm.quit()

    def test_damaged_image(self) -> None:
        images.patch(self.image, 520, b'\xff')
        self.assert_refused('damaged', *backend(self.image))

    def test_never_on_content_alone(self) -> None:
        other = self.directory / 'vm.raw'
        self.image.rename(other)
        with qemu.Qemu(self.directory, *backend(other, f',size={other.stat().st_size}')) as vm:
            self.assertEqual([], vm.qmp('query-pcow'))
            vm.quit()
        with qemu.Qemu(self.directory, *backend(other, ',format=pcow')) as vm:
            self.assertEqual(1, len(vm.qmp('query-pcow')))
            vm.quit()

    def test_foreign_content_under_our_name(self) -> None:
        self.image.write_bytes(b'QFI\xfb' + bytes(images.SLAB))
        self.assert_refused('pcow', *backend(self.image))


class PoolTest(QemuTestCase):
    """A pool of 8 MiB."""

    def setUp(self) -> None:
        super().setUp()
        self.pool = self.directory / 'pool'
        self.pool.mkdir()
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=8m', 'pcow-test', self.pool], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', self.pool], check=True)
        self.image = self.pool / 'vm.pcow'
        tool('pcow-img', 'create', '-q', self.image, SIZE)

    def grow(self) -> None:
        subprocess.run(['mount', '-o', 'remount,size=128m', self.pool], check=True)

    def shrink(self) -> None:
        subprocess.run(['mount', '-o', 'remount,size=8m', self.pool], check=True)


class FullPoolTest(PoolTest):
    def test_a_device_is_told_and_nothing_is_lost(self) -> None:
        """A store on behalf of a device cannot wait: it fails, with an event, and QEMU goes on."""
        with qemu.Qemu(self.directory, *backend(self.image)) as vm:
            address = vm.address('nv0')
            for offset in range(0, SIZE, 4096):
                vm.write(address + offset, (offset + 1).to_bytes(8, 'little'))
            failed = vm.wait_event('PCOW_ERROR')
            self.assertEqual('mem0', failed['id'])
            self.assertIn('No space left', failed['error'])
            for offset in range(0, failed['offset'], 4096):
                self.assertEqual((offset + 1).to_bytes(8, 'little'), vm.read(address + offset, 8))
            self.assertEqual(bytes(8), vm.read(address + failed['offset'], 8))
            self.grow()
            for offset in range(failed['offset'], SIZE, 4096):
                vm.write(address + offset, (offset + 1).to_bytes(8, 'little'))
            for offset in range(0, SIZE, 4096):
                self.assertEqual((offset + 1).to_bytes(8, 'little'), vm.read(address + offset, 8))
            vm.quit()
        tool('pcow-img', 'check', self.image)


class LowSpaceTest(PoolTest):
    def low(self, vm: qemu.Qemu) -> bool:
        return bool(vm.qmp('query-pcow')[0]['pool-low'])

    def test_event_comes_while_there_is_space(self) -> None:
        """Below the watermark, and again above it; whoever took the space."""
        with qemu.Qemu(self.directory, *backend(self.image, ',pcow-low=50')) as vm:
            self.assertFalse(self.low(vm))
            for offset in range(0, 5 * images.MIB, 4096):
                vm.write(vm.address('nv0') + offset, b'x')
            event = vm.wait_event('PCOW_POOL_LOW')
            self.assertEqual(
                ('mem0', True, 50, 8 * images.MIB),
                (event['id'], event['low'], event['watermark'], event['size']),
            )
            self.assertGreater(event['free'], 0)
            self.assertLess(event['free'], 4 * images.MIB)
            self.assertTrue(self.low(vm))
            self.assertIsNone(vm.take_event('PCOW_POOL_FULL'))
            self.grow()
            self.assertFalse(vm.wait_event('PCOW_POOL_LOW')['low'])
            self.assertFalse(self.low(vm))
            # another file in the pool
            (self.pool / 'other').write_bytes(bytes(70 * images.MIB))
            self.assertTrue(vm.wait_event('PCOW_POOL_LOW')['low'])
            vm.quit()
            assert vm.process.stderr is not None
            said = vm.process.stderr.read()
        self.assertRegex(
            said,
            r"warning: pcow image '.*vm\.pcow': \d MiB of 8 MiB are free in its pool, less than 50 "
            r"%",
        )
        self.assertIn('the guest waits when nothing is', said)

    def test_warning_of_stores_that_will_fail(self) -> None:
        with qemu.Qemu(self.directory, *backend(self.image, ',pcow-low=100,pcow-full=fail')) as vm:
            self.assertTrue(vm.wait_event('PCOW_POOL_LOW')['low'])
            vm.quit()
            assert vm.process.stderr is not None
            said = vm.process.stderr.read()
        self.assertIn("the guest's stores fail when nothing is", said)
        self.assertNotIn('waits', said)

    def test_watermark_may_be_changed_while_it_runs(self) -> None:
        with qemu.Qemu(self.directory, *backend(self.image, ',pcow-low=0')) as vm:
            for value in (100, 0, 100):  # the image holds some of it from the start
                vm.qmp('qom-set', path='/objects/mem0', property='pcow-low', value=value)
                self.assertEqual(
                    value, vm.qmp('qom-get', path='/objects/mem0', property='pcow-low')
                )
                self.assertEqual(
                    (value > 0, value),
                    (lambda e: (e['low'], e['watermark']))(vm.wait_event('PCOW_POOL_LOW')),
                )
            self.assertIn(
                'percentage',
                vm.qmp_error('qom-set', path='/objects/mem0', property='pcow-low', value=101),
            )
            vm.quit()
        self.assertIn('percentage', qemu.refused(*backend(self.image, ',pcow-low=101')))
