# SPDX-License-Identifier: Apache-2.0
"""A program: many operations of the real driver at once, under Nova's own API, scheduler,
conductor, compute manager and placement, by green threads or by those of the system.

Something stands still if the hub of the green threads does not come round, or no operation ends;
then the program ends with the stacks of all threads. At quiet points, in the midst and at the end,
what placement is told, what a pool says of itself and what its file system has must agree. Its
arguments are a directory with file systems for the pools ``one`` and ``two``, ``green`` or
``native``, a seed, and how long it goes on in seconds.
"""

import os
import sys

if __name__ == '__main__':
    # before anything else is imported
    os.environ['OS_NOVA_DISABLE_EVENTLET_PATCHING'] = str(sys.argv[2] == 'native')
    from nova import monkey_patch

    monkey_patch.patch()

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import copy
import json
import random
import threading
import time
from typing import Any
import unittest
from unittest import mock

import fixtures
from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.compute import vm_states
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client
from oslo_db.sqlalchemy import enginefacade
from oslo_utils import uuidutils

from nova_pcow import conf as nova_conf
from nova_pcow.common import reserved
from nova_pcow.placement import inventory
from nova_pcow.servers import storage
from pcow_driver.common import conf
from pcow_driver.common import tool
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from tests.unit import accounts
from tests.unit import standing_qemu
from tests.unit import watchdog
from tests.unit.nova_pcow import base

DIRECTORY, MODE, SEED, SECONDS = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
WORKERS = 6
MOST_SERVERS = 12
ROUNDS = 3 if SECONDS > 60 else 2  # with a quiet point after each
# seconds in which the hub comes round, and an operation ends, on a machine that is busy
STANDS_STILL = 30
NO_OPERATION_ENDS = 120
OTHER_IMAGE = '76fa36fc-c930-4bf3-8c8a-ea2a2420deb6'  # of nova.tests' image service
OVERCOMMIT = {'one': 1.0, 'two': 20.0}
DELETED = 'deleted meanwhile'
# What users hear when two operations on one server meet, a pool has no room, or an ordinary volume
# is attached, which takes no snapshot.
REFUSALS = (
    DELETED,
    'No valid host',
    'NoValidHost',
    'is in task_state',
    'in vm_state',
    'placement has no room for',
    'takes no snapshot, and the state of a suspended server is one of all its disks',
    'does not answer: query-status',
    'cannot acquire state change lock',
)


def log(*words: object) -> None:
    print(MODE, *words, flush=True)


class PlainCells(fixtures.Fixture):
    """Each context has the database of its cell, and one without has that of the only cell: Nova's
    fixture keeps which one it is in a variable of all threads, and has them wait for each other.
    """

    def _setUp(self) -> None:  # noqa: N802 - the name is given by fixtures
        cells = nova_context.target_cell.__self__
        assert isinstance(cells, nova_fixtures.CellDatabases)
        usual = cells._default_ctxt_mgr
        for name, value in (
            ('nova.context.target_cell', cells._real_target_cell),
            (
                'nova.db.main.api.get_context_manager',
                lambda context: getattr(context, 'db_connection', None) or usual,
            ),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, value))
        if MODE == 'green':
            self._one_transaction_at_a_time()

    def _one_transaction_at_a_time(self) -> None:
        """Green threads share a connection to each SQLite in memory. MariaDB gives each its own."""
        scope, lock = enginefacade._TransactionContextManager._transaction_scope, threading.RLock()

        @contextlib.contextmanager
        def locked(manager: Any, context: Any) -> Iterator[Any]:
            with lock, scope(manager, context) as found:
                yield found

        self.useFixture(
            fixtures.MockPatchObject(
                enginefacade._TransactionContextManager, '_transaction_scope', locked
            )
        )


class SuspendedState:
    """virDomainSnapshot: what QEMU would write into the images is made in them."""

    def __init__(self, domain: Any) -> None:
        self.domain = domain
        for item in self._images():
            image.snapshot_create(item.path, reserved.SUSPENDED)
        domain.destroy()
        domain._snapshots[reserved.SUSPENDED] = self

    def _images(self) -> list[storage.ServerImage]:
        return storage.devices(self.domain.UUIDString())

    def getName(self) -> str:  # noqa: N802
        return reserved.SUSPENDED

    def revert(self) -> None:
        for item in self._images():
            image.snapshot_revert(item.path, reserved.SUSPENDED)
        self.domain.createWithFlags(0)

    def delete(self, _flags: int = 0) -> None:
        for item in self._images():
            if reserved.SUSPENDED in {one.name for one in image.snapshot_list(item.path)}:
                image.snapshot_delete(item.path, reserved.SUSPENDED)
        self.domain._snapshots.pop(reserved.SUSPENDED, None)


class Libvirt(fixtures.Fixture):
    """What Nova's fixture lacks: domains that go on from what they have saved. No QEMU has the
    images, so that pcow-img works on them, also while a server runs; but for one, which answers
    nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stands: str | None = None  # name of the domain
        self.qemu = standing_qemu.StandingQemu()

    def _monitor(self, domain: Any, command: str, _flags: int) -> str:
        asked = json.loads(command)['execute']
        if domain.name() == self.stands:
            return self.qemu.ask(asked)
        assert asked == 'query-status', asked
        return json.dumps({'return': {'status': 'running'}})

    def _setUp(self) -> None:  # noqa: N802
        fakelibvirt.qemuMonitorCommand = self._monitor
        domain = 'nova.tests.fixtures.libvirt.Domain.'
        for name in (
            'VIR_DOMAIN_SNAPSHOT_CREATE_HALT',
            'VIR_DOMAIN_SNAPSHOT_REVERT_PAUSED',
            'VIR_DOMAIN_SNAPSHOT_DELETE_METADATA_ONLY',
            'VIR_DOMAIN_XML_INACTIVE',
        ):
            if not hasattr(fakelibvirt, name):
                setattr(fakelibvirt, name, 1)
        for name, value in (
            ('nova_pcow.snapshots.snapshot._libvirt', lambda: fakelibvirt),
            ('pcow_driver.virt.libvirt_host.binding', lambda _name: fakelibvirt),
            ('pcow_driver.virt.domain.Domain.active', lambda found: found.name == self.stands),
            ('pcow_driver.virt.domain.Domain._backend', lambda _found, item: item.path),
            (f'{domain}snapshotCreateXML', lambda found, _xml, _flags: SuspendedState(found)),
            (f'{domain}listAllSnapshots', lambda found: list(found._snapshots.values())),
            (f'{domain}revertToSnapshot', lambda _found, snapshot, _flags: snapshot.revert()),
            (
                'nova.virt.libvirt.driver.LibvirtDriver.migrate_disk_and_power_off',
                lambda driver, _context, instance, *_rest: (driver.power_off(instance), '[]')[1],
            ),
        ):
            self.useFixture(fixtures.MonkeyPatch(name, value))


class Server:
    def __init__(self, identity: str, flavor: str) -> None:
        self.id = identity
        self.flavor = flavor
        self.volumes: list[str] = []
        self.busy = False
        self.stands = False  # its QEMU answers nothing
        self.deleted = False  # somebody has asked for that, maybe while something was under way


class Refused(Exception):
    pass


class AtOnce(base.ServersTestCase):
    ADMIN_API = True
    CAST_AS_CALL = False  # nobody waits for what the API has accepted

    def setUp(self) -> None:
        super().setUp()
        self.useFixture(PlainCells())
        self.libvirt = self.useFixture(Libvirt())
        conf.CONF.set_override('libvirt_timeout', 1, 'pcow')
        self.flags(cores=-1, instances=-1, ram=-1, group='quota')
        self.flags(allow_resize_to_same_host=True, rpc_response_timeout=NO_OPERATION_ENDS)
        self.placement_fixture.conf_fixture.config(
            randomize_allocation_candidates=True, group='placement'
        )
        self.flags(
            remove_unused_original_minimum_age_seconds=2,  # templates go, and are made anew
            group='image_cache',
        )
        nova_conf.CONF.set_override('pools', list(OVERCOMMIT), 'nova_pcow')
        self.glance.images[OTHER_IMAGE] = copy.deepcopy(self.glance.images[base.IMAGE]) | {
            'id': OTHER_IMAGE
        }
        self.start_compute(
            host_info=fakelibvirt.HostInfo(
                cpu_nodes=2, cpu_sockets=1, cpu_cores=3, cpu_threads=2, kB_mem=64 << 20
            )
        )
        self.flavors = {
            self.make_flavor(ephemeral=0, claimed_mb=1024, root='true'): 1024,
            self.make_flavor(
                ephemeral=0, claimed_mb=1104, root='true', data_mb='64,16', data_format='none,ext4'
            ): 1104,
        }
        self.larger = {
            self.make_flavor(ephemeral=0, claimed_mb=2048, root='true', disk=2): 2048,
            self.make_flavor(
                ephemeral=0, claimed_mb=2128, root='true', disk=2, data_mb='64,16'
            ): 2128,
        }
        self.manager = self.computes['compute1'].manager
        self.servers: list[Server] = []
        self.done: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.unexpected: list[str] = []
        self.watchdog = watchdog.Watchdog(STANDS_STILL, NO_OPERATION_ENDS)

    def _make_pool(self) -> pool_module.Pool:
        # shorter: the names of sockets have 107 bytes
        conf.CONF.set_override('state_path', os.path.join(DIRECTORY, 'state'), 'pcow')
        conf.CONF.set_override('conversion_dir', DIRECTORY, 'pcow')
        known = registry.PoolRegistry()
        for name, overcommit in OVERCOMMIT.items():
            known.create(name, os.path.join(DIRECTORY, name))
            known.set(name, overcommit=overcommit)
        self.pools = [known.get(name) for name in OVERCOMMIT]
        return self.pools[0]

    # ---- operations --------------------------------------------------------------------------

    def wait(self, server: Server) -> Any:
        """The server, when nothing is under way with it; None: it is gone."""
        while True:
            if not self.under_way(server):
                try:
                    found = self.api.get_server(server.id)
                except client.OpenStackApiNotFoundException:
                    return None
                if found['OS-EXT-STS:task_state'] is None and found['status'] != 'BUILD':
                    return found
            time.sleep(0.2)

    @staticmethod
    def under_way(server: Server) -> bool:
        """As the API would say, with less work."""
        try:
            found = objects.Instance.get_by_uuid(
                nova_context.get_admin_context(), server.id, expected_attrs=[]
            )
        except nova_exception.InstanceNotFound:  # not yet, not any more, or of no cell
            return False
        return found.task_state is not None or found.vm_state == vm_states.BUILDING

    def act(self, server: Server, status: str, action: str, **arguments: Any) -> None:
        self.api.post_server_action(server.id, {action: arguments or None})
        self.expect(server, status)

    def expect(self, server: Server, *statuses: str) -> None:
        """:raises Refused: it went otherwise"""
        found = self.wait(server)
        status = 'gone' if found is None else found['status']
        if status in statuses:
            return
        fault = {} if found is None else found.get('fault', {})
        words = '' if found is None else self.last_words(server)
        raise Refused(f'{status}: {fault.get("message", "")} {fault.get("details", "")} {words}')

    def last_words(self, server: Server) -> str:
        """What the events of the last action say, and Nova's last fault, which the API keeps back
        while the server is not in ERROR.
        """
        path = f'/servers/{server.id}/os-instance-actions'
        events: list[Any] = []
        for last in self.api.api_get(path).body['instanceActions'][:1]:
            until = time.monotonic() + NO_OPERATION_ENDS
            while time.monotonic() < until:  # the words come after the state
                found = self.api.api_get(f'{path}/{last["request_id"]}').body['instanceAction']
                events = found['events']
                if all(event['finish_time'] for event in events):
                    break
                time.sleep(0.2)
        fault = objects.InstanceFault.get_latest_for_instance(
            nova_context.get_admin_context(), server.id
        )
        return f'{json.dumps(events)} {fault and fault.message} {fault and fault.details}'

    def create(self, chance: random.Random) -> None:
        flavor = chance.choice(list(self.flavors))
        wanted = self._build_server(
            image_uuid=chance.choice([base.IMAGE, OTHER_IMAGE]), flavor_id=flavor, networks='none'
        )
        server = Server(self.api.post_server({'server': wanted})['id'], flavor)
        server.busy = True
        self.servers.append(server)
        try:
            self.expect(server, 'ACTIVE')
        except Refused:
            if server.deleted:
                raise Refused(DELETED) from None
            raise
        finally:
            server.busy = False

    def stop(self, server: Server, chance: random.Random) -> None:
        self.act(server, 'SHUTOFF', 'os-stop')

    def start(self, server: Server, chance: random.Random) -> None:
        self.act(server, 'ACTIVE', 'os-start')

    def reboot(self, server: Server, chance: random.Random) -> None:
        self.act(server, 'ACTIVE', 'reboot', type='HARD')

    def suspend(self, server: Server, chance: random.Random) -> None:
        self.act(server, 'SUSPENDED', 'suspend')

    def resume(self, server: Server, chance: random.Random) -> None:
        self.act(server, 'ACTIVE', 'resume')

    def rebuild(self, server: Server, chance: random.Random) -> None:
        before = self.api.get_server(server.id)['status']
        image_id = chance.choice([base.IMAGE, OTHER_IMAGE])
        self.act(server, before, 'rebuild', imageRef=image_id)

    def resize(self, server: Server, chance: random.Random) -> None:
        new = list(self.larger)[list(self.flavors).index(server.flavor)]
        self.act(server, 'VERIFY_RESIZE', 'resize', flavorRef=new)

    def confirm(self, server: Server, chance: random.Random) -> None:
        self.api.post_server_action(server.id, {'confirmResize': None})
        while (found := self.wait(server)) and found['status'] == 'VERIFY_RESIZE':
            time.sleep(0.2)
        self.expect(server, 'ACTIVE', 'SHUTOFF')
        server.flavor = list(self.larger)[list(self.flavors).index(server.flavor)]

    def revert(self, server: Server, chance: random.Random) -> None:
        self.api.post_server_action(server.id, {'revertResize': None})
        self.expect(server, 'ACTIVE', 'SHUTOFF')

    def snapshot(self, server: Server, chance: random.Random) -> None:
        before = self.api.get_server(server.id)['status']
        name = uuidutils.generate_uuid()
        self.act(server, before, 'createImage', name=name)
        made = [key for key, one in self.glance.images.items() if one['name'] == name]
        if [self.glance.images[key]['status'] for key in made] != ['active']:
            raise Refused(f'no image: {self.last_words(server)}')
        del self.glance.images[made[0]]

    def write(self, server: Server, chance: random.Random) -> None:
        """As the guest does."""
        for item in storage.devices(server.id):
            offset, length = (8 + chance.randrange(8)) << 20, chance.randrange(1, 2048) << 10
            tool.run(
                tool.find('pcow_io'), '--no-map', '-c', f'write -q {offset} {length}', item.path
            )

    def attach(self, server: Server, chance: random.Random) -> None:
        volume = uuidutils.generate_uuid()
        before = self.api.get_server(server.id)['status']
        self.api.post_server_volume(server.id, {'volumeAttachment': {'volumeId': volume}})
        self.expect(server, before)
        server.volumes.append(volume)

    def detach(self, server: Server, chance: random.Random) -> None:
        volume = server.volumes.pop()
        self.api.delete_server_volume(server.id, volume)
        while self.wait(server) and volume in {
            one['volumeId'] for one in self.api.get_server_volumes(server.id)
        }:
            time.sleep(0.2)

    def delete(self, server: Server, chance: random.Random) -> None:
        server.deleted = True
        self.api.delete_server(server.id)
        while (found := self.wait(server)) is not None:
            if found['status'] == 'ERROR':
                raise Refused(f'ERROR: {found.get("fault")}')
            time.sleep(0.2)

    def tell_placement(self, _chance: random.Random) -> None:
        self.manager.update_available_resource(nova_context.get_admin_context())

    def image_cache(self, _chance: random.Random) -> None:
        self.manager._run_image_cache_manager_pass(nova_context.get_admin_context())

    def possible(self, status: str, server: Server) -> list[Callable[..., None]]:
        if status == 'ACTIVE':
            larger = [] if server.flavor in self.larger else [self.resize] * 2
            attached = [self.attach, *([self.detach] * 2 if server.volumes else [])]
            anew = [self.stop, self.suspend, self.reboot, self.rebuild, self.snapshot, self.write]
            return [*anew, *larger, *attached, self.delete]
        if status == 'SHUTOFF':
            return [self.start, self.start, self.snapshot, self.rebuild, self.write, self.delete]
        return {
            'SUSPENDED': [*[self.resume] * 3, self.delete],
            'VERIFY_RESIZE': [*[self.confirm, self.revert] * 2, self.write, self.delete],
        }.get(status, [self.delete])

    def one(self, chance: random.Random) -> None:
        number = chance.random()
        if number < 0.08:
            self.count(chance.choice([self.tell_placement, self.image_cache]), chance)
        elif len(self.servers) < MOST_SERVERS and number < 0.4:
            self.count(self.create, chance)
        elif number < 0.44:  # whatever is under way
            busy = [one for one in self.servers if one.busy and not one.deleted and not one.stands]
            if busy:
                self.count(self.delete, chance.choice(busy), chance, word='delete what is busy')
        else:
            free = [one for one in self.servers if not one.busy]
            if free:
                self.of_server(chance.choice(free), chance)

    def one_stands(self) -> None:
        """From now on the QEMU of one server answers nothing."""
        self.create(random.Random(0))
        (server,) = self.servers
        server.busy = server.stands = True
        instance = objects.Instance.get_by_uuid(nova_context.get_admin_context(), server.id)
        self.libvirt.stands = instance.name

    def ask_standing(self) -> None:
        server = next(one for one in self.servers if one.stands)
        for asked in (self.snapshot, self.suspend):
            self.count(asked, server, random.Random(), word=f'{asked.__name__} what stands')

    def goes_on(self) -> None:
        self.libvirt.stands = None
        self.libvirt.qemu.go_on()

    def of_server(self, server: Server, chance: random.Random) -> None:
        server.busy = True
        try:
            found = self.wait(server)
            if found is None:
                with contextlib.suppress(ValueError):
                    self.servers.remove(server)
                return
            self.count(chance.choice(self.possible(found['status'], server)), server, chance)
        finally:
            server.busy = False

    def count(self, operation: Callable[..., None], *arguments: Any, word: str = '') -> None:
        name = word or operation.__name__
        server = arguments[0] if isinstance(arguments[0], Server) else None
        try:
            operation(*arguments)
            self.done[name] += 1
        except client.OpenStackApiException as e:
            said = getattr(e.response, 'text', str(e))
            self.refuse(name, f'{getattr(e.response, "status_code", 0)} {said}', server)
        except Refused as e:
            self.refuse(name, str(e), server)
        self.watchdog.alive()

    def refuse(self, name: str, words: str, server: Server | None) -> None:
        if server is not None and server.deleted:
            self.refused[f'{name}: {DELETED}'] += 1
        elif known := next((one for one in REFUSALS if one in words), None):
            self.refused[f'{name}: {known}'] += 1
        else:
            self.refused[f'{name}: unexpected'] += 1
            self.unexpected.append(f'{name}: {words}')
            log('unexpected:', name, words)

    # ---- accounts ----------------------------------------------------------------------------

    def differences(self) -> list[str]:
        """At a quiet point: what placement, pools and file systems say otherwise of one thing."""
        self.image_cache(random.Random())
        self.tell_placement(random.Random())
        with mock.patch.object(inventory, 'QUIET', 0.0):  # nothing comes nor goes for a minute
            self.tell_placement(random.Random())
        found: list[str] = []
        for pool in self.pools:
            found += accounts.differences(pool)
            found += self.of_placement(pool)
        return found

    def of_placement(self, pool: pool_module.Pool) -> list[str]:
        """Of what a pool and placement say otherwise; MiB."""
        uuid = self.provider(f'compute1_pcow_{pool.name}')['uuid']
        told = self.placement.get(f'/resource_providers/{uuid}/inventories').body['inventories']
        told = told['CUSTOM_PCOW_MB']
        used = self.placement.get(f'/resource_providers/{uuid}/usages').body['usages']
        used = used['CUSTOM_PCOW_MB']
        claims = self.claimed(pool)
        account = pool.account()
        assert account.limit is not None
        total, exact = account.total >> 20, account.reserved_beside(claims.by_images) / (1 << 20)
        left = (account.limit - account.provisioned) / (1 << 20)
        promised = (told['total'] - told['reserved']) * told['allocation_ratio'] - used
        log(
            f'pool {pool.name}: {len(claims.servers)} servers, total {told["total"]} reserved '
            f'{told["reserved"]} ({exact:.1f}) used {used}, promised {promised:.0f} of {left:.0f}, '
            f'held {account.held >> 20} provisioned {account.provisioned >> 20} fixed '
            f'{account.fixed >> 20}'
        )
        found = []
        if told['total'] != total:
            found.append(f'size: {told["total"]}, not {total}')
        if not exact <= told['reserved'] <= exact + 1:  # it is rounded up
            found.append(f'reserved: {told["reserved"]}, not {exact}')
        if used != claims.by_servers:
            found.append(f'used: {used}, not {claims.by_servers} of {claims.servers}')
        if promised > left + 1:
            found.append(f'promised: {promised}, more than the {left} that are left')
        # the steps of what is told, as often as over-commit says; what a resize claims twice
        lost = left - promised - claims.twice
        if lost > 2 * told['allocation_ratio']:
            found.append(f'promised: {promised}, though {left} are left')
        return [f'placement, pool {pool.name}, {words}' for words in found]

    def claimed(self, pool: pool_module.Pool) -> 'Claims':
        """From Nova's records of servers, and from the images."""
        found, sizes = Claims(), self.flavors | self.larger
        for server in self.api.get_servers():
            images = storage.find(server['id'])
            if not images or images[0].pool.name != pool.name:
                continue
            one = next(one for one in self.servers if one.id == server['id'])
            found.servers.append(f'{one.id} {server["status"]}')
            new = (
                list(self.larger)[list(self.flavors).index(one.flavor)]
                if (server['status'] == 'VERIFY_RESIZE')
                else one.flavor
            )
            found.by_images += sizes[new] << 20
            found.by_servers += sizes[one.flavor] + (sizes[new] if new != one.flavor else 0)
            found.twice += sizes[one.flavor] if new != one.flavor else 0
        return found

    # ---- all of it ---------------------------------------------------------------------------

    def round(self, number: int) -> None:
        until, failed = time.monotonic() + SECONDS / ROUNDS, []

        def run(seed: int) -> None:
            chance = random.Random(seed)
            try:
                while time.monotonic() < until:
                    self.one(chance)
            except BaseException as e:
                failed.append(e)
                raise

        asker = threading.Thread(target=self.ask_standing)
        asker.start()
        each_by_a_thread(
            run, [(SEED * ROUNDS + number) * WORKERS + worker for worker in range(WORKERS)]
        )
        asker.join()
        self.assertEqual([], failed)
        self.assertEqual([], self.differences(), f'at quiet point {number}')

    def all_rounds(self) -> None:
        self.one_stands()
        for number in range(ROUNDS):
            self.round(number)
        self.goes_on()
        each_by_a_thread(
            lambda server: self.count(self.delete, server, random.Random()), self.servers
        )
        self.assertEqual([], self.differences(), 'at the end')
        self.assertEqual([], [name for pool in self.pools for name in servers_of(pool)])

    def test(self) -> None:
        try:
            with self.watchdog.watching():
                self.all_rounds()
        finally:
            log(f'{sum(self.done.values())} done {dict(self.done)}')
            log(f'{sum(self.refused.values())} refused {dict(self.refused)}')
        self.assertEqual([], self.unexpected)
        self.assertEqual(
            2 * ROUNDS, sum(self.refused[key] for key in self.refused if 'what stands' in key)
        )
        self.assertGreater(sum(self.done.values()), WORKERS, 'operations: it shows nothing')


class Claims:
    def __init__(self) -> None:
        self.by_images = 0  # bytes
        self.by_servers = 0  # MiB, with what a resize claims beside
        self.twice = 0
        self.servers: list[str] = []


def each_by_a_thread(operation: Callable[[Any], None], items: Iterable[Any]) -> None:
    threads = [threading.Thread(target=operation, args=(item,)) for item in items]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def servers_of(pool: pool_module.Pool) -> list[str]:
    """What a server has left."""
    return [name for name in pool.entries() if name.startswith('server-')]


if __name__ == '__main__':
    log('seed', SEED)
    suite = unittest.TestSuite([AtOnce('test')])
    passed = unittest.TextTestRunner(stream=sys.stdout).run(suite).wasSuccessful()
    sys.stdout.flush()
    os._exit(0 if passed else 1)  # threads of a test that has failed may go on for ever
