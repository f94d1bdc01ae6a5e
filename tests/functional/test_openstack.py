# SPDX-License-Identifier: Apache-2.0
"""nova_pcow on a real OpenStack, with real guests that check their own data."""

import contextlib
import os
from pathlib import Path
import re
import signal
import tempfile
import time
import unittest

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.virt import disk_xml
from tests.functional import long
from tests.functional import openstack_bed
from tests.functional import openstack_pages
from tests.functional import openstack_persist
from tests.functional import openstack_volumes
from tests.functional import openstack_warm
from tests.functional import server_session
from tests.functional import volume_session
from tools.lib.openstack_aio import failures
from tools.lib.openstack_aio import life_cycle
from tools.lib.openstack_aio import processes
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import times
from tools.lib.openstack_aio import volume_cycle
from tools.lib.quickstart import debian_image
from tools.lib.quickstart import guest
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

_bed: openstack_bed.Bed | None = None
# The rows that a change is likely to break; all of them: tools/openstack-aio life-cycle.
CI_ROWS = (
    'create',
    'stop_start',
    'hard_reboot',
    'suspend',
    'snapshot',
    'resize_down',
    'revert_in_place',
    'rebuild',
    'delete',
    'data_devices',
    'damaged_image',
    'no_backend',
    'full_disk',
    *(('crowd',) if long.LONG else ()),
)
REFUSED = ('resize_down', 'damaged_image', 'no_backend', 'full_disk')
TWO_NODES_ROWS = (
    'create',
    'cold_migrate',
    'cold_migrate_revert',
    'live_migrate',
    'live_migrate_snapshot',
    'delete',
    'evacuate',
)
TWO_NODES_REFUSED = ('live_migrate_snapshot', 'evacuate')
STOCK_SECONDS = 400.0  # for two kernels, under emulation
COMPARED = 5  # servers from one image, one after the other
RAM_FLAVOR = 'pcow.life-ram'
RAM_MB, RAM_ROOT_GB = 192, 2
# what does not go by the RAM of the server is that of its other flavors
RAM_ROWS = (
    'create',
    'stop_start',
    'suspend',
    'suspend_again',
    'rescue',
    'snapshot',
    'shelve',
    'rebuild',
    'resize_up',  # to RAM of the host
    'delete',
)


def setUpModule() -> None:
    global _bed
    _bed = openstack_bed.Bed()


def tearDownModule() -> None:
    if _bed is not None:
        # Nothing of it is left: no process, no directory, no pool.
        pools = _bed.close()
        left = processes.Processes(_bed.settings).all()
        if left or pools or openstack_bed.STATE.exists():
            raise AssertionError(
                f'down --purge left processes {left}, pools {pools}, directory '
                f'{openstack_bed.STATE.exists()}'
            )


class Case(unittest.TestCase):
    def setUp(self) -> None:
        assert _bed is not None
        self.bed = _bed
        self.addCleanup(self._delete_servers)

    def _delete_servers(self) -> None:
        for item in self.bed.api.call('nova', 'GET', '/servers')['servers']:
            servers.Server(self.bed.api, item['id']).delete()

    def _run_rows(
        self, life: life_cycle.LifeCycle, rows: tuple[str, ...], refused: tuple[str, ...], log: str
    ) -> dict[str, str]:
        """What each row has said."""
        results = life.run(rows, lambda _result: None)
        text = ''.join(
            f'{item.row:20} {item.outcome:8} {item.seconds:6.1f} s  {item.words}\n'
            for item in results
        )
        openstack_bed.report(log, text)
        self.assertEqual(
            {row.replace('_', ' '): 'refused' if row in refused else 'pass' for row in rows},
            {item.row: item.outcome for item in results},
            text,
        )
        self.assertEqual([], self.bed.pool_images())
        return {item.row: item.words for item in results}


class OpenStackTest(Case):
    def test_session(self) -> None:
        """What a user does, with the commands that a user has."""
        session = server_session.Session(self.bed.api, self.bed.shell)
        openstack_bed.report('server-session.txt', session.run())
        self.assertEqual(2, len(session.roots))
        for said in session.roots:
            self.assertRegex(said, r'root: /dev/(root|pmem0) / ext4 .*dax=always')
        self.assertEqual([], self.bed.pool_images())

    def test_pages(self) -> None:
        """What the documentation has users and administrators type."""
        with tempfile.TemporaryDirectory(prefix='pcow-test-pages-') as directory:
            on = openstack_pages.Pages(self.bed, Path(directory))
            if long.LONG:
                on.tutorial()
            on.nova_and_cinder()
        self.assertEqual([], self.bed.pool_images())

    def test_image_of_a_distribution(self) -> None:
        """Without kernel_id: the kernel is that which GRUB in the image would take. CI leaves out
        what boots it once more.
        """
        api = self.bed.api
        run = state.Run.create()
        self.addCleanup(teardown.tear_down, run)
        disk = debian_image.prepare(guest.Cache(run))
        api.upload_image('stock', disk, 'qcow2')
        specs = {'pcow:root': 'true', 'resources:CUSTOM_PCOW_MB': '1024'}
        api.create_flavor('stock', 256, 1, specs | {'resources:DISK_GB': '0'})
        server = servers.Server.create(api, 'stock', 'stock', 'stock')
        boots = 1
        self._wait_boot(server, boots)
        if long.LONG:
            boots += 1
            server.act('reboot', {'type': 'HARD'})
            self._wait_boot(server, boots)
        image = server.create_image('stock-snapshot')
        server.delete()
        if long.LONG:
            self._boot_from_disk(image, specs, boots + 1)

    def _boot_from_disk(self, image: str, specs: dict[str, str], boots: int) -> None:
        """As a guest would that knows no persistent memory: BIOS reads what the shim would."""
        root, api = '/dev/vda2 / ext4', self.bed.api
        specs = specs | {'resources:DISK_GB': '0', 'pcow:bus': 'virtio'}
        api.create_flavor('stock-disk', 256, 1, specs)
        server = servers.Server.create(api, 'disk', 'stock-disk', image)
        self._wait_boot(server, boots, root)
        server.create_image('disk-snapshot')  # while it runs
        server.wait_status('ACTIVE')  # Nova's task ends behind Glance's
        server.act('reboot', {'type': 'HARD'})
        self._wait_boot(server, boots + 1, root)
        server.delete()
        self.assertEqual([], self.bed.pool_images())
        self.assertEqual([], [*Path(disk_xml.DIRECTORY).glob(f'{server.id}-*')])

    def _wait_boot(
        self, server: servers.Server, number: int, root: str = '/dev/pmem0p2 / ext4 .*dax=always'
    ) -> None:
        server.wait_status('ACTIVE', STOCK_SECONDS)
        kernel = re.escape(debian_image.release(debian_image.kernels()[0]))
        said = re.compile(rf'pcow-guest: boot {number} of {kernel} on {root}')
        servers.wait(
            f'boot {number} of {server.id}',
            lambda: bool(said.search(server.console())) or None,
            STOCK_SECONDS,
        )

    def test_unknown_extra_spec_is_refused(self) -> None:
        with self.assertRaisesRegex(exception.PcowError, 'pcow:rooot'):
            self.bed.api.create_flavor('bad', 160, 0, {'pcow:rooot': 'true'})
        self.bed.shell('openstack flavor create --ram 160 misspelt')
        self.addCleanup(self.bed.shell, 'openstack flavor delete misspelt')
        # and by the command of a user
        with self.assertRaisesRegex(AssertionError, "extra spec 'pcow:rooot'"):
            self.bed.shell('openstack flavor set --property pcow:rooot=true misspelt')

    @long.only_long
    def test_beside_a_qcow2_disk(self) -> None:
        found = times.measure(self.bed.api, self.bed.hosts, COMPARED)
        openstack_bed.report('openstack-times.txt', times.table(found) + '\n')
        first, *others = [item for item in found if item.flavor == times.FLAVORS[0]]
        # The template is shared: a further server takes kilobytes until its guest writes.
        self.assertGreater(first.fresh, units.MIB)
        self.assertLess(max(item.fresh for item in others), units.MIB)
        # While it runs, what QEMU has prepared for its next stores is in it: 2 MiB at a time, more
        # on a busy machine.
        self.assertLess(max(item.used for item in others), 64 * units.MIB)

    def test_life_cycle(self) -> None:
        life = failures.Failures(self.bed.api, two_nodes=False, hosts=self.bed.hosts)
        said = self._run_rows(life, CI_ROWS, REFUSED, 'openstack-life-cycle.txt')
        for row, words in {
            'damaged image': 'is damaged or not complete',
            'full disk': 'cannot be stored in the pool',
            # if placement has heard of it
            'no backend': 'has no pcow backend|No valid host was found',
        }.items():
            self.assertRegex(said[row], words)

    @long.only_long
    def test_checkpoints(self) -> None:
        """Of a server whose RAM is an image: the guest compares what it wrote to its root with what
        it has of that in RAM.
        """
        self._create_ram_flavor()
        server = servers.Server.create(self.bed.api, 'checkpoints', RAM_FLAVOR, life_cycle.IMAGE)
        server.wait_status('ACTIVE')
        root = server.wait_root(lambda found: found.boots == 1)
        self.assertTrue(root.dax)
        boot, seconds = server.wait_alive(lambda _boot, seconds: seconds > 1)
        self._vm(server, 'checkpoint', 'warm')
        self._revert(server, boot, seconds)
        self.assertIn('warm', self._vm(server, 'tree'))
        # a boot leaves it, and it is still what the first boot was
        server.act('reboot', {'type': 'HARD'})
        server.wait_status('ACTIVE')
        server.wait_root(lambda found: found.boots == root.boots + 1)
        server.wait_alive(lambda one, _seconds: one != boot)
        self._revert(server, boot, seconds)
        self._refuse_resize(server)
        self._vm(server, 'delete-checkpoint', 'warm')
        server.delete()
        self.assertEqual([], self.bed.pool_images())

    def _create_ram_flavor(self, name: str = RAM_FLAVOR, ram_mb: int = RAM_MB) -> None:
        specs = {
            'pcow:root': 'true',
            'pcow:ram': 'true',
            'resources:CUSTOM_PCOW_MB': str(RAM_ROOT_GB * units.KIB + ram_mb),
            'resources:DISK_GB': '0',
        }
        self.bed.api.create_flavor(name, ram_mb, RAM_ROOT_GB, specs)

    def _vm(self, server: servers.Server, command: str, *words: str) -> str:
        """As the administrator of its host."""
        name = str(server.show()['OS-EXT-SRV-ATTR:instance_name'])
        return self.bed.hosts.pcowctl(server.host(), 'vm', command, name, *words)

    def _revert(self, server: servers.Server, boot: str, seconds: int) -> None:
        """To the checkpoint ``warm``, which was taken at about this second of a boot."""
        server.wait_alive(lambda one, now: one != boot or now > seconds + 10)
        self._vm(server, 'revert', 'warm')
        back = server.wait_alive(lambda one, now: one == boot and now < seconds + 10)
        server.wait_alive(lambda one, now: one == boot and now > back[1] + 1)
        self.assertEqual('ACTIVE', server.show()['status'])

    def _refuse_resize(self, server: servers.Server) -> None:
        """None of its checkpoints could go on with another size."""
        larger = f'{RAM_FLAVOR}-larger'
        self._create_ram_flavor(larger, 2 * RAM_MB)
        flavor = servers.find_flavor(self.bed.api, larger)
        with contextlib.suppress(exception.PcowError):  # if Nova has heard of it at once
            server.act('resize', {'flavorRef': flavor})
        self.assertIn('has checkpoints (warm)', server.fault('resize'))
        server.wait_status('ACTIVE')

    @long.only_long
    def test_life_cycle_of_ram_on_an_image(self) -> None:
        self._create_ram_flavor()
        life = life_cycle.LifeCycle(self.bed.api, two_nodes=False, flavor=RAM_FLAVOR)
        self._run_rows(life, RAM_ROWS, (), 'openstack-ram.txt')

    def test_warm_images(self) -> None:
        """A server that goes on where another one was, and beside it."""
        on = openstack_warm.Warm(self.bed.settings, self.bed.shell)
        parent = on.parent()
        boot, seconds = parent.wait_alive(lambda _boot, _seconds: True)
        image = on.make(parent, 'warm')
        child, active, heard = on.create('warm-child', image)
        on.check_goes_on(child, boot, seconds)
        self.assertNotEqual(on.generation(parent), on.generation(child))
        # neither knows of the other
        before = parent.wait_alive(lambda one, _seconds: one == boot)
        parent.wait_alive(lambda one, now: one == boot and now > before[1] + 1)
        with self.assertRaisesRegex(AssertionError, 'what stands on it is server-'):
            self.bed.shell(f'pcowctl server delete-warm {image}')
        child.delete()
        parent.delete()
        on.delete_image(image)
        # Nova has not looked after its image cache since
        self.assertEqual({image: 'deletion begun'}, on.kept())
        with self.assertRaisesRegex(AssertionError, 'Nova has not said that it has ended'):
            self.bed.shell(f'pcowctl server delete-warm {image}')
        self.bed.shell(f'pcowctl server delete-warm --parent-deleted {image}')
        self.assertEqual([], self.bed.pool_images())
        openstack_bed.report(
            'openstack-warm.txt',
            f'request to ACTIVE {active:.2f} s, to the first output of the guest {heard:.2f} s\n',
        )

    @long.only_long
    def test_warm_image_whose_parent_is_no_more(self) -> None:
        on = openstack_warm.Warm(self.bed.settings, self.bed.shell)
        parent = on.parent()
        boot, seconds = parent.wait_alive(lambda _boot, _seconds: True)
        image = on.make(parent, 'warm')
        self.assertIn('no more are allowed', on.refusal(parent, 'another'))
        other, _active, booted = on.create('warm-other', image, openstack_warm.OTHER)
        self.assertNotEqual(boot, other.wait_alive(lambda _boot, _seconds: True)[0])
        self.assertIn('RAM on an image, and the checkpoint has', on.why_not(other))
        other.delete()
        self.assertIn('has checkpoints of warm images', on.refused_resize(parent))
        first, _active, heard = on.create('warm-first', image)
        parent.act('reboot', {'type': 'HARD'})
        parent.wait_status('ACTIVE')
        parent.wait_alive(lambda one, _seconds: one != boot)
        on.check_goes_on(first, boot, seconds + 1)
        parent.delete()
        self.assertEqual({image: 'deletion begun'}, on.kept())
        second, _active, again = on.create('warm-orphan', image)
        on.check_goes_on(second, boot, seconds)
        first.act('reboot', {'type': 'HARD'})
        first.wait_status('ACTIVE')
        first.wait_alive(lambda one, _seconds: one != boot)
        for child in (first, second):
            child.delete()
        self.assertEqual(2, len(self.bed.pool_images()))
        on.delete_image(image)
        self.bed.shell(f'pcowctl server delete-warm --parent-deleted {image}')
        self.assertEqual({}, on.kept())
        self.assertEqual([], self.bed.pool_images())
        openstack_bed.report(
            'openstack-warm-long.txt',
            f'request to the first output of the guest: {heard:.2f} s; parent deleted, '
            f'{again:.2f} s; one that boots {booted:.2f} s\n',
        )

    def persist(self) -> openstack_persist.Persist:
        on = openstack_persist.Persist(self.bed)
        self.addCleanup(on.stop_watch)
        on.start_watch()
        return on

    def test_servers_that_go_on(self) -> None:
        """After a kill of QEMU, and after a boot of their host."""
        on = self.persist()
        server = on.create('persists')
        begun = time.time()
        boot, seconds = server.wait_alive(lambda _boot, _seconds: True)
        on.wait_checkpoint(server, begun)
        (guest,) = on.guests()
        os.kill(guest, signal.SIGKILL)
        servers.wait('another QEMU', lambda: True if on.guests() not in ([], [guest]) else None)
        boot, seconds = on.check_goes_on(server, boot, lambda now: now >= seconds)
        on.shut_down()
        on.boot()
        on.check_goes_on(server, boot, lambda now: now >= seconds)
        self.assertEqual(('Success', ''), on.event(server))
        row = on.row(server)
        assert row is not None
        self.assertEqual('runs', row['state'])
        server.delete()
        self.assertEqual([], self.bed.pool_images())
        servers.wait('end of its record', lambda: True if not on.records() else None)

    @long.only_long
    def test_servers_that_go_on_after_other_ends_of_their_host(self) -> None:
        """With a config drive and a volume, which the guest has as before."""
        on = self.persist()
        server = on.create('ends', config_drive=True)
        on.attach_volume(server)
        boot, seconds = server.wait_alive(lambda _boot, _seconds: True)
        on.shut_down_by_signals()
        on.boot()
        boot, seconds = on.check_goes_on(server, boot, lambda now: now >= seconds)
        self.assertEqual(('Success', ''), on.event(server))
        on.wait_checkpoint(server, time.time())
        on.cut_power()
        on.boot()
        boot, seconds = on.check_goes_on(server, boot, lambda now: now >= seconds)
        self.assertEqual('in-use', on.volume_status())
        # what cannot go on
        on.shut_down()
        on.delete_checkpoints(server)
        on.boot()
        server.wait_status('ERROR')
        self.assertIn('reboot it hard, and it boots', server.fault('go_on'))
        self.assertEqual([], on.guests())
        server.act('reboot', {'type': 'HARD'})
        servers.wait('boot', lambda: True if server.show()['status'] == 'ACTIVE' else None)
        server.wait_alive(lambda one, _seconds: one != boot)
        self.assertIn('that stays as checkpoint', server.fault('reboot'))
        server.delete()
        on.delete_volume()
        self.assertEqual([], self.bed.pool_images())

    @long.only_long
    def test_what_a_user_does_with_a_server_that_goes_on(self) -> None:
        on = self.persist()
        server = on.create('used')
        boot, _seconds = server.wait_alive(lambda _boot, _seconds: True)
        for action, values, status in (
            ('pause', None, 'PAUSED'),
            ('unpause', None, 'ACTIVE'),
            ('suspend', None, 'SUSPENDED'),
            ('resume', None, 'ACTIVE'),
        ):
            server.act(action, values)
            server.wait_status(status)
            time.sleep(2)  # the loop has looked
        on.check_goes_on(server, boot, lambda _seconds: True)
        self.assertIsNotNone(on.row(server))
        for action, values, status, is_protected in (
            ('reboot', {'type': 'HARD'}, 'ACTIVE', True),
            ('os-stop', None, 'SHUTOFF', False),
            ('os-start', None, 'ACTIVE', True),
            ('rescue', None, 'RESCUE', False),
            ('unrescue', None, 'ACTIVE', True),
        ):
            server.act(action, values)
            server.wait_status(status)
            self.assertEqual(is_protected, on.row(server) is not None, action)
            if status == 'ACTIVE':
                boot, _seconds = server.wait_alive(lambda one, _seconds, was=boot: one != was)
        # fixated by hand, and not started again: Nova waits
        begun = time.time()
        on.wait_checkpoint(server, begun)
        self.assertEqual([''], [row['problem'] for row in on.pcowctl('host', 'fixate')])
        time.sleep(20)  # Nova looks 15 s after the end of a guest
        server.wait_status('ACTIVE')
        self.assertEqual([], on.guests())
        self.assertEqual([''], [row['problem'] for row in on.pcowctl('host', 'recover')])
        on.check_goes_on(server, boot, lambda _seconds: True)
        # or given up
        on.pcowctl('host', 'fixate')
        server.act('os-stop')
        server.wait_status('SHUTOFF')
        self.assertEqual([], on.pcowctl('host', 'recover'))
        self.assertIn('its next start is a boot', server.fault('stop'))
        server.act('os-start')
        server.wait_status('ACTIVE')
        server.wait_alive(lambda one, _seconds: one != boot)
        server.create_image('of-one-that-goes-on')
        server.wait_status('ACTIVE')

    @long.only_long
    def test_life_cycle_of_a_volume(self) -> None:
        cycle = volume_cycle.VolumeCycle(self.bed.api, two_nodes=False)
        rows = tuple(row for row in volume_cycle.ROWS if row not in life_cycle.NEED_TWO_NODES)
        self._run_rows(cycle, rows, volume_cycle.REFUSED, 'openstack-volume-cycle.txt')

    def test_volumes_that_cannot_be(self) -> None:
        on = openstack_volumes.Volumes(self.bed.settings)
        before = on.entries()
        self.assertIn('would be encrypted', on.encrypted())
        self.assertIn('has QoS specs', on.limited())
        on.multiattach()
        said = on.hostile()
        for name, words in {
            'backing file': 'safety checks',
            'data file': 'safety checks',
            'vmdk': 'does not match',
            'huge': "doesn't fit",
            'damaged': 'safety checks',
        }.items():
            self.assertIn(words, said[name])
        self.assertEqual(before, on.entries())

    def test_volumes_one_after_and_beside_the_other(self) -> None:
        on = openstack_volumes.Volumes(self.bed.settings)
        on.deleted_data()
        seen = on.at_once()
        self.assertEqual('done, done', seen['two clones'])

    def test_a_pool_that_is_not_there(self) -> None:
        self.assertIn('cannot be used', openstack_volumes.Volumes(self.bed.settings).missing_pool())

    def test_session_of_volumes(self) -> None:
        openstack_bed.report(
            'volume-session.txt', volume_session.Session(self.bed.api, self.bed.shell).run()
        )


class TwoNodesTest(Case):
    """What needs a second node, which is there for this class alone."""

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        assert _bed is not None
        cls.enterClassContext(_bed.node2())

    def test_moves(self) -> None:
        life = failures.Failures(self.bed.api, two_nodes=True, hosts=self.bed.hosts)
        said = self._run_rows(life, TWO_NODES_ROWS, TWO_NODES_REFUSED, 'openstack-two-nodes.txt')
        self.assertRegex(
            said['live migrate'],
            r'(node.) to (node.) in .*; \2 to \1 in .*; nothing stays on the other node',
        )
        self.assertRegex(said['live migrate snapshot'], 'would stay behind')
        self.assertRegex(said['evacuate'], 'is in no pool that this host shares')
        self.assertEqual([], self.bed.hosts.images(settings_module.NODE2.name))
        servers.wait(
            'end of all claims', lambda: True if not any(self.bed.hosts.claims().values()) else None
        )
