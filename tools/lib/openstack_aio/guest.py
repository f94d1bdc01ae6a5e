# SPDX-License-Identifier: Apache-2.0
"""Guests for the all-in-one: Debian, or a few MiB that boot in a second and tell on their console
whether their data are intact.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
import shutil

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.quickstart import cpio
from tools.lib.quickstart import guest as quickstart_guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

ROOT_SIZE = 64 * units.MIB
MODULES = ('nfit', 'nd_pmem', 'virtio_pmem', 'virtio_pci', 'virtio_blk', 'ext4')
KERNEL_ARGUMENTS = 'console=ttyS0 quiet panic=-1'
_BUSYBOX = Path('/bin/busybox')
_FILES = Path(__file__).parent / 'guest_files'


def _make_image(part: Path) -> None:
    tree, raw = part.with_name('tree'), part.with_name('raw')
    for name in ('bin', 'sbin', 'proc', 'sys', 'dev'):
        (tree / name).mkdir(parents=True)
    shutil.copy(_BUSYBOX, tree / 'bin/busybox')
    for name in tool.run(str(_BUSYBOX), '--list').split():
        if not (tree / 'bin' / name).exists():
            (tree / 'bin' / name).symlink_to('busybox')
    shutil.copy(_FILES / 'pcow-guest', tree / 'sbin/pcow-guest')
    (tree / 'sbin/pcow-guest').chmod(0o755)
    tool.run(
        tool.find_system('mkfs.ext4', 'e2fsprogs'),
        '-q',
        '-b',
        '4096',
        '-m',
        '0',
        '-d',
        str(tree),
        '-E',
        'lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0',
        str(raw),
        f'{ROOT_SIZE // units.MIB}M',
    )
    tool.run(tool.find('qemu_img'), 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(part))


def _make_ramdisk(part: Path, files: dict[str, Path]) -> None:
    part.write_bytes(cpio.archive(files))


def prepare(debian: bool) -> quickstart_guest.Guest:
    """Make the files of a guest in the cache, unless they are there.

    :param debian: Debian 12 with a shell on the console
    :raises ToolFailed:
    """
    run = state.Run.create()
    try:
        if debian:
            return quickstart_guest.prepare(run, None, None, None)[0]
        if not _BUSYBOX.exists():
            raise exception.PcowError(reason=f'{_BUSYBOX} is missing: install busybox-static')
        cache = quickstart_guest.Cache(run)
        key = hashlib.sha256(
            b'1'.join(path.read_bytes() for path in (_BUSYBOX, *sorted(_FILES.iterdir())))
        ).hexdigest()[:16]
        image = cache.get(f'openstack-guest-{key}.qcow2', _make_image)
        kernel, modules = quickstart_guest.prepare_kernel(cache, MODULES)
        files = {'init': _FILES / 'init', 'pcow/busybox': _BUSYBOX, **modules}
        ramdisk = cache.get(
            f'openstack-initrd-{key}-{kernel.name}', lambda part: _make_ramdisk(part, files)
        )
        return quickstart_guest.Guest(image, kernel, ramdisk)
    finally:
        teardown.tear_down(run)
