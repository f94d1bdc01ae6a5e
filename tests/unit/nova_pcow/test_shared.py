# SPDX-License-Identifier: Apache-2.0
"""Two hosts that have one pool mounted in different places: what one of them deletes, or copies."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import objects
from nova.tests.fixtures.libvirt import libvirtError
from nova.tests.functional.api import client
from nova.virt.libvirt import guest
import oslo_messaging

from nova_pcow.placement import inventory
from nova_pcow.placement import shared
from nova_pcow.servers import storage
from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.pools import registry
from tests.unit.nova_pcow import base

_HOSTS = ('host1', 'host2')


class SharedTest(base.ServersTestCase):
    """One process plays both hosts: the pool is where the host whose driver is called has it."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.places = {'host1': Path(self.pool.path), 'host2': Path(f'{self.pool.path}-elsewhere')}
        self.now = 'host1'
        self.addCleanup(self.see, 'host1')
        with self.on('host2'):
            registry.PoolRegistry().import_(str(self.places['host2']))
        self.useFixture(fixtures.MockPatchObject(image_locks, '_WAIT', 0.1))
        for number, host in enumerate(_HOSTS):
            with self.on(host):
                self.start_compute(hostname=host)
            self.separate(host, f'192.0.2.{number}')
        self.server = self.boot(self.make_flavor(root='true'), host='host1')
        self.name = f'server-{self.server["id"]}-root.pcow'
        self.before = self.uuid()

    def see(self, host: str) -> None:
        if self.places[host] != self.places[self.now]:
            self.places[self.now].rename(self.places[host])
        self.now = host
        conf.CONF.set_override(
            'state_path',
            str(self.directory / f'state-{host}' if host == 'host2' else self.directory / 'state'),
            'pcow',
        )

    @contextlib.contextmanager
    def on(self, host: str) -> Iterator[None]:
        before = self.now
        self.see(host)
        try:
            yield
        finally:
            self.see(before)

    def separate(self, host: str, address: str) -> None:
        driver = self.computes[host].driver
        self.useFixture(fixtures.MockPatchObject(driver, 'get_host_ip_addr', return_value=address))
        for name in dir(type(driver)):
            method = getattr(driver, name)
            if not name.startswith('__') and name != 'get_host_ip_addr' and callable(method):
                setattr(driver, name, self.wrapped(host, method))

    def wrapped(self, host: str, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.on(host):
                return method(*args, **kwargs)

        return call

    def uuid(self) -> str:
        return image.info(str(self.places[self.now] / self.name)).uuid

    def instance(self) -> Any:
        return objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])

    def build(self, fail: Callable[[], contextlib.AbstractContextManager[Any]], words: str) -> None:
        """A server that one host cannot have, whichever comes first, is built on the other."""
        tried: list[str] = []
        choose = inventory.choose

        def chosen(*arguments: Any) -> Any:
            tried.append(self.now)
            if len(tried) == 1:
                self.useFixture(
                    fixtures.MonkeyPatch('nova_pcow.placement.inventory.choose', chosen_again)
                )
                stack.enter_context(fail())
            return choose(*arguments)

        def chosen_again(*arguments: Any) -> Any:
            tried.append(self.now)
            stack.close()
            return choose(*arguments)

        self.useFixture(fixtures.MonkeyPatch('nova_pcow.placement.inventory.choose', chosen))
        with contextlib.ExitStack() as stack:
            server = self.boot(self.make_flavor(root='true'))
        self.assertEqual(list(_HOSTS), sorted(tried))
        self.assertEqual(tried[1], self.api.get_server(server['id'])['OS-EXT-SRV-ATTR:host'])
        self.assertIn(words, self.event_words(server, 'create'))
        names = [name for name in self.images() if server['id'] in name]
        self.assertEqual([f'server-{server["id"]}-root.pcow'], names)

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Of the host whose turn it is alone."""
        registry.PoolRegistry().set('fast', overcommit=0.0001)
        yield

    @contextlib.contextmanager
    def drained(self) -> Iterator[None]:
        registry.PoolRegistry().set('fast', draining=True)
        yield

    def test_build_where_there_is_no_room(self) -> None:
        self.build(self.limited, 'more cannot be provisioned in the pool fast')

    def test_build_where_the_pool_is_drained(self) -> None:
        self.build(self.drained, 'takes nothing new')

    def test_build_where_libvirt_fails(self) -> None:
        error = libvirtError('the monitor is gone')
        self.build(
            lambda: mock.patch.object(guest.Guest, 'create', new=mock.Mock(side_effect=error)),
            'the monitor is gone',
        )

    def evacuate(self) -> None:
        self.computes['host1'].stop()
        self.api.put_service_force_down(self.computes['host1'].service_ref.uuid, True)
        self.api.post_server_action(self.server['id'], {'evacuate': {}})
        self._wait_for_migration_status(self.server, ['done'])
        self.assertEqual('host2', self.api.get_server(self.server['id'])['OS-EXT-SRV-ATTR:host'])

    def come_back(self) -> None:
        """What nova-compute does when its host is up again."""
        manager = self.computes['host1'].manager
        manager._destroy_evacuated_instances(context.get_admin_context(), {})

    def test_evacuated_server_is_off(self) -> None:
        """Nobody has its image open."""
        self.evacuate()
        self.come_back()
        self.assertEqual(self.before, self.uuid())

    def test_evacuated_server_to_a_pool_that_is_not_there(self) -> None:
        self.evacuate()
        with self.on('host2'):
            marker = self.places['host2'] / '.pcow-pool'
            marker.rename(marker.with_name('.away'))
        with (
            mock.patch.object(storage, 'delete') as deleted,
            mock.patch.object(
                shared, 'begin', return_value={'filename': '/gone', 'pcow_pool': self.pool.uuid}
            ),
        ):
            self.come_back()
        deleted.assert_not_called()
        (self.places[self.now] / '.away').rename(self.places[self.now] / '.pcow-pool')

    def test_copy_of_the_pool(self) -> None:
        """The UUID alone tells nothing."""
        data = shared.begin(self.pool)
        self.assertTrue(shared.sees(data))
        os.unlink(data['filename'])
        self.assertFalse(shared.sees(data))

    def test_host_without_the_boot_shim_that_the_server_needs(self) -> None:
        data = shared.needing_shim(shared.begin(self.pool))
        self.assertTrue(shared.sees(data))
        (self.shim / 'initrd').unlink()
        self.assertRaises(exception.BootShimMissing, shared.sees, data)

    def test_running_elsewhere(self) -> None:
        """Whatever Nova thinks: the lock tells."""
        path = str(self.places['host1'] / self.name)
        with contextlib.closing(base.Writer(path)):
            self.assertFalse(storage.delete(self.server['id']))
            self.assertTrue(os.path.exists(path))
        self.assertTrue(storage.delete(self.server['id']))
        self.assertFalse(os.path.exists(path))

    def test_build_on_another_host(self) -> None:
        part = self.places['host1'] / f'.{self.name}.part'
        os.link(self.places['host1'] / self.name, part)
        with contextlib.closing(base.Writer(str(part))):
            self.assertFalse(storage.discard_unfinished(self.server['id']))
        self.assertTrue(storage.discard_unfinished(self.server['id']))
        self.assertFalse(part.exists())

    def migrate(self) -> None:
        def power_off(
            driver: Any, _context: Any, instance: Any, *_args: Any, **_kwargs: Any
        ) -> str:
            driver.power_off(instance)
            return '[]'

        for name, new in (
            ('migrate_disk_and_power_off', power_off),
            ('finish_migration', lambda *_args, **_kwargs: None),
            ('finish_revert_migration', lambda *_args, **_kwargs: None),
        ):
            self.useFixture(
                fixtures.MonkeyPatch(f'nova.virt.libvirt.driver.LibvirtDriver.{name}', new)
            )
        self.api.post_server_action(self.server['id'], {'migrate': {'host': 'host2'}})

    def test_migration_and_its_revert(self) -> None:
        """The new host of a moment has nothing of its own to delete."""
        with mock.patch('nova.virt.libvirt.utils.copy_image') as copied:
            self.migrate()
            self._wait_for_state_change(self.server, 'VERIFY_RESIZE')
        copied.assert_not_called()
        self.assertEqual(self.before, self.uuid())
        self.api.post_server_action(self.server['id'], {'revertResize': None})
        server = self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ACTIVE'}
        )
        self.assertEqual('host1', server['OS-EXT-SRV-ATTR:host'])
        self.assertEqual(self.before, self.uuid())
        self.assertEqual([], image.snapshot_list(str(self.places['host1'] / self.name)))

    def test_new_host_that_does_not_answer(self) -> None:
        with (
            mock.patch.object(
                self.computes['host2'].manager.driver,
                'check_instance_shared_storage_remote',
                side_effect=oslo_messaging.MessagingTimeout('no reply'),
            ),
            contextlib.suppress(client.OpenStackApiException),
        ):
            self.migrate()
        server = self._wait_for_server_parameter(
            self.server, {'OS-EXT-STS:task_state': None, 'status': 'ERROR'}
        )
        self.assertEqual('host1', server['OS-EXT-SRV-ATTR:host'])
        words = self.event_words(self.server, 'migrate')
        self.assertIn('whether host2 sees the pool of the server cannot be told', words)
