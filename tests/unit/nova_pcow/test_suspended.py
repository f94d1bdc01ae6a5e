# SPDX-License-Identifier: Apache-2.0

import contextlib
import os
import re
import subprocess
from typing import Any
from unittest import mock

import fixtures
from nova import context
from nova import objects
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client

from nova_pcow.common import reserved
from nova_pcow.snapshots import snapshot
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.virt import domain
from tests.unit.nova_pcow import base as nova_base
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.virt import test_domain


class Suspended(test_domain.RecordedDomain):
    """A domain that is off, whose libvirt deletes a snapshot from its disks only."""

    def __init__(self, paths: list[str], left: str = reserved.SUSPENDED) -> None:
        super().__init__(paths, active=False)
        self.snapshots = [mock.Mock(getName=lambda: left)]
        self.snapshots[0].delete.side_effect = lambda _flags=0: self.snapshots.clear()
        self.disks = ''

    def listAllSnapshots(self) -> list[Any]:  # noqa: N802
        return list(self.snapshots)

    def XMLDesc(self, flags: int) -> str:  # noqa: N802
        return super().XMLDesc(flags).replace('<devices>', f'<devices>{self.disks}')

    def snapshotCreateXML(self, _xml: str, _flags: int) -> None:  # noqa: N802
        self.calls.append('create')


class SuspendedTest(base.TestCase):
    """What a suspended server would have resumed from goes from all its images, those of volumes
    too.
    """

    def setUp(self) -> None:
        super().setUp()
        test_domain.record_libvirt(self)
        self.useFixture(fixtures.MockPatch('nova_pcow.snapshots.snapshot._libvirt'))
        pool = registry.PoolRegistry().create('fast', str(self.directory / 'fast'))
        self.paths = [
            device.create(pool, name, 16 * units.MIB) for name in ('server-x-root', 'volume-y')
        ]
        for path in self.paths:
            image.snapshot_create(path, 'kept')
            image.snapshot_create(path, reserved.SUSPENDED)

    def names(self) -> list[list[str]]:
        return [
            [one.name for one in image.snapshot_list(path, force_share=True)] for path in self.paths
        ]

    def test_given_up(self) -> None:
        """By a hard reboot."""
        off = Suspended([*self.paths, '/dev/dax0.0'])
        snapshot.forget_suspended(off)
        self.assertEqual(([], [['kept'], ['kept']]), (off.snapshots, self.names()))
        snapshot.forget_suspended(off)

    def test_server_that_goes(self) -> None:
        """And its volumes stay."""
        off = Suspended([str(self.directory / 'fast/deleted.pcow'), *self.paths])
        snapshot.forget_all(off)
        self.assertEqual(([], [['kept'], ['kept']]), (off.snapshots, self.names()))

    def test_other_snapshots_stay(self) -> None:
        """Of a server that was not suspended: what an administrator made with virsh."""
        snapshot.forget_all(Suspended(self.paths, 'kept'))
        self.assertEqual([['kept', reserved.SUSPENDED]] * 2, self.names())

    def test_image_that_is_open(self) -> None:
        """The others are done, and the server is deleted or rebooted all the same; the next
        suspension deletes it.
        """
        writer = nova_base.Writer(self.paths[0])
        self.addCleanup(writer.close)
        with self.assertLogs('nova_pcow.snapshots.snapshot', 'WARNING') as logs:
            snapshot.forget_suspended(Suspended(self.paths))
        self.assertIn(self.paths[0], logs.output[0])
        self.assertEqual([['kept', reserved.SUSPENDED], ['kept']], self.names())

    def test_goes_back(self) -> None:
        """Paused; what a start that was cut off has left is ended before."""
        found = Suspended(self.paths)
        for active in (False, True):
            found.active = active
            found.calls.clear()
            with (
                mock.patch.object(found, 'destroy', create=True) as destroy,
                mock.patch.object(found, 'revertToSnapshot', create=True) as revert,
            ):
                snapshot.go_back(found)
            self.assertEqual(active, destroy.called)
            ((one, flags), _options) = revert.call_args
            self.assertEqual(reserved.SUSPENDED, one.getName())
            self.assertIs(snapshot._libvirt().VIR_DOMAIN_SNAPSHOT_REVERT_PAUSED, flags)

    def test_left_by_an_earlier_suspension(self) -> None:
        """Of another server, or of this one where the deletion failed: a new one is not refused for
        it.
        """
        image.snapshot_delete(self.paths[0], reserved.SUSPENDED)
        running = Suspended(self.paths)
        running.snapshots.clear()
        running.active = True
        snapshot.suspend(running, domain.Domain(running, 'x'), mock.Mock())
        (deleted, created) = running.calls
        self.assertEqual('create', created)
        self.assertEqual(
            ('pcow-snapshot-delete', reserved.SUSPENDED),
            (deleted['execute'], deleted['arguments']['name']),
        )
        refused = exception.QmpFailed(command='x', error_class='y', description='no')
        with mock.patch.object(domain.Domain, 'snapshot_delete', side_effect=refused):
            self.assertRaises(
                exception.QmpFailed,
                snapshot.suspend,
                running,
                domain.Domain(running, 'x'),
                mock.Mock(),
            )

    def test_pool_without_room(self) -> None:
        """The guest could write all of it once more; nobody else gets that space meanwhile."""
        place = self.directory / 'small'
        place.mkdir()
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=128m', 'none', place], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', place], check=True)
        pools = registry.PoolRegistry()
        pools.create('small', str(place))
        pool = pools.set('small', overcommit=1.0)
        path = device.create(pool, 'server-x-root', 30 * units.MIB)
        tool.run(tool.find('pcow_io'), '--no-map', '-c', 'write -q 0 32M', path)
        running, begin, building = Suspended([path]), mock.Mock(), list[int]()
        running.active = True
        running.snapshots.clear()

        def create(_xml: str, _flags: int) -> None:
            running.calls.append('create')
            building.append(pool.account().building)

        self.useFixture(fixtures.MockPatchObject(running, 'snapshotCreateXML', create))
        other = device.create(pool, 'other', 50 * units.MIB)
        self.assertRaises(
            exception.NoRoom, snapshot.suspend, running, domain.Domain(running, 'x'), begin
        )
        self.assertEqual(([], False), (running.calls, begin.called))
        os.unlink(other)
        snapshot.suspend(running, domain.Domain(running, 'x'), begin)
        self.assertEqual((['create'], True), (running.calls, begin.called))
        self.assertGreaterEqual(building[0], 32 * units.MIB)
        self.assertEqual(0, pool.account().building)

    def test_disk_without_snapshots(self) -> None:
        """libvirt would refuse it late and in its own words; nothing is changed."""
        running = Suspended(self.paths)
        running.active = True
        carrier = (
            '<disk device="disk"><driver name="qemu" type="qcow2"/><source file="/i/disk"/><target '
            'dev="vda"/></disk>'
        )
        cdrom = (
            '<disk device="cdrom"><driver type="raw"/><source file="/i/disk.config"/><target '
            'dev="sda"/><readonly/></disk>'
            '<disk device="cdrom"><target dev="sdb"/></disk>'
        )
        raw = '<driver type="raw"/><source dev="/dev/sdx"/>'
        for disk, words in (
            (f'<disk type="block" device="disk">{raw}<target dev="vdb"/></disk>', 'vdb (raw)'),
            (f'<disk type="network" device="lun">{raw}<target dev="vdc"/></disk>', 'vdc (raw)'),
            ('<disk><source file="/i/disk.config"/><target dev="vdz"/></disk>', 'vdz (raw)'),
        ):
            running.disks = carrier + disk + cdrom
            with self.assertRaisesRegex(
                exception.PcowError, re.escape(f'the disk {words} takes no snapshot')
            ):
                snapshot.suspend(running, domain.Domain(running, 'x'), mock.Mock())
        self.assertEqual((1, []), (len(running.snapshots), running.calls))
        running.disks = carrier + cdrom
        image.snapshot_delete(self.paths[0], reserved.SUSPENDED)
        image.snapshot_delete(self.paths[1], reserved.SUSPENDED)
        snapshot.suspend(running, domain.Domain(running, 'x'), mock.Mock())
        self.assertEqual(['create'], running.calls)


class RefusedTest(nova_base.ServersTestCase):
    """A server goes on as it was, by Nova's words as well."""

    ADMIN_API = True

    def setUp(self) -> None:
        super().setUp()
        self.start_compute()
        self.useFixture(
            fixtures.MockPatch('nova_pcow.snapshots.snapshot._libvirt', return_value=fakelibvirt)
        )
        self.server = self.boot(self.make_flavor(root='true'))

    def act(self, action: str) -> Any:
        """The server, after something was refused."""
        # casts are calls here: the API hears what compute raises
        with contextlib.suppress(client.OpenStackApiException):
            self.api.post_server_action(self.server['id'], {action: None})
        return self._wait_for_server_parameter(self.server, {'OS-EXT-STS:task_state': None})

    def test_suspend(self) -> None:
        refused = snapshot.SuspendRefused(disk='vdb (raw)')
        with mock.patch('nova_pcow.snapshots.snapshot.suspend', side_effect=refused):
            self.assertEqual('ACTIVE', self.act('suspend')['status'])
        self.assertIn(
            'the disk vdb (raw) takes no snapshot', self.event_words(self.server, 'suspend')
        )

    def test_suspend_without_room(self) -> None:
        registry.PoolRegistry().set(self.pool.name, overcommit=0.0001)
        # the disks of Nova's libvirt for tests are raw, and there is no QEMU that could be asked
        with (
            mock.patch('nova_pcow.snapshots.snapshot._check_disks'),
            mock.patch('pcow_driver.virt.domain.Domain.check_answers'),
        ):
            self.assertEqual('ACTIVE', self.act('suspend')['status'])
        self.assertIn('more cannot be provisioned', self.event_words(self.server, 'suspend'))

    def test_resume(self) -> None:
        with mock.patch('nova_pcow.snapshots.snapshot.suspend'):
            self.assertEqual('SUSPENDED', self.act('suspend')['status'])
        instance = objects.Instance.get_by_uuid(context.get_admin_context(), self.server['id'])
        self.computes['compute1'].driver._host.get_guest(instance)._domain.destroy()
        with (
            mock.patch('nova_pcow.snapshots.snapshot.suspended'),
            mock.patch(
                'nova_pcow.snapshots.snapshot.go_back',
                side_effect=fakelibvirt.libvirtError('no memory'),
            ),
        ):
            self.assertEqual('SUSPENDED', self.act('resume')['status'])
        self.assertIn('no memory', self.event_words(self.server, 'resume'))
