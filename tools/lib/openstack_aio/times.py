# SPDX-License-Identifier: Apache-2.0
"""How long servers from one image take, on persistent memory and on Nova's own disk, in the same
run.
"""

from __future__ import annotations

import dataclasses
import time

from pcow_driver.common import units
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import hosts as hosts_module
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

FLAVORS = ('pcow.tiny', 'disk.tiny')
_IMAGE = 'times-guest'
_SHOWN = (1, 2, 10)  # of the servers, beside the last one


@dataclasses.dataclass(frozen=True)
class Measured:
    """One server; seconds, bytes."""

    flavor: str
    number: int  # from 1
    active: float  # from the request until Nova says ACTIVE
    booted: float  # until the guest has said what its root holds
    # what it took of the pool, or of the directory of its disk, when it was ACTIVE
    fresh: int
    # and when it had booted, with 4 MiB of data of its own
    used: int
    # createImage, until the image is active; of the last server alone
    snapshot: float | None


def measure(api: api_module.Api, hosts: hosts_module.Hosts, count: int) -> list[Measured]:
    """Make servers of both kinds by turns, each when the one before has booted, from an image that
    no host has seen yet.

    :raises PcowError:
    """
    original = api.call('glance', 'GET', f'/v2/images/{servers.find_image(api, "pcow-guest")}')
    kept = {key: str(original[key]) for key in ('kernel_id', 'ramdisk_id', 'os_command_line')}
    images = [api.upload_image(_IMAGE, hosts.image_file(), 'qcow2', **kept)]
    made: list[servers.Server] = []
    found = []
    try:
        for number in range(1, count + 1):
            for flavor in FLAVORS:
                server, one = _one(api, hosts, flavor, number, images[0], made)
                if number == count:
                    begun = time.monotonic()
                    images.append(server.create_image('times-snapshot'))
                    one = dataclasses.replace(one, snapshot=time.monotonic() - begun)
                found.append(one)
    finally:
        for server in made:
            server.delete()
        for image in images:
            api.call('glance', 'DELETE', f'/v2/images/{image}')
    return found


def _one(
    api: api_module.Api,
    hosts: hosts_module.Hosts,
    flavor: str,
    number: int,
    image: str,
    made: list[servers.Server],
) -> tuple[servers.Server, Measured]:
    pmem = flavor == FLAVORS[0]
    before, begun = hosts.pool_bytes(), time.monotonic()
    server = servers.Server.create(
        api, f'times-{number}', flavor, image, host=settings_module.NODE1.name
    )
    made.append(server)
    server.wait_status('ACTIVE')
    active = time.monotonic() - begun
    fresh = hosts.pool_bytes() - before if pmem else hosts.disk_bytes(server.id)
    server.wait_root(lambda root: root.boots == 1)
    booted = time.monotonic() - begun
    used = hosts.pool_bytes() - before if pmem else hosts.disk_bytes(server.id)
    return server, Measured(flavor, number, active, booted, fresh, used, None)


def table(found: list[Measured]) -> str:
    """For people, with the first, second, tenth and last server of each kind."""
    last = max(item.number for item in found)
    lines = ['flavor     server    ACTIVE    booted  space when ACTIVE  when booted  snapshot']
    for flavor in FLAVORS:
        for item in found:
            if item.flavor == flavor and (item.number in _SHOWN or item.number == last):
                snapshot = '' if item.snapshot is None else f'{item.snapshot:.1f} s'
                lines.append(
                    f'{item.flavor:10} {item.number:6} {item.active:7.1f} s {item.booted:7.1f} s '
                    f'{units.format_size(item.fresh):>18} {units.format_size(item.used):>12} '
                    f'{snapshot:>9}'
                )
    return '\n'.join(lines)
