# SPDX-License-Identifier: Apache-2.0
"""A disk image of Debian as its images for clouds are: systemd, cloud-init, growpart, an SSH
server, and nobody who could log in.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tools.lib.quickstart import boot_matrix
from tools.lib.quickstart import guest

# raise it when what is made here changes
_VERSION = '1'
_PACKAGES = (
    *('linux-image-cloud-amd64', 'initramfs-tools', 'kmod', 'udev', 'e2fsprogs', 'fdisk'),
    *('grub2-common', 'grub-pc-bin', 'systemd-sysv', 'dbus', 'libpam-systemd'),
    *('cloud-init', 'cloud-guest-utils', 'netplan.io', 'openssh-server', 'sudo', 'locales'),
)
USER = 'debian'  # that cloud-init makes there by default
SIZE = 1536  # MiB
# as in fstab of Debian's own images
_OPTIONS = 'rw,discard,errors=remount-ro,x-systemd.growfs'


def _install(suite: str, part: Path) -> None:
    boot_matrix.install(suite, _PACKAGES, part)
    # each machine has its own, and cloud-init gives it a name
    for key in (part / 'etc/ssh').glob('ssh_host_*'):
        key.unlink()
    (part / 'etc/hostname').write_text('localhost\n')


def make(cache: guest.Cache, suite: str, disk: Path) -> None:
    """Make a disk image (raw).

    :raises ToolFailed:
    """
    inputs = (_VERSION, suite, *_PACKAGES)
    key = hashlib.sha256('\0'.join(inputs).encode()).hexdigest()[:16]
    tree = cache.get(f'debian-cloud-{suite}-{key}', lambda part: _install(suite, part))
    image = boot_matrix.Image(suite, 'gpt', 'grub-pc', 'ext4', size=SIZE, options=_OPTIONS)
    boot_matrix.make(image, tree, disk, own_init=True)
