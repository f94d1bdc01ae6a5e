# SPDX-License-Identifier: Apache-2.0
"""Pools of this host that another backend section has: the counterpart of
:mod:`cinder_pcow.remote`, without SSH.
"""

from __future__ import annotations

import dataclasses

from cinder_pcow import backend
from pcow_driver.common import exception
from pcow_driver.copies import clone
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash


@dataclasses.dataclass(frozen=True)
class LocalPool:
    """A pool of this host, under the name that it had."""

    pool: str
    uuid: str

    @property
    def address(self) -> str:
        """For what the log says."""
        return 'this host'

    def has(self, name: str) -> bool:
        """Whether the pool has an image of this name; not what is only kept there for its clones.

        :raises PcowError: the pool cannot be used
        """
        return backend.holds(self._open(), name)

    def send(self, path: str, name: str, data_size: int) -> None:
        """Copy an image, with what it stands on, into one file.

        :raises PcowError: nothing is left there then
        """
        clone.copy(path, self._open(), name, data_size)

    def discard(self, name: str) -> bool:
        """Delete an image that was sent.  Done also if there is none.

        :return: False if clones keep some of it, of an earlier stay there
        :raises PcowError: the pool cannot be used, or somebody has the image open
        """
        return trash.delete_image(self._open(), name)

    def _open(self) -> pool_module.Pool:
        """:raises PoolNotFound: it is none of this host's any more"""
        for entry in registry.PoolRegistry().list():
            if entry.uuid == self.uuid:
                return registry.PoolRegistry().get(entry.name)
        raise exception.PoolNotFound(name=self.pool)
