# SPDX-License-Identifier: Apache-2.0
"""A Debian image boots from an NVDIMM through the boot shim, with the kernel that its own GRUB
would take.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from tests.functional import boot_guest
from tests.functional import long
from tools.lib.quickstart import debian_image


class BootShimTest(boot_guest.BootTestCase):
    disk: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.disk = debian_image.prepare(cls.cache)

    def setUp(self) -> None:
        super().setUp()
        self.old, self.new = map(debian_image.release, debian_image.kernels())

    def make_image(self, configuration: str | None = None) -> None:
        """
        :param configuration: for the file grub.cfg
        """
        self.make_image_of(self.disk, 'qcow2', debian_image.ROOT_OFFSET, configuration)

    @long.only_long
    def test_the_kernel_that_grub_would_take(self) -> None:
        self.make_image()
        with self.start() as vm:
            self.assertEqual(self.old, vm.run('uname -r').strip())
            mount = vm.run('grep " / " /proc/mounts')
            self.assertRegex(mount, '^/dev/pmem0p2 / ext4 .*dax=always')
            # the guest knows its disk, and writes the configuration that it boots next time
            vm.send('update-grub')
            text, status = vm.result(boot_guest.SLOW)
            self.assertEqual(0, status, text)
            self.assertIn(f'Found linux image: /boot/vmlinuz-{self.new}', text)
            self.stop(vm)
        with self.start(more='-- pcow.word', cpus=2) as vm:
            self.assertEqual(self.new, vm.run('uname -r').strip())
            # the shim has started one only
            self.assertEqual('2', vm.run('nproc').strip())
            options = vm.run('cat /proc/cmdline').split()
            self.assertNotIn('nopti', options)
            self.assertIn(f'root=UUID={debian_image.ROOT_UUID}', options)
            self.assertIn('pcow.word', options)
            entry = (
                f'gnulinux-advanced-{debian_image.ROOT_UUID}'
                f'>gnulinux-{self.old}-advanced-{debian_image.ROOT_UUID}'
            )
            vm.run(f'grub-reboot "{entry}"')
            self.assertIn(entry, vm.run('grub-editenv list'))
            self.stop(vm)
        with self.start() as vm:
            self.assertEqual(self.old, vm.run('uname -r').strip())
            # once: the shim has used it up, in the place where GRUB would have
            self.assertEqual('next_entry=', vm.run('grub-editenv list').strip())
            self.stop(vm)

    def test_what_does_not_boot_is_said(self) -> None:
        """A guest whose configuration is a loop."""
        self.make_image('while true; do true; done\n')
        with self.start(
            ready=rb'pcow boot: the boot configuration asks for more memory or time than one may: '
            rb'is there a loop in it\?\r?\npcow boot: nothing boots'
        ) as vm:
            self.assertEqual('running', vm.monitor.run('query-status')['status'])

    def test_too_little_memory_is_said(self) -> None:
        self.make_image()
        with self.start(
            memory=72, ready=rb'pcow boot: there is too little memory for the kernel and its initrd'
        ) as vm:
            self.assertEqual('running', vm.monitor.run('query-status')['status'])

    def test_no_configuration_is_said(self) -> None:
        self.make_image('')
        with self.start(ready=rb'pcow boot: no file system has a configuration of GRUB'):
            pass
