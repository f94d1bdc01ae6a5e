# SPDX-License-Identifier: Apache-2.0
"""Pools that can be made full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
import subprocess
import time
from types import TracebackType
from typing import Self

from tests.vm import chain
from tests.vm import machine

FAIL = ',pcow-full=fail'  # for a backend: a store that needs space fails
_PIECES = (chain.MIB, 4096)
_LARGE_PIECE = 64 * chain.MIB  # the first of fallocate()
_POOL_SIZE = 1 << 30  # at most, of a pool on tmpfs
_ANSWER_SECONDS = 60.0


def mount(directory: Path, options: str) -> None:
    """A pool on tmpfs."""
    subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', options, 'pcow-vm-test', str(directory)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


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


class Pool:
    """A directory for images whose space can be taken, without much writing, and given back: a
    context manager.

    In a directory on tmpfs it is another tmpfs, whose size changes. Elsewhere blocks are allocated,
    so the file system must be one that nobody else needs.
    """

    def __init__(self, parent: Path) -> None:
        self.directory = parent / 'limited'
        self._taken = self.directory / 'taken'
        self._in_memory = os.major(parent.stat().st_dev) == 0

    def __enter__(self) -> Self:
        self.directory.mkdir()
        if self._in_memory:
            mount(self.directory, f'size={_POOL_SIZE}')
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._in_memory:
            unmount(self.directory)
        else:
            self._taken.unlink(missing_ok=True)

    def take(self) -> None:
        """All but a little: somebody who works ahead may take some at the same time."""
        if self._in_memory:
            found = os.statvfs(self.directory)
            mount(
                self.directory,
                f'remount,size={(found.f_blocks - found.f_bfree) * found.f_frsize + 2 * chain.MIB}',
            )
            return
        with open(self._taken, 'wb') as file:
            end = 0
            for size in (_LARGE_PIECE, *_PIECES):
                try:
                    while True:
                        os.posix_fallocate(file.fileno(), end, size)
                        end += size
                except OSError as e:
                    if e.errno != errno.ENOSPC:
                        raise

    def give_back(self) -> None:
        if self._in_memory:
            mount(self.directory, f'remount,size={_POOL_SIZE}')
        else:
            self._taken.unlink()


def check_answers(vm: machine.Machine) -> float:
    """A VM whose guest waits for space can be asked, stopped and continued; returns the seconds
    that it took.
    """
    begun = time.monotonic()
    statuses = [vm.run_qmp('query-status')['status']]
    for change in ('stop', 'cont'):
        vm.run_qmp(change)
        statuses.append(vm.run_qmp('query-status')['status'])
    answered = time.monotonic() - begun
    if statuses != ['running', 'paused', 'running'] or answered > _ANSWER_SECONDS:
        raise vm.failure(
            f'a VM that waits for space had the states {statuses}, in {answered:.1f} s'
        )
    return round(answered, 3)
