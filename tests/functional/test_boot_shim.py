# SPDX-License-Identifier: Apache-2.0
"""A Debian image boots from an NVDIMM through the boot shim, with the kernel that its own GRUB
would take.
"""

from __future__ import annotations

from pathlib import Path
import subprocess
from typing import ClassVar

from tests.functional import boot_guest
from tests.functional import linux_guest
from tests.functional import long
from tools.lib.quickstart import debian_image

ONCE = """load_env
if [ "${next_entry}" ]; then
    set default="${next_entry}"
    set next_entry=
    save_env next_entry
else
    set default=0
fi
"""


class BootShimTest(boot_guest.BootTestCase):
    disk: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.disk = debian_image.prepare(cls.cache)

    def setUp(self) -> None:
        super().setUp()
        self.old, self.new = map(debian_image.release, debian_image.kernels())

    def make_image(self, configuration: str | None = None, environment: str = '') -> None:
        """
        :param configuration: for the file grub.cfg
        :param environment: for the file grubenv
        """
        self.make_image_of(self.disk, 'qcow2', debian_image.ROOT_OFFSET, configuration, environment)

    def two_entries(self, before: str = '') -> str:
        """A configuration: the older kernel is the first one, by default."""
        words = f'root=UUID={debian_image.ROOT_UUID} ro quiet no_timer_check'
        entries = [
            f'''menuentry {name} --id {name}-id {{
    linux /boot/vmlinuz-{release} {words} pcow.entered={name}
    initrd /boot/initrd.img-{release}
}}
'''
            for name, release in (('first', self.old), ('second', self.new))
        ]
        search = f'search --no-floppy --fs-uuid --set=root {debian_image.ROOT_UUID}\n'
        return before + search + ''.join(entries)

    def assert_entered(self, vm: linux_guest.LinuxGuest, name: str) -> None:
        self.assertIn(f'pcow.entered={name}', vm.run('cat /proc/cmdline').split())
        release = self.old if name == 'first' else self.new
        self.assertEqual(release, vm.run('uname -r').strip())

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

    def test_an_end_as_growpart_leaves_it(self) -> None:
        """Within a page of memory, where Linux has no DAX: the kernel is told of another end."""
        raw = self.directory / 'disk.raw'
        tool = ('qemu-img', 'convert', '-f', 'qcow2', '-O', 'raw', self.disk, raw)
        subprocess.run(tool, check=True)
        sectors = debian_image.ROOT_SECTORS + 7
        subprocess.run(
            ['/sbin/sfdisk', '-q', '-N', '2', raw], input=f', {sectors}\n', text=True, check=True
        )
        self.make_image_of(raw, 'raw')
        raw.unlink()
        with self.start() as vm:
            self.assertRegex(vm.run('grep " / " /proc/mounts'), '^/dev/pmem0p2 / ext4 .*dax=always')
            # the table is as it was: entry 2 of GPT has the last sector at byte 40
            last = debian_image.ROOT_OFFSET // 512 + sectors - 1
            self.assertEqual(
                [str(sectors - 7), str(last)],
                vm.run(
                    'cat /sys/class/block/pmem0p2/size; '
                    f'od -An -t d8 -j {1024 + 128 + 40} -N 8 /dev/pmem0'
                ).split(),
            )

    def test_an_entry_meant_once(self) -> None:
        """As Debian's grub.cfg does it; the shim uses it up in the place where GRUB would have. On
        the device that a pool of class page-cache has: its driver is in no initrd, too.
        """
        self.make_image(self.two_entries(ONCE), 'next_entry=second-id\n')
        with self.start(device=('-device', 'virtio-pmem-pci,memdev=mem0,id=nv0')) as vm:
            self.assert_entered(vm, 'second')
            self.assertEqual('next_entry=', vm.run('grub-editenv list').strip())
            self.assertRegex(vm.run('grep " / " /proc/mounts'), '^/dev/pmem0p2 / ext4 .*dax=always')
            self.assertIn('virtio_pmem', vm.run('cat /proc/modules'))
            vm.run('echo kept >/root/note && sync /root/note')

    def test_the_menu(self) -> None:
        """A key shows it, and a number takes another entry than the default."""
        self.make_image(self.two_entries())
        ready = (
            rb'pcow boot: first; a key shows the menu \(/boot/grub/grub.cfg of pmem0p2 \(GRUB\)\)'
        )
        # long enough for a busy machine
        with self.start(more='pcow.timeout=60', ready=ready) as vm:
            vm.press('x')
            vm.expect(rb'\*  1  first\r?\n   2  second\r?\nNumber, then Enter.*: ')
            vm.press('7\r')
            vm.expect(rb'There is no 7. Number: ')
            # what was typed wrong can be taken back
            vm.press('1\b2\r')
            vm.expect(rb'pcow-ready\r?\n', boot_guest.BOOT_SECONDS)
            self.assert_entered(vm, 'second')

    @long.only_long
    def test_an_entry_by_option(self) -> None:
        self.make_image(self.two_entries())
        for wanted, said in (
            ('second-id', rb'pcow boot: second;'),
            ('2', rb'pcow boot: second;'),
            (
                'third',
                rb'pcow boot: there is no entry third: the default is taken\r?\n'
                rb'pcow boot: first;',
            ),
        ):
            with self.start(more=f'pcow.entry={wanted}', ready=said):
                pass

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
