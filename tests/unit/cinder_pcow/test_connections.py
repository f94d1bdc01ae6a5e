# SPDX-License-Identifier: Apache-2.0
"""Who may attach, and what he gets."""

import contextlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import time
from typing import Any

from cinder import exception
from cinder import objects
from cinder.objects import fields
from cinder.tests.unit import utils
from cinder.volume import group_types
from cinder.volume import qos_specs
from cinder.volume import volume_types
from cinder.volume import volume_utils
from os_brick import privileged

from pcow_driver.common import exception as pcow_exception
from pcow_driver.common import tool
from tests.unit.cinder_pcow import base

GUEST = {'host': socket.gethostname(), 'mountpoint': '/dev/pmem1'}


class ConnectionsTest(base.PcowTestCase):
    def test_a_guest_of_this_host_gets_the_image(self) -> None:
        volume = self.volume(size=2)
        connection = self.driver.initialize_connection(volume, GUEST)
        self.assertEqual('pcow', connection['driver_volume_type'])
        data = connection['data']
        self.assertEqual(
            (self.path(volume), 2 << 30, volume.id, 'one', False),
            tuple(data[key] for key in ('image_path', 'size', 'volume_id', 'pool', 'encrypted')),
        )
        self.driver.terminate_connection(volume, GUEST)
        self.driver.terminate_connection(volume, None, force=True)

    def test_a_foreign_host_is_told_why_not(self) -> None:
        error = self.assertRaises(
            exception.InvalidVolume,
            self.driver.initialize_connection,
            self.volume(),
            {'host': 'elsewhere', 'mountpoint': '/dev/pmem1'},
        )
        self.assertIn(
            f'is memory of the host {socket.gethostname()} and cannot be attached on elsewhere',
            str(error),
        )
        self.assertRaises(exception.InvalidConnectorException, self.driver.validate_connector, {})

    def test_another_name_of_this_machine(self) -> None:
        volume = self.volume()
        named = self.make_driver(pcow_compute_host='compute-7')
        self.assertEqual(
            'pcow',
            named.initialize_connection(volume, {**GUEST, 'host': 'compute-7'})[
                'driver_volume_type'
            ],
        )

    def test_limits_that_its_type_got_later(self) -> None:
        """No guest of a type with QoS is without them, silently; a program that makes a backup may
        go on.
        """
        made = volume_types.create(self.context, 'limited', {})
        volume = self.volume(volume_type_id=made['id'])
        self.driver.initialize_connection(volume, GUEST)
        qos = qos_specs.create(
            self.context, 'slow', {'consumer': 'front-end', 'total_iops_sec': '5'}
        )
        qos_specs.associate_qos_with_type(self.context, qos['id'], made['id'])
        volume = objects.Volume.get_by_id(self.context, volume.id)
        error = self.assertRaises(
            exception.InvalidVolume, self.driver.initialize_connection, volume, GUEST
        )
        self.assertIn('the volume type limited has QoS specs', str(error))
        self.assertEqual(
            'local',
            self.driver.initialize_connection(volume, {'host': GUEST['host']})[
                'driver_volume_type'
            ],
        )
        self.driver.terminate_connection(volume, None, force=True)

    def test_a_volume_that_somebody_has_open(self) -> None:
        volume = self.volume()
        snapshot = self.snapshot(volume)
        with subprocess.Popen(
            [tool.find('pcow_io'), self.path(volume)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(b'read 0 4096\n')
            process.stdin.flush()
            process.stdout.readline()
            self.assertRaises(exception.VolumeIsBusy, self.driver.delete_volume, volume)
            for operation in (
                lambda: self.driver.extend_volume(volume, 2),
                lambda: self.driver.revert_to_snapshot(self.context, volume, snapshot),
                lambda: self.driver.create_snapshot(self.snapshot_record(volume)),
            ):
                error = self.assertRaises(exception.VolumeBackendAPIException, operation)
                self.assertRegex(str(error), 'in use|open for writing elsewhere')
            child = self.record()
            self.driver.create_volume_from_snapshot(child, snapshot)  # that needs no one's leave
            process.stdin.close()
        self.driver.delete_volume(volume)


class LocalFileTest(base.PcowTestCase):
    """What Cinder's own services do through the released os-brick."""

    def setUp(self) -> None:
        super().setUp()
        # we are root, so nothing needs a daemon that is
        privileged.default.set_client_mode(False)
        self.addCleanup(privileged.default.set_client_mode, True)

    def attach(self, volume: object) -> Any:
        properties = volume_utils.brick_get_connector_properties()
        attached, _volume = self.driver._attach_volume(self.context, volume, properties)
        self.addCleanup(self.driver.connections.end, volume)
        return attached

    def detach(self, volume: object, attached: Any) -> None:
        self.driver._detach_volume(
            self.context, attached, volume, volume_utils.brick_get_connector_properties()
        )

    def test_the_data_of_a_volume_as_a_file(self) -> None:
        volume = self.volume()
        self.write(volume, 65536, 7)
        attached = self.attach(volume)
        path = str(attached['device']['path'])
        with open(path, 'r+b') as f:
            self.assertEqual(1 << 30, os.fstat(f.fileno()).st_size)
            f.seek(65536)
            self.assertEqual(b'\7' * 65536, f.read(65536))
            f.seek(0)
            f.write(b'\5' * 65536)
        self.detach(volume, attached)
        self.assertFalse(os.path.exists(path))
        self.check_content(volume, {0: 5, 65536: 7})

    def test_glance_keeps_an_image_in_a_volume(self) -> None:
        """Its store for Cinder names a mount point, too, and is no guest."""
        volume = self.volume()
        self.addCleanup(self.driver.connections.end, volume)
        connection = self.driver.initialize_connection(
            volume, {'host': GUEST['host'], 'mountpoint': 'glance_store'}
        )
        self.assertEqual('local', connection['driver_volume_type'])
        self.assertEqual(1 << 30, os.stat(connection['data']['device_path']).st_size)

    def test_a_service_that_died_left_the_file(self) -> None:
        volume = self.volume()
        self.attach(volume)
        again = self.attach(volume)
        self.detach(volume, again)
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())

    def test_a_volume_is_deleted_while_its_file_is_shown(self) -> None:
        volume = self.volume()
        self.attach(volume)
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())
        self.assertEqual([], os.listdir(os.path.join(self.directory, 'state', 'exports')))

    def test_a_volume_is_not_deleted_while_a_program_works_on_it(self) -> None:
        """The status is what it was then, and deleting it again is all that has to be done."""
        volume = self.volume()
        with open(self.attach(volume)['device']['path'], 'rb'):
            error = self.assertRaises(exception.VolumeIsBusy, self.driver.delete_volume, volume)
            self.assertIn('its file is in use', str(error))
            volume.update({'status': 'deleting', 'previous_status': 'available'})
            volume.save()
            self.manager.delete_volume(self.context, volume)
            volume.refresh()
            self.assertEqual('available', volume.status)
        self.manager.delete_volume(self.context, volume)
        self.assertEqual([], self.files())

    def kill_nbdfuse(self, volume: Any) -> None:
        """As the out-of-memory killer does it: its mount stays, and everything under that fails."""
        directory = Path(self.directory, 'state', 'exports', volume.name)
        os.kill(int((directory / 'nbdfuse.pid').read_text()), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while True:
            try:
                os.lstat(directory / 'mount')
            except OSError:
                return
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)

    def test_what_shows_the_file_was_killed(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 7)
        for _time in range(2):  # the second begin() finds what the first left
            path = self.attach(volume)['device']['path']
            # of no use to whoever has it, so nothing waits for him
            descriptor = os.open(path, os.O_RDONLY)
            self.kill_nbdfuse(volume)
            if _time:
                self.driver.terminate_connection(volume, None, force=True)
                self.assertFalse(os.path.lexists(os.path.dirname(os.path.dirname(path))))
            with contextlib.suppress(OSError):  # it tells of the death, too
                os.close(descriptor)
        self.attach(volume)
        self.kill_nbdfuse(volume)
        self.driver.delete_volume(volume)
        self.assertEqual([], self.files())
        self.assertEqual([], os.listdir(os.path.join(self.directory, 'state', 'exports')))

    def exports(self) -> list[str]:
        return os.listdir(os.path.join(self.directory, 'state', 'exports'))

    def test_what_a_dead_program_left_keeps_no_guest_out(self) -> None:
        volume = self.volume()
        path = self.attach(volume)['device']['path']
        self.assertRaises(pcow_exception.ToolFailed, self.write, volume, 0)
        with open(path, 'rb'):  # but a living one does
            error = self.assertRaises(
                exception.VolumeBackendAPIException,
                self.driver.initialize_connection,
                volume,
                GUEST,
            )
            self.assertIn('its file is in use', str(error))
        self.driver.initialize_connection(volume, GUEST)
        self.write(volume, 0)
        self.assertEqual([], self.exports())

    def test_what_a_dead_program_left_hinders_nothing(self) -> None:
        volume = self.volume()
        snapshot, later, of_group = (
            self.snapshot(volume),
            self.snapshot_record(volume),
            self.snapshot_record(volume),
        )
        pools = {item['pool_name']: item for item in self.driver.get_volume_stats(True)['pools']}
        there = {'host': f'{base.HOST}#two', 'capabilities': pools['two']}
        for operation in (
            lambda: self.driver.create_snapshot(later),
            lambda: self.driver.create_group_snapshot(self.context, self.consistent(), [of_group]),
            lambda: self.driver.create_cloned_volume(self.record(size=2), volume),
            lambda: self.driver.revert_to_snapshot(self.context, volume, snapshot),
            lambda: self.driver.extend_volume(volume, 2),
        ):
            self.attach(volume)
            operation()
            self.assertEqual([], self.exports())
        other = self.volume()
        self.attach(other)
        self.driver.migrate_volume(self.context, other, there)
        self.assertEqual([f'{other.name}.pcow'], self.files('two'))

    def consistent(self) -> Any:
        """A group of a type whose snapshots are of one moment."""
        made = group_types.create(
            self.context, 'consistent', {'consistent_group_snapshot_enabled': '<is> True'}
        )
        return utils.create_group_snapshot(
            self.context,
            utils.create_group(self.context, group_type_id=made['id']).id,
            group_type_id=made['id'],
        )

    def test_a_snapshot_that_a_dead_program_was_reading(self) -> None:
        snapshot = self.snapshot(self.volume())
        with open(self.read(snapshot), 'rb'):
            self.assertRaises(exception.SnapshotIsBusy, self.driver.delete_snapshot, snapshot)
        self.driver.delete_snapshot(snapshot)
        self.assertEqual([], self.exports())

    def read(self, snapshot: Any) -> str:
        """Have a program read a snapshot; the path."""
        connection = self.driver.initialize_connection_snapshot(snapshot, {'host': GUEST['host']})
        self.addCleanup(self.driver.connections.end, snapshot)
        return str(connection['data']['device_path'])

    def test_snapshots_of_a_group_that_a_dead_program_was_reading(self) -> None:
        snapshot = self.snapshot(self.volume())
        group_snapshot = self.consistent()
        with open(self.read(snapshot), 'rb'):
            status, updates = self.driver.delete_group_snapshot(
                self.context, group_snapshot, [snapshot]
            )
            self.assertEqual(
                ('error_deleting', 'error_deleting'), (status['status'], updates[0]['status'])
            )
        status, updates = self.driver.delete_group_snapshot(
            self.context, group_snapshot, [snapshot]
        )
        self.assertEqual(('deleted', 'deleted'), (status['status'], updates[0]['status']))
        self.assertEqual([], self.exports())

    def test_snapshots_that_dead_programs_were_reading_end_when_the_service_starts(self) -> None:
        snapshots = [self.snapshot(self.volume()) for _ in range(4)]
        paths = [self.read(snapshot) for snapshot in snapshots]
        snapshots[1].status = fields.SnapshotStatus.BACKING_UP
        snapshots[2].volume.status = 'backing-up'  # of which it is a temporary snapshot
        with open(paths[3], 'rb'):
            self.driver.update_provider_info([], snapshots)
        self.assertEqual(
            sorted(snapshot.name for snapshot in snapshots[1:]), sorted(self.exports())
        )

    def test_what_dead_programs_left_ends_when_the_service_starts(self) -> None:
        volumes = [self.volume() for _ in range(5)]
        paths = [self.attach(volume)['device']['path'] for volume in volumes]
        for volume, (status, migration) in zip(
            volumes,
            [
                ('available', None),
                ('error_restoring', 'success'),
                ('backing-up', None),
                ('available', 'target:x'),
                ('available', 'error'),
            ],
            strict=True,
        ):
            volume.update({'status': status, 'migration_status': migration})
        with open(paths[4], 'rb'):
            self.driver.update_provider_info(volumes, [])
            self.assertEqual(sorted(volume.name for volume in volumes[2:]), sorted(self.exports()))
