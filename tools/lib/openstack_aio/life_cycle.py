# SPDX-License-Identifier: Apache-2.0
"""The life of a server, step by step on the running all-in-one; the guest checks its own data after
each.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import time

from pcow_driver.common import exception
from pcow_driver.common import units
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

IMAGE = 'pcow-guest'
FLAVOR = 'pcow.life'
# MiB of memory, GiB of the root
_FLAVORS = {FLAVOR: (192, 2), 'pcow.life-larger': (224, 3), 'pcow.life-smaller': (160, 1)}
_LARGER, _SMALLER = tuple(_FLAVORS)[1:]
_NODES = (settings_module.NODE1.name, settings_module.NODE2.name)


@dataclasses.dataclass(frozen=True)
class Result:
    row: str
    outcome: str  # pass, refused, FAILED
    seconds: float
    words: str


class LifeCycle:
    """One server, taken through all of it. Rows are the methods named in ROWS; each returns what it
    saw.

    :param flavor: name of one whose root is the guest's
    """

    def __init__(self, api: api_module.Api, two_nodes: bool, flavor: str = FLAVOR) -> None:
        self.api = api
        self._flavor = flavor
        self._two_nodes = two_nodes
        self._made: list[servers.Server] = []
        self._images: list[str] = []
        self._server: servers.Server | None = None
        self._root: servers.Root | None = None

    @property
    def server(self) -> servers.Server:
        if self._server is None:
            raise servers.ServerFailed(reason='there is no server: its creation failed')
        return self._server

    @property
    def root(self) -> servers.Root:
        if self._root is None:
            raise servers.ServerFailed(reason='the guest has not booted')
        return self._root

    # The guest

    def _create(self, name: str, image: str, flavor: str = '', **more: str) -> servers.Server:
        self._make_flavors()
        server = servers.Server.create(self.api, name, flavor or self._flavor, image, **more)
        self._made.append(server)
        server.wait_status('ACTIVE')
        return server

    def _booted(self) -> str:
        """The guest has booted once more, from its own data."""
        before = self.root
        after = self.server.wait_root(lambda root: root.boots == before.boots + 1)
        if after.sum != before.sum:
            raise servers.ServerFailed(reason=f'the data are others than before: {before}, {after}')
        self._root = after
        return f'boot {after.boots} on {after.device}, data intact'

    def _went_on(self, before: tuple[str, int]) -> str:
        """The guest goes on with what it did, without a boot."""
        after = self.server.wait_alive(
            lambda boot, seconds: boot != before[0] or seconds > before[1] + 1
        )
        if after[0] != before[0]:
            raise servers.ServerFailed(reason=f'the guest has booted: {before}, {after}')
        return f'the guest went on at second {after[1]}, no boot'

    def _alive(self) -> tuple[str, int]:
        return self.server.wait_alive(lambda _boot, seconds: seconds > 0)

    # Rows

    def create(self) -> str:
        # where the rows are that change a host's configuration
        self._server = self._create('life-cycle', IMAGE, host=_NODES[0])
        self._root = root = self.server.wait_root(lambda root: root.boots == 1)
        return f'/ on {root.device} ({"DAX" if root.dax else "disk"}, {root.size} MiB)'

    def stop_start(self) -> str:
        self.server.act('os-stop')
        self.server.wait_status('SHUTOFF')
        self.server.act('os-start')
        self.server.wait_status('ACTIVE')
        return self._booted()

    def _reboot(self, kind: str) -> str:
        self.server.act('reboot', {'type': kind})
        self.server.wait_status('ACTIVE')
        return self._booted()

    def soft_reboot(self) -> str:
        return self._reboot('SOFT')

    def hard_reboot(self) -> str:
        return self._reboot('HARD')

    def pause(self) -> str:
        before = self._alive()
        self.server.act('pause')
        self.server.wait_status('PAUSED')
        self.server.act('unpause')
        self.server.wait_status('ACTIVE')
        return self._went_on(before)

    def suspend(self) -> str:
        before = self._alive()
        self.server.act('suspend')
        self.server.wait_status('SUSPENDED')
        self.server.act('resume')
        self.server.wait_status('ACTIVE')
        return self._went_on(before)

    def suspend_again(self) -> str:
        """A hard reboot gives up what the server would resume from, in all its parts: the next
        suspension has the name.
        """
        self.server.act('suspend')
        self.server.wait_status('SUSPENDED')
        words = self._reboot('HARD')
        return f'{words}; {self.suspend()}'

    def rescue(self) -> str:
        root = self.root
        self.server.act('rescue', {'rescue_image_ref': servers.find_image(self.api, IMAGE)})
        self.server.wait_status('RESCUE')
        try:
            device = self.server.wait_device(lambda device: device.sum == root.sum)
        finally:
            self.server.act('unrescue')
            self.server.wait_status('ACTIVE')
        if device.state != 'intact':
            raise servers.ServerFailed(reason=f'under rescue: {device}')
        return f'seen as {device.name} under rescue, data intact; then {self._booted()}'

    def snapshot(self) -> str:
        before = self._alive()
        begun = time.monotonic()
        image = self.server.create_image('life-cycle-snapshot')
        self._images.append(image)
        took = time.monotonic() - begun
        self.server.wait_status('ACTIVE')
        words = self._went_on(before)
        copy = self._create('life-cycle-copy', image)
        found = copy.wait_root(lambda root: True)
        copy.delete()
        if found.sum != self.root.sum or found.boots != self.root.boots + 1:
            raise servers.ServerFailed(
                reason=f'the server of the snapshot has other data: {self.root}, {found}'
            )
        return f'image in {took:.1f} s, {words}; a server of it has the data'

    def shelve(self) -> str:
        self.server.act('shelve')
        self.server.wait_status('SHELVED_OFFLOADED')
        self.server.act('unshelve')
        self.server.wait_status('ACTIVE')
        return self._booted()

    def resize_up(self) -> str:
        self._resize(_LARGER)
        words = self._booted()
        if self.root.size != _FLAVORS[_LARGER][1] * units.KIB:
            raise servers.ServerFailed(reason=f'the root has {self.root.size} MiB')
        return f'{self.root.size} MiB, {words}'

    def resize_down(self) -> str:
        """Raises what Nova says: this row is refused."""
        before, flavor = self._alive(), servers.find_flavor(self.api, _SMALLER)
        try:
            self.server.act('resize', {'flavorRef': flavor})
            servers.wait(
                'end of the resize',
                lambda: True if self.server.show()['OS-EXT-STS:task_state'] is None else None,
            )
        except exception.PcowError as e:
            words = str(e)
        else:
            words = self.server.fault()
        status = str(self.server.show()['status'])
        if status != 'ACTIVE':
            raise servers.ServerFailed(
                reason=f'a smaller flavor is not refused, or the server does not go on: status '
                f'{status}'
            )
        self._went_on(before)
        raise Refused(reason=words)

    def _make_flavors(self) -> None:
        for name, (memory, root) in _FLAVORS.items():
            self.api.create_flavor(
                name,
                memory,
                root,
                {
                    'pcow:root': 'true',
                    'resources:CUSTOM_PCOW_MB': str(root * units.KIB),
                    'resources:DISK_GB': '0',
                },
            )

    def _resize(self, flavor: str) -> None:
        self.server.act('resize', {'flavorRef': servers.find_flavor(self.api, flavor)})
        self._confirm()

    def _confirm(self) -> None:
        self.server.wait_status('VERIFY_RESIZE')
        self.server.act('confirmResize')
        self.server.wait_status('ACTIVE')

    def cold_migrate(self) -> str:
        before = self.server.host()
        self.server.act('migrate')
        self._confirm()
        return f'{before} to {self.server.host()}, {self._booted()}'

    def cold_migrate_revert(self) -> str:
        before, root = self.server.host(), self.root
        self.server.act('migrate')
        self.server.wait_status('VERIFY_RESIZE')
        self.server.act('revertResize')
        self.server.wait_status('ACTIVE')
        if self.server.host() != before:
            raise servers.ServerFailed(
                reason=f'it is on {self.server.host()} and not back on {before}'
            )
        after = self.server.wait_root(lambda found: found.boots > root.boots)
        if after.sum != root.sum:
            raise servers.ServerFailed(reason=f'the data are others than before: {root}, {after}')
        self._root = after
        return f'back on {before}, data intact'

    def rebuild(self) -> str:
        before = self.root
        self.server.act('rebuild', {'imageRef': servers.find_image(self.api, IMAGE)})
        self.server.wait_status('ACTIVE')
        self._root = self.server.wait_root(lambda root: root.boots == 1 and root.sum != before.sum)
        return 'the data are gone, by design; boot 1 with new ones'

    def rebuild_to_snapshot(self) -> str:
        """Back to what an image of the server has kept."""
        kept = self.root
        image = self.server.create_image('life-cycle-state')
        self._images.append(image)
        self.server.wait_status('ACTIVE')
        words = self.rebuild()
        self.server.act('rebuild', {'imageRef': image})
        self.server.wait_status('ACTIVE')
        self._root = self.server.wait_root(
            lambda root: root.sum == kept.sum and root.boots == kept.boots + 1
        )
        return f'{words}; rebuilt with the image of before, it has those again'

    def delete(self) -> str:
        self.server.delete()
        return 'gone'

    # All of it

    def run(self, rows: tuple[str, ...], say: Callable[[Result], None]) -> list[Result]:
        """Take the rows in their order; those that need two nodes only with both. What they made is
        deleted.
        """
        results = []
        try:
            for row in rows:
                if row in NEED_TWO_NODES and not self._two_nodes:
                    continue
                begun = time.monotonic()
                try:
                    outcome, words = 'pass', str(getattr(self, row)())
                except Refused as e:
                    outcome, words = 'refused', str(e)
                except exception.PcowError as e:
                    outcome, words = 'FAILED', str(e)
                results.append(
                    Result(
                        row.replace('_', ' '),
                        outcome,
                        time.monotonic() - begun,
                        ' '.join(words.split()),
                    )
                )
                say(results[-1])
        finally:
            self.clean()
        return results

    def clean(self) -> None:
        """Delete what is left of it.

        :raises PcowError:
        """
        for server in self._made:
            if not server.gone():
                server.delete()
        for image in self._images:
            self.api.call('glance', 'DELETE', f'/v2/images/{image}')
        self._made, self._images = [], []


class Refused(exception.PcowError):
    """What the row asks for is refused, as it should be; the message has the words of Nova."""


ROWS = (
    'create',
    'stop_start',
    'soft_reboot',
    'hard_reboot',
    'pause',
    'suspend',
    'suspend_again',
    'rescue',
    'snapshot',
    'shelve',
    'resize_up',
    'resize_down',
    'cold_migrate',
    'cold_migrate_revert',
    'rebuild_to_snapshot',
    'rebuild',
    'delete',
)
NEED_TWO_NODES = (
    'cold_migrate',
    'cold_migrate_revert',
    'live_migrate',
    'live_migrate_data',
    'live_migrate_snapshot',
    'live_migrate_full_pool',
    'live_migrate_killed',
    'host_reboot',
    'evacuate',
    'cold_migrate_attached',
)
