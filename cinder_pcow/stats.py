# SPDX-License-Identifier: Apache-2.0
"""What the scheduler is told: of each pool its size, what is free, and what was provisioned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cinder.volume import volume_utils
from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.pools import capacity
from pcow_driver.pools import pool as pool_module

LOG = logging.getLogger(__name__)

PROTOCOL = 'pcow'
VENDOR = 'pcow'
LOCATION = 'PcowDriver'


def location_info(hostname: str, pool: pool_module.Pool) -> str:
    """By which another driver of this kind knows the pool as its target of a migration."""
    return f'{LOCATION}:{hostname}:{pool.uuid}:{pool.name}'


def of_pools(
    pools: Iterable[pool_module.Pool], hostname: str, configuration: Any
) -> list[dict[str, Any]]:
    """As :func:`of_pool`, of those that can be looked at; why one cannot is logged."""
    found = []
    for pool in pools:
        try:
            found.append(of_pool(pool, hostname, configuration))
        except (exception.PcowError, OSError) as e:
            LOG.error('Pool %s takes no volumes for now: %s', pool.name, e)
    return found


def of_pool(pool: pool_module.Pool, hostname: str, configuration: Any) -> dict[str, Any]:
    """Capabilities of one pool; capacities in GiB.

    What "pcowctl pool set" says of over-commit and reserve counts before cinder.conf.

    :raises PcowError: it cannot be looked at
    :raises OSError: the same
    """
    usage = capacity.usage(pool, with_shared=False)
    ratio = pool.settings.overcommit or volume_utils.get_max_over_subscription_ratio(
        configuration.max_over_subscription_ratio, supports_auto=True
    )
    return {
        'pool_name': pool.name,
        'total_capacity_gb': round(usage.total / units.GIB, 2),
        'free_capacity_gb': 0
        if pool.settings.draining or usage.read_only
        else round(usage.free / units.GIB, 2),
        # what nobody can fill counts as often as what is left of the pool is provisioned: Cinder
        # compares with all of it
        'provisioned_capacity_gb': round(
            (usage.provisioned + usage.account.fixed * pool.settings.overcommit) / units.GIB, 2
        ),
        'allocated_capacity_gb': round(usage.allocated / units.GIB, 2),
        'max_over_subscription_ratio': ratio,
        'reserved_percentage': pool.settings.reserve or configuration.reserved_percentage,
        'total_volumes': sum(not item.template for item in usage.images),
        'location_info': location_info(hostname, pool),
        'pcow_persistence': pool.persistence(),
        **CAPABILITIES,
    }


CAPABILITIES: dict[str, Any] = {
    'thin_provisioning_support': True,
    'thick_provisioning_support': False,
    'QoS_support': False,
    'multiattach': False,
    'online_extend_support': False,
    # Cinder would leave out zeros also when it copies over data: reimage from a snapshot
    'sparse_copy_volume': False,
    'clone_across_pools': True,
    'consistent_group_snapshot_enabled': True,
}
