# SPDX-License-Identifier: Apache-2.0
"""Pools that can be made full."""

from __future__ import annotations

import errno
from pathlib import Path
import subprocess

from tests.vm import chain

FAIL = ',pcow-full=fail'                       # for a backend: a store that needs space fails
_PIECES = (chain.MIB, 4096)


def mount(directory: Path, options: str) -> None:
    """A pool on tmpfs."""
    subprocess.run(['mount', '-t', 'tmpfs', '-o', options, 'pcow-vm-test', str(directory)], check=True, stdin=subprocess.DEVNULL)


def unmount(directory: Path) -> None:
    subprocess.run(['umount', '-l', str(directory)], check=True, stdin=subprocess.DEVNULL)


def take(pool: Path) -> Path:
    """Make a file of all the space that there is in a pool; returns it."""
    path = pool / 'taken'
    with open(path, 'ab', buffering=0) as file:
        for size in _PIECES:
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as e:
                if e.errno != errno.ENOSPC:
                    raise
    return path
