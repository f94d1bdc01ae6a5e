# SPDX-License-Identifier: Apache-2.0
"""Who passes the directory of a new pool: its owner and QEMU. Images in it are 0640, and libvirt
gives each to QEMU's user.
"""

from __future__ import annotations

import grp
import os

QEMU_GROUP = 'kvm'  # QEMU's user is in it wherever it may open /dev/kvm
_QEMU_PASSES, _ALL_PASS = 0o710, 0o711


def close(directory: str) -> None:
    """Where there is no such group, or this user may not give it something, everybody passes;
    nobody lists what is there.

    :raises OSError:
    """
    try:
        os.chown(directory, -1, grp.getgrnam(QEMU_GROUP).gr_gid)
    except (KeyError, PermissionError):
        os.chmod(directory, _ALL_PASS)
    else:
        os.chmod(directory, _QEMU_PASSES)
