# SPDX-License-Identifier: Apache-2.0
"""Where pcow-img remembers what it found out of the images of a pool, so that it looks only at
those that have changed: a file for each pool and user, in ``lists`` under ``[pcow] state_path``.
Another one beside it says what each image stood on, for the time when it cannot be read: a QEMU
that was taken over writes to its own image, and to no such file.

What is in them is compared with each image, and may be lost at any time. pcow-img takes nobody
else's.
"""

from __future__ import annotations

import contextlib
import os

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import locks


def path(uuid: str) -> str | None:
    """Of the pool with this uuid; None: this user has nothing to do with such files."""
    try:
        return os.path.join(locks.shared_directory('lists'), f'{uuid}.{os.geteuid()}')
    except (OSError, exception.PcowError):
        return None


def forget(uuid: str) -> None:
    """The pool is one of this host no longer."""
    directory = os.path.join(locks.state_path(), 'lists')
    with contextlib.suppress(OSError), descriptors.directory_place(directory) as place:
        for name in os.listdir(place):
            if name.partition('.')[0] == uuid:
                os.unlink(os.path.join(place, name))
