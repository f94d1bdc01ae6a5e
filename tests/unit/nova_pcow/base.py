# SPDX-License-Identifier: Apache-2.0
"""Nova's functional test base (real API, scheduler, placement and compute in one process, on a
libvirt that only keeps XML), with real pools, templates and images beneath."""

import json
import os
from pathlib import Path
import shutil
import subprocess
import tempfile
import time
import types
from typing import Any
from unittest import mock

import fixtures
import nova.conf
from nova.tests.functional.libvirt import base
from nova.virt.libvirt import guest

from nova_pcow import conf as nova_conf
from pcow_driver.common import conf
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry

TOP = Path(__file__).resolve().parents[3]
IMAGE_SIZE = 64 * units.MIB
# of nova.tests' image service
IMAGE = '155d900f-4e14-4e4c-a73d-069cbf4541e6'
_ASK_SECONDS = 0.05
_ASK_TIMES = 40  # as often as Nova's helper
KERNEL = 'a2459075-d96c-40d5-893e-577ff92e721c'  # any other image


class PoolFixture(fixtures.Fixture):
    """A pool on DRAM, known to this test alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _setUp(self) -> None:  # noqa: N802 - the name is given by fixtures
        directory = tempfile.mkdtemp(prefix='pcow-test-nova-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, directory)
        self.pool: pool_module.Pool = registry.PoolRegistry().create(self.name, directory)


class ServersTestCase(base.ServersTestBase):
    """Servers on hosts that take pcow flavors."""

    microversion = 'latest'
    api_major_version = 'v2.1'

    def setUp(self) -> None:
        # where the wheel has it; nova.tests looks where a checkout of Nova has it
        nova.conf.CONF.set_override(
            'api_paste_config',
            str(Path(nova.__file__).parents[4] / 'etc/nova/api-paste.ini'),
            'wsgi',
        )
        super().setUp()
        self.directory = Path(self.useFixture(fixtures.TempDir()).path)
        emulator = self.directory / 'qemu'
        # libvirt starts nothing here; the driver asks it
        emulator.write_text('#!/bin/sh\necho "  format=<string> - live migration"\n')
        emulator.chmod(0o755)
        self.shim = self.directory / 'shim'
        self.shim.mkdir()
        for name in ('kernel', 'initrd'):
            (self.shim / name).touch()
        programs = Path(os.environ.get('PCOW_BIN_DIR', TOP / 'build/bin'))
        for group, options in (
            (
                'pcow',
                {
                    'state_path': str(self.directory / 'state'),
                    'conversion_dir': str(self.directory),
                    'emulator': str(emulator),
                    'boot_shim': str(self.shim),
                    'pcow_img': str(programs / 'pcow-img'),
                    'pcow_io': str(programs / 'pcow-io'),
                },
            ),
            ('nova_pcow', {'pools': ['fast']}),
        ):
            for name, value in options.items():
                (conf if group == 'pcow' else nova_conf).CONF.set_override(name, value, group)
                self.addCleanup(
                    (conf if group == 'pcow' else nova_conf).CONF.clear_override, name, group
                )
        self.pool = self._make_pool()
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.tests.fixtures.libvirt.Domain.listAllSnapshots', lambda domain: []
            )
        )
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.tests.fixtures.libvirt.Connection.lookupByName',
                lambda connection, name: next(
                    item for item in connection.listAllDomains(3) if item.name() == name
                ),
            )
        )
        self.defined: dict[str, str] = {}
        create = guest.Guest.create
        self.useFixture(
            fixtures.MockPatch(
                'nova.virt.libvirt.guest.Guest.create',
                side_effect=lambda xml, host: (
                    self.defined.update({xml.partition('<uuid>')[2].partition('<')[0]: xml}),
                    create(xml, host),
                )[1],
            )
        )
        self.source = self._make_source()
        self.fetched: list[str] = []
        self.set_image(
            disk_format='qcow2',
            checksum='0123456789abcdef0123',
            kernel_id=KERNEL,
            ramdisk_id=KERNEL,
        )
        self.useFixture(fixtures.MockPatch('nova.virt.images.fetch', side_effect=self._fetch))

    def _wait_for_server_parameter(
        self, server: Any, expected: Any, max_retries: int = 10, *args: Any, **kwargs: Any
    ) -> Any:
        """As Nova's, which asks twice in a second and for five: oftener, and longer on a busy
        machine.
        """
        brief = types.SimpleNamespace(sleep=lambda _seconds: time.sleep(_ASK_SECONDS))
        with mock.patch('nova.tests.functional.integrated_helpers.time', brief):
            return super()._wait_for_server_parameter(
                server, expected, max_retries * _ASK_TIMES, *args, **kwargs
            )

    def _make_pool(self) -> pool_module.Pool:
        made: pool_module.Pool = self.useFixture(PoolFixture('fast')).pool
        return made

    def _setup_compute_service(self) -> None:
        self.flags(compute_driver='nova_pcow.driver.PcowLibvirtDriver')

    def _make_source(self) -> Path:
        """The data of the image: a raw disk that is no container of any kind."""
        path = self.directory / 'source.qcow2'
        raw = self.directory / 'source.raw'
        raw.write_bytes(b'\x5a' * units.MIB)
        os.truncate(raw, IMAGE_SIZE)
        tool.run(tool.find('qemu_img'), 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(path))
        return path

    def _fetch(self, _context: Any, image_id: str, path: str, _certificates: Any = None) -> None:
        self.fetched.append(image_id)
        shutil.copyfile(self.source, path)

    def set_image(self, **properties: Any) -> None:
        """Change what the image service says of :data:`IMAGE`; None removes a property."""
        image = self.glance.images[IMAGE]
        for name, value in properties.items():
            where = image if name in ('disk_format', 'checksum') else image['properties']
            where[name] = value
            if value is None:
                del where[name]

    def make_flavor(
        self,
        claimed_mb: int | None = 1024,
        disk: int = 1,
        *,
        ephemeral: int = 10,
        **extra_specs: str,
    ) -> str:
        specs = {f'pcow:{name}': value for name, value in extra_specs.items()}
        if claimed_mb is not None:
            specs['resources:CUSTOM_PCOW_MB'] = str(claimed_mb)
        return str(
            self._create_flavor(
                disk=disk, ephemeral=ephemeral, extra_spec=specs | {'resources:DISK_GB': '0'}
            )
        )

    def make_misspelt_flavor(self) -> str:
        """As the openstack command makes one by default: at a microversion at which the API checks
        no extra specs.
        """
        with mock.patch.object(self.api_fixture.admin_api, 'microversion', '2.61'):
            return self.make_flavor(rooot='true')

    def boot(self, flavor: str, state: str = 'ACTIVE', **arguments: Any) -> Any:
        return self._create_server(
            image_uuid=IMAGE, flavor_id=flavor, networks='none', expected_state=state, **arguments
        )

    def images(self) -> list[str]:
        """Names of what is in the pool."""
        return [name for name in self.pool.entries() if not name.startswith('image-')]

    def xml(self, server: Any) -> str:
        """What the driver gave libvirt last: the libvirt here does not keep all of it."""
        return self.defined[server['id']]

    def provider(self, name: str) -> Any:
        found = self.placement.get(f'/resource_providers?name={name}').body['resource_providers']
        return found[0] if found else None

    def claims(self, server: Any) -> dict[str, Any]:
        """What placement has reserved for a server, by the UUID of the resource provider."""
        found = self.placement.get(f'/allocations/{server["id"]}').body['allocations']
        return {uuid: item['resources'] for uuid, item in found.items()}

    def event_words(self, server: Any, action: str) -> str:
        """What the events of an action say."""
        (found,) = [
            item for item in self.api.get_instance_actions(server['id']) if item['action'] == action
        ]
        return json.dumps(
            self.admin_api.api_get(
                f'/servers/{server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def fault(self, server: Any) -> str:
        return json.dumps(self.api.get_server(server['id'])['fault'])


class Writer:
    """Somebody who has an image open for writing."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            (tool.find('pcow_io'), path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b'write -P 1 8M 4k\n')
        self._process.stdin.flush()
        self._process.stdout.readline()

    def close(self) -> None:
        self._process.communicate()
