# SPDX-License-Identifier: Apache-2.0
"""Volumes of images and images of volumes; the image service is a directory, everything else is
real.
"""

import hashlib
import os
from pathlib import Path
import subprocess
from typing import Any
import uuid as uuidlib

from cinder import exception
from cinder import privsep
from cinder.image import image_utils

from pcow_driver.common import units
from pcow_driver.health import scrub
from tests.unit.cinder_pcow import base
from tests.unit.pcow_driver import base as pcow_base

MIB = units.MIB


class ImageService:
    """What the driver uses of cinder.image.glance.GlanceImageService."""

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self.directory.mkdir()
        self.images: dict[str, dict[str, Any]] = {}
        self.downloads = 0
        self.temp_images: Any = None

    def add(self, path: Path, disk_format: str, **values: Any) -> dict[str, Any]:
        data = path.read_bytes()
        image_id = str(uuidlib.uuid4())
        (self.directory / image_id).write_bytes(data)
        self.images[image_id] = {
            'id': image_id,
            'disk_format': disk_format,
            'container_format': 'bare',
            'size': len(data),
            'status': 'active',
            'checksum': hashlib.md5(data, usedforsecurity=False).hexdigest(),
            'properties': {},
            'min_disk': 0,
            **values,
        }
        return self.images[image_id]

    def show(self, _context: Any, image_id: str) -> dict[str, Any]:
        return self.images[image_id]

    def download(self, _context: Any, image_id: str, data: Any = None) -> None:
        self.downloads += 1
        data.write((self.directory / image_id).read_bytes())

    def update(
        self, _context: Any, image_id: str, _meta: Any, data: Any = None, **_kwargs: Any
    ) -> None:
        with open(self.directory / image_id, 'wb') as f:
            while chunk := data.read(1 << 20):
                f.write(chunk)


class ImagesTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.service = ImageService(os.path.join(self.directory, 'glance'))
        # we are root, so nothing needs a daemon that is
        privsep.sys_admin_pctxt.set_client_mode(False)
        self.addCleanup(privsep.sys_admin_pctxt.set_client_mode, True)

    def raw(self, size: int = 16 * MIB) -> Path:
        path = Path(self.directory, 'disk.raw')
        with open(path, 'wb') as f:
            f.truncate(size)
            f.seek(MIB)
            f.write(b'\x11' * 65536)
        return path

    def qcow2(self, size: int = 16 * MIB, *options: str) -> Path:
        path = Path(self.directory, 'disk.qcow2')
        subprocess.run(
            ['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', *options, self.raw(size), path],
            check=True,
        )
        return path

    def clone(self, meta: dict[str, Any], **values: Any) -> Any:
        volume = self.record(**values)
        self.assertEqual(
            (None, True), self.driver.clone_image(self.context, volume, None, meta, self.service)
        )
        return volume

    def test_the_second_volume_of_an_image_reads_nothing(self) -> None:
        for meta in (self.service.add(self.qcow2(), 'qcow2'), self.service.add(self.raw(), 'raw')):
            self.service.downloads = 0
            volumes = [self.clone(meta), self.clone(meta, size=3)]
            self.assertEqual(1, self.service.downloads)
            for volume in volumes:
                self.check_content(
                    volume, {0: 0, MIB: 0x11, 16 * MIB: 0, volume.size * units.GIB - 65536: 0}
                )
                self.assertEqual(2, self.info(volume).chain_depth)
                self.assertLess(self.info(volume).actual_size, MIB)
                self.driver.delete_volume(volume)
        self.assertEqual([True] * 2, [name.startswith('image-') for name in self.files()])

    def test_each_pool_has_its_template(self) -> None:
        meta = self.service.add(self.qcow2(), 'qcow2')
        self.check_content(self.clone(meta), {MIB: 0x11})
        self.check_content(self.clone(meta, pool='two'), {MIB: 0x11}, pool='two')
        self.assertEqual(2, self.service.downloads)

    def refused(self, meta: dict[str, Any], *words: str) -> None:
        error = self.assertRaises(
            exception.ImageUnacceptable,
            self.driver.clone_image,
            self.context,
            self.record(),
            None,
            meta,
            self.service,
        )
        for word in words:
            self.assertIn(word, str(error))
        self.assertEqual([], self.files())

    def test_hostile_uploads(self) -> None:
        secret = Path(self.directory, 'secret')
        secret.write_bytes(b'\x77' * MIB)
        path = Path(self.directory, 'hostile')
        subprocess.run(
            [
                'qemu-img',
                'create',
                '-q',
                '-f',
                'qcow2',
                '-u',
                '-b',
                secret,
                '-F',
                'raw',
                path,
                '16M',
            ],
            check=True,
        )
        self.refused(self.service.add(path, 'qcow2'), 'backing_file')
        self.refused(self.service.add(path, 'raw'), 'it was given as raw and holds qcow2')
        path.unlink()
        subprocess.run(
            [
                'qemu-img',
                'create',
                '-q',
                '-f',
                'qcow2',
                '-o',
                f'data_file={path}.data,data_file_raw=on',
                path,
                '16M',
            ],
            check=True,
        )
        self.refused(self.service.add(path, 'qcow2'), 'data_file')
        subprocess.run(['qemu-img', 'create', '-q', '-f', 'vmdk', path, '16M'], check=True)
        self.refused(self.service.add(path, 'vmdk'), 'qcow2 or raw')
        self.refused(self.service.add(path, 'qcow2'), 'holds vmdk')
        path.write_bytes(self.qcow2().read_bytes()[:100000])
        self.refused(self.service.add(path, 'qcow2'), 'not complete')

    def test_pcow_uploads_are_refused(self) -> None:
        volume = self.volume()
        meta = self.service.add(Path(self.path(volume)), 'pcow')
        self.driver.delete_volume(volume)
        self.refused(meta, 'qcow2 or raw')

    def test_a_small_file_of_a_huge_disk(self) -> None:
        path = Path(self.directory, 'huge')
        subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', path, '8T'], check=True)
        self.refused(self.service.add(path, 'qcow2'), '8192 GiB')

    def test_too_large_for_the_volume_also_when_the_template_is_there(self) -> None:
        meta = self.service.add(self.qcow2(units.GIB + 2 * MIB), 'qcow2')
        self.clone(meta, size=2)
        error = self.assertRaises(
            exception.ImageUnacceptable,
            self.driver.clone_image,
            self.context,
            self.record(),
            None,
            meta,
            self.service,
        )
        self.assertIn('choose a size of 2 GiB', str(error))

    def test_conversion_may_be_forbidden(self) -> None:
        self.flags(image_conversion_disable=True)
        meta = self.service.add(self.qcow2(), 'qcow2')
        self.assertRaises(
            exception.ImageConversionNotAllowed,
            self.driver.clone_image,
            self.context,
            self.record(),
            None,
            meta,
            self.service,
        )
        self.clone(self.service.add(self.raw(), 'raw'))

    def test_what_cinder_has_to_fetch_itself(self) -> None:
        for values in ({'container_format': 'compressed'}, {'properties': {'img_signature': 'x'}}):
            self.assertEqual(
                (None, False),
                self.driver.clone_image(
                    self.context,
                    self.record(),
                    None,
                    self.service.add(self.raw(), 'raw', **values),
                    self.service,
                ),
            )
        self.mock_object(image_utils, 'verify_glance_image_signature', return_value=True)
        volume = self.volume()
        self.driver.copy_image_to_volume(
            self.context, volume, self.service, self.service.add(self.qcow2(), 'qcow2')['id']
        )
        self.check_content(volume, {0: 0, MIB: 0x11, 16 * MIB: 0})

    def test_another_image_in_a_volume_that_has_data(self) -> None:
        """Reimage, and Nova's rebuild of a server whose root is a volume: nothing of the old data
        is left, as in a new volume.
        """
        volume = self.volume()
        filled = (0, MIB, 8 * MIB, 16 * MIB, units.GIB - 65536)
        for offset in filled:
            self.write(volume, offset, 0x55)
        for meta in (self.service.add(self.raw(), 'raw'), self.service.add(self.qcow2(), 'qcow2')):
            self.driver.copy_image_to_volume(
                self.context, volume, self.service, meta['id'], disable_sparse=True
            )
            self.check_content(volume, dict.fromkeys(filled, 0) | {MIB: 0x11})
            self.write(volume, 8 * MIB, 0x55)
        self.assertLess(self.info(volume).actual_size, 16 * MIB)
        # Cinder's own copy, of reimage from a snapshot for instance, would leave out zeros as well
        self.assertIs(False, self.driver.get_volume_stats(refresh=True)['sparse_copy_volume'])

    def test_image_of_a_volume(self) -> None:
        volume = self.volume()
        self.write(volume, MIB, 0x22)
        # a guest may write any header to its disk: the bytes stay bytes
        header = self.qcow2().read_bytes()[:65536]
        self.io(self.path(volume), f'write -q -P 0 {2 << 20} 65536')
        source = Path(self.directory, 'header')
        source.write_bytes(header)
        self.io(self.path(volume), f'write -q -s {source} {2 << 20} 65536')
        for disk_format in ('raw', 'qcow2'):
            meta = {
                'id': f'upload-{disk_format}',
                'disk_format': disk_format,
                'container_format': 'bare',
            }
            self.driver.copy_volume_to_image(self.context, volume, self.service, meta)
            path = self.service.directory / meta['id']
            output = subprocess.run(
                ['qemu-img', 'info', '-f', disk_format, '--output=json', path],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
            self.assertIn(f'"virtual-size": {units.GIB}', output)
            raw = Path(self.directory, 'again')
            subprocess.run(
                ['qemu-img', 'convert', '-f', disk_format, '-O', 'raw', path, raw], check=True
            )
            with open(raw, 'rb') as f:
                self.assertEqual(header, f.read(65536))
                f.seek(MIB)
                self.assertEqual(b'\x22' * 65536, f.read(65536))
        self.assertEqual((), self.info(volume).snapshots)

    def test_image_of_a_volume_on_a_damaged_template(self) -> None:
        """Glance would have it with a checksum that says it is whole."""
        volume = self.clone(self.service.add(self.raw(), 'raw'))
        (template,) = (name for name in self.files() if name.startswith('image-'))
        path = self.pools['one'].existing_path(template.removesuffix('.pcow'))
        pcow_base.flip(path)
        meta = {'id': 'upload', 'disk_format': 'raw', 'container_format': 'bare'}
        upload = self.driver.copy_volume_to_image
        error = self.assertRaises(
            exception.VolumeBackendAPIException, upload, self.context, volume, self.service, meta
        )
        self.assertIn(f'{path} is damaged (the 2 MiB from guest byte 0', str(error))
        self.assertFalse((self.service.directory / 'upload').exists())
        scrub.accept(self.pools['one'], template.removesuffix('.pcow'))
        upload(self.context, volume, self.service, meta)
        self.assertEqual(units.GIB, (self.service.directory / 'upload').stat().st_size)
