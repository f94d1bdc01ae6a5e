# SPDX-License-Identifier: Apache-2.0
"""pcowctl template build --align: what was in the partitions is in them, and the largest one begins
at a multiple of 2 MiB.
"""

import hashlib
import json
from pathlib import Path
import random
import subprocess
from typing import Any

from tests.functional import test_pcowctl
from tests.functional.images import MIB

SECTOR = 512
SIZE = 40 * MIB
GPT = """label: gpt
size=8192, type=21686148-6449-6E6F-744E-656564454649
size=10240, type=U
size=2048
size={0}, name=root
"""
# up to the second table, which is shorter where there are few entries
ROOT = 22528  # where it begins
LONG = GPT.format(SIZE // SECTOR - 33 - ROOT)
SHORT = GPT.format(SIZE // SECTOR - 2 - ROOT).replace('gpt', 'gpt\ntable-length: 4')
MBR = """label: dos
size=8192, type=83
bootable, type=83
"""


class AlignTest(test_pcowctl.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl('pool', 'create', 'p', self.pool)

    def sfdisk(self, path: Path, script: str) -> None:
        subprocess.run(('/sbin/sfdisk', '-q', path), input=script, text=True, check=True)

    def make_disk(self, script: str, size: int = SIZE) -> Path:
        """Of random bytes to its end, but for some in the middle."""
        path = self.directory / 'disk.raw'
        data = random.Random(script).randbytes(size // 2)
        path.write_bytes(data)
        with path.open('r+b') as file:
            file.truncate(size)
            file.seek(size - MIB)
            file.write(data[:MIB])
            file.seek(0)
            file.write(bytes(MIB // 2))
        self.sfdisk(path, script)
        return path

    def table(self, path: Path) -> dict[str, Any]:
        words = ('/sbin/sfdisk', '--json', path)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        self.assertEqual('', done.stderr)
        table: dict[str, Any] = json.loads(done.stdout)['partitiontable']
        return table

    def partitions(self, path: Path, disk: bytes) -> list[tuple[dict[str, Any], str]]:
        """What the table says of each but where it begins, and a hash of what is in it."""
        found = []
        for one in self.table(path)['partitions']:
            start, length = one.pop('start') * SECTOR, one['size'] * SECTOR
            one['node'] = one['node'].removeprefix(str(path))
            found.append((one, hashlib.sha256(disk[start : start + length]).hexdigest()))
        return found

    def build(self, source: Path, source_format: str, *options: str) -> Path:
        """The disk that a guest of the template sees."""
        words = ('template', 'build', source, 'p/t', '--source-format', source_format)
        self.ctl(*words, '--align', *options)
        disk = self.directory / 'guest.raw'
        view = self.guest_view(self.pool / 't.pcow')
        disk.write_bytes(view[test_pcowctl.OFFSET :])
        self.ctl('template', 'delete', 'p/t')
        return disk

    def check(self, source: Path, made: Path, distance: int) -> None:
        """:param made: not longer than the disk; the table of GPT ends with it"""
        size = source.stat().st_size + distance
        with made.open('r+b') as file:
            file.truncate(size)
        starts = [one['start'] for one in self.table(made)['partitions']]
        self.assertEqual(0, starts[-1] * SECTOR % (2 * MIB))
        before = self.table(source)['partitions'][-1]['start']
        self.assertEqual(distance, (starts[-1] - before) * SECTOR)
        self.assertEqual(
            self.partitions(source, source.read_bytes()), self.partitions(made, made.read_bytes())
        )

    def test_tables(self) -> None:
        for script in (LONG, SHORT, MBR):
            with self.subTest(script.partition('\nsize')[0]):
                source = self.make_disk(script)
                start = self.table(source)['partitions'][-1]['start'] * SECTOR
                distance = -start % (2 * MIB)
                self.assertNotEqual(0, distance)
                self.check(source, self.build(source, 'raw'), distance)
                compressed = self.directory / 'disk.qcow2'
                words = ('qemu-img', 'convert', '-c', '-f', 'raw', '-O', 'qcow2')
                self.run_program(*words, source, compressed)
                self.check(source, self.build(compressed, 'qcow2'), distance)

    def test_a_sector_that_dax_could_not_take(self) -> None:
        source = self.make_disk('label: dos\nstart=63, type=83\n')
        self.check(source, self.build(source, 'raw'), 2 * MIB - 63 * SECTOR)

    def test_what_is_well_stays_as_it_is(self) -> None:
        for script in ('label: gpt\nstart=4096\n', None):
            source = self.make_disk(script or MBR)
            if script is None:  # no table: a bare file system
                with source.open('r+b') as file:
                    file.write(bytes(SECTOR))
            made = self.build(source, 'raw').read_bytes()
            self.assertTrue(source.read_bytes() == made)

    def test_an_export(self) -> None:
        source = self.make_disk(LONG)
        self.ctl('template', 'build', source, 'p/first', '--source-format', 'raw')
        exported = self.directory / 'exported.qcow2'
        self.ctl('image', 'export', 'p/first', exported, '--format', 'qcow2')
        start = self.table(source)['partitions'][-1]['start'] * SECTOR
        self.check(source, self.build(exported, 'qcow2'), -start % (2 * MIB))

    def test_many_entries(self) -> None:
        """Their list ends behind 17 KiB."""
        source = self.make_disk('label: gpt\ntable-length: 512\nsize=10000\nname=root\n')
        start = self.table(source)['partitions'][-1]['start'] * SECTOR
        self.check(source, self.build(source, 'raw'), -start % (2 * MIB))

    def refused(self) -> str:
        said = self.fails(
            *('template', 'build', self.directory / 'disk.raw', 'p/t', '--align'),
            *('--source-format', 'raw'),
        )
        self.assertEqual([], self.show('template', 'list'))
        self.assertEqual([], list(self.directory.glob('pcow-template-*')))
        return said

    def patch(self, path: Path, offset: int, data: bytes) -> None:
        with path.open('r+b') as file:
            file.seek(offset)
            file.write(data)

    def test_what_cannot_be_moved(self) -> None:
        self.make_disk('label: gpt\nstart=2048, size=65536\nstart=69632, size=4096\n')
        said = self.refused()
        self.assertIn('partition 1 cannot be moved', said)
        self.assertIn('not the last one on the disk', said)
        disk = self.make_disk('label: dos\nstart=2047, type=83\n')
        self.patch(disk, 446 + 12, (1 << 31).to_bytes(4, 'little'))  # its sectors
        self.assertIn('where no partition can be', self.refused())
        # one that holds the table itself, as on a disk that is a CD-ROM as well
        disk = self.make_disk('label: dos\nstart=2048, size=4096\nstart=9313, type=83\n')
        self.patch(disk, 446 + 8, bytes(4))
        self.assertIn('where no partition can be', self.refused())

    def test_what_is_not_seen_as_a_whole(self) -> None:
        disk = self.make_disk(LONG)
        self.patch(disk, SECTOR, bytes(SECTOR))  # there is a second one, at the end
        self.assertIn('no GPT that is whole', self.refused())
        disk = self.make_disk(LONG)
        # where others look
        slot = b'\0\0\0\0\x83\0\0\0' + (2048).to_bytes(4, 'little') * 2
        self.patch(disk, 446 + 16, slot)
        self.assertIn('an MBR beside the GPT', self.refused())
        self.make_disk('label: dos\nsize=4096\ntype=5\nstart=10241, type=83\n')
        self.assertIn('an extended one', self.refused())
