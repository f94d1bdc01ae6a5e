# SPDX-License-Identifier: Apache-2.0
"""Two backend sections of one host, each with a pool of its own: volumes that go to the other, and
what becomes of notes.
"""

import fcntl
import json
import os
from pathlib import Path
import struct
from typing import Any
from unittest import mock

from cinder import exception as cinder_exception
from cinder.tests.unit import utils
from cinder.volume import group_types

from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import trash
from tests.unit.cinder_pcow import base
from tests.unit.cinder_pcow import test_kill
from tests.unit.cinder_pcow import test_transfer


def sections(case: base.PcowTestCase) -> tuple[Any, Any]:
    """The drivers of the section that has the pool ``one``, and of the one that has ``two``."""
    made = case.make_driver(pcow_pools=['one']), case.make_driver(pcow_pools=['two'])
    case.make_driver(pcow_pools=[])  # as the others of the test are
    return made


def place(driver: Any, pool: str) -> dict[str, Any]:
    """As the scheduler describes the section with this pool."""
    stats = {item['pool_name']: item for item in driver.get_volume_stats(True)['pools']}
    return {'host': f'{base.HOST}#{pool}', 'capabilities': stats[pool]}


class SectionsCase(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.first, self.second = sections(self)
        self.there = place(self.second, 'two')

    def note(self, volume: Any) -> Path:
        return Path(self.directory, 'state', 'migrations', volume.name)

    def migrate(self, driver: Any, volume: Any, there: dict[str, Any]) -> None:
        self.assertEqual((True, None), driver.migrate_volume(self.context, volume, there))


class SectionsTest(SectionsCase):
    def test_there_and_back(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 6)
        self.migrate(self.first, volume, self.there)
        self.assertEqual([], self.files())
        volume.host = f'{base.HOST}#two'
        with self.away(self.pools['two']):
            # the note is of what has become of it, also while that is away
            self.second.update_provider_info([volume], [])
        self.assertFalse(self.note(volume).exists())
        self.second.update_provider_info([volume], [])
        self.check_content(volume, {0: 6}, pool='two')
        self.migrate(self.second, volume, place(self.first, 'one'))
        self.assertEqual([], self.files('two'))
        volume.host = f'{base.HOST}#one'
        self.migrate(self.first, volume, self.there)  # with the note of how it came here
        volume.host = f'{base.HOST}#two'
        self.second.delete_volume(volume)
        self.assertEqual(([], []), (self.files(), self.files('two')))
        self.assertFalse(self.note(volume).exists())

    def test_cut_off_before_the_original_is_deleted(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 6)
        delete = trash.delete_image

        def die(pool: pool_module.Pool, name: str) -> bool:
            if pool.name == 'one':
                raise InterruptedError
            return delete(pool, name)

        with mock.patch.object(trash, 'delete_image', die):
            self.assertRaises(
                InterruptedError, self.first.migrate_volume, self.context, volume, self.there
            )
        self.assertEqual([f'{volume.name}.pcow'], self.files('two'))
        self.assertEqual(
            {'pool': 'two', 'uuid': self.pools['two'].uuid},
            json.loads(self.note(volume).read_text()),
        )
        self.first.update_provider_info([volume], [])
        self.assertEqual([], self.files('two'))
        self.assertFalse(self.note(volume).exists())
        with mock.patch.object(trash, 'delete_image', die):
            self.assertRaises(
                InterruptedError, self.first.migrate_volume, self.context, volume, self.there
            )
        self.migrate(self.first, volume, self.there)
        self.check_content(volume, {0: 6}, pool='two')
        self.assertEqual([], self.files())

    def test_cut_off_before_the_database_knew(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 6)
        self.migrate(self.first, volume, self.there)
        self.first.update_provider_info([volume], [])
        self.check_content(volume, {0: 6}, pool='two')
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException, self.first.unmanage, volume
        )
        self.assertIn('is in the pool two of this host', str(error))
        self.migrate(self.first, volume, self.there)
        self.check_content(volume, {0: 6}, pool='two')
        with self.away(self.pools['two']):
            error = self.assertRaises(
                cinder_exception.VolumeBackendAPIException, self.first.delete_volume, volume
            )
            self.assertIn(f'gone for good, delete {self.note(volume)}', str(error))
        self.first.delete_volume(volume)
        self.assertEqual([], self.files('two'))

    def test_what_clones_need_there(self) -> None:
        volume, clone = self.volume(), self.record(pool='two')
        self.write(volume, 0, 6)
        self.migrate(self.first, volume, self.there)
        volume.host = f'{base.HOST}#two'
        self.second.create_cloned_volume(clone, volume)
        self.migrate(self.second, volume, place(self.first, 'one'))
        volume.host = f'{base.HOST}#one'
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException,
            self.first.migrate_volume,
            self.context,
            volume,
            self.there,
        )
        self.assertIn('migrate or delete them first', str(error))
        self.check_content(volume, {0: 6})
        self.second.delete_volume(clone)
        self.migrate(self.first, volume, self.there)

    def test_snapshots_would_be_lost(self) -> None:
        volume = self.volume()
        self.snapshot(volume)
        error = self.assertRaises(
            cinder_exception.InvalidVolume,
            self.first.migrate_volume,
            self.context,
            volume,
            self.there,
        )
        self.assertIn('delete them first', str(error))
        self.assertFalse(self.note(volume).exists())

    def test_a_pool_that_this_host_does_not_know(self) -> None:
        self.there['capabilities']['location_info'] = self.there['capabilities'][
            'location_info'
        ].replace(self.pools['two'].uuid, '0' * 36)
        self.assertEqual(
            (False, None), self.first.migrate_volume(self.context, self.volume(), self.there)
        )


class NotesTest(SectionsCase):
    """A note may be out of date, and nothing of a volume goes for that."""

    def setUp(self) -> None:
        super().setUp()
        self.other = test_transfer.TwoHosts(self)

    def remote_note(self, volume: Any, pool: pool_module.Pool) -> None:
        self.note(volume).parent.mkdir(exist_ok=True)
        self.note(volume).write_text(
            json.dumps({'address': 'other', 'pool': pool.name, 'uuid': pool.uuid})
        )

    def test_a_pool_that_another_host_has_too(self) -> None:
        """Its SSH reaches the same images, or this host under another name."""
        with self.other.registry() as pools:
            pools.import_(self.pools['one'].path)
        volume = self.volume()
        self.write(volume, 0, 6)
        capabilities = {
            'location_info': f'PcowDriver:other:{self.pools["one"].uuid}:one',
            'pcow_migration_address': 'other',
        }
        self.migrate(self.first, volume, {'host': 'other@pcow#one', 'capabilities': capabilities})
        self.remote_note(volume, self.pools['one'])
        self.first.update_provider_info([volume], [])
        self.check_content(volume, {0: 6})
        self.assertFalse(self.note(volume).exists())

    def test_it_came_back(self) -> None:
        volume = self.volume()
        self.remote_note(volume, self.other.pool)
        self.other.down()
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException, self.first.delete_volume, volume
        )
        self.assertIn(f'gone for good, delete {self.note(volume)}', str(error))
        volume.migration_status = 'success'
        self.first.delete_volume(volume)
        self.assertEqual([], self.files())
        self.assertFalse(self.note(volume).exists())

    def test_one_that_cannot_be_settled_does_not_keep_the_service_from_starting(self) -> None:
        unreadable, away, open_, elsewhere, last = (self.volume() for _ in range(5))
        self.note(unreadable).parent.mkdir(exist_ok=True)
        self.note(unreadable).write_text('[')
        self.remote_note(away, self.other.pool)
        self.other.down()
        for volume in (open_, elsewhere, last):
            image.convert(self.path(volume), image.FORMAT, self.path(volume, 'two'))
        elsewhere.host = f'{base.HOST}#three'
        with open(self.path(open_, 'two'), 'r+b') as writer:
            fcntl.fcntl(
                writer,
                fcntl.F_OFD_SETLK,
                struct.pack('hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 12288, 1, 0),
            )
            self.driver.update_provider_info([unreadable, away, open_, elsewhere, last], [])
            self.assertEqual(
                sorted(f'{one.name}.pcow' for one in (open_, elsewhere)), self.files('two')
            )
        self.driver.update_provider_info([open_], [])
        self.assertEqual([f'{elsewhere.name}.pcow'], self.files('two'))


class ForgottenTest(SectionsCase):
    """What leaves Cinder by other ways than its own deletion leaves nothing on other hosts, nor a
    file that is shown.
    """

    def setUp(self) -> None:
        super().setUp()
        self.other = test_transfer.TwoHosts(self)

    def cut_off(self) -> Any:
        """A volume of which a migration has left a copy on the other host."""
        volume = self.volume()
        with mock.patch.object(trash, 'delete_image', side_effect=InterruptedError):
            self.assertRaises(
                InterruptedError,
                self.driver.migrate_volume,
                self.context,
                volume,
                self.other.host(),
            )
        self.assertEqual([f'{volume.name}.pcow'], self.other.entries())
        self.driver.initialize_connection(volume, {'host': base.HOST.partition('@')[0]})
        self.addCleanup(self.driver.connections.end, volume)
        return volume

    def check_forgotten(self, volume: Any) -> None:
        self.assertEqual([], self.other.entries())
        self.assertEqual([], os.listdir(os.path.join(self.directory, 'state', 'exports')))
        self.assertFalse(self.note(volume).exists())

    def test_delete_with_a_group(self) -> None:
        volume = self.cut_off()
        made = group_types.create(
            self.context, 'consistent', {'consistent_group_snapshot_enabled': '<is> True'}
        )
        group = utils.create_group(self.context, group_type_id=made['id'])
        status, updates = self.driver.delete_group(self.context, group, [volume])
        self.assertEqual(
            ('deleted', ['deleted']), (status['status'], [update['status'] for update in updates])
        )
        self.check_forgotten(volume)
        self.assertEqual([], self.files())

    def test_unmanage(self) -> None:
        volume = self.cut_off()
        self.driver.unmanage(volume)
        self.check_forgotten(volume)
        self.write(volume, 0)


class KilledTest(test_kill.KillCase):
    def test_migrate_to_another_section(self) -> None:
        first, second = sections(self)
        there = place(second, 'two')

        def prepare() -> Any:
            volume = self.volume()
            self.write(volume, 0, 6)
            return volume

        def afterwards(volume: Any) -> None:
            first.update_provider_info([volume], [])
            self.assertEqual(1, self.exists(volume) + self.exists(volume, 'two'))
            self.assertEqual((True, None), first.migrate_volume(self.context, volume, there))
            self.check_content(volume, {0: 6}, pool='two')
            first.delete_volume(volume)  # the database still has it here

        self.each_kill(
            prepare, lambda volume: first.migrate_volume(self.context, volume, there), afterwards
        )
