# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import subprocess
import sys
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import task_states
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client

from nova_pcow import conf as nova_conf
from nova_pcow.records import notes
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import registry
from tests.unit.nova_pcow import base
from tests.unit.nova_pcow import two_hosts


class LeftoversTestCase(two_hosts.TwoHostsTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.admin = context.get_admin_context()
        self.driver = self.computes['host2'].driver

    def leave(self, size: int = 16 * units.MIB) -> None:
        """What a live migration to host2 leaves if nova-compute, or the host, ends in the midst of
        it.
        """
        with self.on('host2'):
            notes.put(notes.ARRIVING, self.server['id'], self.pools['host2'].uuid)
            os.mkdir(self.directory_left())
            for path in self.files('host1'):
                there = str(Path(self.pools['host2'].path, path.name))
                image.create(there, size)
                image.mark_arriving(there)

    def directory_left(self) -> Path:
        return self.places['host2'] / str(self.server['id'])

    def noted(self) -> bool:
        with self.on('host2'):
            return notes.get(notes.ARRIVING, self.server['id']) is not None


class CleaningTest(LeftoversTestCase):
    """What host2 deletes by itself."""

    def setUp(self) -> None:
        super().setUp()
        self.leave()

    def clean(self) -> None:
        self.driver.manage_image_cache(self.admin, [])

    def check_stays(self) -> None:
        before = [path.name for path in self.files('host2')]
        self.assertEqual(list(self.before), before)
        self.clean()
        self.assertEqual(before, [path.name for path in self.files('host2')])
        self.assertTrue(self.noted())

    def set(self, **values: Any) -> None:
        instance = self.instance()
        instance.update(values)
        instance.save()

    def test_server_that_is_where_it_was(self) -> None:
        """Its directory is nobody's, too, and goes with the server: should the hosts share it by
        now, it would be its own.
        """
        part = Path(self.pools['host2'].path, f'.server-{self.server["id"]}-data0.pcow.part')
        part.touch()
        self.clean()
        self.assertEqual([], self.files('host2'))
        self.assertFalse(part.exists())
        self.assertEqual((True, True), (self.directory_left().exists(), self.noted()))
        self.assertEqual(
            self.before, {path.name: image.info(str(path)).uuid for path in self.files('host1')}
        )
        self._delete_server(self.server)
        self.clean()
        self.assertEqual((False, False), (self.directory_left().exists(), self.noted()))

    def test_server_that_was_deleted(self) -> None:
        self._delete_server(self.server)
        self.assertEqual(2, len(self.files('host2')))
        self.clean()
        self.assertEqual(
            ([], False, False), (self.files('host2'), self.directory_left().exists(), self.noted())
        )

    def test_start_of_the_service(self) -> None:
        os.rmdir(self.directory_left())
        with mock.patch(f'{two_hosts.LIBVIRT_DRIVER}init_host'):
            self.driver.init_host('host2')
        self.assertEqual(([], False), (self.files('host2'), self.noted()))

    def test_server_that_is_on_its_way(self) -> None:
        self.set(task_state=task_states.MIGRATING)
        self.check_stays()

    def test_server_whose_state_was_reset_meanwhile(self) -> None:
        move = objects.Migration(
            self.admin,
            instance_uuid=self.server['id'],
            source_compute='host1',
            source_node='host1',
            dest_compute='host2',
            status='preparing',
            migration_type='live-migration',
        )
        move.create()
        self.check_stays()
        move.status = 'error'
        move.save()
        self.clean()
        self.assertEqual([], self.files('host2'))

    @contextlib.contextmanager
    def arrives(self) -> Iterator[None]:
        """By another process, as nova-compute that is being replaced."""
        code = (
            'import sys\n'
            'from pcow_driver.common import conf, locks\n'
            'conf.CONF([], default_config_files=[])\n'
            'conf.CONF.set_override("state_path", sys.argv[1], "pcow")\n'
            'with locks.lock(sys.argv[2]):\n'
            '    print("mine", flush=True)\n'
            '    sys.stdin.read()\n'
        )
        name = f'arrival-{self.server["id"]}'
        with subprocess.Popen(
            [sys.executable, '-c', code, self.places['host2'] / 'state', name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            self.assertEqual('mine\n', process.stdout.readline())
            try:
                yield
            finally:
                process.stdin.close()

    def test_arrival_that_is_being_prepared(self) -> None:
        with self.arrives(), self.assertNoLogs('nova_pcow.libvirt_driver.deletion', 'WARNING'):
            self.check_stays()

    def test_arrival_beside_another(self) -> None:
        """It is not waited for without end."""
        self.useFixture(
            fixtures.MonkeyPatch('nova_pcow.libvirt_driver.live_arrivals._PATIENCE', 0.1)
        )
        instance = objects.Instance.get_by_uuid(self.admin, self.server['id'])
        with self.arrives():
            error = self.assertRaises(
                nova_exception.MigrationError,
                self.driver.pre_live_migration,
                self.admin,
                instance,
                *[None] * 4,
            )
        self.assertIn('is not given up: process ', str(error))

    def test_server_that_is_here(self) -> None:
        self.set(host='host2')
        self.check_stays()

    def test_domain_that_is_here(self) -> None:
        self.driver._host.get_connection().createXML(self.xml(self.server), 0)
        self.check_stays()

    def test_server_that_nobody_knows(self) -> None:
        error = nova_exception.InstanceNotFound(instance_id='x')
        with mock.patch('nova.objects.Instance.get_by_uuid', side_effect=error):
            self.check_stays()

    def test_image_without_mark(self) -> None:
        """As QEMU leaves one all of which has arrived."""
        root = self.files('host2')[-1]
        image.snapshot_delete(str(root), names.ARRIVING_MARK)
        self.clean()
        self.assertEqual(([root], True), (self.files('host2'), self.noted()))
        self._delete_server(self.server)
        self.clean()
        self.assertEqual(([root], True), (self.files('host2'), self.noted()))

    def test_image_that_a_qemu_has_open(self) -> None:
        with contextlib.ExitStack() as stack:
            for path in self.files('host2'):
                stack.enter_context(contextlib.closing(base.Writer(str(path))))
            self.check_stays()
        self.clean()
        self.assertEqual([], self.files('host2'))

    def test_pool_that_is_not_mounted(self) -> None:
        marker = Path(self.pools['host2'].path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self._delete_server(self.server)
        self.check_stays()
        marker.with_name('.away').rename(marker)
        self.clean()
        self.assertEqual(([], False), (self.files('host2'), self.noted()))


class NextTest(LeftoversTestCase):
    """The server comes to host2 later."""

    def test_room(self) -> None:
        """What is deleted has none."""
        self.leave(3 * units.GIB // 4)
        total = self.pools['host2'].capacity().total
        with self.on('host2'):
            registry.PoolRegistry().set('other', overcommit=2 * units.GIB / total)
        self.assertEqual('host2', self.live_migrate('completed')['OS-EXT-SRV-ATTR:host'])

    def test_directory_that_was_left(self) -> None:
        self.leave()
        self.driver.manage_image_cache(self.admin, [])
        self.assertEqual('host2', self.live_migrate('completed')['OS-EXT-SRV-ATTR:host'])

    def offload(self) -> None:
        """Its root has become an image."""
        nova_conf.CONF.set_override('shelve_drops_data', True, 'nova_pcow')
        self.addCleanup(nova_conf.CONF.clear_override, 'shelve_drops_data', 'nova_pcow')
        self.flags(shelved_offload_time=0)
        with mock.patch.object(self.computes['host1'].driver, 'snapshot'):
            self.api.post_server_action(self.server['id'], {'shelve': None})
        self._wait_for_server_parameter(
            self.server, {'status': 'SHELVED_OFFLOADED', 'OS-EXT-STS:task_state': None}
        )
        shelved = self.glance.images[self.instance().system_metadata['shelved_image_id']]
        shelved.update(disk_format='qcow2', checksum='fedcba98765432100123')

    def unshelve(self) -> Any:
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'unshelve': {'host': 'host2'}})
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def unshelve_words(self) -> str:
        (found, *_earlier) = [
            item
            for item in self.api.get_instance_actions(self.server['id'])
            if item['action'] == 'unshelve'
        ]
        return str(
            self.api.api_get(
                f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
            ).body
        )

    def test_unshelving(self) -> None:
        self.leave()
        self.offload()
        (self.directory_left() / 'disk.config').write_text('old')
        found = self.unshelve()
        self.assertEqual(('ACTIVE', 'host2'), (found['status'], found['OS-EXT-SRV-ATTR:host']))
        self.assertFalse(self.noted())
        self.assertFalse((self.directory_left() / 'disk.config').exists())
        for path in self.files('host2'):
            self.assertEqual((), image.info(str(path)).snapshots)

    def test_unshelving_with_an_image_that_a_qemu_has_open(self) -> None:
        self.leave()
        self.offload()
        _data, root = self.files('host2')
        with contextlib.closing(base.Writer(str(root))):
            self.assertEqual('SHELVED_OFFLOADED', self.unshelve()['status'])
        self.assertTrue(root.exists())
        self.assertIn(
            f'{root} was left by a live migration to this host that was cut short',
            self.unshelve_words(),
        )
        self.assertEqual('ACTIVE', self.unshelve()['status'])

    def test_unshelving_with_an_image_without_mark(self) -> None:
        self.leave()
        self.offload()
        for path in self.files('host2'):
            image.snapshot_delete(str(path), names.ARRIVING_MARK)
        self.assertEqual('SHELVED_OFFLOADED', self.unshelve()['status'])
        self.assertEqual(2, len(self.files('host2')))
        self.assertIn('was cut short, and may hold all that the server had', self.unshelve_words())
        for path in self.files('host2'):
            path.unlink()
        self.assertEqual('ACTIVE', self.unshelve()['status'])


class StayedTest(two_hosts.TwoHostsTestCase):
    """nova-compute of host1 was killed in the midst of a migration, which it has aborted since."""

    def setUp(self) -> None:
        super().setUp()
        self.driver = self.computes['host1'].driver
        with self.on('host1'):
            notes.put(notes.LEAVING, self.server['id'], 'host2')

    def noted(self) -> bool:
        with self.on('host1'):
            return notes.get(notes.LEAVING, self.server['id']) is not None

    def test_stop_and_start(self) -> None:
        self._stop_server(self.server)
        self._start_server(self.server)
        self.assertFalse(self.noted())

    def test_rescue(self) -> None:
        (self.places['host1'] / self.server['id']).mkdir(exist_ok=True)
        self.api.post_server_action(self.server['id'], {'rescue': {'rescue_image_ref': base.IMAGE}})
        self._wait_for_state_change(self.server, 'RESCUE')

    def test_guest_that_ends_by_itself_later(self) -> None:
        self._run_periodics()
        self.assertFalse(self.noted())

    def test_migration_that_goes_on(self) -> None:
        domain = self.driver._host.get_connection().lookupByUUIDString(self.server['id'])
        domain._job_type = fakelibvirt.VIR_DOMAIN_JOB_UNBOUNDED
        self._run_periodics()
        self.assertTrue(self.noted())
        domain._job_type = 0
        for state in (fakelibvirt.VIR_DOMAIN_SHUTOFF, fakelibvirt.VIR_DOMAIN_PAUSED):
            domain._state = state
            self.driver._settle_stayed(self.server['id'])
            self.assertTrue(self.noted())

    def test_migration_that_has_not_begun_yet(self) -> None:
        self.driver._operations[self.server['id']] = mock.sentinel.operation
        self._run_periodics()
        self.assertTrue(self.noted())
