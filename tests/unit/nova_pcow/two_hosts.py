# SPDX-License-Identifier: Apache-2.0
"""Two hosts between which servers migrate while they run."""

from collections.abc import Iterator
import contextlib
import json
from pathlib import Path
from typing import Any

import fixtures
from nova import context
from nova import objects
import nova.conf
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client
from nova.virt.libvirt import utils as libvirt_utils

from nova_pcow import conf as nova_conf
from nova_pcow.records import notes
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from tests.unit.nova_pcow import base

HOSTS = ('host1', 'host2')
LIBVIRT_DRIVER = 'nova.virt.libvirt.driver.LibvirtDriver.'


class TwoHostsTestCase(base.ServersTestCase):
    """Two hosts with a pool and a directory of servers each, in one process: what a host's driver
    does sees what is its own.
    """

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.places = {'host1': self.directory, 'host2': self.directory / 'host2'}
        self.places['host2'].mkdir()
        self.names = {'host1': ['fast'], 'host2': ['other']}
        self.now = 'host1'
        with self.on('host2'):
            self.pools: dict[str, pool_module.Pool] = {
                'host1': self.pool,
                'host2': self.useFixture(base.PoolFixture('other')).pool,
            }
        for name, value in (('get_instance_disk_info', '[]'), ('_create_images_and_backing', None)):
            self.useFixture(fixtures.MockPatch(LIBVIRT_DRIVER + name, return_value=value))
        # the libvirt here has not all of it
        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.virt.libvirt.guest.Guest.get_xml_desc',
                lambda guest, **_options: self.defined[guest.uuid],
            )
        )
        self.useFixture(
            fixtures.MonkeyPatch('nova.tests.fixtures.libvirt.Domain.migrateToURI3', self.migrate)
        )
        self.useFixture(
            fixtures.MockPatch('nova.virt.libvirt.utils.copy_image', side_effect=self.copy)
        )
        self.outcome = 'arrives'
        for host in HOSTS:
            with self.on(host):
                self.start_compute(hostname=host)
            self.separate(host)
        self.server = self.boot(self.make_flavor(1028, root='true', data_mb='4'), host='host1')
        self.before = {path.name: image.info(str(path)).uuid for path in self.files('host1')}

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        before, self.now = self.now, host
        self.see()
        try:
            yield
        finally:
            self.now = before
            self.see()

    def see(self) -> None:
        nova_conf.CONF.set_override('pools', self.names[self.now], 'nova_pcow')
        nova_conf.CONF.set_override('state_path', str(self.places[self.now] / 'state'), 'pcow')
        nova.conf.CONF.set_override('instances_path', str(self.places[self.now]))

    def separate(self, host: str) -> None:
        driver = self.computes[host].driver
        for name in dir(type(driver)):
            method = getattr(driver, name)
            if (
                not name.startswith('__')
                and name != '_live_migration_operation'
                and callable(method)
            ):
                setattr(driver, name, self.wrapped(host, method))

    def wrapped(self, host: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.on(host):
                return method(*args, **kwargs)

        return call

    def files(self, host: str) -> list[Path]:
        return sorted(Path(self.pools[host].path).glob('*server-*'))

    def instance(self) -> Any:
        return objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])

    def copy(self, source: str, target: str, host: str | None = None, **_options: Any) -> None:
        if host is not None and self.outcome == 'no copy':
            raise libvirt_utils.processutils.ProcessExecutionError(
                stderr='Host key verification failed.\n'
            )
        tool.run('/bin/cp', source, target)

    def migrate(self, domain: Any, _destination: str, params: dict[str, Any], flags: int) -> None:
        """libvirt's part, and QEMU's."""
        del flags
        new_xml = params['destination_xml']
        for path in self.files('host1'):
            there = Path(self.pools['host2'].path, path.name)
            self.assertIn(f'<path>{there}</path>', new_xml)
            old, new = image.info(str(path)), image.info(str(there))
            self.assertEqual(
                (old.base_uuid, old.virtual_size, 0),
                (new.base_uuid, new.virtual_size, new.data_size),
            )
            self.assertEqual([names.ARRIVING_MARK], [one.name for one in new.snapshots])
        self.assertEqual('host2', notes.get(notes.LEAVING, self.server['id']))
        if self.outcome == 'pool is full':
            raise fakelibvirt.make_libvirtError(
                fakelibvirt.libvirtError,
                'its pool is full, make room and migrate again',
                error_code=1,
                error_domain=10,
            )
        if self.outcome == 'killed':
            domain._state = fakelibvirt.VIR_DOMAIN_SHUTOFF
            raise fakelibvirt.make_libvirtError(
                fakelibvirt.libvirtError,
                'QEMU unexpectedly closed the monitor',
                error_code=1,
                error_domain=10,
            )
        for path in self.files('host2'):
            image.snapshot_delete(str(path), names.ARRIVING_MARK)
        self.computes['host2'].driver._host.get_connection().createXML(new_xml, 0)
        domain._connection._undefine(domain)
        domain.complete_job()

    def live_migrate(self, state: str) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(
                self.server['id'], {'os-migrateLive': {'host': 'host2', 'block_migration': 'auto'}}
            )
        for _attempt in range(3):  # five seconds each, which a machine that is busy exceeds
            with contextlib.suppress(self.failureException):
                self._wait_for_migration_status(self.server, [state])
                break
        self._wait_for_migration_status(self.server, [state])
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def words(self) -> str:
        (found,) = [
            item
            for item in self.api.get_instance_actions(self.server['id'])
            if item['action'] == 'live-migration'
        ]
        return json.dumps(
            self.api.api_get(
                f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def check_stayed(self, state: str, words: str) -> None:
        before = self.claims(self.server)
        found = self.live_migrate(state)
        self.assertIn(words, self.words())
        self.assertEqual(('ACTIVE', 'host1'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual(before, self.claims(self.server))
        self.assertEqual(
            self.before, {path.name: image.info(str(path)).uuid for path in self.files('host1')}
        )
        self.assertFalse(self.instance().cleaned)
        for host in HOSTS:
            with self.on(host):
                self.assertEqual(
                    [None, None],
                    [
                        notes.get(kind, self.server['id'])
                        for kind in (notes.LEAVING, notes.ARRIVING)
                    ],
                )
