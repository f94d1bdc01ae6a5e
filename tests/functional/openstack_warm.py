# SPDX-License-Identifier: Apache-2.0
"""Warm images of a server, and servers that go on from one, through Nova and Glance."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
import time

from pcow_driver.common import exception
from pcow_driver.common import units
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import guest
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

FLAVOR, OTHER = 'pcow.warm', 'pcow.warm-other'
_IMAGE = 'warm-guest'
_BOOTED = 'PCOW-GUEST: root'  # what a guest says of its root then
_RAM_MB, _OTHER_RAM_MB, _ROOT_GB = 192, 256, 2


class Warm:
    """On an all-in-one that is up.

    :param shell: runs a command as the user and returns what it prints
    """

    def __init__(self, settings: settings_module.Settings, shell: Callable[[str], str]) -> None:
        self._machine = allinone.AllInOne(settings)
        self._settings, self._shell = settings, shell
        self.api = self._machine.api
        self.api.log_in()
        # of which libvirt tells whether an agent in it listens, as long as it runs
        original = self.api.call(
            'glance', 'GET', f'/v2/images/{servers.find_image(self.api, life_cycle.IMAGE)}'
        )
        kept = {key: str(original[key]) for key in ('kernel_id', 'ramdisk_id', 'os_command_line')}
        self.api.upload_image(
            _IMAGE, guest.prepare(debian=False).image, 'qcow2', hw_qemu_guest_agent='yes', **kept
        )
        for name, ram_mb in ((FLAVOR, _RAM_MB), (OTHER, _OTHER_RAM_MB)):
            self.api.create_flavor(
                name,
                ram_mb,
                _ROOT_GB,
                {
                    'pcow:root': 'true',
                    'pcow:ram': 'true',
                    'resources:CUSTOM_PCOW_MB': str(_ROOT_GB * units.KIB + ram_mb),
                    'resources:DISK_GB': '0',
                },
            )

    def parent(self) -> servers.Server:
        """One whose guest has gone on for a while."""
        made = servers.Server.create(self.api, 'warm-parent', FLAVOR, _IMAGE)
        made.wait_status('ACTIVE')
        made.wait_alive(lambda _boot, seconds: seconds > 1)
        return made

    def make(self, server: servers.Server, name: str) -> str:
        """Make a warm image as a user does; its ID."""
        image = self._shell(f'pcowctl server warm {server.id} {name}').strip()
        server.wait_status('ACTIVE')
        return image

    def create(
        self, name: str, image: str, flavor: str = FLAVOR
    ) -> tuple[servers.Server, float, float]:
        """A server from an image; seconds from the request until Nova said that it is ACTIVE, and
        until its guest was first heard.
        """
        begun = time.monotonic()
        made = servers.Server.create(self.api, name, flavor, image)
        made.wait_status('ACTIVE')
        active = time.monotonic() - begun
        made.wait_alive(lambda _boot, _seconds: True)
        return made, active, time.monotonic() - begun

    def check_goes_on(self, child: servers.Server, boot: str, seconds: int) -> None:
        """Its guest never booted: it counts on from where its parent was at that second.

        :raises ServerFailed:
        """
        now = child.wait_alive(lambda _boot, _seconds: True)
        if _BOOTED in child.console() or now[0] != boot or now[1] < seconds:
            raise servers.ServerFailed(
                reason=f'{child.id} is at {now}, and its parent was at {(boot, seconds)}'
            )
        child.wait_alive(lambda one, later: one == boot and later > now[1] + 1)

    def refused_resize(self, server: servers.Server) -> str:
        """Why it gets no other size."""
        with contextlib.suppress(exception.PcowError):  # if Nova has heard of it at once
            server.act('resize', {'flavorRef': servers.find_flavor(self.api, OTHER)})
        said = server.fault('resize')
        server.wait_status('ACTIVE')
        return said

    def generation(self, server: servers.Server) -> str:
        """The generation id that its QEMU shows to its guest."""
        text = self._machine.on_node(
            settings_module.NODE1.name,
            'virsh',
            '-c',
            self._settings.libvirt_uri(settings_module.NODE1),
            'qemu-monitor-command',
            str(server.show()['OS-EXT-SRV-ATTR:instance_name']),
            '{"execute": "query-vm-generation-id"}',
        )
        return str(json.loads(text)['return']['guid'])

    def why_not(self, server: servers.Server) -> str:
        """What the events of its creation say."""
        return server.fault('create')

    def refusal(self, server: servers.Server, name: str) -> str:
        """Why no warm image of it is made."""
        try:
            made = self.make(server, name)
        except AssertionError as e:
            return str(e)
        raise servers.ServerFailed(reason=f'{made} was made of {server.id}')

    def kept(self) -> dict[str, str]:
        """State of each checkpoint that the host keeps, by the ID of its image."""
        found = json.loads(self._shell('pcowctl server list-warm -f json'))
        return {one['image']: one['state'] for one in found}

    def delete_image(self, image: str) -> None:
        self.api.call('glance', 'DELETE', f'/v2/images/{image}')
