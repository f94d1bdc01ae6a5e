# SPDX-License-Identifier: Apache-2.0
"""Whether two hosts see one pool, wherever each has it mounted: by its UUID and a file in it.

Nova asks before it deletes what an evacuated or reverted server has here, because it may be all
that the server has.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from oslo_log import log as logging

from nova_pcow.placement import inventory
from pcow_driver.pools import pool as pool_module
from pcow_driver.virt import boot

LOG = logging.getLogger(__name__)

_FILE = 'filename'  # Nova's own, and all that an earlier driver on the other host looks at
_POOL = 'pcow_pool'
_BOOT_SHIM = 'pcow_boot_shim'


def begin(pool: pool_module.Pool) -> dict[str, str]:
    """Make the file; what the other host is to be asked.  Nova deletes the file afterwards."""
    descriptor, path = tempfile.mkstemp(prefix='.nova-', suffix='.part', dir=pool.path)
    os.close(descriptor)
    return {_FILE: path, _POOL: pool.uuid}


def needing_shim(data: dict[str, Any]) -> dict[str, Any]:
    """The same question to a host on which the server is to boot by its boot shim."""
    return data | {_BOOT_SHIM: True}


def is_ours(data: dict[str, Any]) -> bool:
    """Whether a question is of :func:`begin`, on another host."""
    return _POOL in data


def sees(data: dict[str, Any]) -> bool:
    """The answer: whether this host sees that pool, or may see it later.

    :raises StateInvalid: the list of pools cannot be read
    :raises BootShimMissing: this host has none, and the server needs one
    """
    if data.get(_BOOT_SHIM):
        boot.shim()
    for pool in inventory.pools():
        if pool.uuid == data[_POOL]:  # and no copy of it
            return os.path.lexists(os.path.join(pool.path, os.path.basename(data[_FILE])))
    if inventory.all_there():
        return False
    LOG.warning(
        'A pool of this host is not there, and may be the pool %s that another host asks for: what '
        'is '
        'in that stays',
        data[_POOL],
    )
    return True
