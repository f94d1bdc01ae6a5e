# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
from pathlib import Path
from unittest import mock

from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import task_states
from nova.tests.fixtures import libvirt as fakelibvirt

from nova_pcow.records import notes
from pcow_driver.images import image
from pcow_driver.pools import registry
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import two_hosts


class LiveMigrationDriverTest(two_hosts.TwoHostsTestCase):
    def test_success(self) -> None:
        found = self.live_migrate('completed')
        self.assertEqual(('ACTIVE', 'host2'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertEqual(
            [[], list(self.before)],
            [[path.name for path in self.files(host)] for host in two_hosts.HOSTS],
        )
        self.assertEqual(
            set(),
            set(self.before.values())
            & {image.info(str(path)).uuid for path in self.files('host2')},
        )
        self.assertIn(self.provider('host2_pcow_other')['uuid'], self.claims(self.server))
        self.assertFalse(self.instance().cleaned)
        for host in two_hosts.HOSTS:
            with self.on(host):
                self.assertEqual(
                    [None, None],
                    [
                        notes.get(kind, self.server['id'])
                        for kind in (notes.LEAVING, notes.ARRIVING)
                    ],
                )
        self._delete_server(self.server)
        self.assertEqual([], self.files('host2'))

    def test_image_that_is_larger_than_the_flavor(self) -> None:
        """Its QEMU can write that."""
        image.resize(str(self.files('host1')[0]), 8 << 30)
        self.check_stayed('error', 'says that it holds')
        self.assertEqual([], self.files('host2'))

    def test_image_that_is_larger_than_the_flavor_for_the_new_host(self) -> None:
        """As its own host looks earlier, and may be of an earlier version."""
        image.resize(str(self.files('host1')[0]), 8 << 30)
        with mock.patch('nova_pcow.servers.storage.check_sizes'):
            self.check_stayed('error', ' has 8 GiB on its host, and the flavor ')
        self.assertEqual([], self.files('host2'))

    def test_pool_that_is_full(self) -> None:
        self.outcome = 'pool is full'
        self.check_stayed('failed', 'its pool is full, make room and migrate again')
        self.assertEqual([], self.files('host2'))
        self.outcome = 'arrives'
        with contextlib.suppress(AssertionError):
            self.api.post_server_action(
                self.server['id'], {'os-migrateLive': {'host': 'host2', 'block_migration': 'auto'}}
            )
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-SRV-ATTR:host': 'host2', 'OS-EXT-STS:task_state': None}
        )
        # later than that; the end would wait for its last call
        self._wait_for_migration_status(self.server, ['completed'])

    def test_qemu_that_is_killed(self) -> None:
        """Nova takes a guest that does not run for one that has arrived, and deletes
        what it had.
        """
        self.outcome = 'killed'
        self.check_stayed('failed', 'QEMU unexpectedly closed the monitor')
        self.assertEqual([], self.files('host2'))

    def test_template_that_cannot_be_copied(self) -> None:
        self.outcome = 'no copy'
        self.check_stayed('failed', 'Host key verification failed.')
        self.assertEqual([], self.files('host2'))

    def test_kernel(self) -> None:
        """Fetched as for a new server: Nova's own way takes one with a boot sector for a disk that
        is unsafe.
        """
        for error in (None, nova_exception.ImageNotFound(image_id=base.KERNEL)):
            with (
                mock.patch(
                    'nova.virt.libvirt.utils.fetch_raw_image', new=mock.Mock(side_effect=error)
                ) as fetch,
                mock.patch('nova.virt.libvirt.utils.copy_image', new=mock.Mock()) as copy,
                mock.patch('nova.virt.libvirt.utils.fetch_image', new=mock.Mock()) as unsafe,
            ):
                self.computes['host2'].driver._try_fetch_image(
                    None, '/x/kernel', base.KERNEL, self.instance(), 'host1'
                )
            fetch.assert_called_once()
            unsafe.assert_not_called()
            self.assertEqual(
                []
                if error is None
                else [mock.call('/x/kernel', '/x/kernel', host='host1', receive=True)],
                copy.mock_calls,
            )

    def test_image_of_an_earlier_time(self) -> None:
        """It is left alone, also by a rollback, and by one for which nothing was made."""
        path = Path(self.pools['host2'].path, f'server-{self.server["id"]}-root.pcow')
        image.create(str(path), 2 << 20)
        self.check_stayed('error', 'of an earlier time of the server is still on the new host')
        driver = self.computes['host2'].driver
        instance = self.instance()
        instance.task_state = task_states.MIGRATING
        driver.rollback_live_migration_at_destination(
            context.get_admin_context(),
            instance,
            [],
            None,
            True,
            objects.LibvirtLiveMigrateData(
                is_shared_instance_path=False, instance_relative_path=instance.uuid
            ),
        )
        self.assertTrue(path.exists())

    def test_what_a_killed_service_left(self) -> None:
        """Images that were made for an arrival, and the directory of the server: the next migration
        begins anew.
        """
        with self.on('host2'):
            notes.put(notes.ARRIVING, self.server['id'], self.pools['host2'].uuid)
            image.create(
                str(Path(self.pools['host2'].path, f'server-{self.server["id"]}-root.pcow')),
                2 << 20,
            )
            os.mkdir(self.places['host2'] / self.server['id'])
        self.test_success()

    def test_rollback_of_an_earlier_migration(self) -> None:
        """It comes late: the server has arrived by then."""
        self.live_migrate('completed')
        before = {path.name for path in self.files('host2')}
        instance = self.instance()
        instance.task_state = task_states.MIGRATING
        self.computes['host2'].driver.rollback_live_migration_at_destination(
            context.get_admin_context(),
            instance,
            [],
            None,
            True,
            objects.LibvirtLiveMigrateData(
                is_shared_instance_path=False, instance_relative_path=instance.uuid
            ),
        )
        self.assertEqual(before, {path.name for path in self.files('host2')})
        self.computes['host2'].driver._host.get_connection().lookupByUUIDString(self.server['id'])

    def test_evacuation_to_what_was_left(self) -> None:
        """Images that were made for an arrival are not what the server has, whatever else is known
        of them.
        """
        for with_note in (True, False):
            with self.on('host2'):
                for path in self.files('host1'):
                    there = Path(self.pools['host2'].path, path.name)
                    if not there.exists():
                        image.create(str(there), 2 << 20)
                        image.mark_arriving(str(there))
                (
                    notes.put(notes.ARRIVING, self.server['id'], self.pools['host2'].uuid)
                    if with_note
                    else notes.forget(notes.ARRIVING, uuid=self.server['id'])
                )
            error = self.assertRaises(
                nova_exception.NovaException,
                self.computes['host2'].driver.instance_on_disk,
                self.instance(),
            )
            self.assertIn(
                'it is where it was' if with_note else 'not all of it has arrived', str(error)
            )

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
        self.check_stayed(
            'error', f'{emulator} does not take pcow images along in a live migration'
        )

    def test_postcopy(self) -> None:
        with mock.patch.object(
            self.computes['host1'].driver, '_is_post_copy_enabled', return_value=True
        ):
            self.check_stayed('error', 'set [libvirt] live_migration_permit_post_copy to false')

    def test_start_after_it_left(self) -> None:
        """nova-compute was killed while libvirt completed the migration: the guest runs on the
        other host.
        """
        with self.on('host1'):
            notes.put(notes.LEAVING, self.server['id'], 'host2')
        connection = self.computes['host1'].driver._host.get_connection()
        driver, instance = self.computes['host1'].driver, self.instance()
        domain = connection.lookupByUUIDString(self.server['id'])
        # libvirt had no time to take it away
        for state, job, stays in (
            (fakelibvirt.VIR_DOMAIN_SHUTOFF, 0, True),
            (fakelibvirt.VIR_DOMAIN_RUNNING, fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED, True),
            (fakelibvirt.VIR_DOMAIN_RUNNING, 0, False),
        ):
            domain._state, domain._job_type = state, job
            driver._settle_leaving(instance)
            with self.on('host1'):
                self.assertEqual(
                    stays, notes.get(notes.LEAVING, self.server['id']) is not None, (state, job)
                )
        with self.on('host1'):
            notes.put(notes.LEAVING, self.server['id'], 'host2')
        connection._undefine(connection.lookupByUUIDString(self.server['id']))
        error = self.assertRaises(
            nova_exception.InternalError, driver.power_on, context.get_admin_context(), instance, []
        )
        self.assertIn('it runs there, with its data, and what is here is old', str(error))
