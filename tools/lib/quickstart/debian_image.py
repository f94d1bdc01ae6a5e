# SPDX-License-Identifier: Apache-2.0
"""A disk image of Debian with GRUB and two kernels, made with Debian's own tools as images for
clouds are; BIOS boots it from a disk.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
import re
import shutil
import struct
import subprocess

from pcow_driver.common import exception
from pcow_driver.common import tool
from tools.lib.quickstart import apt
from tools.lib.quickstart import guest

PACKAGES = ('grub-pc', 'initramfs-tools', 'linux-base', 'kmod', 'udev')
ROOT_UUID = '6d1a7c52-93be-4f08-b2d4-5e0c8a97f613'
# raise it when what is made here changes
_VERSION = '2'
# does what it is told on the serial port
INIT = Path(__file__).parent / 'debian-init'
_ROOT_MIB = 900
_SECTOR = 512
_GRUB_SECTOR = 2048  # the partition for GRUB's own use
ROOT_OFFSET = 4 << 20  # behind that
ROOT_SECTORS = _ROOT_MIB << 11
# include/grub/i386/pc/boot.h and diskboot of GRUB: where a sector names the one to read next
_NEXT_OF_BOOT, _NEXT_OF_CORE = 0x5C, 0x1F4
_MBR_CODE = 440  # bytes; what follows is the table of partitions
# Debian's command runs in the guest, which has the disk that it looks for
_FIRST_CONFIGURATION = f"""
set timeout=1
search --no-floppy --fs-uuid --set=root {ROOT_UUID}
menuentry first {{
    linux /boot/vmlinuz-%(old)s root=UUID={ROOT_UUID} ro console=ttyS0 quiet no_timer_check
    initrd /boot/initrd.img-%(old)s
}}
"""
GRUB_SETTINGS = """GRUB_DEFAULT=0
GRUB_TIMEOUT=5
GRUB_CMDLINE_LINUX_DEFAULT=""
GRUB_CMDLINE_LINUX="console=ttyS0 quiet panic=-1 no_timer_check"
GRUB_DISABLE_OS_PROBER=true
"""


def _run(*words: str | Path) -> str:
    """:raises ToolFailed:"""
    program, *arguments = map(str, words)
    return tool.run(program, *arguments)


def kernels() -> tuple[str, str]:
    """Two packages with cloud kernels that this machine's apt has: an older one and the newest.

    :raises PcowError: it has one only
    """
    newest, _version = apt.kernel_package()
    series = re.sub(r'\d+-cloud-amd64$', '', newest)
    names = _run('apt-cache', 'pkgnames', series).split()
    numbers = sorted(
        int(match[1])
        for name in names
        if (match := re.fullmatch(re.escape(series) + r'(\d+)-cloud-amd64', name))
        and name != newest
    )
    if not numbers:
        raise exception.PcowError(reason=f'apt has no other kernel than {newest}')
    return f'{series}{numbers[-1]}-cloud-amd64', newest


def release(package: str) -> str:
    return package.removeprefix('linux-image-')


def install_kernels(tree: Path, packages: tuple[str, ...], scratch: Path) -> None:
    """Into a directory with Debian, each with the initrd that its own scripts make."""
    for package in packages:
        place = scratch / package
        place.mkdir()
        file = apt.download(package, apt.version(package), place)
        target = tree / 'var/tmp' / file.name
        shutil.copy(file, target)
        # its scripts make the initrd; they need /proc
        _run(
            'unshare',
            '--mount',
            'sh',
            '-c',
            'mount --bind /proc "$1/proc" && exec chroot "$1" dpkg -i "$2"',
            'sh',
            tree,
            f'/var/tmp/{file.name}',  # noqa: S108 - in the tree
        )
        target.unlink()


def _write_files(tree: Path, old: str) -> None:
    (tree / 'etc/hostname').write_text('pcow-guest\n')
    (tree / 'etc/fstab').write_text(f'UUID={ROOT_UUID} / ext4 defaults 0 1\n')
    (tree / 'etc/default/grub').write_text(GRUB_SETTINGS)
    (tree / 'boot/grub').mkdir(exist_ok=True)
    (tree / 'boot/grub/grub.cfg').write_text(_FIRST_CONFIGURATION % {'old': release(old)})
    _run('chroot', tree, 'grub-editenv', '/boot/grub/grubenv', 'create')
    shutil.copy(INIT, tree / 'sbin/init')
    (tree / 'sbin/init').chmod(0o755)


def _grub(tree: Path) -> tuple[bytes, bytes]:
    """What BIOS reads first, and what that reads: as grub-install does it, which wants to have the
    disk as a device.
    """
    modules = tree / 'usr/lib/grub/i386-pc'
    shutil.copytree(modules, tree / 'boot/grub/i386-pc')
    _run(
        *('chroot', tree, 'grub-mkimage', '-O', 'i386-pc', '-p', '(hd0,gpt2)/boot/grub'),
        *('-o', '/boot/grub/i386-pc/core.img', 'biosdisk', 'part_gpt', 'ext2'),
    )
    boot = bytearray((modules / 'boot.img').read_bytes())
    struct.pack_into('<Q', boot, _NEXT_OF_BOOT, _GRUB_SECTOR)
    core = bytearray((tree / 'boot/grub/i386-pc/core.img').read_bytes())
    struct.pack_into('<Q', core, _NEXT_OF_CORE, _GRUB_SECTOR + 1)
    return bytes(boot[:_MBR_CODE]), bytes(core)


def _make(part: Path) -> None:
    tree, root, disk = (part.with_name(name) for name in ('tree', 'root.raw', 'disk.raw'))
    packages = kernels()
    guest.debootstrap(apt.mirror(guest.SUITE), PACKAGES, tree)
    install_kernels(tree, packages, part.parent)
    _write_files(tree, packages[0])
    boot, core = _grub(tree)
    _run(
        '/sbin/mkfs.ext4',
        '-q',
        *('-b', '4096', '-m', '0', '-U', ROOT_UUID),
        *('-E', 'lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0', '-d'),
        *(tree, root, f'{_ROOT_MIB}M'),
    )
    with disk.open('wb') as file:
        file.truncate((_ROOT_MIB + 8) << 20)
    subprocess.run(
        ['/sbin/sfdisk', '-q', disk],
        input=f'label: gpt\nstart={_GRUB_SECTOR}, size=4096, '
        'type=21686148-6449-6E6F-744E-656564454649\n'
        f'start={ROOT_OFFSET // _SECTOR}, size={ROOT_SECTORS}, '
        'type=0FC63DAF-8483-4772-8E79-3D69D8477DE4\n',
        text=True,
        check=True,
    )
    with disk.open('r+b') as file:
        file.write(boot)
        file.seek(_GRUB_SECTOR * _SECTOR)
        file.write(core)
    _run(
        'dd',
        *(f'if={root}', f'of={disk}', 'bs=1M', 'conv=notrunc,sparse', 'status=none'),
        f'seek={ROOT_OFFSET >> 20}',
    )
    _run('qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', disk, part)


def prepare(cache: guest.Cache) -> Path:
    """The image as qcow2: a partition for GRUB, and the root as the second one."""
    inputs = (
        _VERSION,
        *kernels(),
        *PACKAGES,
        INIT.read_text(),
        GRUB_SETTINGS,
        _FIRST_CONFIGURATION,
    )
    key = hashlib.sha256('\0'.join(inputs).encode()).hexdigest()[:16]
    return cache.get(f'debian-boot-{key}.qcow2', _make)
