# SPDX-License-Identifier: Apache-2.0
"""What a user does with servers, with the commands that a user has, and what these and a Debian
guest say.
"""

from collections.abc import Callable
import re
import shlex

from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import guest
from tools.lib.openstack_aio import servers
from tools.lib.quickstart import guest as quickstart_guest

_SAID = re.compile(r'^pcow-guest: root: \S', re.MULTILINE)
_BOOT_SECONDS = 240.0


class Session:
    """:param shell: runs a command as the user and returns what it prints"""

    def __init__(self, api: api_module.Api, shell: Callable[[str], str]) -> None:
        self._api = api
        self._shell = shell
        self._transcript: list[str] = []
        self.roots: list[str] = []  # what each guest said of its root

    def run(self) -> str:
        """Returns the transcript.

        :raises ServerFailed: a guest does not boot
        """
        self._image(guest.prepare(debian=True))
        self._user(
            'openstack flavor create --ram 512 --disk 4 --vcpus 1 --property pcow:root=true '
            '--property resources:CUSTOM_PCOW_MB=4096 --property resources:DISK_GB=0 session.small '
            '-f value -c name'
        )
        for name in ('web1', 'web2'):
            self._user(
                f'openstack server create --flavor session.small --image session-debian --nic none '
                f'--wait {name} '
                '-f value -c status'
            )
            self._boot(name)
            self._user('pcowctl image list nova')
        self._user('openstack server list -c Name -c Status -c Image -c Flavor')
        for name in ('web1', 'web2'):
            self._user(f'openstack server delete --wait {name}')
        self._user('pcowctl image list nova')
        return '\n'.join(self._transcript)

    def _user(self, command: str) -> str:
        output = self._shell(command)
        self._transcript.append(f'$ {command}\n{output}')
        return output

    def _image(self, files: quickstart_guest.Guest) -> None:
        """The user has the three files at hand, under plain names."""
        found = {}
        for name, kind, path in (('kernel', 'aki', files.kernel), ('ramdisk', 'ari', files.initrd)):
            made = self._shell(
                f'openstack image create --disk-format {kind} --container-format {kind} '
                f'--file {shlex.quote(str(path))} session-{name} -f value -c id'
            )
            found[name] = made.strip()
            self._transcript.append(
                f'$ openstack image create --disk-format {kind} --container-format {kind} '
                f'--file {"vmlinuz" if kind == "aki" else "initrd"} session-{name} -f value -c '
                f'id\n{made}'
            )
        words = (
            f'--property kernel_id={found["kernel"]} --property ramdisk_id={found["ramdisk"]} '
            f"--property 'os_command_line={guest.KERNEL_ARGUMENTS}' session-debian -f value -c "
            f"status -c disk_format"
        )
        made = self._shell(
            f'openstack image create --disk-format qcow2 --file {shlex.quote(str(files.image))} '
            f'{words}'
        )
        self._transcript.append(
            f'$ openstack image create --disk-format qcow2 --file debian.qcow2 {words}\n{made}'
        )

    def _boot(self, name: str) -> None:
        """Wait until the guest says on its console what its root is."""
        server = servers.Server(
            self._api, self._shell(f'openstack server show {name} -f value -c id').strip()
        )
        servers.wait(
            f'word of the guest {name} on its root',
            lambda: bool(_SAID.search(server.console())) or None,
            _BOOT_SECONDS,
        )
        self.roots.append(
            self._user(f'openstack console log show {name} | grep "pcow-guest: root"').strip()
        )
