# SPDX-License-Identifier: Apache-2.0
"""pcowctl and the libvirt hook with the real pcow-img, pcow-io and qemu-img; no virtual machine.

The programs come from PCOW_BIN_DIR or build/bin.
"""

import contextlib
import errno
import json
import os
from pathlib import Path
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any
import unittest
import uuid

from pcow_driver.images import info_block
from tests.functional import long

TOP = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get('PCOW_BIN_DIR') or TOP / 'build/bin').resolve()
HOOK = TOP / 'etc/libvirt/hooks/qemu.d/pcow'
MIB = 1 << 20
OFFSET = 2 * MIB  # of the data in a template with its page map in RAM


class TestCase(unittest.TestCase):
    """A pool on tmpfs with a configuration of its own."""

    def setUp(self) -> None:
        self.assertTrue((BIN / 'pcow-img').exists(), f'{BIN} has no pcow-img: run tools/build')
        self.directory = self._temporary(None)
        self.pool = self._temporary('/dev/shm') / 'pool'
        self.config = self.directory / 'pcow.conf'
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\nconversion_dir = {self.directory}\n'
            f'pcow_img = {BIN}/pcow-img\npcow_io = {BIN}/pcow-io\n'
            f'nbdkit_plugin = {BIN}/nbdkit-pcow-plugin.so\nemulator = {BIN}/qemu-system-x86_64\n'
        )
        self.environment = os.environ | {'PATH': f'{BIN}:{os.environ["PATH"]}'}

    def _temporary(self, parent: str | None) -> Path:
        directory = Path(tempfile.mkdtemp(prefix='pcow-test-', dir=parent))
        self.addCleanup(shutil.rmtree, directory, ignore_errors=True)
        directory.chmod(0o711)
        return directory

    def command(self, *args: object) -> list[str]:
        return [
            sys.executable,
            '-m',
            'pcow_driver.cli.app',
            '--config-file',
            str(self.config),
            *map(str, args),
        ]

    def run_program(
        self, *args: object, exit_code: int = 0, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            list(map(str, args)),
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=TOP,
            stdin=None if 'input' in kwargs else subprocess.DEVNULL,
            timeout=120,
            check=False,
            **kwargs,
        )
        self.assertEqual(exit_code, done.returncode, done)
        return done

    def status(self, *args: object) -> int:
        return subprocess.run(
            list(map(str, args)), env=self.environment, cwd=TOP, capture_output=True, check=False
        ).returncode

    def ctl(self, *args: object) -> str:
        return self.run_program(*self.command(*args)).stdout

    def show(self, *args: object) -> Any:
        return json.loads(self.ctl(*args, '-f', 'json'))

    def fails(self, *args: object) -> str:
        """What pcowctl says in the one line that an error gets."""
        done = self.run_program(*self.command('-q', *args), exit_code=1)
        self.assertEqual('', done.stdout)
        self.assertEqual(1, len(done.stderr.splitlines()), done.stderr)
        return done.stderr

    def make_raw(self, name: str, size: int, **patterns: int) -> Path:
        """A sparse raw file; ``at_OFFSET=BYTE`` writes 64 KiB of that byte."""
        path = self.directory / name
        with open(path, 'wb') as f:
            f.truncate(size)
            for offset, byte in patterns.items():
                f.seek(int(offset.removeprefix('at_')))
                f.write(bytes([byte]) * 65536)
        return path

    def make_qcow2(self, name: str, size: int, **patterns: int) -> Path:
        raw = self.make_raw(name + '.raw', size, **patterns)
        path = self.directory / name
        self.run_program('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', raw, path)
        return path

    def io(self, path: Path, *commands: str, exit_code: int = 0) -> str:
        words = [word for command in commands for word in ('-c', command)]
        done = self.run_program(BIN / 'pcow-io', *words, path, exit_code=exit_code)
        return done.stdout + done.stderr

    def guest_view(self, path: Path) -> bytes:
        raw = self.directory / f'{uuid.uuid4()}.raw'
        self.run_program(BIN / 'pcow-img', 'convert', '-f', 'pcow', '-O', 'raw', path, raw)
        content = raw.read_bytes()
        raw.unlink()
        return content

    def files(self) -> list[str]:
        return sorted(
            name for name in os.listdir(self.pool) if name not in ('.pcow-pool', '.pcow-lock')
        )

    def make_template(self, name: str = 't', size: int = 8 * MIB) -> Path:
        if not self.pool.exists():
            self.ctl('pool', 'create', 'p', self.pool)
        source = self.make_qcow2(f'{name}.qcow2', size, at_0=0x11, at_1048576=0x22)
        self.ctl('template', 'build', source, f'p/{name}', '--source-format', 'qcow2')
        return self.pool / f'{name}.pcow'


class LifeTest(TestCase):
    def test_template_overlay_snapshot_revert_delete(self) -> None:
        made = self.show('pool', 'create', 'p', self.pool)
        self.assertEqual(('volatile', 0), (made['persistence'], made['images']))
        source = self.make_qcow2('source.qcow2', 30 * MIB + 65536, at_0=0x11, at_31457280=0x22)
        built = self.show('template', 'build', source, 'p/debian', '--source-format', 'qcow2')
        self.assertEqual((34 * MIB, True), (built['virtual size'], built['template']))
        self.assertEqual(['debian.pcow'], self.files())
        self.assertEqual(['debian'], [row['name'] for row in self.show('template', 'list')])
        self.assertEqual([], self.show('image', 'list', 'p'))

        vm = self.show('image', 'create', 'p/vm', '--template', 'debian')
        self.assertEqual(
            (34 * MIB, 'debian.pcow', 2), (vm['virtual size'], vm['base'], vm['chain depth'])
        )
        self.assertLess(vm['allocated size'], MIB)
        path = self.pool / 'vm.pcow'
        self.io(
            path,
            f'read -P 0x11 {OFFSET} 64k',
            f'read -P 0x22 {OFFSET + 30 * MIB} 64k',
            f'write -P 0xaa {OFFSET} 4k',
        )
        self.ctl('snapshot', 'create', 'p/vm', 's1')
        self.io(path, f'write -P 0xbb {OFFSET} 64k')
        self.ctl('snapshot', 'create', path, 's2')
        self.assertEqual(
            [('s1', ''), ('s2', 's1')],
            [(row['name'], row['parent']) for row in self.show('snapshot', 'list', 'p/vm')],
        )
        self.ctl('snapshot', 'revert', 'p/vm', 's1')
        self.io(path, f'read -P 0xaa {OFFSET} 4k', f'read -P 0x11 {OFFSET + 4096} 60k')
        self.ctl('snapshot', 'revert', 'p/vm', 's2')
        self.io(path, f'read -P 0xbb {OFFSET} 64k')
        self.ctl('snapshot', 'rename', 'p/vm', 's1', 'first')
        self.ctl('snapshot', 'delete', 'p/vm', 'first')
        self.io(path, f'read -P 0xbb {OFFSET} 64k', f'read -P 0x22 {OFFSET + 30 * MIB} 64k')
        self.assertEqual(['s2'], [row['name'] for row in self.show('snapshot', 'list', 'p/vm')])
        self.assertTrue(self.show('image', 'check', 'p/vm')['clean'])
        self.assertEqual(64 * MIB, self.show('image', 'resize', 'p/vm', '64M')['virtual size'])

        self.assertIn('vm', self.fails('template', 'delete', 'p/debian'))
        self.assertEqual('vm', self.show('template', 'show', 'p/debian')['children'])
        self.assertIn('debian.pcow', self.fails('pool', 'remove', 'p'))
        self.ctl('image', 'delete', 'p/vm')
        self.ctl('template', 'delete', 'p/debian')
        self.ctl('pool', 'remove', 'p')
        self.assertEqual([], os.listdir(self.pool))

    def test_pool_on_an_ordinary_file_system(self) -> None:
        made = self.show('pool', 'create', 'disk', self.directory / 'disk')
        self.assertIn(
            made['persistence'],
            ('page-cache', 'volatile' if _on_tmpfs(self.directory) else 'page-cache'),
        )
        self.assertEqual(
            2 * MIB, self.show('image', 'create', 'disk/a', '--size', '2M')['virtual size']
        )

    def test_forget_and_import(self) -> None:
        self.make_template()
        self.ctl('pool', 'remove', '--forget', 'p')
        self.assertEqual([], self.show('pool', 'list'))
        self.assertEqual(1, self.show('pool', 'import', self.pool, '--name', 'q')['templates'])
        self.ctl('image', 'create', 'q/vm', '--template', 't')

    def test_stand_on_a_snapshot(self) -> None:
        self.make_template()
        self.ctl('image', 'create', 'p/a', '--template', 't')
        self.io(self.pool / 'a.pcow', f'write -P 1 {OFFSET} 4k')
        self.ctl('snapshot', 'create', 'p/a', 'one')
        self.io(self.pool / 'a.pcow', f'write -P 2 {OFFSET} 4k')
        made = self.show('image', 'create', 'p/b', '--template', 'a', '--template-snapshot', 'one')
        self.assertEqual(
            ('a.pcow', 'one', 3), (made['base'], made['base snapshot'], made['chain depth'])
        )
        self.io(self.pool / 'b.pcow', f'read -P 1 {OFFSET} 4k')
        self.assertIn(' b', self.fails('image', 'delete', 'p/a'))

    def test_domain_xml(self) -> None:
        self.make_template()
        self.ctl('image', 'create', 'p/vm', '--template', 't')
        kernel = self.make_raw('vmlinuz', 4096)
        xml = self.ctl(
            'domain-xml',
            'p/vm',
            '--kernel',
            kernel,
            '--type',
            'qemu',
            '--emulator',
            '/opt/qemu',
            '--memory',
            '512M',
        )
        for part in (
            f'<path>{self.pool}/vm.pcow</path>',
            '<size unit="KiB">10240</size>',
            f'<kernel>{kernel}</kernel>',
            '<name>vm</name>',
        ):
            self.assertIn(part, xml)
        self.assertIn(
            'image create',
            self.fails('domain-xml', 'p/t', '--kernel', kernel, '--emulator', '/opt/qemu'),
        )
        self.assertIn(
            '/no/kernel',
            self.fails('domain-xml', 'p/vm', '--kernel', '/no/kernel', '--emulator', '/opt/qemu'),
        )

    def test_domain_xml_with_a_seed(self) -> None:
        self.make_template()
        self.ctl('image', 'create', 'p/vm', '--template', 't')
        kernel, seed = self.make_raw('vmlinuz', 4096), self.directory / 'seed.iso'
        command = ('domain-xml', 'p/vm', '--emulator', '/opt/qemu', '--seed', seed)
        self.assertIn(f'{seed} is no seed for cloud-init', self.fails(*command))
        (self.directory / 'files').mkdir()
        self.run_program(
            'genisoimage', '-quiet', '-o', seed, '-V', 'cidata', self.directory / 'files'
        )
        for options in (('--kernel', kernel), ('--bus', 'virtio')):
            xml = self.ctl(*command, *options)
            self.assertRegex(xml, rf'<source file="{seed}" ?/>')
            self.assertRegex(xml, r'<readonly ?/>')

    def test_domain_xml_with_a_virtio_pmem(self) -> None:
        self.make_template()
        self.ctl('image', 'create', 'p/vm', '--template', 't')
        kernel = self.make_raw('vmlinuz', 4096)
        done = self.run_program(
            *self.command('domain-xml', 'p/vm', '--emulator', '/opt/qemu', '--kernel', kernel),
            *('--device', 'virtio-pmem'),
        )
        self.assertIn('<memory model="virtio-pmem"', done.stdout)
        self.assertEqual('', done.stderr)

    def test_domain_xml_with_the_boot_shim(self) -> None:
        self.make_template()
        self.ctl('image', 'create', 'p/vm', '--template', 't')
        shim = self.directory / 'shim'
        with self.config.open('a') as config:
            config.write(f'boot_shim = {shim}\n')
        command = ('domain-xml', 'p/vm', '--emulator', '/opt/qemu')
        self.assertIn(f'the boot shim {shim} was not found', self.fails(*command))
        shim.mkdir()
        for name in ('kernel', 'initrd'):
            (shim / name).touch()
        xml = self.ctl(*command)
        self.assertIn(f'<kernel>{shim}/kernel</kernel>', xml)
        self.assertIn(f'<initrd>{shim}/initrd</initrd>', xml)
        self.assertIn(' -- swiotlb=noforce<', xml)
        self.assertNotIn(' -- ', self.ctl(*command, '--memory', '4G'))
        self.assertIn(
            ' -- swiotlb=noforce a=b c</cmdline>', self.ctl(*command, '--cmdline', 'a=b c')
        )
        self.assertIn('--kernel', self.fails(*command, '--initrd', shim / 'initrd'))


def _on_tmpfs(path: Path) -> bool:
    return (
        subprocess.run(
            ['stat', '-f', '-c', '%T', path], capture_output=True, text=True, check=True
        ).stdout.strip()
        == 'tmpfs'
    )


class TemplateTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl('pool', 'create', 'p', self.pool)

    def _check_content(self, name: str, raw: Path, page_map: info_block.PageMap) -> None:
        content, source = self.guest_view(self.pool / f'{name}.pcow'), raw.read_bytes()
        offset = info_block.data_offset(len(content), page_map)
        self.assertEqual(
            info_block.InfoBlock(offset, len(content) - offset),
            info_block.parse(
                content[info_block.BLOCK_OFFSET : info_block.BLOCK_OFFSET + info_block.BLOCK_SIZE]
            ),
        )
        self.assertEqual(source, content[offset : offset + len(source)])
        self.assertFalse(
            any(
                content[: info_block.BLOCK_OFFSET]
                + content[info_block.BLOCK_OFFSET + info_block.BLOCK_SIZE : offset]
            )
        )
        self.assertFalse(any(content[offset + len(source) :]))

    def test_content_is_the_source_behind_the_info_block(self) -> None:
        source = self.make_qcow2('s,1.qcow2', 9 * MIB, at_0=1, at_4128768=2, at_9371648=3)
        raw = self.directory / 's,1.qcow2.raw'
        for name, args in (
            ('plain', ()),
            ('large', ('--size', '40M')),
            ('pmem', ('--page-map', 'pmem')),
            ('small-clusters', ('--cluster-size', '4k')),
            ('ä,b c', ()),
        ):
            self.ctl('template', 'build', source, f'p/{name}', '--source-format', 'qcow2', *args)
            self._check_content(
                name, raw, info_block.PageMap.PMEM if name == 'pmem' else info_block.PageMap.RAM
            )
        self.assertEqual(40 * MIB, self.show('template', 'show', 'p/large')['virtual size'])
        self.ctl('template', 'build', raw, 'p/raw', '--source-format', 'raw')
        self._check_content('raw', raw, info_block.PageMap.RAM)

    def test_sparse_stays_sparse(self) -> None:
        source = self.make_qcow2('sparse.qcow2', 1 << 40, at_0=1, at_549755813888=2)
        made = self.show('template', 'build', source, 'p/sparse', '--source-format', 'qcow2')
        self.assertEqual((1 << 40) + OFFSET, made['virtual size'])
        self.assertLess(made['allocated size'], 8 * MIB)

    def test_templates_are_read_only(self) -> None:
        path = self.make_template()
        before = path.read_bytes()
        self.io(path, 'write -P 1 0 4k', exit_code=1)
        self.assertIn('t.pcow', self.fails('snapshot', 'create', 'p/t', 's1'))
        self.assertIn('t.pcow', self.fails('image', 'resize', 'p/t', '100M'))
        self.assertIn('template', self.fails('image', 'delete', 'p/t'))
        self.assertEqual(before, path.read_bytes())

    def test_bad_sources_leave_nothing(self) -> None:
        backed = self.directory / 'backed'
        self.run_program(
            'qemu-img',
            'create',
            '-q',
            '-f',
            'qcow2',
            '-b',
            '/etc/hostname',
            '-F',
            'raw',
            backed,
            '8M',
        )
        good = self.make_qcow2('good.qcow2', 8 * MIB, at_0=1)
        truncated = self.directory / 'truncated'
        truncated.write_bytes(good.read_bytes()[:300000])
        huge = self.directory / 'huge'
        self.run_program('qemu-img', 'create', '-q', '-f', 'qcow2', huge, '20T')
        for source, source_format, args in (
            (backed, 'qcow2', ()),
            (good, 'raw', ()),
            (truncated, 'qcow2', ()),
            (huge, 'qcow2', ()),
            (self.directory / 'missing', 'qcow2', ()),
            (good, 'qcow2', ('--size', '8M')),
            (good, 'qcow2', ('--cluster-size', '5000')),
        ):
            self.fails(
                'template', 'build', source, 'p/bad', '--source-format', source_format, *args
            )
            self.assertEqual([], self.files(), source)
        self.assertEqual([], list(self.directory.glob('pcow-template-*')))

    def test_taken_name(self) -> None:
        path = self.make_template()
        before = path.stat()
        source = self.directory / 't.qcow2'
        self.assertIn(
            'exists already',
            self.fails('template', 'build', source, 'p/t', '--source-format', 'qcow2'),
        )
        self.assertEqual(before, path.stat())

    def test_two_builds_of_one_name(self) -> None:
        source = self.make_qcow2('s.qcow2', 8 * MIB, at_0=1)
        builds = [
            subprocess.Popen(
                self.command('template', 'build', source, 'p/t', '--source-format', 'qcow2'),
                cwd=TOP,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(3)
        ]
        self.assertEqual([0, 1, 1], sorted(build.wait(120) for build in builds))
        self.assertEqual(['t.pcow'], self.files())

    def test_interrupted_build_leaves_nothing(self) -> None:
        content = os.urandom(MIB)
        raw = self.directory / 'big.raw'
        with open(raw, 'wb') as f:
            for _ in range(400):
                f.write(content)
        for number, delay in (
            (signal.SIGINT, 0.0),
            (signal.SIGINT, 0.1),
            (signal.SIGTERM, 0.0),
            (signal.SIGTERM, 0.15),
        ):
            build = subprocess.Popen(
                self.command('template', 'build', raw, 'p/t', '--source-format', 'raw'),
                cwd=TOP,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            self._wait_until(lambda: any(self.directory.glob('pcow-template-*/*')))
            time.sleep(delay)
            build.send_signal(number)
            _stdout, stderr = build.communicate(timeout=60)
            self.assertEqual(128 + number, build.returncode, stderr)
            self.assertEqual([], self.files())
            self.assertEqual([], list(self.directory.glob('pcow-template-*')))

    def test_build_after_a_killed_one(self) -> None:
        (self.pool / '.t.pcow.part').write_bytes(b'what a killed build left')
        self.make_template()
        self.assertEqual(['t.pcow'], self.files())

    def _wait_until(self, condition: Any) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)


class BadCasesTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.make_template()
        self.ctl('image', 'create', 'p/vm', '--template', 't')
        self.path = self.pool / 'vm.pcow'

    def test_sizes_are_rounded_up_as_pcow_img_does(self) -> None:
        said = 'image size 3145728 rounded up to 4194304, a multiple of 2 MiB'
        words = ('image', 'create', 'p/x', '--size', '3M', '-f', 'json')
        done = self.run_program(*self.command(*words))
        self.assertEqual(f'note: {said}\n', done.stderr)
        self.assertEqual(4 * MIB, json.loads(done.stdout)['virtual size'])
        made = self.run_program(BIN / 'pcow-img', 'create', self.pool / 'y.pcow', '3M')
        self.assertEqual(f'pcow-img: note: {said}\n', made.stderr)
        quiet = self.run_program(*self.command('-q', 'image', 'resize', 'p/x', '5.5M'))
        self.assertEqual('', quiet.stderr)
        self.assertEqual(6 * MIB, self.show('image', 'show', 'p/x')['virtual size'])
        source = self.make_raw('odd.raw', 4 * MIB, at_0=0x11)
        done = self.run_program(
            *self.command('template', 'build', source, 'p/odd', '--source-format', 'raw'),
            *('--size', '9M'),
        )
        self.assertIn('rounded up to 10485760', done.stderr)

    def test_a_template_of_its_pool(self) -> None:
        made = self.show('image', 'create', 'p/x', '--template', 'p/t')
        self.assertEqual('t.pcow', made['base'])
        self.assertIn('not in the pool', self.fails('image', 'create', 'p/y', '--template', 'q/t'))

    def test_names_and_sizes(self) -> None:
        self.assertIn('exists already', self.fails('image', 'create', 'p/vm', '--template', 't'))
        for size, message in (('1GB', 'write 1G or 1GiB'), ('-2M', 'write 2M'), ('0', 'is zero')):
            done = self.run_program(
                *self.command('image', 'create', 'p/x', '--size', size), exit_code=2
            )
            self.assertIn(message, done.stderr)
        self.assertIn('needs a size', self.fails('image', 'create', 'p/x'))
        self.assertIn('no image', self.fails('image', 'create', 'p/x', '--template', 'nosuch'))
        self.assertIn(
            'nosuch',
            self.fails(
                'image', 'create', 'p/x', '--template', 't', '--template-snapshot', 'nosuch'
            ),
        )
        for name in ('.x', '-x/', 'a/b', '..', 'x' * 250):
            self.fails('image', 'create', f'p/{name}', '--size', '2M')
        self.ctl('snapshot', 'create', 'p/vm', 's1')
        self.assertIn('s1', self.fails('snapshot', 'create', 'p/vm', 's1'))
        for command in ('revert', 'delete'):
            self.assertIn('nosuch', self.fails('snapshot', command, 'p/vm', 'nosuch'))
        self.assertEqual(['t.pcow', 'vm.pcow'], self.files())

    def test_an_image_that_somebody_writes_to(self) -> None:
        writer = subprocess.Popen(
            [BIN / 'pcow-io', self.path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            self._wait_for_lock(writer)
            for command in (
                ('snapshot', 'create', 'p/vm', 's1'),
                ('image', 'delete', 'p/vm'),
                ('image', 'resize', 'p/vm', '100M'),
            ):
                self.assertIn('vm.pcow', self.fails(*command))
            self.assertEqual('vm', self.show('image', 'list', 'p')[0]['name'])
            self.assertEqual([], self.show('snapshot', 'list', 'p/vm'))
            self.assertEqual('', self.show('image', 'list', 'p')[0]['problem'])
        finally:
            writer.communicate(b'quit\n', timeout=60)
        self.ctl('snapshot', 'create', 'p/vm', 's1')

    def _wait_for_lock(self, writer: subprocess.Popen[bytes]) -> None:
        """Until it has locked the image. Trying to open it as well would be in its way, and it
        would give up.
        """
        deadline = time.monotonic() + 60
        while writer.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):  # one that it closes meanwhile
                if any(
                    '\nlock:' in info.read_text()
                    for info in Path(f'/proc/{writer.pid}/fdinfo').iterdir()
                ):
                    return
            time.sleep(0.02)
        self.fail('pcow-io takes no lock')

    def test_damaged_image(self) -> None:
        with open(self.path, 'r+b') as f:
            f.truncate(4096 // 2)
        (row,) = self.show('image', 'list', 'p')
        self.assertIn('vm.pcow', row['problem'])
        self.assertEqual('vm', self.show('pool', 'show', 'p')['unreadable'])
        self.assertIn('vm', self.fails('template', 'delete', 'p/t'))
        self.assertIn('vm.pcow', self.fails('image', 'delete', 'p/vm'))
        self.assertIn(self.status(*self.command('image', 'check', 'p/vm')), (1, 2))
        self.ctl('image', 'delete', '--force', 'p/vm')
        self.ctl('template', 'delete', 'p/t')

    def test_missing_base(self) -> None:
        (self.pool / 't.pcow').unlink()
        self.assertIn('t.pcow', self.fails('snapshot', 'create', 'p/vm', 's1'))
        self.ctl('image', 'delete', 'p/vm')

    def test_create_and_delete_race(self) -> None:
        """Whoever comes first: an image never loses the template that it was made on."""
        for turn in range(30 if long.LONG else 3):
            self.make_template(f'r{turn}')
            commands = (
                ('image', 'create', f'p/c{turn}', '--template', f'r{turn}'),
                ('template', 'delete', f'p/r{turn}'),
            )
            racers = [
                subprocess.Popen(
                    self.command(*words),
                    cwd=TOP,
                    env=self.environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for words in commands
            ]
            created, deleted = (racer.wait(120) == 0 for racer in racers)
            self.assertNotEqual(created, deleted)
            self.assertEqual(created, (self.pool / f'r{turn}.pcow').exists())
            self.assertEqual(created, (self.pool / f'c{turn}.pcow').exists())


class HookTest(TestCase):
    """libvirt's call, with a chain of three files that only root may read."""

    def setUp(self) -> None:
        super().setUp()
        self.make_template()
        self.ctl('image', 'create', 'p/middle', '--template', 't')
        self.ctl('image', 'create', 'p/vm', '--template', 'middle')
        for path in self.pool.glob('*.pcow'):
            path.chmod(0o600)
        self.user = pwd.getpwnam('nobody')

    def _hook(self, path: object, exit_code: int = 0) -> str:
        xml = (
            f"<domain><devices><memory "
            f"model='nvdimm'><source><path>{path}</path></source></memory></devices>"
            f"<seclabel type='static' "
            f"model='dac'><label>+{self.user.pw_uid}:+{self.user.pw_gid}</label></seclabel></domain>"
        )
        done = self.run_program(
            '/usr/bin/python3',
            '-I',
            HOOK,
            'vm',
            'prepare',
            'begin',
            '-',
            exit_code=exit_code,
            input=xml,
        )
        return done.stderr

    def _readable(self, name: str) -> bool:
        """Whether the user may read the file, tried as that user, who is in QEMU's group and so
        passes the directory.
        """
        code = 'import sys; open(sys.argv[1], "rb").read(1)'
        done = subprocess.run(
            ['/usr/bin/python3', '-I', '-c', code, self.pool / name],
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            extra_groups=['kvm'],
            capture_output=True,
            check=False,
            cwd='/',
        )
        return done.returncode == 0

    def test_bases_become_readable_and_nothing_else(self) -> None:
        self.ctl('image', 'create', 'p/other', '--size', '2M')
        (self.pool / 'other.pcow').chmod(0o600)
        self.assertFalse(self._readable('t.pcow'))
        self.assertEqual('', self._hook(self.pool / 'vm.pcow'))
        self.assertEqual(
            {'t.pcow': True, 'middle.pcow': True, 'vm.pcow': False, 'other.pcow': False},
            {name: self._readable(name) for name in self.files()},
        )

    def test_a_base_that_is_a_link(self) -> None:
        secret = self.directory / 'secret'
        shutil.copy(self.pool / 't.pcow', secret)
        secret.chmod(0o600)
        (self.pool / 't.pcow').unlink()
        (self.pool / 't.pcow').symlink_to(secret)
        error = self._hook(self.pool / 'vm.pcow', exit_code=1)
        self.assertEqual(1, len(error.splitlines()), error)
        with self.assertRaises(OSError) as caught:
            os.getxattr(secret, 'system.posix_acl_access')
        self.assertEqual(errno.ENODATA, caught.exception.errno)

    def test_missing_image(self) -> None:
        self.assertIn('gone.pcow', self._hook(self.pool / 'gone.pcow', exit_code=1))


if __name__ == '__main__':
    unittest.main()
