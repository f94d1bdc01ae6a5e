# SPDX-License-Identifier: Apache-2.0
"""Disk images of Debian with the boot loaders, partition tables and file systems that images for
clouds have, made with the tools of the Debian in them.

A release of Debian is installed once and kept in the cache; an image is made of it in seconds.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
import shutil

from pcow_driver.common import tool
from tools.lib.quickstart import apt
from tools.lib.quickstart import debian_image
from tools.lib.quickstart import guest

# raise it when what is made here changes
_VERSION = '1'
_PACKAGES = (
    *('initramfs-tools', 'kmod', 'udev', 'systemd', 'linux-base'),
    *('grub2-common', 'grub-pc-bin', 'grub-efi-amd64-bin', 'systemd-boot'),
    *('e2fsprogs', 'xfsprogs', 'btrfs-progs', 'dosfstools', 'mtools'),
)
# what only this release has
_MORE_PACKAGES = {
    'bookworm': (),
    'trixie': ('linux-image-cloud-amd64', 'systemd-boot-efi', 'systemd-ukify'),
}
_LEFT_OUT = ('/usr/share/doc/*', '/usr/share/man/*', '/usr/share/locale/*')
_SCRIPT = Path(__file__).parent / 'boot-image'
MIB = 2048  # in sectors


@dataclasses.dataclass(frozen=True)
class Image:
    suite: str  # bookworm, trixie
    table: str  # gpt, dos
    loader: str  # grub-pc, grub-efi, systemd-boot, uki
    file_system: str  # ext4, xfs, xfs-reflink, btrfs
    start: int = 4 * MIB  # of the root, in sectors
    size: int = 1024  # MiB
    options: str = 'defaults'  # that the root is mounted with


def _packages(suite: str) -> tuple[str, ...]:
    """What this machine's own apt has to add: kernels of its own release."""
    return debian_image.kernels() if suite == guest.SUITE else ()


def install(suite: str, packages: tuple[str, ...], part: Path) -> None:
    """Debian's minimum and some packages into a directory.

    :raises ToolFailed:
    """
    mirror = apt.mirror(suite)
    environment = [f'{key}={value}' for key, value in apt.proxy_environment().items()]
    # in namespaces of its own, as for debootstrap
    tool.run(
        '/usr/bin/env',
        *environment,
        *('unshare', '--mount', '--pid', '--fork', '--kill-child', '--mount-proc'),
        *('mmdebstrap', '--quiet', '--mode=root', '--variant=minbase'),
        *(f'--dpkgopt=path-exclude={pattern}' for pattern in _LEFT_OUT),
        f'--include={",".join(packages)}',
        *([f'--keyring={mirror.keyring}'] if mirror.keyring else []),
        *(suite, str(part), mirror.uri),
    )


def _install(suite: str, part: Path) -> None:
    install(suite, _PACKAGES + _MORE_PACKAGES[suite], part)
    debian_image.install_kernels(part, _packages(suite), part.parent)
    (part / 'etc/hostname').write_text('pcow-guest\n')


def prepare(cache: guest.Cache, suite: str) -> Path:
    """A directory with Debian, its kernels and all boot loaders."""
    inputs = (_VERSION, suite, *_packages(suite), *_PACKAGES, *_MORE_PACKAGES[suite], *_LEFT_OUT)
    key = hashlib.sha256('\0'.join(inputs).encode()).hexdigest()[:16]
    return cache.get(f'debian-{suite}-{key}', lambda part: _install(suite, part))


def releases(tree: Path) -> list[str]:
    """Of its kernels, the oldest first."""
    found = [path.name.removeprefix('vmlinuz-') for path in (tree / 'boot').glob('vmlinuz-*')]
    return sorted(
        found,
        key=lambda release: [
            int(part) if part.isdigit() else 0 for part in release.replace('-', '.').split('.')
        ],
    )


def make(image: Image, tree: Path, disk: Path, *, own_init: bool = False) -> None:
    """Make a disk image (raw) whose oldest kernel boots, or with GRUB the newest.

    :param tree: what :func:`prepare` made of the image's release
    :param own_init: the image starts what is in it, as a machine that is new; else its init does
        what it is told on the serial port
    :raises ToolFailed:
    """
    files = disk.with_suffix('.files')
    (files / 'etc/default').mkdir(parents=True)
    (files / 'etc/default/grub').write_text(debian_image.GRUB_SETTINGS)
    if own_init:
        (files / 'etc/machine-id').touch()
    else:
        (files / 'usr/sbin').mkdir(parents=True)
        shutil.copy(debian_image.INIT, files / 'usr/sbin/init')
        (files / 'usr/sbin/init').chmod(0o755)
    try:
        tool.run(
            *('/usr/bin/unshare', '--mount', str(_SCRIPT), str(tree), str(files), str(disk)),
            *(image.table, image.loader, image.file_system, str(image.start)),
            *(releases(tree)[0], str(image.size), image.options),
        )
    finally:
        shutil.rmtree(files)
