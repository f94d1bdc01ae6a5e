# SPDX-License-Identifier: Apache-2.0
"""What a server that changes its size claims in placement, kept in the pool that its images stay
in.
"""

from __future__ import annotations

from typing import Any
from urllib import parse

from keystoneauth1 import exceptions as keystone_exception
from nova import exception as nova_exception
from nova.scheduler.client import report

from nova_pcow.common import flavor as flavor_module
from nova_pcow.placement import inventory
from pcow_driver.common import units

_ATTEMPTS = 3


def of_server(context: Any, uuid: str) -> dict[str, Any]:
    """What a server claims, by the UUID of the resource provider, as Nova hands it to a driver.

    :raises PlacementMismatch: placement cannot be asked
    """
    try:
        return dict(
            report.report_client_singleton().get_allocs_for_consumer(context, uuid)['allocations']
        )
    except (nova_exception.NovaException, keystone_exception.ClientException) as e:
        raise _not_asked(e) from e


def is_on_class(context: Any, uuid: str, persistence: str) -> bool:
    """Whether a server claims its memory in a pool of this class.

    :param persistence: of :data:`nova_pcow.common.flavor.CLASS_TRAITS`
    :raises PlacementMismatch: placement cannot be asked
    """
    client, trait = report.report_client_singleton(), flavor_module.CLASS_TRAITS[persistence]
    try:
        return any(
            trait in client.get_provider_traits(context, provider).traits
            for provider, item in of_server(context, uuid).items()
            if flavor_module.RESOURCE_CLASS in item['resources']
        )
    except (nova_exception.NovaException, keystone_exception.ClientException) as e:
        raise _not_asked(e) from e


def _not_asked(error: Exception) -> inventory.PlacementMismatch:
    return inventory.PlacementMismatch(
        reason=f'placement cannot be asked, try again later ({error})'
    )


def follow(context: Any, uuid: str, pool: str, nodename: str) -> None:
    """Have a server claim in a pool what it claims in another of the same host since its resize
    began.

    Placement chooses among the pools of a host that fit, but images stay where they are. What the
    server had is claimed for the migration, which this leaves alone: Nova gives it back to the
    server if the resize fails later, or is reverted.

    :param nodename: of the host that goes on with the images
    :raises PlacementMismatch: placement has no room there, or cannot be asked
    """
    try:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _follow(context, uuid, pool, nodename)
                return
            except (
                nova_exception.AllocationUpdateFailed
            ):  # somebody else has changed the claims meanwhile
                if attempt == _ATTEMPTS:
                    raise
    except (nova_exception.NovaException, keystone_exception.ClientException) as e:
        raise _not_asked(e) from e


def _follow(context: Any, uuid: str, pool: str, nodename: str) -> None:
    """:raises AllocationUpdateFailed: the claims are not what they were when they were read"""
    client, key = report.report_client_singleton(), flavor_module.RESOURCE_CLASS
    found = client.get_allocs_for_consumer(context, uuid)
    claims = {provider: dict(item['resources']) for provider, item in found['allocations'].items()}
    target = _provider(client, inventory.provider_name(nodename, pool))
    elsewhere = [
        resources
        for provider, resources in claims.items()
        if key in resources and provider != target
    ]
    if not elsewhere:
        return
    size = sum(resources.pop(key) for resources in elsewhere)
    if target is not None:
        there = claims.setdefault(target, {})
        there[key] = there.get(key, 0) + size
        payload = {
            'allocations': {
                provider: {'resources': resources}
                for provider, resources in claims.items()
                if resources
            },
            **{name: found[name] for name in ('consumer_generation', 'project_id', 'user_id')},
        }
        if client.put_allocations(context, uuid, payload):
            return
    raise inventory.PlacementMismatch(
        reason=(
            f'its images lie in the pool {pool} and stay there, and placement has no room for '
            f'{units.format_size(size * units.MIB)} in '
            'it beside the old size, which is given up when the resize is confirmed: free or '
            'extend that pool, or have the server '
            'resized on another host'
        )
    )


def _provider(client: Any, name: str) -> str | None:
    answer = client.get(f'/resource_providers?name={parse.quote(name)}')
    if answer.status_code != 200:
        raise nova_exception.ResourceProviderRetrievalFailed(uuid=name)
    return next((str(item['uuid']) for item in answer.json()['resource_providers']), None)
