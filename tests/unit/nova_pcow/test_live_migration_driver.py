# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import task_states
import nova.conf
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client
from nova.virt.libvirt import utils as libvirt_utils

from nova_pcow import conf as nova_conf
from nova_pcow import notes
from pcow_driver import image
from pcow_driver import names
from pcow_driver import pool as pool_module
from pcow_driver import registry
from pcow_driver import tool
from tests.unit.nova_pcow import base

_HOSTS = ('host1', 'host2')
_libvirt_driver = 'nova.virt.libvirt.driver.LibvirtDriver.'


class LiveMigrationDriverTest(base.ServersTestCase):
    """Two hosts with a pool and a directory of servers each, in one process: what a host's driver does sees what is its own."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.places = {'host1': self.directory, 'host2': self.directory / 'host2'}
        self.places['host2'].mkdir()
        self.names = {'host1': ['fast'], 'host2': ['other']}
        self.now = 'host1'
        with self.on('host2'):
            self.pools: dict[str, pool_module.Pool] = {
                'host1': self.pool, 'host2': self.useFixture(base.PoolFixture('other')).pool}
        for name, value in (('get_instance_disk_info', '[]'), ('_create_images_and_backing', None)):
            self.useFixture(fixtures.MockPatch(_libvirt_driver + name, return_value=value))
        self.useFixture(fixtures.MonkeyPatch(                    # the libvirt here has not all of it
            'nova.virt.libvirt.guest.Guest.get_xml_desc', lambda guest, **_options: self.defined[guest.uuid]))
        self.useFixture(fixtures.MonkeyPatch('nova.tests.fixtures.libvirt.Domain.migrateToURI3', self.migrate))
        self.useFixture(fixtures.MockPatch('nova.virt.libvirt.utils.copy_image', side_effect=self.copy))
        self.outcome = 'arrives'
        for host in _HOSTS:
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
            if not name.startswith('__') and name != '_live_migration_operation' and callable(method):
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
            raise libvirt_utils.processutils.ProcessExecutionError(stderr='Host key verification failed.\n')
        tool.run('/bin/cp', source, target)

    def migrate(self, domain: Any, _destination: str, params: dict[str, Any], flags: int) -> None:
        """libvirt's part, and QEMU's."""
        del flags
        new_xml = params['destination_xml']
        for path in self.files('host1'):
            there = Path(self.pools['host2'].path, path.name)
            self.assertIn(f'<path>{there}</path>', new_xml)
            old, new = image.info(str(path)), image.info(str(there))
            self.assertEqual((old.base_uuid, old.virtual_size, 0), (new.base_uuid, new.virtual_size, new.data_size))
            self.assertEqual([names.ARRIVING_MARK], [one.name for one in new.snapshots])
        self.assertEqual('host2', notes.get(notes.LEAVING, self.server['id']))
        if self.outcome == 'pool is full':
            raise fakelibvirt.make_libvirtError(
                fakelibvirt.libvirtError, 'its pool is full, make room and migrate again', error_code=1, error_domain=10)
        if self.outcome == 'killed':
            domain._state = fakelibvirt.VIR_DOMAIN_SHUTOFF
            raise fakelibvirt.make_libvirtError(
                fakelibvirt.libvirtError, 'QEMU unexpectedly closed the monitor', error_code=1, error_domain=10)
        for path in self.files('host2'):
            image.snapshot_delete(str(path), names.ARRIVING_MARK)
        self.computes['host2'].driver._host.get_connection().createXML(new_xml, 0)
        domain._connection._undefine(domain)
        domain.complete_job()

    def live_migrate(self, state: str) -> Any:
        with contextlib.suppress(client.OpenStackApiException):      # casts are calls here: the API hears what compute raises
            self.api.post_server_action(self.server['id'], {'os-migrateLive': {'host': 'host2', 'block_migration': 'auto'}})
        self._wait_for_migration_status(self.server, [state])
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def words(self) -> str:
        (found,) = [item for item in self.api.get_instance_actions(self.server['id']) if item['action'] == 'live-migration']
        return json.dumps(self.api.api_get(f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}').body)

    def check_stayed(self, state: str, words: str) -> None:
        before = self.claims(self.server)
        found = self.live_migrate(state)
        self.assertIn(words, self.words())
        self.assertEqual(('ACTIVE', 'host1'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual(before, self.claims(self.server))
        self.assertEqual(self.before, {path.name: image.info(str(path)).uuid for path in self.files('host1')})
        self.assertFalse(self.instance().cleaned)
        for host in _HOSTS:
            with self.on(host):
                self.assertEqual([None, None], [notes.get(kind, self.server['id']) for kind in (notes.LEAVING, notes.ARRIVING)])

    def test_success(self) -> None:
        found = self.live_migrate('completed')
        self.assertEqual(('ACTIVE', 'host2'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual([[], list(self.before)], [[path.name for path in self.files(host)] for host in _HOSTS])
        self.assertEqual(set(), set(self.before.values()) & {image.info(str(path)).uuid for path in self.files('host2')})
        self.assertIn(self.provider('host2_pcow_other')['uuid'], self.claims(self.server))
        self.assertFalse(self.instance().cleaned)
        for host in _HOSTS:
            with self.on(host):
                self.assertEqual([None, None], [notes.get(kind, self.server['id']) for kind in (notes.LEAVING, notes.ARRIVING)])
        self._delete_server(self.server)
        self.assertEqual([], self.files('host2'))

    def test_pool_that_is_full(self) -> None:
        self.outcome = 'pool is full'
        self.check_stayed('failed', 'its pool is full, make room and migrate again')
        self.assertEqual([], self.files('host2'))
        self.outcome = 'arrives'
        with contextlib.suppress(AssertionError):
            self.api.post_server_action(self.server['id'], {'os-migrateLive': {'host': 'host2', 'block_migration': 'auto'}})
        self._wait_for_server_parameter(self.server, {'OS-EXT-SRV-ATTR:host': 'host2', 'OS-EXT-STS:task_state': None})

    def test_qemu_that_is_killed(self) -> None:
        """Nova takes a guest that does not run for one that has arrived, and deletes what it had."""
        self.outcome = 'killed'
        self.check_stayed('failed', 'QEMU unexpectedly closed the monitor')
        self.assertEqual([], self.files('host2'))

    def test_template_that_cannot_be_copied(self) -> None:
        self.outcome = 'no copy'
        self.check_stayed('failed', 'Host key verification failed.')
        self.assertEqual([], self.files('host2'))

    def test_kernel(self) -> None:
        """Fetched as for a new server: Nova's own way takes one with a boot sector for a disk that is unsafe."""
        for error in (None, nova_exception.ImageNotFound(image_id=base.KERNEL)):
            with mock.patch('nova.virt.libvirt.utils.fetch_raw_image', new=mock.Mock(side_effect=error)) as fetch, \
                    mock.patch('nova.virt.libvirt.utils.copy_image', new=mock.Mock()) as copy, \
                    mock.patch('nova.virt.libvirt.utils.fetch_image', new=mock.Mock()) as unsafe:
                self.computes['host2'].driver._try_fetch_image(None, '/x/kernel', base.KERNEL, self.instance(), 'host1')
            fetch.assert_called_once()
            unsafe.assert_not_called()
            self.assertEqual([] if error is None else [mock.call('/x/kernel', '/x/kernel', host='host1', receive=True)],
                             copy.mock_calls)

    def test_image_of_an_earlier_time(self) -> None:
        """It is left alone, also by a rollback, and by one for which nothing was made."""
        path = Path(self.pools['host2'].path, f'server-{self.server["id"]}-root.pcow')
        image.create(str(path), 2 << 20)
        self.check_stayed('error', 'of an earlier time of the server is still on the new host')
        driver = self.computes['host2'].driver
        instance = self.instance()
        instance.task_state = task_states.MIGRATING
        driver.rollback_live_migration_at_destination(
            context.get_admin_context(), instance, [], None, True, objects.LibvirtLiveMigrateData(
                is_shared_instance_path=False, instance_relative_path=instance.uuid))
        self.assertTrue(path.exists())

    def test_what_a_killed_service_left(self) -> None:
        """Images that were made for an arrival, and the directory of the server: the next migration begins anew."""
        with self.on('host2'):
            notes.put(notes.ARRIVING, self.server['id'], self.pools['host2'].uuid)
            image.create(str(Path(self.pools['host2'].path, f'server-{self.server["id"]}-root.pcow')), 2 << 20)
            os.mkdir(self.places['host2'] / self.server['id'])
        self.test_success()

    def test_rollback_of_an_earlier_migration(self) -> None:
        """It comes late: the server has arrived by then."""
        self.live_migrate('completed')
        before = {path.name for path in self.files('host2')}
        instance = self.instance()
        instance.task_state = task_states.MIGRATING
        self.computes['host2'].driver.rollback_live_migration_at_destination(
            context.get_admin_context(), instance, [], None, True, objects.LibvirtLiveMigrateData(
                is_shared_instance_path=False, instance_relative_path=instance.uuid))
        self.assertEqual(before, {path.name for path in self.files('host2')})
        self.computes['host2'].driver._host.get_connection().lookupByUUIDString(self.server['id'])

    def test_evacuation_to_what_was_left(self) -> None:
        """Images that were made for an arrival are not what the server has, whatever else is known of them."""
        for with_note in (True, False):
            with self.on('host2'):
                for path in self.files('host1'):
                    there = Path(self.pools['host2'].path, path.name)
                    if not there.exists():
                        image.create(str(there), 2 << 20)
                        image.mark_arriving(str(there))
                (notes.put(notes.ARRIVING, self.server['id'], self.pools['host2'].uuid) if with_note
                 else notes.forget(notes.ARRIVING, uuid=self.server['id']))
            error = self.assertRaises(nova_exception.NovaException, self.computes['host2'].driver.instance_on_disk, self.instance())
            self.assertIn('it is where it was' if with_note else 'not all of it has arrived', str(error))

    def test_snapshot_inside(self) -> None:
        path = str(self.files('host1')[0])
        image.snapshot_create(path, 'before-upgrade')
        self.check_stayed('error', 'has snapshots, which would stay behind (before-upgrade)')

    def test_shared_pool(self) -> None:
        with self.on('host2'):
            registry.PoolRegistry().import_(self.pool.path)
        self.names['host2'].append('fast')
        self.check_stayed('error', 'both hosts see the pool of the server')

    def test_qemu_that_cannot(self) -> None:
        emulator = self.directory / 'qemu'
        emulator.write_text('#!/bin/sh\necho "  format=<string>"\n')
        os.utime(emulator, (1, 1))
        self.check_stayed('error', f'{emulator} does not take pcow images along in a live migration')

    def test_postcopy(self) -> None:
        with mock.patch.object(self.computes['host1'].driver, '_is_post_copy_enabled', return_value=True):
            self.check_stayed('error', 'set [libvirt] live_migration_permit_post_copy to false')

    def test_start_after_it_left(self) -> None:
        """nova-compute was killed while libvirt completed the migration: the guest runs on the other host."""
        with self.on('host1'):
            notes.put(notes.LEAVING, self.server['id'], 'host2')
        connection = self.computes['host1'].driver._host.get_connection()
        driver, instance = self.computes['host1'].driver, self.instance()
        domain = connection.lookupByUUIDString(self.server['id'])
        for state, job, stays in ((fakelibvirt.VIR_DOMAIN_SHUTOFF, 0, True),       # libvirt had no time to take it away
                                  (fakelibvirt.VIR_DOMAIN_RUNNING, fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED, True),
                                  (fakelibvirt.VIR_DOMAIN_RUNNING, 0, False)):
            domain._state, domain._job_type = state, job
            driver._settle_leaving(instance)
            with self.on('host1'):
                self.assertEqual(stays, notes.get(notes.LEAVING, self.server['id']) is not None, (state, job))
        with self.on('host1'):
            notes.put(notes.LEAVING, self.server['id'], 'host2')
        connection._undefine(connection.lookupByUUIDString(self.server['id']))
        error = self.assertRaises(nova_exception.InternalError, driver.power_on, context.get_admin_context(), instance, [])
        self.assertIn('it runs there, with its data, and what is here is old', str(error))
