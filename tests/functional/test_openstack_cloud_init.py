# SPDX-License-Identifier: Apache-2.0
"""A server from an image of Debian as its images for clouds are, on a real OpenStack: cloud-init
takes key, name and user data from the config drive, and the root grows to the size of the flavor.

It takes some minutes: --long.
"""

from __future__ import annotations

import base64
from pathlib import Path
import re
import unittest

from pcow_driver.common import units
from tests.functional import libvirt_vm
from tests.functional import long
from tests.functional import openstack_bed
from tools.lib.openstack_aio import servers
from tools.lib.quickstart import cloud_image
from tools.lib.quickstart import guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

NAME = 'cloudy'
ROOT_GIB = 3  # about twice the image's
MEMORY = 512  # MiB
SECONDS = 1500.0  # of two kernels, and of systemd, under emulation
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPfx3e4jW0G7Jt2DqbL9eXcO5m1rZ8sYkU6hVnTgEwRa you@example'
SCRIPTS = '/var/lib/cloud/scripts'
# Who has made it on which boot is told apart: per-once is not run anew.
USER_DATA = f"""#cloud-config
locale: C.UTF-8
write_files:
  - path: {SCRIPTS}/per-boot/told
    permissions: '0755'
    content: |
      #!/bin/sh
      root=$(grep ' / ' /proc/mounts); blocks=$(stat -f -c %b /); name=$(hostname)
      key=$(cat /home/{cloud_image.USER}/.ssh/authorized_keys)
      warned=$(grep -c -E 'WARN|Traceback' /var/log/cloud-init.log)
      echo "pcow-boot: $name blocks=$blocks warned=$warned root=$root key=$key;" >/dev/ttyS0
runcmd:
  - echo pcow-first-boot >/dev/ttyS0
"""
TOLD = re.compile(r'pcow-boot: (\S+) blocks=(\d+) warned=(\d+) root=(.*?) key=(.*?);')
END = re.compile(r'Cloud-init v\. \S+ finished at .* Datasource (\S+)')


def ended(text: str, before: str) -> str | None:
    """The text, if it has all of another boot than the one before."""
    ends = [match[0] for match in END.finditer(text)]
    return text if TOLD.search(text) and ends and ends[-1] not in before else None


@long.only_long
class CloudInitTest(unittest.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.bed = openstack_bed.Bed()
        self.addCleanup(self.bed.close)
        run = state.Run.create()
        self.addCleanup(teardown.tear_down, run)
        self.disk = run.directory / 'disk.qcow2'
        self._make_disk(guest.Cache(run), openstack_bed.POOLS / 'disk.raw')

    def _make_disk(self, cache: guest.Cache, raw: Path) -> None:
        cloud_image.make(cache, guest.SUITE, raw)
        libvirt_vm.run('qemu-img', 'convert', '-O', 'qcow2', '-f', 'raw', raw, self.disk)
        raw.unlink()

    def create(self) -> servers.Server:
        api = self.bed.api
        api.upload_image(NAME, self.disk, 'qcow2')
        specs = {
            'pcow:root': 'true',
            'resources:CUSTOM_PCOW_MB': str(ROOT_GIB * 1024),
            'resources:DISK_GB': '0',
        }
        api.create_flavor(NAME, MEMORY, ROOT_GIB, specs)
        api.call('nova', 'POST', '/os-keypairs', {'keypair': {'name': NAME, 'public_key': KEY}})
        return servers.Server.create(
            *(api, NAME, NAME, NAME),
            key_name=NAME,
            config_drive=True,
            user_data=base64.b64encode(USER_DATA.encode()).decode(),
        )

    def wait_boot(self, server: servers.Server, before: str = '') -> str:
        """Until cloud-init has ended; what the console says, which begins anew with each start.

        :param before: what it said of the boot before
        """
        server.wait_status('ACTIVE', SECONDS)
        return servers.wait(
            f'boot of {server.id}', lambda: ended(server.console(), before), SECONDS
        )

    def check_boot(self, text: str) -> None:
        self.assertEqual(['DataSourceConfigDrive'], END.findall(text))
        ((name, blocks, warned, root, key),) = TOLD.findall(text)
        self.assertEqual((NAME, '0', KEY), (name, warned, key))
        self.assertRegex(root, '^/dev/pmem0p2 / ext4 .*dax=always')
        self.assertGreater(int(blocks) * 4096, 0.93 * ROOT_GIB * units.GIB)

    def test_config_drive(self) -> None:
        server = self.create()
        first = self.wait_boot(server)
        self.check_boot(first)
        self.assertIn('pcow-first-boot', first)
        server.act('reboot', {'type': 'SOFT'})
        second = self.wait_boot(server, first)
        self.check_boot(second)
        self.assertNotIn('pcow-first-boot', second)
        server.delete()
        self.assertEqual([], self.bed.pool_images())
