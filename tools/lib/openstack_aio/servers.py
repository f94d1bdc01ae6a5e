# SPDX-License-Identifier: Apache-2.0
"""Servers of the tiny guest: what Nova does with them, and what they say of their data on the
console.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import re
import time
from typing import Any
from typing import TypeVar

from pcow_driver.common import exception
from tools.lib.openstack_aio import api as api_module

SECONDS = 120.0  # for one step of Nova's, or one boot
_POLL = 0.1
_ROOT = re.compile(
    r'PCOW-GUEST: root (\S+) (dax|disk) (\d+) boots=(\d+) sum=([0-9a-f]{16}) (intact|BROKEN)'
)
_ALIVE = re.compile(r'PCOW-GUEST: alive boot=(\S+) seconds=(\d+)( BROKEN)?')
_DEVICE = re.compile(
    r'PCOW-GUEST: device (\S+) (\d+) (new|intact|BROKEN) sum=([0-9a-f]{16})(?: fs=(dax|disk))?'
)
T = TypeVar('T')


class ServerFailed(exception.PcowError):
    """A server is in another state than it should be, or its guest says something else than it
    should.
    """


@dataclasses.dataclass(frozen=True)
class Root:
    """What the guest said of its root when it booted; ``size`` in MiB."""

    device: str
    dax: bool
    size: int
    boots: int
    sum: str
    intact: bool


@dataclasses.dataclass(frozen=True)
class Device:
    """What the guest said of a further device; ``size`` in MiB, ``state`` is new, intact or BROKEN.

    ``formatted`` is dax or disk if it came with a file system, by how that could be mounted, else
    empty.
    """

    name: str
    size: int
    state: str
    sum: str
    formatted: str = ''


def wait(what: str, look: Callable[[], T | None], seconds: float = SECONDS) -> T:
    """Look until there is something.

    :raises ServerFailed: there is nothing in time
    """
    limit = time.monotonic() + seconds
    while True:
        found = look()
        if found is not None:
            return found
        if time.monotonic() > limit:
            raise ServerFailed(reason=f'no {what} within {seconds:.0f} s')
        time.sleep(_POLL)


class Server:
    def __init__(self, api: api_module.Api, uuid: str) -> None:
        self.api = api
        self.id = uuid

    @classmethod
    def create(cls, api: api_module.Api, name: str, flavor: str, image: str, **more: Any) -> Server:
        """Ask for a server, without a network; it is not waited for.

        :param flavor: name
        :param image: name or ID
        :raises PcowError:
        """
        body = {
            'name': name,
            'flavorRef': find_flavor(api, flavor),
            'imageRef': find_image(api, image),
            'networks': 'none',
            **more,
        }
        return cls(api, str(api.call('nova', 'POST', '/servers', {'server': body})['server']['id']))

    def show(self) -> dict[str, Any]:
        return dict(self.api.call('nova', 'GET', f'/servers/{self.id}')['server'])

    def host(self) -> str:
        return str(self.show()['OS-EXT-SRV-ATTR:host'])

    def wait_status(self, status: str, seconds: float = SECONDS) -> None:
        """Wait until it has a status and nothing is being done with it.

        :raises ServerFailed: it has not in time, or something failed (with Nova's words)
        """

        def look() -> bool | None:
            found = self.show()
            if found['status'] == 'ERROR' and status != 'ERROR':
                raise ServerFailed(
                    reason=f'server {found["name"]}: '
                    f'{found.get("fault", {}).get("message", "no reason is told")}'
                )
            return (
                True
                if found['status'] == status and found['OS-EXT-STS:task_state'] is None
                else None
            )

        wait(f'status {status} of server {self.id}', look, seconds)

    def act(self, action: str, values: Any = None) -> Any:
        """Ask for an action by the name that it has in the API.

        :raises PcowError: Nova refuses
        """
        return self.api.call('nova', 'POST', f'/servers/{self.id}/action', {action: values})

    def create_image(self, name: str) -> str:
        """Make an image of it, and wait until that can be used; returns its ID.

        :raises PcowError:
        """
        image = str(self.act('createImage', {'name': name})['image_id'])
        wait(
            f'image {name}',
            lambda: (
                True
                if self.api.call('glance', 'GET', f'/v2/images/{image}')['status'] == 'active'
                else None
            ),
        )
        return image

    def console(self) -> str:
        """What is in the log of its console."""
        try:
            return str(self.act('os-getConsoleOutput', {'length': None})['output'])
        except exception.PcowError:  # it has none while it is off
            return ''

    def wait_root(self, fits: Callable[[Root], bool], seconds: float = SECONDS) -> Root:
        """Wait until the guest has booted and says something of its root.

        :raises ServerFailed: it does not, or its data are broken
        """

        def look() -> Root | None:
            for match in reversed(list(_ROOT.finditer(self.console()))):
                root = Root(
                    match[1],
                    match[2] == 'dax',
                    int(match[3]),
                    int(match[4]),
                    match[5],
                    match[6] == 'intact',
                )
                return root if fits(root) else None
            return None

        root = wait(f'fitting root of server {self.id}', look, seconds)
        if not root.intact:
            raise ServerFailed(reason=f'the data of server {self.id} are broken: {root}')
        return root

    def devices(self) -> list[Device]:
        return [
            Device(match[1], int(match[2]), match[3], match[4], match[5] or '')
            for match in _DEVICE.finditer(self.console())
        ]

    def wait_device(self, fits: Callable[[Device], bool]) -> Device:
        """:raises ServerFailed: the guest never says such a thing"""
        return wait(
            f'fitting device of server {self.id}',
            lambda: next((item for item in self.devices() if fits(item)), None),
        )

    def wait_alive(self, fits: Callable[[str, int], bool]) -> tuple[str, int]:
        """Wait until the last sign of life fits; returns the boot and its seconds.

        :raises ServerFailed: it never does, or what the guest writes all the while is broken
        """

        def look() -> tuple[str, int] | None:
            found = _ALIVE.findall(self.console())
            if any(item[2] for item in found):
                raise ServerFailed(reason=f'what the guest of server {self.id} writes is broken')
            return (
                (found[-1][0], int(found[-1][1]))
                if found and fits(found[-1][0], int(found[-1][1]))
                else None
            )

        return wait(f'sign of life of server {self.id}', look)

    def delete(self) -> None:
        """Delete it and wait until it is gone."""
        self.api.call('nova', 'DELETE', f'/servers/{self.id}')
        self.wait_gone()

    def wait_gone(self, seconds: float = SECONDS) -> None:
        """:raises ServerFailed:"""
        wait(f'end of server {self.id}', lambda: True if self.gone() else None, seconds)

    def gone(self) -> bool:
        return self.id not in {
            item['id'] for item in self.api.call('nova', 'GET', '/servers')['servers']
        }

    def fault(self, wanted: str = '') -> str:
        """The words of the last action that failed.

        :param wanted: of the last one of this name, which must fail; that is waited for
        """
        if wanted:
            return wait(f'failure of {wanted}', lambda: self._fault_of(wanted))
        return self._fault_of('') or str(self.show().get('fault', {}).get('message', ''))

    def _fault_of(self, wanted: str) -> str | None:
        actions = self.api.call('nova', 'GET', f'/servers/{self.id}/os-instance-actions')[
            'instanceActions'
        ]
        for action in (
            [one for one in actions if one['action'] == wanted][:1] if wanted else actions
        ):
            found = self.api.call(
                'nova', 'GET', f'/servers/{self.id}/os-instance-actions/{action["request_id"]}'
            )['instanceAction']
            for event in found.get('events', ()):
                if event['result'] == 'Error':
                    return str(
                        event.get('details')
                        or (event.get('traceback') or '').strip().splitlines()[-1:]
                    )
        return None


def find_flavor(api: api_module.Api, name: str) -> str:
    """ID of a flavor.

    :raises PcowError: there is none of that name
    """
    for item in api.call('nova', 'GET', '/flavors')['flavors']:
        if item['name'] == name:
            return str(item['id'])
    raise exception.PcowError(reason=f'there is no flavor {name}: run tools/openstack-aio image')


def find_image(api: api_module.Api, name: str) -> str:
    """ID of an image that is ready.

    :param name: name or ID
    :raises PcowError: there is none of that name
    """
    for key in ('name', 'id'):
        found = api.call('glance', 'GET', f'/v2/images?{key}={name}&status=active')['images']
        if found:
            return str(found[0]['id'])
    raise exception.PcowError(reason=f'there is no image {name}: run tools/openstack-aio image')
