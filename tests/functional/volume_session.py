# SPDX-License-Identifier: Apache-2.0
"""What a user does with volumes, with the commands that a user has, and what these and the guest
say.
"""

from collections.abc import Callable

from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import volumes

_OVERWRITTEN = 0xD7
_OFFSET = 2 * units.MIB  # of the data of a volume in its image


class Session:
    """:param shell: runs a command as the user and returns what it prints"""

    def __init__(self, api: api_module.Api, shell: Callable[[str], str]) -> None:
        self._api = api
        self._shell = shell
        self._transcript: list[str] = []

    def run(self) -> str:
        """Returns the transcript.

        :raises ServerFailed: the guest finds something else than it wrote
        """
        server = self._server()
        first = self._volume('v1', '')
        self._user('openstack server add volume web1 v1 -f value -c Device')
        written = server.wait_device(lambda item: item.state == 'new')
        self._guest(written)
        first.wait_status('in-use')
        self._user(
            'openstack --os-volume-api-version 3.66 volume snapshot create --volume v1 s0 -f value '
            '-c status'
        )
        self._wait_snapshots('available')
        self._user('openstack server stop web1')
        server.wait_status('SHUTOFF')
        self._user('openstack server remove volume web1 v1')
        first.wait_status('available')
        path = self._shell(f'pcowctl image show cinder/volume-{first.id} -f value -c path').strip()
        tool.run(
            tool.find('pcow_io'),
            '--no-map',
            '-c',
            f'write -q -P {_OVERWRITTEN} {_OFFSET} {units.MIB}',
            path,
        )
        self._transcript.append('(the first MiB of v1 is overwritten)\n')
        self._user('openstack --os-volume-api-version 3.40 volume revert s0')
        first.wait_status('available')
        made = [first, self._volume('v2', '--source v1'), self._volume('v3', '--snapshot s0')]
        made.append(self._volume('v4', '--image pcow-guest'))
        for name in ('v1', 'v2', 'v3'):
            self._user(f'openstack server add volume web1 {name} -f value -c Device')
        self._user('openstack server start web1')
        server.wait_status('ACTIVE')
        for device in ('pmem1', 'pmem2', 'pmem3'):
            self._check(server, device, written.sum)
        self._user('openstack volume list -f value -c Name -c Status -c Size')
        self._end(made)
        return '\n'.join(self._transcript)

    def _user(self, command: str) -> str:
        output = self._shell(command)
        self._transcript.append(f'$ {command}\n{output}')
        return output

    def _server(self) -> servers.Server:
        self._user(
            'openstack volume type create session-pmem --property volume_backend_name=pcow -f '
            'value -c name'
        )
        self._user(
            'openstack flavor create --ram 400 --disk 0 --vcpus 1 --property pcow:root=true '
            '--property resources:CUSTOM_PCOW_MB=130 session.volumes -f value -c name'
        )
        self._user(
            'openstack server create --flavor session.volumes --image pcow-guest --nic none --wait '
            'web1 -f value -c status'
        )
        made = servers.Server(
            self._api, self._shell('openstack server show web1 -f value -c id').strip()
        )
        made.wait_root(lambda root: root.boots == 1)
        return made

    def _volume(self, name: str, source: str) -> volumes.Volume:
        words = f'openstack volume create --type session-pmem --size 1 {source}'.strip()
        made = volumes.Volume(self._api, self._user(f'{words} {name} -f value -c id').strip())
        made.wait_status('available')
        return made

    def _guest(self, device: servers.Device) -> None:
        self._transcript.append(
            f'(guest) /dev/{device.name}: {device.size} MiB, {device.state}, checksum '
            f'{device.sum}\n'
        )

    def _check(self, server: servers.Server, name: str, wanted: str) -> None:
        found = server.wait_device(lambda item: item.name == name and item.sum == wanted)
        if found.state != 'intact':
            raise servers.ServerFailed(
                reason=f'/dev/{name} holds something else than was written: {found}'
            )
        self._guest(found)

    def _wait_snapshots(self, status: str) -> None:
        def look() -> bool | None:
            return (
                True
                if self._shell('openstack volume snapshot list -f value -c Status').strip()
                == status
                else None
            )

        servers.wait('snapshot', look)

    def _end(self, made: list[volumes.Volume]) -> None:
        self._user('openstack server delete --wait web1')
        for volume in made:
            volume.wait_status('available')
        self._user('openstack volume snapshot delete s0')
        self._wait_snapshots('')
        for volume in made:
            volume.delete()
        self._user('openstack volume type delete session-pmem')
