# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
import subprocess
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.virt import seed
from tests.unit.pcow_driver import base


class SeedTest(base.TestCase):
    def _iso(self, label: str) -> Path:
        files, image = self.directory / 'files', self.directory / 'seed.iso'
        files.mkdir(exist_ok=True)
        (files / 'meta-data').write_text('instance-id: web1\n')
        subprocess.run(
            ['genisoimage', '-quiet', '-o', image, '-V', label, '-J', '-r', files], check=True
        )
        return image

    def _fat(self, label: str, kind: str) -> Path:
        """A boot sector as that of mkfs.fat 4.2."""
        image, sector = self.directory / 'seed.fat', bytearray(512)
        place = 71 if kind == 'FAT32' else 43
        sector[place : place + 19] = f'{label:11}{kind:8}'.encode()
        sector[510:] = b'\x55\xaa'
        image.write_bytes(sector + bytes(1 << 20))
        return image

    def _refused(self, path: Path, words: str) -> None:
        error = self.assertRaises(exception.SeedInvalid, seed.check, str(path))
        self.assertIn(f'{path} is no seed for cloud-init: ', str(error))
        self.assertIn(words, str(error))

    def test_iso_9660(self) -> None:
        for label in ('cidata', 'CIDATA', 'config-2'):
            seed.check(str(self._iso(label)))

    def test_fat(self) -> None:
        for kind in ('FAT12', 'FAT16', 'FAT32'):
            seed.check(str(self._fat('CIDATA', kind)))
            self._refused(self._fat('CiData', kind), 'label cidata or config-2')

    def test_other_labels(self) -> None:
        self._refused(self._iso('CDROM'), 'label cidata or config-2')
        self._refused(self._iso('cidata2'), 'label cidata or config-2')

    def test_no_file_system(self) -> None:
        for content in (b'', b'#cloud-config\n', b'QFI\xfb' + bytes(65536), bytes(1 << 20)):
            path = self.directory / 'file'
            path.write_bytes(content)
            self._refused(path, 'it has no file system')

    def test_no_regular_file(self) -> None:
        path = self.directory / 'fifo'
        os.mkfifo(path)
        self._refused(path, 'it is no regular file')
        self._refused(self.directory, 'it is no regular file')
        self._refused(self.directory / 'none', 'No such file or directory')

    def test_the_guest_only_reads_it(self) -> None:
        self.assertEqual(
            '<disk type="file" device="disk"><driver name="qemu" type="raw" />'
            '<source file="/seeds/a &amp; b.iso" /><target dev="vdb" bus="virtio" /><readonly />'
            '</disk>',
            ET.tostring(seed.to_element('/seeds/a & b.iso', 'vdb'), encoding='unicode'),
        )
