# SPDX-License-Identifier: Apache-2.0
"""The images of test_boot_matrix as ordinary disks (``--bus virtio``): firmware, BIOS or UEFI,
starts their own boot loader, whatever their file system. With --long; test_virtio_disk boots one by
BIOS in every run.
"""

from __future__ import annotations

import re

from tests.functional import domain_case
from tests.functional import long
from tests.functional import test_boot_matrix
from tools.lib.quickstart import boot_matrix

Image = boot_matrix.Image
BOOT_SECONDS = 600


@long.only_long
class BootFirmwareTest(domain_case.DomainTestCase):
    def boots(self, image: Image, firmware: str) -> None:
        tree = boot_matrix.prepare(self.cache, image.suite)
        releases = boot_matrix.releases(tree)
        disk = self.run_.directory / 'disk'
        boot_matrix.make(image, tree, disk)
        self.make_image(disk, 'raw')
        disk.unlink()
        self.start_daemon()
        name = self.define('disk', '--bus', 'virtio', '--firmware', firmware)
        self.virsh('start', name)
        # systemd-boot has been told of one kernel, and update-grub finds them all
        release = releases[-1] if image.loader.startswith('grub') else releases[0]
        number = 1 if (image.table, image.loader) == ('dos', 'grub-pc') else 2
        kind = image.file_system.partition('-')[0]
        with domain_case.Console(self.virsh('dumpxml', name)) as console:
            console.expect(
                rb'pcow-guest: boot 1 of %s on /dev/vda%d / %s '
                % (re.escape(release.encode()), number, kind.encode()),
                BOOT_SECONDS,
            )
            console.expect(rb'pcow-ready\r?\n', domain_case.COMMAND_SECONDS)
            console.run('echo kept >/root/note; sync')
            self.assertEqual(
                'efi' if firmware == 'efi' else 'bios',
                console.run('if [ -d /sys/firmware/efi ]; then echo efi; else echo bios; fi'),
            )

    def test_trixie_gpt_grub_pc_xfs_reflink(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-pc', 'xfs-reflink'), 'bios')

    def test_trixie_dos_grub_pc_ext4_unaligned(self) -> None:
        self.boots(Image('trixie', 'dos', 'grub-pc', 'ext4', 63), 'bios')

    def test_bookworm_gpt_grub_pc_btrfs(self) -> None:
        self.boots(Image('bookworm', 'gpt', 'grub-pc', 'btrfs'), 'bios')

    def test_trixie_gpt_grub_efi_ext4(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-efi', 'ext4', test_boot_matrix.ESP_ENDS), 'efi')

    def test_trixie_gpt_grub_efi_btrfs(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-efi', 'btrfs', test_boot_matrix.ESP_ENDS), 'efi')

    def test_trixie_gpt_uki_xfs(self) -> None:
        self.boots(Image('trixie', 'gpt', 'uki', 'xfs', test_boot_matrix.ESP_ENDS), 'efi')

    def test_bookworm_gpt_systemd_boot_ext4(self) -> None:
        self.boots(
            Image('bookworm', 'gpt', 'systemd-boot', 'ext4', test_boot_matrix.ESP_ENDS), 'efi'
        )
