# SPDX-License-Identifier: Apache-2.0
"""What ``pcowctl image export`` wrote goes back in by each documented way, and a guest finds its
file system where its kernel looks: behind the one info block.
"""

from pathlib import Path
import shutil
import struct
import subprocess
import uuid

from pcow_driver.images import info_block
from tests.functional import linux_guest
from tests.functional import test_pcowctl
from tests.functional.test_pcowctl import BIN
from tests.functional.test_pcowctl import MIB

_SIZE = 16 * MIB


def _forged(offset: int) -> bytes:
    """An info block with a right checksum that lets the data begin somewhere else."""
    block = bytearray(info_block.info_block(_SIZE, info_block.PageMap.RAM, uuid.uuid4()))
    block[56:64] = struct.pack('<Q', offset)
    block[-8:] = bytes(8)
    return bytes(block[:-8]) + struct.pack('<Q', info_block.fletcher64(bytes(block)))


class _ExportCase(test_pcowctl.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl('pool', 'create', 'p', self.pool)
        tree = self.directory / 'tree'
        tree.mkdir()
        (tree / 'etc').mkdir()
        (tree / 'etc/hostname').write_text('web1\n')
        disk = self.directory / 'disk.raw'
        self.run_program('mkfs.ext4', '-q', '-b', '4096', '-d', tree, disk, '16M')
        self.ctl('template', 'build', disk, 'p/debian', '--source-format', 'raw')

    def make_image(self, template: str = 'debian') -> Path:
        self.ctl('image', 'create', 'p/web1', '--template', template)
        path = self.pool / 'web1.pcow'
        # a guest's own file: in the last block, which the file system does not use yet
        at = self.view(path)[0] + _SIZE - 65536
        self.io(path, f'write -P 7 {at} 64k')
        return path

    def view(self, path: Path) -> tuple[int, bytes]:
        """Where a guest's kernel finds /dev/pmem0, and what it finds there."""
        content = self.guest_view(path)
        at = info_block.BLOCK_OFFSET
        found = info_block.parse(content[at : at + info_block.BLOCK_SIZE])
        assert found is not None
        data = content[found.data_offset :]
        self.assertEqual(len(data), found.data_size)
        return found.data_offset, data

    def assert_boots(self, name: str, expected: bytes) -> None:
        _offset, data = self.view(self.pool / f'{name}.pcow')
        self.assertTrue(expected == data[:_SIZE], f'{name} has other data')
        file = self.directory / 'pmem0'
        file.write_bytes(data)
        said = self.run_program('debugfs', '-R', 'cat /etc/hostname', file).stdout
        self.assertEqual('web1\n', said)

    def exported(self, image_format: str) -> Path:
        path = self.directory / f'web1.{image_format}'
        self.ctl('image', 'export', '--format', image_format, 'p/web1', path)
        return path

    def build(self, source: Path, name: str, *more: object, image_format: str) -> None:
        self.ctl('template', 'build', source, f'p/{name}', '--source-format', image_format, *more)
        self.ctl('image', 'create', f'p/{name}-vm', '--template', name)


class ExportsReturnTest(_ExportCase):
    def test_a_template_of_an_export(self) -> None:
        image = self.make_image()
        offset, data = self.view(image)
        for image_format in ('qcow2', 'raw'):
            source = self.exported(image_format)
            self.build(source, image_format, image_format=image_format)
            self.assert_boots(f'{image_format}-vm', data)
            again = self.view(self.pool / f'{image_format}.pcow')
            self.assertTrue((offset, data) == again, 'no byte more, and none less')
            self.build(
                source,
                f'{image_format}2',
                '--page-map',
                'pmem',
                '--size',
                '64M',
                image_format=image_format,
            )
            self.assert_boots(f'{image_format}2-vm', data)

    def test_a_page_map_in_front_of_the_data_is_left_out(self) -> None:
        self.ctl(
            'template',
            'build',
            self.directory / 'disk.raw',
            'p/large',
            '--source-format',
            'raw',
            '--page-map',
            'pmem',
            '--size',
            '256M',
        )
        image = self.make_image('large')
        offset, data = self.view(image)
        self.assertGreater(offset, info_block.OFFSET)
        self.build(self.exported('qcow2'), 'again', image_format='qcow2')
        self.assert_boots('again-vm', data[:_SIZE])
        self.assertEqual(info_block.OFFSET, self.view(self.pool / 'again-vm.pcow')[0])

    def test_convert(self) -> None:
        _offset, data = self.view(self.make_image())
        for image_format in ('qcow2', 'raw'):
            source = self.exported(image_format)
            for name, base in ((f'whole-{image_format}', ()), ('thin', ('-B', 'debian.pcow'))):
                target = self.pool / f'{name}.pcow'
                self.run_program(
                    BIN / 'pcow-img',
                    'convert',
                    '-f',
                    image_format,
                    '-O',
                    'pcow',
                    *base,
                    source,
                    target,
                )
                self.assert_boots(name, data)
            (self.pool / 'thin.pcow').unlink()

    def test_a_template_that_is_copied_into_the_pool(self) -> None:
        _offset, data = self.view(self.make_image())
        shutil.copy(self.exported('pcow'), self.pool / 'restored.pcow')
        self.ctl('image', 'create', 'p/restored-vm', '--template', 'restored')
        self.assert_boots('restored-vm', data)

    def test_send_and_receive(self) -> None:
        _offset, data = self.view(self.make_image())
        stream = self.directory / 'stream'
        with stream.open('wb') as file:
            subprocess.run(
                self.command('image', 'send', 'p/web1'),
                stdout=file,
                env=self.environment,
                cwd=test_pcowctl.TOP,
                check=True,
            )
        with stream.open('rb') as file:
            subprocess.run(
                self.command('image', 'receive', 'p/arrived'),
                stdin=file,
                env=self.environment,
                cwd=test_pcowctl.TOP,
                check=True,
            )
        self.assert_boots('arrived', data)

    def test_an_info_block_that_pcow_does_not_write(self) -> None:
        """Whoever has the device can write it: it decides about nothing that pcow would not do."""
        for offset, message in (
            (4 * MIB, 'where pcow puts none'),
            (info_block.OFFSET + 4096, 'where pcow puts none'),
            (0, 'where pcow puts none'),
            (_SIZE, 'where pcow puts none'),
        ):
            self.assertIn(message, self.refused(offset), str(offset))
        self.assertEqual(['debian.pcow'], self.files())

    def refused(self, offset: int) -> str:
        source = self.directory / 'forged.raw'
        with source.open('wb') as file:
            file.truncate(_SIZE)
            file.seek(info_block.BLOCK_OFFSET)
            file.write(_forged(offset))
        return self.fails('template', 'build', source, 'p/x', '--source-format', 'raw')


class BootTest(_ExportCase):
    """A guest's kernel finds its root file system in what came back."""

    def nvdimm(self, number: int, name: str) -> tuple[str, ...]:
        path = self.pool / f'{name}.pcow'
        return (
            '-object',
            f'memory-backend-file,id=mem{number},mem-path={path},share=on',
            '-device',
            f'nvdimm,memdev=mem{number},id=nv{number}',
        )

    def test_roots(self) -> None:
        self.make_image()
        for image_format in ('qcow2', 'raw'):
            self.build(self.exported(image_format), image_format, image_format=image_format)
        kernel = linux_guest.Kernel()
        self.addCleanup(kernel.close)
        devices = [
            word
            for number, name in enumerate(('qcow2-vm', 'raw-vm'))
            for word in self.nvdimm(number, name)
        ]
        with linux_guest.LinuxGuest(kernel, self.directory, *devices) as guest:
            for device in ('pmem0', 'pmem1'):
                guest.run(f'mount -t ext4 -o dax=always /dev/{device} /mnt')
                self.assertIn('web1', guest.run('cat /mnt/etc/hostname'), device)
                guest.run('umount /mnt')
            guest.quit()
