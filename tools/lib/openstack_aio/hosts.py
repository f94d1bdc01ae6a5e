# SPDX-License-Identifier: Apache-2.0
"""The compute nodes as their administrator reaches them: what lies on them, and what happens to
them beside Nova.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
import contextlib
import json
import os
from pathlib import Path
import time

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import guest
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

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
        return self._machine.on_node(
            host, program, '--config-file', str(self._settings.etc / name), *words
        )

    def images(self, host: str) -> list[str]:
        """Names of the images of servers in the pool of a node."""
        found = json.loads(self.pcowctl(host, 'image', 'list', pools.NOVA, '-f', 'json'))
        return [
            name
            for item in found
            if (name := str(item.get('name', item.get('Name')))).startswith(names.SERVER_PREFIX)
        ]

    def domains(self, host: str) -> list[str]:
        """Names of all domains of a node."""
        node = (
            settings_module.NODE1 if host == settings_module.NODE1.name else settings_module.NODE2
        )
        return self._machine.on_node(
            host, 'virsh', '-c', self._settings.libvirt_uri(node), 'list', '--all', '--name'
        ).split()

    def directories(self) -> list[str]:
        """Names of the directories of servers on the first node."""
        return [
            path.name
            for path in self._settings.instances.iterdir()
            if len(path.name) == _UUID_LENGTH
        ]

    def claims(self) -> dict[str, int]:
        """MiB that placement has reserved for servers in each pool, by the name of its resource
        provider.
        """
        call = self._machine.api.call
        found = {}
        for item in call('placement', 'GET', '/resource_providers')['resource_providers']:
            usages = call('placement', 'GET', f'/resource_providers/{item["uuid"]}/usages')[
                'usages'
            ]
            if 'CUSTOM_PCOW_MB' in usages:
                found[str(item['name'])] = int(usages['CUSTOM_PCOW_MB'])
        return found

    def claims_of(self, server: str) -> set[str]:
        """Names of the resource providers of pools in which a server claims space."""
        call = self._machine.api.call
        names = {
            item['uuid']: str(item['name'])
            for item in call('placement', 'GET', '/resource_providers')['resource_providers']
        }
        found = call('placement', 'GET', f'/allocations/{server}')['allocations']
        return {
            names[uuid] for uuid, item in found.items() if 'CUSTOM_PCOW_MB' in item['resources']
        }

    def image_file(self) -> Path:
        """The qcow2 file of the tiny guest."""
        return guest.prepare(debian=False).image

    def pool_bytes(self) -> int:
        """What the files in the first node's pool of servers take, holes excepted."""
        return _bytes(pools.directory(self._settings) / pools.NOVA)

    def disk_bytes(self, server: str) -> int:
        """The same of a server's directory on the first node."""
        return _bytes(self._settings.instances / server)

    def _on_node1(self, *command: str) -> str:
        return self._machine.on_node(settings_module.NODE1.name, *command)

    @contextlib.contextmanager
    def small_pool(self, size: int) -> Iterator[None]:
        """For the context, the first node has an empty file system of ``size`` bytes in place of
        its pool of servers.
        """
        place = pools.directory(self._settings) / pools.NOVA
        small = place.with_name('small')
        small.mkdir(exist_ok=True)
        self._on_node1('mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(small))
        try:
            self._on_node1('cp', '-p', str(place / names.MARKER), str(small))
            self._on_node1('mount', '--bind', str(small), str(place))
            try:
                yield
            finally:
                self._on_node1('umount', '--lazy', str(place))
        finally:
            self._on_node1('umount', '--lazy', str(small))
            small.rmdir()
            self._offer_again()

    def resize_small_pool(self, size: int) -> None:
        self._on_node1(
            'mount', '-o', f'remount,size={size}', str(pools.directory(self._settings) / pools.NOVA)
        )

    def free_bytes(self) -> int:
        """Of the file system of the first node's pool of servers."""
        return self._blocks('%a')

    def _blocks(self, which: str) -> int:
        """Bytes in blocks of that file system, which of them as stat(1) has it."""
        blocks, size = self._on_node1(
            'stat', '-f', '-c', f'{which} %S', str(pools.directory(self._settings) / pools.NOVA)
        ).split()
        return int(blocks) * int(size)

    @contextlib.contextmanager
    def other_emulator(self) -> Iterator[None]:
        """For the time of the context the first node has another program in place of QEMU."""
        path = os.path.realpath(tool.find('emulator'))
        self._on_node1('mount', '--bind', os.path.realpath('/bin/true'), path)
        try:
            yield
        finally:
            self._on_node1('umount', '--lazy', path)
            self._offer_again()

    def _offer_again(self) -> None:
        """Have placement told now, not within a minute, that the pool of the first node takes
        servers.
        """
        self.restart_compute()
        servers.wait('offer of the pool', lambda: True if self._offers_pool() else None)

    def _offers_pool(self) -> bool:
        """Whether placement would put servers into the first node's pool."""
        call, name = self._machine.api.call, f'{settings_module.NODE1.name}_pcow_{pools.NOVA}'
        (found,) = call('placement', 'GET', f'/resource_providers?name={name}')[
            'resource_providers'
        ]
        inventory = call('placement', 'GET', f'/resource_providers/{found["uuid"]}/inventories')[
            'inventories'
        ]['CUSTOM_PCOW_MB']
        return bool(
            inventory['total'] == self._blocks('%b') // units.MIB
            and inventory['reserved'] < inventory['total']
        )

    @contextlib.contextmanager
    def nova_option(self, group: str, name: str, value: str) -> Iterator[None]:
        """For the context, nova-compute of the first node runs with an option that is not set
        otherwise.
        """
        path = self._machine.configuration.file('nova', settings_module.NODE1)
        before = path.read_text()
        path.write_text(before.replace(f'[{group}]\n', f'[{group}]\n{name} = {value}\n', 1))
        try:
            self.restart_compute()
            yield
        finally:
            path.write_text(before)
            self.restart_compute()

    def restart_compute(self) -> None:
        """What is asked of it before it is ready waits in its queue."""
        self._machine.kill_and_start('nova-compute', 'Determined node identity')

    def kill_libvirtd(self) -> None:
        """SIGKILL for the daemon of the first node; its virtual machines go on."""
        self._machine.compute_node(settings_module.NODE1).kill_libvirtd()

    def start_libvirtd(self) -> None:
        """:raises PcowError: it does not start"""
        self._machine.compute_node(settings_module.NODE1).start_libvirtd()

    def takes_servers(self, host: str) -> bool:
        """Whether nova-compute of a node is enabled, which it is not while it has no libvirt."""
        return any(
            (item['binary'], item['host'], item['status']) == ('nova-compute', host, 'enabled')
            for item in self._machine.api.call('nova', 'GET', '/os-services')['services']
        )

    def fail(self) -> None:
        """The second node loses its power."""
        self._machine.end_node2()
        self._force_down(down=True)

    def reboot(self) -> None:
        """The second node ends and starts again.

        :raises PcowError:
        """
        self._machine.end_node2()
        self._machine.node2(self._settings.compute_driver)

    def recover(self) -> None:
        """The second node starts again.

        :raises PcowError:
        """
        with futures.ThreadPoolExecutor(1) as worker:
            start = worker.submit(self._machine.node2, self._settings.compute_driver)
            # Nova lets it up when it has given up the servers that went on elsewhere, and without
            # that it is never ready.
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
