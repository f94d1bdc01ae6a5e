# SPDX-License-Identifier: Apache-2.0
"""What a guest writes in front of its data decides about nothing; pool, images and tools
are real.
"""

import os
from pathlib import Path
import struct

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.templates import template
from tests.unit.pcow_driver import base

MIB, GIB = units.MIB, units.GIB


class GuestWritesTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(
            pcow_img=str(programs / 'pcow-img'),
            pcow_io=str(programs / 'pcow-io'),
            nbdkit_plugin=str(programs / 'nbdkit-pcow-plugin.so'),
        )
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))

    def write(self, path: str, offset: int, size: int) -> None:
        """What a guest that has the image as its NVDIMM can store at byte 4096."""
        block = info_block._FIELDS.pack(
            info_block.SIGNATURE,
            b'\1' * 16,
            bytes(16),
            0,
            1,
            4,
            offset,
            size // units.PAGE_SIZE,
            1,
            0,
            0,
            info_block.ALIGNMENT,
            units.PAGE_SIZE,
            64,
        ).ljust(info_block.BLOCK_SIZE, b'\0')
        source = self.directory / 'block'
        source.write_bytes(block[:-8] + struct.pack('<Q', info_block.fletcher64(block)))
        tool.run(
            tool.find('pcow_io'),
            '--no-map',
            '-c',
            f'write -q -f -s {source} {info_block.BLOCK_OFFSET} {info_block.BLOCK_SIZE}',
            path,
        )

    def make_template(self, name: str, page_map: info_block.PageMap) -> str:
        source = self.directory / 'source'
        source.write_bytes(b'\x5a' * 4096)
        os.truncate(source, 256 * MIB)
        return template.build(self.pool, name, str(source), 'raw', page_map=page_map)

    def check_refused(self, name: str) -> None:
        path = self.pool.existing_path(name)
        before = image.info(path).virtual_size
        size = (before - info_block.OFFSET) * 2
        for call in (
            lambda: device.window(path),
            lambda: device.grow(path, size),
            lambda: device.extend(self.pool, name, size),
            lambda: clone.copy(path, self.pool, 'copy', size),
        ):
            self.assertRaisesRegex(exception.DeviceInvalid, 'pcow puts none', call)
        image.snapshot_create(path, 's')
        self.assertRaisesRegex(
            exception.DeviceInvalid,
            'pcow puts none',
            clone.on_base,
            self.pool,
            name,
            self.pool,
            'clone',
            size,
            max_chain=8,
            snapshot='s',
        )
        self.assertEqual(before, image.info(path).virtual_size)

    def test_offset_of_a_volume(self) -> None:
        path = device.create(self.pool, 'volume-1', GIB)
        for offset in (
            GIB,
            4 * MIB,
            info_block.data_offset(GIB + info_block.OFFSET, info_block.PageMap.PMEM),
            0,
            4096,
            3 * MIB,
        ):
            self.write(path, offset, 2 * MIB)
            if offset == GIB:
                self.check_refused('volume-1')
            self.assertRaises(exception.DeviceInvalid, device.window, path)
        device.write_info_block(path, GIB + info_block.OFFSET)  # as it was
        device.extend(self.pool, 'volume-1', 2 * GIB)
        self.assertEqual(2 * GIB + info_block.OFFSET, image.info(path).virtual_size)

    def test_offset_of_a_volume_that_cinder_calls_otherwise(self) -> None:
        self.configure(volume_name_template='ours_%s')
        name = 'ours_0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
        path = device.create(self.pool, name, GIB)
        self.write(path, 4 * MIB, 2 * MIB)
        self.assertRaises(exception.DeviceInvalid, device.window, path)

    def test_offset_of_a_server(self) -> None:
        self.make_template('image-1', info_block.PageMap.RAM)
        path = device.create_on(self.pool, 'server-1-root', 'image-1', data_size=GIB)
        self.write(path, info_block.data_offset(256 * MIB, info_block.PageMap.PMEM), 2 * MIB)
        self.check_refused('server-1-root')

    def test_offset_of_a_clone_of_what_is_deleted(self) -> None:
        """What it stands on is sealed, and a guest has written to it before."""
        path = device.create(self.pool, 'volume-1', GIB)
        image.snapshot_create(path, 's')
        cloned = clone.on_base(
            self.pool, 'volume-1', self.pool, 'volume-2', GIB, max_chain=8, snapshot='s'
        )
        self.write(path, 16 * MIB, 2 * MIB)
        self.write(cloned, 16 * MIB, 2 * MIB)
        image.seal(path)
        self.assertRaises(exception.DeviceInvalid, device.window, cloned)

    def test_size(self) -> None:
        """A smaller one does not make the image larger at the next growth, nor a clone of it."""
        path = device.create(self.pool, 'volume-1', GIB)
        self.write(path, info_block.OFFSET, 2 * MIB)
        self.assertEqual(device.Window(info_block.OFFSET, GIB), device.window(path))
        self.assertRaises(exception.InvalidSize, device.grow, path, 4 * MIB)
        device.grow(path, GIB)
        self.assertEqual(
            (GIB + info_block.OFFSET, GIB), (image.info(path).virtual_size, self.told(path))
        )
        self.write(path, info_block.OFFSET, 2 * MIB)
        image.snapshot_create(path, 's')
        cloned = clone.on_base(
            self.pool, 'volume-1', self.pool, 'volume-2', GIB, max_chain=8, snapshot='s'
        )
        self.assertEqual(
            (GIB + info_block.OFFSET, GIB), (image.info(cloned).virtual_size, self.told(cloned))
        )

    def told(self, path: str) -> int:
        """The bytes of data that a guest finds."""
        return device._look(path)[1]

    def test_size_of_a_snapshot(self) -> None:
        path = device.create(self.pool, 'volume-1', 8 * MIB)
        image.snapshot_create(path, 's')
        device.grow(path, 32 * MIB)
        self.assertEqual(8 * MIB, device.window(path, snapshot='s').size)
        self.assertEqual(32 * MIB, device.window(path).size)

    def test_page_map_in_the_template(self) -> None:
        """The offset is that of the template, also where it was made before, and in
        copies of it.
        """
        self.make_template('t', info_block.PageMap.PMEM)
        offset = info_block.data_offset(
            image.info(self.pool.existing_path('t')).virtual_size, info_block.PageMap.PMEM
        )
        self.assertEqual(3 * info_block.ALIGNMENT, offset)
        path = device.create_on(self.pool, 'volume-1', 't')
        device.extend(self.pool, 'volume-1', GIB)
        self.assertEqual(
            (device.Window(offset, GIB), offset + GIB),
            (device.window(path), image.info(path).virtual_size),
        )
        self.write(path, offset + 2 * MIB, 2 * MIB)
        self.check_refused('volume-1')

    def test_more_than_it_was_given(self) -> None:
        """Where the data begin is asked of what nobody writes to."""
        self.make_template('t', info_block.PageMap.PMEM)
        alone = device.create(self.pool, 'volume-1', GIB)
        above = device.create_on(self.pool, 'volume-2', 't', data_size=GIB)
        for path, offset in ((alone, info_block.OFFSET), (above, 3 * info_block.ALIGNMENT)):
            device.check_size(path, GIB, 'o', 'W')
            self.write(path, GIB, 2 * MIB)  # as if most of it lay in front of its data
            image.snapshot_create(path, 's')
            image.resize(path, offset + GIB + 2 * MIB)
            device.check_size(path, GIB, 'o', 'W', snapshot='s')
            device.check_size(path, GIB + 2 * MIB, 'o', 'W')
            error = self.assertRaises(
                exception.DeviceTooLarge, device.check_size, path, GIB, 'o', 'Way out'
            )
            self.assertEqual(
                f'{path} says that it holds 1026 MiB of data, and o gives 1 GiB: a QEMU that was '
                'taken over can write that, and what was cut off or resized by hand can leave it. '
                'Way out, or give up what is beyond: pcowctl image resize --shrink '
                f'{path} {offset + GIB}',
                str(error),
            )

    def test_copy_of_one_with_a_page_map(self) -> None:
        """It has its data where a volume has them, as nothing but the template could tell
        otherwise.
        """
        self.make_template('t', info_block.PageMap.PMEM)
        path = device.create_on(self.pool, 'volume-1', 't')
        device.check_movable(path)  # it stands on the template
        copy = clone.copy(path, self.pool, 'volume-2', 512 * MIB)
        self.assertEqual(device.Window(info_block.OFFSET, 512 * MIB), device.window(copy))
        tool.run(
            tool.find('pcow_io'),
            '-r',
            '-c',
            f'read -q -P 0x5a {info_block.OFFSET} 4096',
            '-c',
            f'read -q -P 0 {info_block.OFFSET + 4096} 511M',
            copy,
        )
        self.assertIsNone(image.info(copy).base_filename)
        self.assertRaises(exception.InvalidSize, clone.copy, path, self.pool, 'volume-3', 2 * MIB)

    def test_made_by_an_operator(self) -> None:
        """Its own block is believed as far as a page map reaches, and not as a volume."""
        path = self.pool.create_image('mine', size=GIB)
        most = info_block.data_offset(GIB, info_block.PageMap.PMEM)
        self.write(path, most, 2 * MIB)
        self.assertEqual(device.Window(most, GIB - most), device.window(path))
        self.assertRaisesRegex(exception.DeviceInvalid, 'page-map', device.check_movable, path)
        self.write(path, most + 2 * MIB, 2 * MIB)
        self.assertRaises(exception.DeviceInvalid, device.window, path)
