# SPDX-License-Identifier: Apache-2.0
"""A pool that cannot be looked at, for the tests of all services."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
from unittest import mock

from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import watermark


@contextlib.contextmanager
def sick(name: str) -> Iterator[None]:
    """The file system of one pool does not tell its space."""
    capacity = pool_module.Pool.capacity

    def broken(pool: pool_module.Pool) -> watermark.Capacity:
        if pool.name == name:
            raise OSError(errno.EIO, 'Input/output error')
        return capacity(pool)

    with mock.patch.object(pool_module.Pool, 'capacity', broken):
        yield
