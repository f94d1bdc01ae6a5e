# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.virt import boot
from tests.unit.pcow_driver import base


class ShimTest(base.TestCase):
    def _make(self, place: Path) -> Path:
        place.mkdir(parents=True)
        for name in ('kernel', 'initrd'):
            (place / name).touch()
        return place

    def test_a_path(self) -> None:
        place = self._make(self.directory / 'shim')
        self.configure(boot_shim=str(place))
        start = boot.shim()
        self.assertEqual((f'{place}/kernel', f'{place}/initrd'), (start.kernel, start.initrd))
        self.assertEqual(boot.SHIM_CMDLINE, start.cmdline)

    def test_a_name_is_looked_for_in_the_checkout(self) -> None:
        place = self._make(self.directory / 'build/share/pcow-boot-shim')
        built = [self.directory / 'build/bin']
        with mock.patch.object(tool, 'build_dirs', return_value=built):
            self.assertEqual(f'{place}/kernel', boot.shim().kernel)

    def test_words_go_to_the_guest(self) -> None:
        self.configure(boot_shim=str(self._make(self.directory / 'shim')))
        self.assertEqual(f'{boot.SHIM_CMDLINE} -- a=b c', boot.shim('a=b c').cmdline)

    def test_half_of_one_is_none(self) -> None:
        place = self._make(self.directory / 'shim')
        os.unlink(place / 'initrd')
        self.configure(boot_shim=str(place))
        error = self.assertRaises(exception.BootShimMissing, boot.shim)
        self.assertEqual(
            f'the boot shim {place} was not found: build it (tools/build), set [pcow] boot_shim to '
            'its directory, or bring a kernel beside the image (--kernel; of an image in Glance '
            'the properties kernel_id and ramdisk_id)',
            str(error),
        )


class MemoryTest(base.TestCase):
    def test_words(self) -> None:
        self.assertEqual('swiotlb=noforce', boot.memory_options(2815 * units.MIB))
        self.assertEqual('', boot.memory_options(2816 * units.MIB))
