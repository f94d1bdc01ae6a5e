# SPDX-License-Identifier: Apache-2.0
"""What QEMU loads at the start of a guest, as no firmware boots from persistent memory."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import tool

# 'quiet': what its kernel has to say is not of the guest. On a busy host an emulated timer is late,
# and a kernel that checks it gives up. The rest is what this kernel need not do, as it lives for a
# second and runs one program: tests, memory for devices that it does not have, other processors
# (the guest's kernel starts them), other page tables at each system call, rewriting itself for one
# processor.
SHIM_CMDLINE = (
    'console=ttyS0 quiet no_timer_check cryptomgr.notests ipv6.disable=1 init_on_alloc=0 '
    'swiotlb=noforce nr_cpus=1 nopti noreplace-smp'
)
_PLACES = ('/usr/local/share', '/usr/share')


@dataclasses.dataclass(frozen=True)
class Start:
    kernel: str
    initrd: str | None
    cmdline: str


def _directory(name: str) -> Path | None:
    if '/' in name:
        places = [Path(name)]
    else:
        built = [directory.parent / 'share' for directory in tool.build_dirs()]
        places = [place / name for place in (*built, *map(Path, _PLACES))]
    for place in places:
        if (place / 'kernel').is_file() and (place / 'initrd').is_file():
            return place
    return None


def shim(more: str = '') -> Start:
    """The boot shim, which goes on in the kernel that the guest's own boot loader would take.

    :param more: words for the command line of the guest's kernel
    :raises BootShimMissing:
    """
    name = str(conf.CONF.pcow.boot_shim)
    directory = _directory(name)
    if directory is None:
        raise exception.BootShimMissing(name=name)
    return Start(
        kernel=os.path.abspath(directory / 'kernel'),
        initrd=os.path.abspath(directory / 'initrd'),
        cmdline=f'{SHIM_CMDLINE} -- {more}' if more else SHIM_CMDLINE,
    )
