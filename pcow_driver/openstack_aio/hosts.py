# SPDX-License-Identifier: Apache-2.0
"""The compute nodes as their administrator reaches them: what lies on them, and what happens to them beside Nova."""

from __future__ import annotations

from concurrent import futures
import contextlib
import json
from pathlib import Path
import time

from pcow_driver import exception
from pcow_driver.openstack_aio import allinone
from pcow_driver.openstack_aio import guest
from pcow_driver.openstack_aio import pools
from pcow_driver.openstack_aio import settings as settings_module

_SERVER = 'server-'                            # what the names of servers' images begin with

_UUID_LENGTH = 36


class Hosts:
    def __init__(self, machine: allinone.AllInOne) -> None:
        self._machine = machine
        self._settings = machine.settings

    @property
    def pools_are_shared(self) -> bool:
        return self._settings.shared_pools

    def pcowctl(self, host: str, *words: str) -> str:
        """What pcowctl prints on a node.

        :raises ToolFailed:
        """
        name = 'pcow.conf' if host == settings_module.NODE1.name else f'pcow-{host}.conf'
        program = str(self._settings.venv / 'bin/pcowctl')
        return self._machine.on_node(host, program, '--config-file', str(self._settings.etc / name), *words)

    def images(self, host: str) -> list[str]:
        """Names of the images of servers in the pool of a node."""
        found = json.loads(self.pcowctl(host, 'image', 'list', pools.NOVA, '-f', 'json'))
        return [name for item in found if (name := str(item.get('name', item.get('Name')))).startswith(_SERVER)]

    def domains(self, host: str) -> list[str]:
        """Names of all domains of a node."""
        node = settings_module.NODE1 if host == settings_module.NODE1.name else settings_module.NODE2
        return self._machine.on_node(host, 'virsh', '-c', self._settings.libvirt_uri(node), 'list', '--all', '--name').split()

    def directories(self) -> list[str]:
        """Names of the directories of servers on the first node."""
        return [path.name for path in self._settings.instances.iterdir() if len(path.name) == _UUID_LENGTH]

    def claims(self) -> dict[str, int]:
        """MiB that placement has reserved for servers in each pool, by the name of its resource provider."""
        call = self._machine.api.call
        found = {}
        for item in call('placement', 'GET', '/resource_providers')['resource_providers']:
            usages = call('placement', 'GET', f'/resource_providers/{item["uuid"]}/usages')['usages']
            if 'CUSTOM_PCOW_MB' in usages:
                found[str(item['name'])] = int(usages['CUSTOM_PCOW_MB'])
        return found

    def image_file(self) -> Path:
        """The qcow2 file of the tiny guest."""
        return guest.prepare(debian=False).image

    def pool_bytes(self) -> int:
        """What the files in the first node's pool of servers take, holes excepted."""
        return _bytes(pools.directory(self._settings) / pools.NOVA)

    def disk_bytes(self, server: str) -> int:
        """The same of a server's directory on the first node."""
        return _bytes(self._settings.instances / server)

    def fail(self) -> None:
        """The second node loses its power."""
        self._machine.end_node2()
        self._force_down(down=True)

    def recover(self) -> None:
        """The second node starts again.

        :raises PcowError:
        """
        with futures.ThreadPoolExecutor(1) as pool:
            start = pool.submit(self._machine.node2, self._settings.compute_driver)
            # Nova lets it up when it has given up the servers that went on elsewhere, and without that it is never ready.
            while not start.done():
                with contextlib.suppress(exception.PcowError):
                    self._force_down(down=False)
                    break
                time.sleep(1)
            start.result()

    def _force_down(self, *, down: bool) -> None:
        """Tell Nova, which would take a minute to notice."""
        call = self._machine.api.call
        for item in call('nova', 'GET', '/os-services')['services']:
            if (item['binary'], item['host']) == ('nova-compute', settings_module.NODE2.name):
                call('nova', 'PUT', f'/os-services/{item["id"]}', {'forced_down': down})


def _bytes(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.iterdir())
