# SPDX-License-Identifier: Apache-2.0
"""Asking Nova for a warm image, as a user does: with the environment of the openstack command."""

from __future__ import annotations

import importlib
import time
from typing import Any

from nova_pcow.warm_images import warm
from pcow_driver.common import exception

_POLL = 0.5  # seconds
_EVENT_SECONDS = 10.0  # Nova deletes the image before it notes that
_DETAILS = '2.84'  # microversion that has what an event says


class WarmFailed(exception.PcowError):
    msg_fmt = 'no warm image of the server %(server)s was made: %(reason)s'


def make(server: str, name: str, *, timeout: float) -> str:
    """Have the service that has a server keep a checkpoint of it; the ID of the image that stands
    for that.

    :param server: its name or ID
    :param name: of the image
    :param timeout: seconds to wait until the image is there
    :raises WarmFailed: OpenStack cannot be asked, or refuses
    """
    try:
        return _make(server, name, timeout)
    except exception.PcowError:
        raise
    except Exception as e:  # of openstacksdk, keystoneauth, requests
        raise WarmFailed(server=server, reason=str(e)) from e


def _make(server: str, name: str, timeout: float) -> str:
    cloud = _connect(server)
    found = cloud.compute.find_server(server, ignore_missing=False)
    made = str(cloud.compute.create_server_image(found, name, {warm.PROPERTY: 'true'}).id)
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        there = cloud.image.find_image(made, ignore_missing=True)
        if there is None or there.status in ('deleted', 'killed'):
            raise WarmFailed(server=server, reason=_words(cloud, str(found.id)))
        if there.status == 'active':
            said = str(there.properties.get(warm.PROPERTY))
            if said.lower() == 'true':
                raise WarmFailed(
                    server=server,
                    reason=(
                        f'its host has made an ordinary image, {made}: it runs an earlier version '
                        f'of pcow, or its flavor has nothing of it'
                    ),
                )
            return made
        time.sleep(_POLL)
    raise WarmFailed(
        server=server, reason=f'the image {made} is not there after {timeout:.0f} s, and may come'
    )


def _connect(server: str) -> Any:
    try:
        sdk = importlib.import_module('openstack')
    except ImportError as e:
        raise WarmFailed(
            server=server,
            reason=f"{e}; install python3-openstacksdk, or 'pip install openstacksdk'",
        ) from None
    return sdk.connect()


def _words(cloud: Any, server: str) -> str:
    """Why the last image of it failed, as far as its events tell this user."""
    limit = time.monotonic() + _EVENT_SECONDS
    while True:
        request, ended = _last_failure(cloud, server)
        if ended is not None or time.monotonic() > limit:
            break
        time.sleep(_POLL)
    return ended or (
        f'the log of nova-compute says why, and to an administrator openstack server event show '
        f'{server} {request}'
    )


def _last_failure(cloud: Any, server: str) -> tuple[str, str | None]:
    """Request of the last image, and what its event says of that; None: it has not ended."""
    place = f'/servers/{server}/os-instance-actions'
    for action in _get(cloud, place)['instanceActions']:
        if action['action'] == 'createImage':
            request = str(action['request_id'])
            found = _get(cloud, f'{place}/{request}')['instanceAction']
            for event in found.get('events') or ():
                if event.get('result') == 'Error':
                    return request, str(event.get('details') or '')
            return request, None
    return '', None


def _get(cloud: Any, path: str) -> dict[str, Any]:
    answer = cloud.compute.get(path, microversion=_DETAILS)
    answer.raise_for_status()
    return dict(answer.json())
