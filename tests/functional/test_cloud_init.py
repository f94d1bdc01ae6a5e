# SPDX-License-Identifier: Apache-2.0
"""An image of Debian as its images for clouds are boots through the shim with a seed, in a domain
that pcowctl prints: cloud-init makes the user, grows the root to the size of the image, and has
nothing to do on the second boot.

It takes some minutes: --long.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
from pathlib import Path

from pcow_driver.common import units
from pcow_driver.images import image
from tests.functional import domain_case
from tests.functional import libvirt_vm
from tests.functional import long
from tools.lib.quickstart import cloud_image

BOOT_SECONDS = 900  # of two kernels, and of systemd
SLOW = 600  # a command of Python's, under emulation
STOP_SECONDS = 300
SIZE = 2 * cloud_image.SIZE * units.MIB
NAME = 'web1'
# Of somebody for whom nobody has the other half; its blob is of the right form.
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPfx3e4jW0G7Jt2DqbL9eXcO5m1rZ8sYkU6hVnTgEwRa you@example'
PASSWORD = 'not-a-secret'
USER_DATA = f"""#cloud-config
hostname: {NAME}
locale: C.UTF-8
ssh_authorized_keys:
  - {KEY}
password: {PASSWORD}
chpasswd:
  expire: false
"""
# a store through such a mapping reaches the device: only files with DAX have it
MAP_SYNC = (
    'import mmap, os; fd = os.open("/big", os.O_RDWR); '
    'mmap.mmap(fd, os.fstat(fd).st_size, flags=0x80003)[-1] = 1'
)


class CloudInitTest(domain_case.DomainTestCase):
    def make_seed(self) -> Path:
        files, seed = self.run_.directory / 'files', self.run_.directory / 'seed.iso'
        files.mkdir()
        (files / 'user-data').write_text(USER_DATA)
        (files / 'meta-data').write_text(f'instance-id: {NAME}\n')
        libvirt_vm.run(
            *('genisoimage', '-quiet', '-output', seed, '-volid', 'cidata', '-joliet', '-rock'),
            *(files / 'user-data', files / 'meta-data'),
        )
        return seed

    def make(self, suite: str) -> str:
        """The name of a domain on an image with twice the size of its template."""
        disk = self.place.scratch / 'disk.raw'
        cloud_image.make(self.cache, suite, disk)
        self.make_image(disk, 'raw', '--size', str(SIZE))
        disk.unlink()
        self.start_daemon()
        return self.define(NAME, '--seed', str(self.make_seed()), memory='512M')

    @contextlib.contextmanager
    def logged_in(self, name: str) -> Iterator[domain_case.Console]:
        """The domain is off afterwards, by the guest's own doing."""
        self.virsh('start', name)
        with domain_case.Console(self.virsh('dumpxml', name)) as console:
            console.seconds = SLOW
            console.expect(rb'pcow boot: .*; a key shows the menu', BOOT_SECONDS)
            # by then it has given the name and the password
            console.expect(rb'Cloud-init v\. \S+ finished', BOOT_SECONDS)
            console.send('')  # what it has said may stand behind the prompt
            console.expect(rb'%s login: ' % NAME.encode(), SLOW)
            console.send(cloud_image.USER)
            console.expect(rb'Password: ', SLOW)
            console.send(PASSWORD)
            console.expect(rb'\$ ', SLOW)
            console.take_commands('sudo sh')
            yield console
            console.send('systemctl poweroff')
            self.wait_off(name, STOP_SECONDS)

    def check_machine(self, console: domain_case.Console) -> None:
        """What holds after each boot."""
        status = json.loads(console.run('cloud-init status --wait --format json'))
        self.assertEqual(('done', []), (status['status'], status['errors']), status)
        self.assertEqual(
            '', console.run('grep -E "WARN|Traceback" /var/log/cloud-init.log || true')
        )
        self.assertEqual('', console.run('systemctl --failed --plain --no-legend'))
        self.assertEqual(NAME, console.run('hostname'))
        self.assertIn('sudo', console.run(f'id -nG {cloud_image.USER}').split())
        self.assertEqual(KEY, console.run(f'cat /home/{cloud_image.USER}/.ssh/authorized_keys'))
        self.assertEqual('active', console.run('systemctl is-active ssh'))
        self.assertRegex(
            console.run('grep " / " /proc/mounts'), '^/dev/pmem0p2 / ext4 .*dax=always'
        )

    def check_root(self, console: domain_case.Console) -> None:
        """It is as large as the image, but for what lies in front of it and behind."""
        size = image.info(str(self.image), force_share=True).virtual_size
        self.assertGreaterEqual(size, SIZE)
        self.assertLess(
            size - 16 * units.MIB, 512 * int(console.run('cat /sys/class/block/pmem0p2/size'))
        )
        self.assertLess(0.93 * size, int(console.run('stat -f -c "%b" /')) * 4096)
        self.assertIn('No errors detected', console.run('sfdisk --verify /dev/pmem0 2>&1'))

    def boots_twice(self, name: str) -> None:
        done = 'cd /var/lib/cloud && ls -l --time-style=+%s.%N instances/*/sem sem; cd /'
        keys = 'sha256sum /etc/ssh/ssh_host_*_key /etc/machine-id'
        with self.logged_in(name) as console:
            self.check_machine(console)
            self.check_root(console)
            console.run(f'fallocate -l {SIZE // 2} /big')
            console.run(f"python3 -c '{MAP_SYNC}'")
            before = [console.run(done), console.run(keys)]
            self.assertRegex(before[1], 'ssh_host_ed25519_key')
            self.assertIn('config_users_groups', before[0])
        with self.logged_in(name) as console:
            self.check_machine(console)
            self.check_root(console)
            self.assertEqual(before, [console.run(done), console.run(keys)])
            self.assertEqual(str(SIZE // 2), console.run('stat -c %s /big'))
            log = console.run('grep -E "cc_growpart|NOCHANGE" /var/log/cloud-init.log')
            self.assertRegex(log, 'NOCHANGE')

    @long.only_long
    def test_bookworm(self) -> None:
        self.boots_twice(self.make('bookworm'))

    @long.only_long
    def test_trixie(self) -> None:
        self.boots_twice(self.make('trixie'))
