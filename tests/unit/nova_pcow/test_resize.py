# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import time
from typing import Any
from unittest import mock

import fixtures
from keystoneauth1 import exceptions as keystone_exception
from nova import context
from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.scheduler.client import report
from nova.tests.functional.api import client
from nova.virt.libvirt import driver as libvirt_driver
from nova.virt.libvirt import utils as libvirt_utils
from oslo_concurrency import processutils

from nova_pcow import conf as nova_conf
from nova_pcow.migration import cold_migration
from nova_pcow.placement import inventory
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from tests.unit.nova_pcow import base

_SECONDS = 10.0
_FULL = processutils.ProcessExecutionError(
    stderr='No space left on device', exit_code=11, cmd='rsync'
)


class ResizeTestCase(base.ServersTestCase):
    """A server that is resized on its host."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.flags(allow_resize_to_same_host=True)
        self.start_compute()
        self.server = self.boot(self.make_flavor(root='true'))
        self.root = Path(self.pool.existing_path(f'server-{self.server["id"]}-root'))
        self.before = image.info(str(self.root)).uuid

    def resize(self, status: str, flavor: str = '') -> None:
        flavor = flavor or self.make_flavor(2048, root='true', disk=2)
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'resize': {'flavorRef': flavor}})
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': status}
        )

    def check_refused(self, words: str = '', action: str = 'resize') -> None:
        (found,) = [
            item
            for item in self.api.get_instance_actions(self.server['id'])
            if item['action'] == action
        ]
        wanted = (
            words
            or f'{self.root.stem} is in none of the pools fast of this host: mount the pool that '
            f'has it'
        )
        end, found_words = time.monotonic() + _SECONDS, ''
        # the server may be as it was before all of the action has been noted
        while wanted not in found_words and time.monotonic() < end:
            found_words = json.dumps(
                self.api.api_get(
                    f'/servers/{self.server["id"]}/os-instance-actions/{found["request_id"]}'
                ).body
            )
            time.sleep(0.1)
        self.assertIn(wanted, found_words)


class ResizeTest(ResizeTestCase):
    """While something of the server is not there."""

    def test_pool_that_is_not_mounted(self) -> None:
        marker = Path(self.pool.path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self.resize('ERROR')  # of the conductor, which hears it too: see above
        marker.with_name('.away').rename(marker)
        self.check_refused()
        # what lets a server go on as it was
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual(self.before, image.info(str(self.root)).uuid)

    def test_pool_without_room(self) -> None:
        """Found out while the server still runs."""
        registry.PoolRegistry().set('fast', overcommit=0.0001)
        self.resize('ERROR')  # as above
        self.check_refused('more cannot be provisioned in the pool fast')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def test_flavor_with_a_misspelt_extra_spec(self) -> None:
        """Of a server without persistent memory as well, which would have got none."""
        self.server = self.boot(self._create_flavor(disk=1))
        self.resize('ERROR', self.make_misspelt_flavor())  # as above
        self.check_refused('has the property pcow:rooot, which does not exist')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))

    def test_each_resize_has_its_own_mark(self) -> None:
        """A service that ends before it has made that does not go back to what an earlier resize
        left.
        """
        image.snapshot_create(str(self.root), 'nova-resize-0')
        with (
            mock.patch.object(
                libvirt_driver.LibvirtDriver,
                'migrate_disk_and_power_off',
                new=mock.Mock(return_value='[]'),
            ),
            mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_migration'),
        ):
            self.resize('VERIFY_RESIZE')
        (migration,) = [
            one for one in self.api.get_migrations() if one['instance_uuid'] == self.server['id']
        ]
        self.assertEqual(
            [f'nova-resize-{migration["id"]}'],
            [one.name for one in image.snapshot_list(str(self.root))],
        )
        size = image.info(str(self.root)).virtual_size
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        driver = self.computes['compute1'].driver
        for number, marks, compare in (
            (migration['id'] + 1, 1, self.assertEqual),
            (migration['id'], 0, self.assertGreater),
        ):
            with mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_revert_migration'):
                driver.finish_revert_migration(
                    context.get_admin_context(), instance, [], mock.Mock(id=number)
                )
            self.assertEqual(marks, len(image.snapshot_list(str(self.root))))
            compare(size, image.info(str(self.root)).virtual_size)

    def test_root_that_was_copied_to_another_host(self) -> None:
        image.snapshot_create(str(self.root), 'nova-sent')
        self.resize('ERROR')  # as above
        self.check_refused('was copied to another host')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual(['nova-sent'], [one.name for one in image.snapshot_list(str(self.root))])

    def test_root_that_goes_away_meanwhile(self) -> None:
        """No new one is made of the image in its place."""

        def power_off(*_args: Any) -> str:
            os.rename(self.root, self.root.with_suffix('.away'))
            return '[]'

        with mock.patch.object(
            libvirt_driver.LibvirtDriver,
            'migrate_disk_and_power_off',
            new=mock.Mock(side_effect=power_off),
        ):
            self.resize('ERROR')
        self.check_refused()
        self.assertFalse(self.root.exists())


class LateFailureTest(ResizeTestCase):
    """What fails when the server is off already."""

    def setUp(self) -> None:
        super().setUp()
        self.driver = self.computes['compute1'].driver
        self.offs = 0
        self.error: Exception | None = None

        def power_off(
            driver: Any, _context: Any, instance: Any, *_args: Any, **_kwargs: Any
        ) -> str:
            driver.power_off(instance)
            self.offs += 1
            if self.error is not None:
                raise self.error
            return '[]'

        self.useFixture(
            fixtures.MonkeyPatch(
                'nova.virt.libvirt.driver.LibvirtDriver.migrate_disk_and_power_off', power_off
            )
        )

    def state(self) -> int:
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        return int(self.driver.get_info(instance).state)

    def migrate(self) -> None:
        """To a host that does not see the pool of the first."""
        self.start_compute(hostname='compute2')
        self.useFixture(
            fixtures.MonkeyPatch('nova_pcow.placement.shared.sees', lambda _data: False)
        )
        for number, name in enumerate(('compute1', 'compute2')):
            self.useFixture(
                fixtures.MockPatchObject(
                    self.computes[name].driver, 'get_host_ip_addr', return_value=f'192.0.2.{number}'
                )
            )
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {'migrate': {'host': 'compute2'}})
        # as above
        self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ERROR'}
        )

    def check_rolled_back(self, action: str, words: str) -> None:
        self.check_refused(words, action)
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def test_mark_that_fails(self) -> None:
        with mock.patch.object(
            image, 'snapshot_create', side_effect=exception.ToolFailed(message='the pool is full')
        ):
            self.resize('ERROR')  # as above
        self.check_rolled_back('resize', 'the pool is full')
        self.assertEqual((1, power_state.RUNNING), (self.offs, self.state()))

    def test_server_that_was_stopped(self) -> None:
        self._stop_server(self.server)
        with mock.patch.object(
            image, 'snapshot_create', side_effect=exception.ToolFailed(message='the pool is full')
        ):
            self.resize('ERROR')  # as above
        self.assertEqual((1, power_state.SHUTDOWN), (self.offs, self.state()))

    def test_start_that_fails_too(self) -> None:
        """The server is off, for Nova to see; the words are of what failed first."""
        with (
            mock.patch.object(
                image,
                'snapshot_create',
                side_effect=exception.ToolFailed(message='the pool is full'),
            ),
            mock.patch.object(
                self.driver, 'power_on', side_effect=exception.ToolFailed(message='another error')
            ),
        ):
            self.resize('ERROR')  # as above
        self.check_rolled_back('resize', 'the pool is full')

    def test_copy_that_fails(self) -> None:
        with mock.patch('nova.virt.libvirt.utils.copy_image', side_effect=_FULL):
            self.migrate()
        self.check_rolled_back('migrate', 'No space left on device')
        self.assertEqual((1, power_state.RUNNING), (self.offs, self.state()))

    def test_images_that_find_no_room_on_the_new_host(self) -> None:
        """A hard reboot there, which Nova advises, goes on with what has arrived."""
        self.server = self.boot(self.make_flavor(2048, root='true', data_mb='64'), host='compute1')
        paths = [
            self.pool.existing_path(f'server-{self.server["id"]}-{role}')
            for role in ('root', 'data0')
        ]
        before = [image.info(path).uuid for path in paths]
        directory = Path(libvirt_utils.get_instance_path(objects.Instance(uuid=self.server['id'])))
        directory.mkdir(parents=True, exist_ok=True)
        send, copy, failures = cold_migration.send, cold_migration._copy, [False, True, True]

        def send_away(*arguments: Any, **options: Any) -> Any:
            sent = send(*arguments, **options)
            for path in paths:  # two hosts that each have a pool of their own
                os.rename(path, f'{path}.away')
            return sent

        def copy_one(*arguments: Any) -> None:
            if failures and failures.pop(0):
                raise exception.ToolFailed(message='the pool is full')
            copy(*arguments)

        with (
            mock.patch.object(cold_migration, 'send', side_effect=send_away),
            mock.patch.object(cold_migration, '_copy', side_effect=copy_one),
        ):
            self.migrate()
            self.assertEqual(
                'compute2', self.api.get_server(self.server['id'])['OS-EXT-SRV-ATTR:host']
            )
            self.assertIn('the pool is full', self.fault(self.server))
            for status in ('ERROR', 'ACTIVE'):  # with and without room
                with contextlib.suppress(client.OpenStackApiException):
                    self.api.post_server_action(self.server['id'], {'reboot': {'type': 'HARD'}})
                self._wait_for_server_parameter(
                    self.server, {'OS-EXT-STS:task_state': None, 'status': status}
                )
        self.assertEqual(before, [image.info(path).uuid for path in paths])
        self.assertIn(paths[1], self.xml(self.server))
        self.assertEqual([], [path.name for path in directory.iterdir() if 'pcow' in path.name])

    def test_copy_of_other_files_that_fails(self) -> None:
        self.error = _FULL
        self.migrate()
        self.check_rolled_back('migrate', 'make room in instances_path there')
        self.assertEqual((1, power_state.RUNNING), (self.offs, self.state()))

    def test_fork_of_a_snapshot(self) -> None:
        """Found out while the server runs."""
        device.create(self.pool, 'base', 64 * units.MIB)
        image.snapshot_create(self.pool.existing_path('base'), 's')
        device.create_on(self.pool, 'fork', 'base', base_snapshot='s')
        os.replace(self.pool.existing_path('fork'), self.root)
        self.migrate()
        self.check_rolled_back('migrate', 'is a fork of a snapshot, which does not travel')
        self.assertEqual((0, power_state.RUNNING), (self.offs, self.state()))


class TwoPoolsTest(ResizeTestCase):
    """Placement has chosen the pool that the server does not lie in, as far as it has room."""

    def setUp(self) -> None:
        super().setUp()
        self.other = self.useFixture(base.PoolFixture('other')).pool
        nova_conf.CONF.set_override('pools', ['fast', 'other'], 'nova_pcow')
        self._run_periodics()
        self.uuids = {
            name: self.provider(f'compute1_pcow_{name}')['uuid'] for name in ('fast', 'other')
        }
        check = cold_migration.check_stays

        def choose_other(*arguments: Any) -> None:
            self.claim('other')
            check(*arguments)

        self.useFixture(
            fixtures.MockPatch(
                'nova_pcow.migration.cold_migration.check_stays', side_effect=choose_other
            )
        )

    def claim(self, pool: str) -> None:
        found = self.placement.get(f'/allocations/{self.server["id"]}', version='1.28').body
        claims = {
            uuid: {'resources': dict(item['resources'])}
            for uuid, item in found['allocations'].items()
        }
        amount = sum(item['resources'].pop('CUSTOM_PCOW_MB', 0) for item in claims.values())
        claims.setdefault(self.uuids[pool], {'resources': {}})['resources']['CUSTOM_PCOW_MB'] = (
            amount
        )
        answer = self.placement.put(
            f'/allocations/{self.server["id"]}',
            found
            | {'allocations': {uuid: item for uuid, item in claims.items() if item['resources']}},
            version='1.28',
        )
        self.assertEqual(204, answer.status)

    def claimed(self) -> dict[str, int]:
        claims = self.claims(self.server)
        return {
            name: claims[uuid]['CUSTOM_PCOW_MB']
            for name, uuid in self.uuids.items()
            if uuid in claims
        }

    @contextlib.contextmanager
    def libvirt_does_nothing(self) -> Iterator[None]:
        with (
            mock.patch.object(
                libvirt_driver.LibvirtDriver,
                'migrate_disk_and_power_off',
                new=mock.Mock(return_value='[]'),
            ),
            mock.patch.object(libvirt_driver.LibvirtDriver, 'finish_migration'),
        ):
            yield

    def test_claim_follows_the_images(self) -> None:
        with self.libvirt_does_nothing():
            self.resize('VERIFY_RESIZE', self.make_flavor(2048, root='true', data_mb='64'))
        self.assertEqual({'fast': 2048}, self.claimed())
        self.assertIn('MEMORY_MB', str(self.claims(self.server)))
        self.assertIn(f'server-{self.server["id"]}-data0.pcow', self.pool.entries())
        self.assertEqual([], [name for name in self.other.entries() if name.startswith('server-')])

    def test_claim_of_another_size(self) -> None:
        """The image grows where it is."""
        with self.libvirt_does_nothing():
            self.resize('VERIFY_RESIZE')
        self.assertEqual({'fast': 2048}, self.claimed())

    def test_claim_follows_after_a_conflict(self) -> None:
        put, conflicts = report.SchedulerReportClient.put_allocations, [1, 1]

        def conflict(*arguments: Any) -> bool:
            if conflicts:
                conflicts.pop()
                raise nova_exception.AllocationUpdateFailed(
                    consumer_uuid=arguments[2], error='consumer generation conflict'
                )
            return bool(put(*arguments))

        with (
            self.libvirt_does_nothing(),
            mock.patch.object(report.SchedulerReportClient, 'put_allocations', conflict),
        ):
            self.resize('VERIFY_RESIZE')
        self.assertEqual({'fast': 2048}, self.claimed())

    def test_claim_for_which_the_pool_has_no_room(self) -> None:
        before = self.claimed()
        found = self.placement.get(f'/resource_providers/{self.uuids["fast"]}/inventories').body
        small = found['inventories']['CUSTOM_PCOW_MB'] | {
            'total': 2560,
            'reserved': 0,
            'allocation_ratio': 1.0,
            'max_unit': 2560,
        }
        answer = self.placement.put(
            f'/resource_providers/{self.uuids["fast"]}/inventories',
            found | {'inventories': {'CUSTOM_PCOW_MB': small}},
        )
        self.assertEqual(200, answer.status)
        # What others take of the pool's file system changes what the service tells: for this test
        # it tells nothing new.
        with mock.patch.object(inventory, 'update_provider_tree'):
            self.resize('ERROR')  # of the conductor, which hears it too: see above
        self.check_refused(
            'lie in the pool fast and stay there, and placement has no room for 2 GiB in it beside '
            'the old size'
        )
        self.assertIn('InstanceFaultRollback', self.fault(self.server))
        self.assertEqual(before, self.claimed())
        self.assertEqual([], image.snapshot_list(str(self.root)))

    def test_claim_while_placement_is_away(self) -> None:
        with mock.patch(
            'nova_pcow.placement.resize_claims._provider',
            side_effect=keystone_exception.ConnectFailure('placement is away'),
        ):
            self.resize('ERROR')  # as above
        self.check_refused('placement is away')
        self.assertIn('InstanceFaultRollback', self.fault(self.server))

    def test_claim_that_is_given_back(self) -> None:
        """What fails later takes the server back to what it had claimed."""
        error = exception.ImageInUse(path=str(self.root), reason='somebody has it')
        with (
            self.libvirt_does_nothing(),
            mock.patch.object(image, 'snapshot_create', side_effect=error),
        ):
            self.resize('ERROR')  # as above
        self.assertEqual({'fast': 1024}, self.claimed())
