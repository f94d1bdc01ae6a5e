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
# (the guest's kernel starts them), rewriting itself for one processor.
SHIM_CMDLINE = (
    'console=ttyS0 quiet no_timer_check cryptomgr.notests ipv6.disable=1 init_on_alloc=0 '
    'swiotlb=noforce nr_cpus=1 noreplace-smp'
)
# What a guest of less RAM has is all below 4 GiB: where QEMU's q35 parts it, which is the first.
_BELOW_4_GIB = 0xB0000000
_PLACES = ('/usr/local/share', '/usr/share')


@dataclasses.dataclass(frozen=True)
class Start:
    kernel: str
    initrd: str | None
    cmdline: str


def memory_options(memory: int) -> str:
    """Words for the command line of a guest with this much RAM in bytes, all of whose devices reach
    any address.

    Linux on x86 sets 64 MiB aside, in which it copies for devices that do not (SWIOTLB,
    Documentation/arch/x86/x86_64/boot-options.rst), as soon as there may be memory above 4 GiB: an
    NVDIMM is there.
    """
    return 'swiotlb=noforce' if memory < _BELOW_4_GIB else ''


def _directory(name: str) -> Path | None:
    if '/' in name:
        places = [Path(name)]
    else:
        built = [directory.parent / 'share' for directory in tool.build_dirs()]
        places = [place / name for place in (*built, *map(Path, _PLACES))]
    for place in places:
        if all(os.access(place / name, os.R_OK) for name in ('kernel', 'initrd')):
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
