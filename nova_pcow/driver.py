# SPDX-License-Identifier: Apache-2.0
"""The compute driver: Nova's libvirt driver, and what differs for servers whose root or data
devices are pcow images.

What is here is of the host; the rest is in :mod:`nova_pcow.libvirt_driver`. A server without
``pcow:*`` in its flavor takes Nova's own way everywhere.
"""

from __future__ import annotations

import copy
from typing import Any

import nova.conf
from oslo_log import log as logging

from nova_pcow.libvirt_driver import persistent
from nova_pcow.placement import inventory
from nova_pcow.records import notes
from nova_pcow.servers import persistence
from nova_pcow.snapshots import suspension
from pcow_driver.common import exception
from pcow_driver.templates import template_cache

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF


class PcowLibvirtDriver(persistent.PersistenceLibvirtDriver):
    """See :mod:`nova_pcow.driver`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._had_emulator = True
        self._quiet = inventory.Quiet()

    def init_host(self, host: str) -> None:
        super().init_host(host)
        self._service_host = host
        if not CONF.nova_pcow.pools:
            LOG.warning(
                '[nova_pcow] pools names no pool: servers with persistent memory are not scheduled '
                'to this host'
            )
        try:
            self._emulator.path()
            inventory.pools()
        except exception.PcowError as e:
            LOG.error('Servers with persistent memory will not start: %s', e)
        self._delete_leftovers()
        self._drop_pending()
        self._interrupted = suspension.settle(self._host, suspension.interrupted(host))
        persistence.expect(host, self._domain)

    def update_provider_tree(
        self, provider_tree: Any, nodename: str, allocations: Any = None
    ) -> None:
        super().update_provider_tree(provider_tree, nodename, allocations)
        inventory.update_provider_tree(
            provider_tree, nodename, takes_servers=self._has_emulator(), quiet=self._quiet
        )
        self.provider_tree = copy.deepcopy(provider_tree)
        self._lost_claims.put_back(self._service_host)
        self._settle_stayed(*notes.servers(notes.LEAVING))
        self._interrupted &= suspension.settle(self._host, set(self._interrupted))

    def _has_emulator(self) -> bool:
        """One warning each time that it goes."""
        had, self._had_emulator = self._had_emulator, True
        try:
            self._emulator.path()
        except exception.PcowError as e:
            self._had_emulator = False
            if had:
                LOG.warning('The pools of this host take no servers: %s', e)
        return self._had_emulator

    def manage_image_cache(self, context: Any, all_instances: Any) -> None:
        super().manage_image_cache(context, all_instances)
        self._drop_warm_leftovers()
        self._delete_leftovers()  # first: templates that nothing stands on age
        if CONF.image_cache.remove_unused_base_images:
            for pool in inventory.pools():
                template_cache.TemplateCache(pool).age_out(
                    CONF.image_cache.remove_unused_original_minimum_age_seconds
                )
