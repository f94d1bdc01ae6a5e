# SPDX-License-Identifier: Apache-2.0
"""The pages on OpenStack, Nova and Cinder, typed as they stand: what a user or an administrator
types, on an all-in-one; what root types on a host before, on a host of its own.
"""

from collections.abc import Callable
from pathlib import Path
import re

from tests.functional import long
from tests.functional import openstack_bed
from tests.functional import own_host
from tests.functional import pages
from tools.lib.openstack_aio import guest
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import servers

_SETTINGS = r'^\[[\w-]+\]$|^\w+ = '
_FILE = 'debian-12-genericcloud-amd64.qcow2'
_TYPE = 'pages-pmem'  # there is a pcow-pmem already
_NOVA = {
    _SETTINGS: 'settings: tools/lib/openstack_aio/configuration.py writes them',
    r'^pip install ': 'test_wheel installs what is built',
    r'^systemctl ': 'needs systemd: scenario confinement-disk',
    r'^nova ALL = ': 'a rule of sudo',
    'flavor pcow.persistent': 'wants class pmem: test_servers_that_go_on has such a server on DRAM',
    '^openstack resource provider list': 'needs osc-placement, which the all-in-one has not',
    '--live-migration': 'wants a second node: test_moves',
}
# what takes a minute more
_LONG = {
    '(flavor|property.*) pcow.checkpoints|OS-EXT-SRV-ATTR|instance-0': 'only with --long',
    '^pcowctl server |--image warm1 ': 'only with --long',
    '^openstack server (stop|start) ': 'only with --long',
    'pcow:bus=virtio': 'only with --long',
}
_CINDER = {
    _SETTINGS: 'settings: tools/lib/openstack_aio/configuration.py writes them',
    r'^cinder ALL = ': 'a rule of sudo',
    '^openstack volume migrate ': 'wants a second node: tools/openstack-aio life-cycle --volume',
}
_TUTORIAL = {'^tools/openstack-aio (up|image|down)$': 'the test is run on what these make'}


class Pages:
    """On a bed that is up; it leaves no server, volume or image of an owner."""

    def __init__(self, bed: openstack_bed.Bed, directory: Path) -> None:
        """:param directory: in which the user is"""
        self._bed = bed
        self._here = directory
        (directory / _FILE).symlink_to(guest.prepare(debian=False).image)
        self.shell = pages.Shell(directory, prelude=f'. {bed.settings.openrc}')
        self.shell.places = {'image list fast': 'image list nova'}

    def tutorial(self) -> None:
        page = pages.Page('tutorial/openstack', _TUTORIAL)
        # each line has a shell of its own
        self.shell.places['build/openstack/openrc'] = str(self._bed.settings.openrc)
        page.type(self.shell, '^[.] ')
        page.type(self.shell, '^openstack server create')
        server = self._server('web1')
        server.wait_root(lambda found: found.boots == 1 and found.dax)
        _expect('PCOW-GUEST: root', page.type(self.shell, '^openstack console log'))
        _expect(f'server-{server.id}', page.type(self.shell, '^pcowctl image list'))
        self._delete('web1')
        page.check()

    def nova_and_cinder(self) -> None:
        page = pages.Page('howto/nova', _NOVA if long.LONG else _NOVA | _LONG)
        self._rights(page, 'nova')
        self._create(page)
        if long.LONG:
            self._snapshot(page)
            self._as_disks(page)
        page.type(self.shell, r'--property pcow:persist=true')
        self._cinder()
        if long.LONG:
            self._checkpoints(page)
            self._warm(page)
        page.check()

    def _rights(self, page: pages.Page, user: str) -> None:
        """What root does on the host of the service."""
        host = own_host.OwnHost()
        try:
            memory = '--memory --size 64M'
            shell = host.shell(
                {'--region region0': memory, '--region region1': memory}, directory=pages.TOP
            )
            shell.type(f'groupadd -f pcow; useradd -M {user}; mkdir -p /etc/systemd/system')
            page.type(shell, '^usermod ')
            page.type(shell, '^pcowctl host setup')
            page.type(shell, '^pcowctl pool create')
            _expect(user, shell.type('stat -c %U /var/lib/pcow/pools/fast'))
            if user == 'nova':
                page.type(shell, '^install ')
                shell.type(
                    'for unit in pcow-nbd.socket pcow-nbd@.service; do '
                    'cmp etc/systemd/system/$unit /etc/systemd/system/$unit; done'
                )
            # as the service, in the pool and in what it shares with root
            shell.type(
                f'setpriv --reuid {user} --regid {user} --init-groups '
                'touch /var/lib/pcow/pools/fast/x /var/lib/pcow/locks/x'
            )
        finally:
            host.close()

    def _create(self, page: pages.Page) -> None:
        page.type(self.shell, 'pcow.small$')
        page.type(self.shell, '^openstack image create')
        # The guest of the tests has no boot loader.
        original = self._bed.api.call(
            'glance', 'GET', f'/v2/images/{servers.find_image(self._bed.api, life_cycle.IMAGE)}'
        )
        kept = ' '.join(
            f"--property '{key}={original[key]}'"
            for key in ('kernel_id', 'ramdisk_id', 'os_command_line')
        )
        self.shell.type(f'openstack image set {kept} --property hw_qemu_guest_agent=yes debian12')
        page.type(self.shell, 'flavor pcow.small ')
        server = self._server('web1')
        server.wait_root(lambda found: found.boots == 1 and found.dax)
        _expect('ACTIVE', page.type(self.shell, '^openstack server show web1'))
        found = self._bed.api.call('placement', 'GET', '/resource_providers')
        _expect('_pcow_nova', str(found))
        _expect(f'server-{server.id}-root', page.type(self.shell, '^pcowctl image list'))

    def _snapshot(self, page: pages.Page) -> None:
        server = self._server('web1')
        before = server.wait_root(lambda _found: True)
        self.shell.places['SERVER'] = server.id
        page.type(self.shell, '^pcowctl server snapshot')
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        server.wait_root(lambda found: found.boots == before.boots + 1)
        boot, _seconds = server.wait_alive(lambda _boot, _seconds: True)
        page.type(self.shell, '^openstack server stop')
        server.wait_status('SHUTOFF')
        page.type(self.shell, '^pcowctl server revert')
        page.type(self.shell, '^openstack server start')
        server.wait_status('ACTIVE')
        server.wait_alive(lambda one, _seconds: one != boot)
        # its root has never seen the second boot
        server.wait_root(lambda found: found.boots == before.boots + 1)

    def _as_disks(self, page: pages.Page) -> None:
        self.shell.type(
            f'openstack image create --disk-format qcow2 --file {_FILE} windows; '
            'openstack flavor create --ram 256 pcow.disk'
        )
        page.type(self.shell, '^openstack image set')
        page.type(self.shell, ' flavor set ')
        _expect("bus='virtio'", self.shell.type('openstack image show -c properties windows'))
        _expect('virtio', self.shell.type('openstack flavor show -c properties pcow.disk'))

    def _checkpoints(self, page: pages.Page) -> None:
        page.type(self.shell, 'pcow.checkpoints$')
        page.type(self.shell, 'flavor pcow.checkpoints --image debian12')
        server = self._server('web1')
        boot, seconds = server.wait_alive(lambda _boot, seconds: seconds > 1)
        name = page.type(self.shell, 'OS-EXT-SRV-ATTR').strip()
        host = self._on_host(name)
        host('checkpoint', page)
        server.wait_alive(lambda _boot, now: now > seconds + 5)
        _expect('warm', host('tree', page))
        host('revert', page)
        server.wait_alive(lambda one, now: one == boot and now < seconds + 5)

    def _on_host(self, name: str) -> Callable[[str, pages.Page], str]:
        """Root of the host of the server."""
        self.shell.places['instance-00000001'] = name

        def type_in(command: str, page: pages.Page) -> str:
            return page.type(self.shell, f'^pcowctl vm {command} ')

        return type_in

    def _warm(self, page: pages.Page) -> None:
        server = self._server('web1')
        boot, seconds = server.wait_alive(lambda _boot, _seconds: True)
        image = page.type(self.shell, '^pcowctl server warm ').strip()
        server.wait_status('ACTIVE')
        page.type(self.shell, '--image warm1 ')
        child = self._server('web2')
        child.wait_alive(lambda one, now: one == boot and now >= seconds)
        _expect(image, page.type(self.shell, '^pcowctl server list-warm'))
        for name in ('web2', 'web1'):
            self._delete(name)
        self.shell.type('openstack image delete warm1')
        self.shell.places['delete-warm IMAGE-ID'] = f'delete-warm --parent-deleted {image}'
        page.type(self.shell, '^pcowctl server delete-warm')

    def _cinder(self) -> None:
        """With the server of Nova's page."""
        page = pages.Page('howto/cinder', _CINDER)
        self._rights(page, 'cinder')
        self.shell.places |= {
            'type create pcow-pmem': f'type create {_TYPE}',
            '--type pcow-pmem': f'--type {_TYPE}',
            # the RAM of the guest bears no more
            '--size 4': '--size 1',
            'image list fast': 'image list cinder',
        }
        server = self._server('web1')
        page.type(self.shell, '^openstack volume type create')
        page.type(self.shell, '^openstack volume create')
        _wait_volume(self.shell, 'v1', 'available')
        page.type(self.shell, '^openstack server add volume')
        found = server.wait_device(lambda item: item.state == 'new')
        _expect('pmem', found.name)
        said = page.type(self.shell, '^openstack volume show')
        _expect('cinder-volume', page.type(self.shell, '^openstack volume service list'))
        (volume,) = re.findall(r'\| id +\| (\S+)', said)
        _expect(f'volume-{volume}', page.type(self.shell, '^pcowctl image list'))
        self._delete('web1')
        _wait_volume(self.shell, 'v1', 'available')
        self.shell.type('openstack volume delete v1')
        page.check()

    def _server(self, name: str) -> servers.Server:
        found = self._bed.api.call('nova', 'GET', f'/servers?name=^{name}$')['servers']
        (one,) = found
        return servers.Server(self._bed.api, str(one['id']))

    def _delete(self, name: str) -> None:
        self._server(name).delete()


def _expect(part: str, said: str) -> None:
    if part not in said:
        raise AssertionError(f'{part!r} is not in {said!r}')


def _wait_volume(shell: pages.Shell, name: str, status: str) -> None:
    def look() -> bool | None:
        said = shell.type(f'openstack volume show -f value -c status {name}')
        return True if said.strip() == status else None

    servers.wait(f'status {status} of volume {name}', look)
