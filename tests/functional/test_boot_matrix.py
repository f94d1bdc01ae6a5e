# SPDX-License-Identifier: Apache-2.0
"""Images of Debian with the boot loaders, partition tables and file systems of images for clouds
boot from an NVDIMM through the boot shim, which says what of DAX the root cannot have.

The rows that differ most are in every run, the others with --long.
"""

from __future__ import annotations

from tests.functional import boot_guest
from tests.functional import long
from tools.lib.quickstart import boot_matrix

Image = boot_matrix.Image
MIB = boot_matrix.MIB
ESP_ENDS = 200 * MIB  # two kernels with their initrds, or unified images, fit in front
# what the shim says about the root
SMALL = rb'the root on pmem0p\d is mapped in pages of 4 KiB'
UNALIGNED = rb'without DAX: the partition does not begin at a multiple of 4 KiB'
REFLINK = rb'without DAX: XFS with reflink has none in a partition'
BTRFS = rb'without DAX: btrfs has none'


class BootMatrixTest(boot_guest.BootTestCase):
    def boots(
        self,
        image: Image,
        words: bytes = b'',
        partition: int = 2,
        upgrade: str = '',
        align: bool = False,
    ) -> None:
        """
        :param words: what the shim says, as a pattern: without any, the root has DAX and says none
        :param upgrade: a command in the guest that makes the newest kernel the next one
        :param align: as ``pcowctl template build --align``
        """
        tree = boot_matrix.prepare(self.cache, image.suite)
        releases = boot_matrix.releases(tree)
        disk = self.directory / 'disk'
        boot_matrix.make(image, tree, disk)
        self.make_image_of(disk, 'raw', align=align)
        disk.unlink()
        said = words or rb'\A(?!.*the root on)'
        # systemd-boot has been told of one kernel, and update-grub finds them all
        with self.start(ready=rb'(?s)%s.*pcow-ready\r?\n' % said) as vm:
            self.assertEqual(
                releases[-1] if image.loader.startswith('grub') else releases[0],
                vm.run('uname -r').strip(),
            )
            mount = vm.run('grep " / " /proc/mounts')
            kind = image.file_system.partition('-')[0]
            self.assertRegex(mount, f'^/dev/pmem0p{partition} / {kind} ')
            check = self.assertIn if words in (b'', SMALL) else self.assertNotIn
            check('dax=always', mount)
            if upgrade:
                self.assertLess(1, len(releases))
                vm.send(upgrade.format(new=releases[-1]))
                text, status = vm.result(boot_guest.SLOW)
                self.assertEqual(0, status, text)
            self.stop(vm)
        if upgrade:
            with self.start() as vm:
                self.assertEqual(releases[-1], vm.run('uname -r').strip())

    @long.only_long
    def test_trixie_gpt_systemd_boot_ext4(self) -> None:
        self.boots(Image('trixie', 'gpt', 'systemd-boot', 'ext4', ESP_ENDS))

    def test_trixie_gpt_uki_xfs(self) -> None:
        self.boots(Image('trixie', 'gpt', 'uki', 'xfs', ESP_ENDS))

    @long.only_long
    def test_trixie_gpt_grub_efi_btrfs(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-efi', 'btrfs', ESP_ENDS), BTRFS)

    @long.only_long
    def test_trixie_dos_grub_pc_ext4_unaligned(self) -> None:
        self.boots(Image('trixie', 'dos', 'grub-pc', 'ext4', 63), UNALIGNED, partition=1)

    @long.only_long
    def test_trixie_dos_grub_pc_ext4_aligned_by_us(self) -> None:
        self.boots(Image('trixie', 'dos', 'grub-pc', 'ext4', 63), partition=1, align=True)

    @long.only_long
    def test_trixie_gpt_grub_efi_ext4(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-efi', 'ext4', ESP_ENDS))

    @long.only_long
    def test_trixie_gpt_grub_pc_xfs_reflink(self) -> None:
        self.boots(Image('trixie', 'gpt', 'grub-pc', 'xfs-reflink'), REFLINK)

    @long.only_long
    def test_trixie_dos_grub_pc_xfs(self) -> None:
        self.boots(Image('trixie', 'dos', 'grub-pc', 'xfs', MIB), SMALL, partition=1)

    @long.only_long
    def test_bookworm_dos_grub_efi_ext4(self) -> None:
        self.boots(Image('bookworm', 'dos', 'grub-efi', 'ext4', ESP_ENDS))

    @long.only_long
    def test_bookworm_gpt_grub_pc_xfs_reflink(self) -> None:
        self.boots(Image('bookworm', 'gpt', 'grub-pc', 'xfs-reflink'), REFLINK)

    @long.only_long
    def test_bookworm_dos_grub_pc_xfs(self) -> None:
        self.boots(Image('bookworm', 'dos', 'grub-pc', 'xfs', MIB), SMALL, partition=1)

    @long.only_long
    def test_bookworm_gpt_grub_pc_btrfs(self) -> None:
        self.boots(Image('bookworm', 'gpt', 'grub-pc', 'btrfs'), BTRFS)

    @long.only_long
    def test_bookworm_gpt_systemd_boot_ext4(self) -> None:
        """A kernel that the guest installs boots next."""
        self.boots(
            Image('bookworm', 'gpt', 'systemd-boot', 'ext4', ESP_ENDS),
            upgrade='mount /boot/efi && kernel-install add {new} /boot/vmlinuz-{new} '
            '/boot/initrd.img-{new} && umount /boot/efi',
        )
