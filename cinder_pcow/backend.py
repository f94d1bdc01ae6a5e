# SPDX-License-Identifier: Apache-2.0
"""The pools of one backend section, and where in them a volume is."""

from __future__ import annotations

import os
import socket
from typing import Any

from cinder.volume import volume_utils
from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash

LOG = logging.getLogger(__name__)

_MARK = '#'


class Backend:
    """Nothing is remembered: a pool that is mounted, or made, while the service runs is there for
    the next call.

    :param host: ``host@backend`` of the service
    :param wanted: names of pools; all of the host if empty
    :param compute_host: another name of this machine
    """

    def __init__(self, host: str, wanted: list[str], compute_host: str | None) -> None:
        self.host = host
        self._wanted = wanted
        self.hostnames = frozenset(
            filter(
                None, (volume_utils.extract_host(host, 'host'), socket.gethostname(), compute_host)
            )
        )

    def _all_names(self) -> list[str]:
        """:raises StateInvalid:"""
        return self._wanted or [entry.name for entry in registry.PoolRegistry().list()]

    def pool_names(self) -> list[str]:
        """Of those that Cinder can name.

        :raises StateInvalid:
        """
        return [name for name in self._all_names() if _MARK not in name]

    def pools(self) -> list[pool_module.Pool]:
        """Those that can be used; why one cannot is logged."""
        found = []
        for name in self._all_names():
            try:
                found.append(_open(name))
            except exception.PcowError as e:
                LOG.error('Pool %s of backend %s cannot be used: %s', name, self.host, e)
        return found

    def pool_uuids(self) -> frozenset[str]:
        """Of the pools that the host knows, whether they can be used or not.

        :raises StateInvalid:
        """
        names = frozenset(self.pool_names())
        return frozenset(
            entry.uuid for entry in registry.PoolRegistry().list() if entry.name in names
        )

    def check(self) -> None:
        """Find out whether volumes can be made at all.

        :raises PcowError: there is no usable pool, with the reason
        """
        names = self._all_names()
        if not names:
            raise exception.ConfigInvalid(
                reason='this host has no pool; make one with "pcowctl pool create"'
            )
        if not self.pools():
            _open(names[0])  # says why

    def pool(self, name: str) -> pool_module.Pool:
        """:raises PoolNotFound: it is not one of this backend, or not known
        :raises PoolInvalid: its directory is not there
        """
        if name not in self.pool_names():
            raise exception.ConfigInvalid(
                reason=f'the pool {name} is not one of backend {self.host} (pcow_pools)'
            )
        return registry.PoolRegistry().get(name)

    def pool_of(self, volume: Any) -> pool_module.Pool:
        """The pool in which the scheduler has put a volume, or in which it is found if its host
        names none.

        :raises PcowError: that pool cannot be used
        """
        name = volume_utils.extract_host(volume.host, 'pool')
        if name is None:
            return self.find(volume) or self.pool(self.pool_names()[0])
        return self.pool(name)

    def locate(self, volume: Any) -> pool_module.Pool:
        """The pool that has the image of a volume; another one of the backend than its host says,
        if the service died at the end of a migration.

        :raises ImageNotFound: none has it
        :raises PcowError: its pool cannot be used
        """
        home = self.pool_of(volume)
        pool = home if self.holds(home, volume) else self.find(volume)
        if pool is None:
            raise exception.ImageNotFound(path=home.image_path(volume.name))
        return pool

    def find(self, volume: Any) -> pool_module.Pool | None:
        """Look in all pools of the backend."""
        for pool in self.pools():
            if self.holds(pool, volume):
                return pool
        return None

    @staticmethod
    def holds(pool: pool_module.Pool, volume: Any) -> bool:
        """As the function of this name."""
        return holds(pool, volume.name)


def _open(name: str) -> pool_module.Pool:
    """:raises PcowError: it cannot be used"""
    if _MARK in name:
        raise exception.InvalidName(
            kind='pool',
            name=name,
            reason=(
                f"it holds a '{_MARK}', which begins the pool in Cinder's names of hosts; 'pcowctl "
                f"pool remove --forget {name}', then "
                "'pcowctl pool import --name OTHER DIRECTORY' gives it another"
            ),
        )
    return registry.PoolRegistry().get(name)


def holds(pool: pool_module.Pool, name: str) -> bool:
    """Whether the image of a volume is in a pool.

    What is only kept there for its clones (:mod:`pcow_driver.snapshots.trash`), because the volume
    was deleted or has gone elsewhere, is not the volume.
    """
    return os.path.lexists(pool.image_path(name)) and name not in trash.deleted_images(pool)
