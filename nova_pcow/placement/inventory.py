# SPDX-License-Identifier: Apache-2.0
"""What placement is told of the pools: one resource provider each, below that of the
compute node.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Mapping
import dataclasses
import time
from typing import Any

from oslo_log import log as logging

from nova_pcow import conf
from nova_pcow.common import flavor as flavor_module
from nova_pcow.records import warm_records
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import info_block
from pcow_driver.pools import bases
from pcow_driver.pools import capacity
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.vm import ram as vm_ram

LOG = logging.getLogger(__name__)

NO_LIMIT_RATIO = 10000.0  # placement knows no ratio without limit
# Percent of a pool by which placement may be told more as reserved than is, so that it is not told
# anew at each look: see _settled().
SLACK = 1
QUIET = 60.0  # seconds without a change, after which it is told to the MiB
_MAX_UNIT = 2**31 - 1
_UUID_LENGTH = 36


class PlacementMismatch(exception.PcowError):
    msg_fmt = 'the server cannot be put on a pool of this host: %(reason)s'


@dataclasses.dataclass(frozen=True)
class Offer:
    """What one pool offers; ``inventory`` is as placement takes it, in MiB."""

    pool: str
    inventory: dict[str, Any]
    traits: frozenset[str]


def pools() -> list[pool_module.Pool]:
    """The configured pools that can be used.

    :raises StateInvalid: the list of pools cannot be read
    """
    known, found = registry.PoolRegistry(), []
    for name in conf.CONF.nova_pcow.pools:
        try:
            found.append(known.get(name))
        except (exception.PoolInvalid, exception.PoolNotFound) as e:
            LOG.error('The pool %s of [nova_pcow] pools takes no servers: %s', name, e)
    return found


def all_there() -> bool:
    """Whether every configured pool can be used.

    :raises StateInvalid: the list of pools cannot be read
    """
    return len(pools()) == len(conf.CONF.nova_pcow.pools)


def traits(pool: pool_module.Pool) -> frozenset[str]:
    """:raises ToolFailed:"""
    return frozenset((flavor_module.TRAIT, flavor_module.CLASS_TRAITS[pool.persistence()]))


class Quiet:
    """Since when what is reserved of each pool has been the same, as far as this service has
    looked.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    def lasts(self, pool: str, reserved: int) -> bool:
        """Whether it has been this figure for long enough.

        :param pool: its UUID
        """
        now = time.monotonic()
        before, since = self._since.get(pool, (-1, now))
        if before != reserved:
            since = now
            self._since[pool] = reserved, since
        return before == reserved and now - since >= QUIET


def offer(
    pool: pool_module.Pool, told: Mapping[str, Any] | None = None, quiet: Quiet | None = None
) -> Offer:
    """What a pool has now.

    Reserved are what the operator keeps free and what is provisioned beside the claims of servers;
    everything, if the pool takes nothing new or is so full that guests will soon wait.

    :param told: the inventory that placement has of it, if it has one
    :param quiet: what was seen before; None: nothing
    :raises ToolFailed:
    """
    now, settings = pool.capacity(), pool.settings
    total = now.total // units.MIB
    ratio = settings.overcommit or NO_LIMIT_RATIO
    if settings.overcommit:
        # in this order: of a server that comes meanwhile more counts as provisioned, and not less,
        # than it claims
        orphaned = warm_records.orphaned()
        claimed = sum(_claimed(pool, item, orphaned) for item in pool.listed())
        reserved = min(-(-pool.account().reserved_beside(claimed) // units.MIB), total)
        if quiet is None or not quiet.lasts(pool.uuid, reserved):
            reserved = _settled(reserved, total, told)
    else:
        reserved = -(-settings.reserved(now.total) // units.MIB)
    if settings.draining or capacity.judge(now, settings)[0] is capacity.State.CRITICAL:
        reserved = total
    return Offer(
        pool.name,
        {
            'total': total,
            'reserved': reserved,
            'min_unit': 1,
            'step_size': 1,
            'allocation_ratio': ratio,
            'max_unit': max(1, min(int((total - reserved) * ratio), _MAX_UNIT)),
        },
        traits(pool),
    )


def _settled(reserved: int, total: int, told: Mapping[str, Any] | None) -> int:
    """What to tell placement of what is reserved, all in MiB: never less, and up to :data:`SLACK`
    percent of the pool more, so that it stays what it was while metadata and small files come and
    go.

    nova-compute writes an inventory that has changed with each claim and each periodic update.
    Placement refuses that if anybody has claimed something of the pool since it was read, which
    takes as long as the look at the pools. Nova tries four times, and then fails the build or the
    resize. Where nothing comes nor goes there are no claims to be in the way of.
    """
    slack = total * SLACK // 100
    if told and told['total'] == total and 0 <= told['reserved'] - reserved <= slack:
        return int(told['reserved'])
    # in the middle: it may now become more as well as less
    return min(reserved + slack // 2, total)


def _claimed(
    pool: pool_module.Pool, item: bases.ListedImage, orphaned: Collection[str] = ()
) -> int:
    """Bytes that a server claims of what is provisioned for its image: the virtual size without the
    DAX info block, which RAM has not. Also if it cannot be read: the server is there.

    :param orphaned: UUIDs of those that are not, and claim nothing
    """
    if not item.name.startswith(names.SERVER_PREFIX):
        return 0
    if item.name.removeprefix(names.SERVER_PREFIX)[:_UUID_LENGTH] in orphaned:
        return 0
    if item.summary is None:
        size = pool.known_size(item.name)
    else:
        size = 0 if item.summary.sealed else item.summary.virtual_size
    if not size or item.name.endswith(names.RAM_SUFFIX):
        return size
    return size - info_block.data_offset(size, info_block.PageMap.RAM)


def provider_name(nodename: str, pool: str) -> str:
    return f'{nodename}_pcow_{pool}'


def update_provider_tree(
    tree: Any, nodename: str, *, takes_servers: bool, quiet: Quiet | None = None
) -> None:
    """Tell placement (nova.compute.provider_tree.ProviderTree) what the pools have now.

    A pool that is not there for the moment, or was taken out of the configuration, keeps its
    provider, because servers may be on it, and takes no more.

    :param takes_servers: False: so it is with all of them
    :param quiet: what was seen before
    """
    offered = set()
    for pool in pools() if takes_servers else ():
        provider = provider_name(nodename, pool.name)
        told = tree.data(provider).inventory if tree.exists(provider) else {}
        try:
            found = offer(pool, told.get(flavor_module.RESOURCE_CLASS), quiet)
        except (exception.PcowError, OSError) as e:
            LOG.error('The pool %s takes no servers: %s', pool.name, e)
            continue
        if not tree.exists(provider):
            tree.new_child(provider, nodename)
        tree.update_inventory(provider, {flavor_module.RESOURCE_CLASS: found.inventory})
        tree.remove_traits(provider, *(set(flavor_module.CLASS_TRAITS.values()) - found.traits))
        tree.add_traits(provider, *found.traits)
        offered.add(provider)
    for uuid in tree.get_provider_uuids_in_tree(nodename):
        provider = tree.data(uuid)
        if provider.name.startswith(provider_name(nodename, '')) and provider.name not in offered:
            tree.update_inventory(
                uuid,
                {
                    key: dict(value, reserved=value['total'])
                    for key, value in provider.inventory.items()
                },
            )


def choose(
    tree: Any,
    nodename: str,
    allocations: Mapping[str, Any] | None,
    wanted: flavor_module.PcowFlavor,
) -> pool_module.Pool:
    """The pool in which placement has reserved space for a server.

    :param tree: None: nova-compute has not made it yet
    :raises PlacementMismatch: none, or it has not what the flavor requires
    :raises PoolInvalid: the RAM of the server cannot be on it
    """
    if tree is None:
        raise PlacementMismatch(
            reason='this nova-compute has not told placement yet which pools it has'
        )
    claimed = {
        tree.data(uuid).name
        for uuid, item in (allocations or {}).items()
        if flavor_module.RESOURCE_CLASS in item.get('resources', {}) and tree.exists(uuid)
    }
    found = [pool for pool in pools() if provider_name(nodename, pool.name) in claimed]
    if len(found) != 1:
        raise PlacementMismatch(
            reason=(
                f'placement reserved {flavor_module.RESOURCE_CLASS} in {len(found)} pools of it; a '
                f'server lies in one'
            )
        )
    if wanted.has_ram:
        vm_ram.check_pool(found[0])
    missing = wanted.required_traits - traits(found[0])
    if missing:
        raise PlacementMismatch(
            reason=(
                f'the pool {found[0].name} has not {", ".join(sorted(missing))}; this host has '
                f'pools of several kinds, so give the '
                f'flavor resources_PCOW:{flavor_module.RESOURCE_CLASS} and trait_PCOW:... in one '
                f'group'
            )
        )
    return found[0]
