# SPDX-License-Identifier: Apache-2.0
"""Whether what a pool says of its space is what its file system has. While nobody works on it, and
if it has a file system of its own.
"""

import dataclasses
import os
import stat

from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import capacity
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned


@dataclasses.dataclass
class _Files:
    """Bytes in blocks of what is in a directory, as ``du`` counts them."""

    held: int = 0
    of_images: int = 0
    of_guests: int = 0  # images that guests can fill
    whole: int = 0  # most that those can come to hold, if they have no snapshots


def _files(pool: pool_module.Pool) -> _Files:
    found = _Files()
    for entry in os.scandir(pool.path):
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            continue
        size = status.st_blocks * 512
        found.held += size
        if entry.name.endswith(names.IMAGE_SUFFIX) and not entry.name.startswith('.'):
            found.of_images += size
            info = image.info(entry.path, force_share=True)
            if not info.sealed:
                found.of_guests += size
                found.whole += _whole(info, size)
    return found


def _whole(info: model.ImageInfo, size: int) -> int:
    """A snapshot keeps what it has, and the guest can fill the image once more beside it."""
    return provisioned.whole_size(info.virtual_size) + (size if info.snapshots else 0)


def _differ(what: str, expected: int, found: int, within: int = units.MIB) -> list[str]:
    """Bytes, which agree if less than a MiB is between them."""
    return [] if abs(expected - found) < within else [f'{what}: {found}, not {expected}']


def differences(pool: pool_module.Pool) -> list[str]:
    """One sentence each; none: all agrees to the MiB."""
    status, usage = os.statvfs(pool.path), capacity.usage(pool, with_shared=False)
    account, files = usage.account, _files(pool)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    with_snapshots = any(item.info and item.info.snapshots for item in pool.images())
    found = [
        *_differ('size', total, usage.total),
        *_differ('free', free, usage.free),
        *_differ('allocated', files.of_images, usage.allocated),
        *_differ('others', files.held - files.of_images, usage.others),
        *_differ('held by all files', total - free, files.held),
        *_differ('held by images that guests can fill', files.of_guests, account.held),
        *_differ('fixed', files.held - files.of_guests, account.fixed),
        *_differ('being built', 0, account.building + account.building_fixed),
    ]
    if with_snapshots:
        if account.provisioned > files.whole + units.MIB:
            found.append(f'provisioned: {account.provisioned}, more than {files.whole}')
    else:
        found += _differ('provisioned', files.whole, account.provisioned)
    return [f'pool {pool.name}, {words}' for words in found]
