# SPDX-License-Identifier: Apache-2.0
"""Manage, unmanage and list; groups; moves between pools."""

import os
import socket
from typing import Any
from unittest import mock
import uuid

from cinder import exception
from cinder import objects
from cinder.objects import fields
from cinder.tests.unit import utils
from cinder.volume import group_types
from cinder.volume import volume_types

from pcow_driver.common import conf
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from tests.unit.cinder_pcow import base

GIB = units.GIB


class ManageTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.libvirt('/no/such.pcow')

    def existing(self, name: str = 'web1', size: int = GIB + (64 << 20)) -> str:
        path = device.create(self.pools['one'], name, size)
        self.io(path, f'write -q -P 7 {2 << 20} 65536')
        return path

    def list_volumes(self, *known: Any) -> dict[str, dict[str, Any]]:
        found = self.driver.get_manageable_volumes(known, None, 100, 0, ['size'], ['asc'])
        return {item['reference']['source-name']: item for item in found}

    def test_an_image_becomes_a_volume_of_whole_gib(self) -> None:
        self.existing()
        reference = {'source-name': 'web1'}
        volume = self.record(size=0)
        self.assertEqual(2, self.driver.manage_existing_get_size(volume, reference))
        volume.size = 2
        self.driver.manage_existing(volume, reference)
        self.assertEqual(2 * GIB, device.window(self.path(volume)).size)
        self.check_content(volume, {0: 7, 2 * GIB - 65536: 0})
        self.driver.unmanage(volume)
        volume.destroy()  # as the manager does
        again = self.record(size=2)
        self.driver.manage_existing(again, {'source-name': f'one/{volume.name}'})
        self.check_content(again, {0: 7})

    def test_volumes_of_cinder_are_not_looked_at_one_by_one(self) -> None:
        known = [self.volume(size=1)]

        def programs() -> int:
            with mock.patch.object(tool, 'run', wraps=tool.run) as run:
                listed = self.list_volumes(*known)
            self.assertEqual(
                {'already managed'}, {item['reason_not_safe'] for item in listed.values()}
            )
            self.assertEqual({1}, {item['size'] for item in listed.values()})
            return run.call_count

        one = programs()
        known += [self.volume(size=1) for _ in range(5)]
        self.assertEqual(one, programs())

    def test_what_cannot_become_a_volume(self) -> None:
        volume = self.record()
        image.create(os.path.join(self.pools['one'].path, 'plain.pcow'), GIB)
        image.seal(self.existing('template'))
        image.snapshot_create(self.existing('parent'), 's')
        device.create_on(self.pools['one'], 'child', 'parent', base_snapshot='s')
        for name, words in (
            ('nothing', 'no image'),
            ('plain', 'no DAX info block'),
            ('template', 'is a template'),
            ('parent', 'images stand on it'),
            ('two/web', 'in the pool two'),
            ('../x', 'in the pool ..'),
            ('.x', "begins with '.'"),
            ('', 'it is empty'),
        ):
            error = self.assertRaises(
                exception.ManageExistingInvalidReference,
                self.driver.manage_existing,
                volume,
                {'source-name': name},
            )
            self.assertIn(words, str(error))
        self.assertRaises(
            exception.ManageExistingInvalidReference,
            self.driver.manage_existing,
            volume,
            {'id': 'x'},
        )
        listed = self.list_volumes()
        self.assertEqual(
            {'one/child': True, 'one/parent': False, 'one/plain': False, 'one/template': False},
            {name: item['safe_to_manage'] for name, item in listed.items()},
        )
        self.driver.manage_existing(volume, {'source-name': 'child'})

    def test_what_is_a_volume_already(self) -> None:
        """Also one whose image has the name of another, into which a backend of another kind has
        moved it.
        """
        volume, moved, new = self.volume(), self.record(), self.volume()
        self.write(volume, 0, 1)
        moved.update(self.driver.update_migrated_volume(self.context, moved, new, 'available'))
        moved.save()
        new.destroy()
        for one in (volume, moved):
            for reference in (one.name, f'one/{one.name}'):
                error = self.assertRaises(
                    exception.ManageExistingInvalidReference,
                    self.driver.manage_existing,
                    self.record(),
                    {'source-name': reference},
                )
                self.assertIn(f'it is the volume {one.id} already', str(error))
        self.check_content(volume, {0: 1})
        self.assertEqual(2, len(self.files()))

    def refused(self, words: str, name: str = 'web1') -> dict[str, Any]:
        """What the list says of it."""
        error = self.assertRaises(
            exception.ManageExistingInvalidReference,
            self.driver.manage_existing,
            self.record(),
            {'source-name': name},
        )
        self.assertIn(words, str(error))
        listed = self.list_volumes()[f'one/{name}']
        self.assertFalse(listed['safe_to_manage'])
        self.assertIn(words, listed['reason_not_safe'])
        return listed

    def test_what_is_a_volume_of_another_service(self) -> None:
        """Of another backend section, or of another host, that has the pool as well."""
        volume, moved, new = self.volume(), self.record(), self.volume()
        self.write(volume, 0, 1)
        moved.update(self.driver.update_migrated_volume(self.context, moved, new, 'available'))
        new.destroy()
        for host in (f'{base.HOST}-second#one', 'elsewhere@pcow#fast'):
            for one in (volume, moved):
                one.host = host
                one.save()
                listed = self.refused(f'it is the volume {one.id} already', one.name)
                self.assertEqual(one.id, listed['cinder_id'])
        self.check_content(volume, {0: 1})
        volume.destroy()
        self.assertTrue(self.list_volumes()[f'one/{volume.name}']['safe_to_manage'])

    def test_disk_of_a_server(self) -> None:
        """Nova knows whether it needs it: a server that is shelved, or on a host that has the pool
        as well, has no domain here.
        """
        name = f'server-{uuid.uuid4()}-root'
        self.existing(name)
        self.refused("Nova's", name)

    def test_image_of_a_domain_that_is_off(self) -> None:
        """Also when the pool was made known, or the domain defined, with a path through a symbolic
        link.
        """
        path = self.existing()
        self.libvirt(path)
        self.refused('in the configuration of a domain')
        link = os.path.join(self.directory, 'link')
        os.symlink(self.pools['one'].path, link)
        registry.PoolRegistry().remove('one', forget=True)
        registry.PoolRegistry().import_(link, 'one')
        self.refused('in the configuration of a domain')

    def test_libvirt_does_not_tell(self) -> None:
        self.existing()
        conf.CONF.set_override('libvirt_uri', f'test://{self.directory}/none', 'pcow')
        self.refused('libvirt')

    def test_list_knows_what_is_managed_and_hides_what_is_deleted(self) -> None:
        volume = self.volume()
        clone = self.record()
        self.driver.create_cloned_volume(clone, volume)
        self.driver.delete_volume(volume)
        listed = self.list_volumes(clone)
        self.assertEqual([f'one/{clone.name}'], list(listed))
        self.assertEqual(
            (clone.id, 'already managed', 1),
            tuple(
                listed[f'one/{clone.name}'][key] for key in ('cinder_id', 'reason_not_safe', 'size')
            ),
        )

    def test_snapshots(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        image.snapshot_create(self.path(volume), 'before')
        self.write(volume, 0, 2)
        clone = self.record()
        self.driver.create_cloned_volume(clone, volume)
        snapshot = self.snapshot_record(volume)
        listed = self.driver.get_manageable_snapshots([], None, 10, 0, ['size'], ['asc'])
        self.assertEqual(
            [('before', True)],
            [(item['reference']['source-name'], item['safe_to_manage']) for item in listed],
        )
        self.assertEqual(
            1, self.driver.manage_existing_snapshot_get_size(snapshot, {'source-name': 'before'})
        )
        self.driver.manage_existing_snapshot(snapshot, {'source-name': 'before'})
        listed = self.driver.get_manageable_snapshots([snapshot], None, 10, 0, ['size'], ['asc'])
        self.assertEqual(
            [(snapshot.id, False)], [(item['cinder_id'], item['safe_to_manage']) for item in listed]
        )
        self.assertRaises(
            exception.ManageExistingInvalidReference,
            self.driver.manage_existing_snapshot,
            snapshot,
            {'source-name': 'before'},
        )
        self.driver.unmanage_snapshot(snapshot)
        self.driver.revert_to_snapshot(self.context, volume, snapshot)
        self.check_content(volume, {0: 1})


class GroupsTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.type = group_types.create(
            self.context, 'consistent', {'consistent_group_snapshot_enabled': '<is> True'}
        )
        self.plain = group_types.create(self.context, 'plain', {})
        self.group = self.make_group(self.type)
        self.assertEqual(
            {'status': 'available'}, self.driver.create_group(self.context, self.group)
        )

    def make_group(self, of: Any) -> Any:
        return utils.create_group(
            self.context, host=base.HOST, group_type_id=of['id'], volume_type_ids=[self.type_id]
        )

    def test_snapshots_of_a_group_and_a_group_of_them(self) -> None:
        volumes = [self.volume(), self.volume(pool='two')]
        for volume, pool in zip(volumes, self.pools, strict=True):
            self.write(volume, 0, 1, pool=pool)
        group_snapshot = utils.create_group_snapshot(
            self.context, self.group.id, group_type_id=self.type['id']
        )
        snapshots = [self.snapshot_record(volume) for volume in volumes]
        status, updates = self.driver.create_group_snapshot(self.context, group_snapshot, snapshots)
        self.assertEqual(
            ['available'] * 3, [status['status'], *(update['status'] for update in updates)]
        )
        for volume, pool in zip(volumes, self.pools, strict=True):
            self.write(volume, 0, 2, pool=pool)
        second = self.make_group(self.type)
        made = [
            self.record(pool=pool, snapshot_id=snapshot.id)
            for pool, snapshot in zip(self.pools, snapshots, strict=True)
        ]
        self.driver.create_group_from_src(self.context, second, made, group_snapshot, snapshots)
        third = [self.record(pool=pool) for pool in self.pools]
        self.driver.create_group_from_src(
            self.context, second, third, source_group=self.group, source_vols=volumes
        )
        for pool, from_snapshot, clone in zip(self.pools, made, third, strict=True):
            self.check_content(from_snapshot, {0: 1}, pool=pool)
            self.check_content(clone, {0: 2}, pool=pool)
        status, updates = self.driver.delete_group_snapshot(self.context, group_snapshot, snapshots)
        self.assertEqual(
            ['deleted'] * 3, [status['status'], *(update['status'] for update in updates)]
        )
        for group in (volumes, made, third):
            status, updates = self.driver.delete_group(self.context, self.group, group)
            self.assertEqual(
                ['deleted'] * 3, [status['status'], *(update['status'] for update in updates)]
            )
        self.assertEqual(([], []), (self.files(), self.files('two')))
        self.assertEqual(
            (None, None, None), self.driver.update_group(self.context, self.group, [], [])
        )

    def test_all_snapshots_or_none(self) -> None:
        volume = self.volume()
        snapshots = [self.snapshot_record(volume), self.snapshot_record(self.record())]
        self.assertRaises(
            exception.VolumeBackendAPIException,
            self.driver.create_group_snapshot,
            self.context,
            utils.create_group_snapshot(self.context, self.group.id, group_type_id=self.type['id']),
            snapshots,
        )
        self.assertEqual((), self.info(volume).snapshots)

    def test_other_groups_are_left_to_cinder(self) -> None:
        group = self.make_group(self.plain)
        self.assertRaises(NotImplementedError, self.driver.create_group, self.context, group)
        self.assertRaises(NotImplementedError, self.driver.delete_group, self.context, group, [])


class MigrationTest(base.PcowTestCase):
    def host(self, pool: str) -> dict[str, Any]:
        stats = {item['pool_name']: item for item in self.driver.get_volume_stats(True)['pools']}
        return {'host': f'{base.HOST}#{pool}', 'capabilities': stats[pool]}

    def test_to_another_pool(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        child = self.record()
        self.driver.create_cloned_volume(child, volume)
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, child, self.host('two'))
        )
        self.check_content(child, {0: 1}, pool='two')
        self.assertEqual([f'{volume.name}.pcow'], self.files())
        self.assertEqual((), self.info(volume).snapshots)
        # the service died before the database knew: the volume is found, and may be moved again
        self.driver.extend_volume(child, 2)
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, child, self.host('two'))
        )
        self.driver.delete_volume(child)
        self.assertEqual([], self.files('two'))

    def test_what_its_clones_need_is_not_the_volume(self) -> None:
        """The database names the old pool until the migration has ended, and the clone keeps a part
        of the volume there.
        """
        volume, clone = self.volume(), self.record()
        self.write(volume, 0, 1)
        self.driver.create_cloned_volume(clone, volume)
        self.write(volume, 0, 2)
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, volume, self.host('two'))
        )
        self.driver.update_provider_info([volume, clone], [])
        self.assertEqual('two', self.driver.get_pool(volume))
        snapshot = self.snapshot(volume)
        self.driver.delete_snapshot(snapshot)
        self.assertNotIn(snapshot.name, [one.name for one in self.info(volume, 'two').snapshots])
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, volume, self.host('two'))
        )
        self.check_content(volume, {0: 2}, pool='two')
        error = self.assertRaises(
            exception.VolumeBackendAPIException,
            self.driver.migrate_volume,
            self.context,
            volume,
            self.host('one'),
        )
        self.assertIn('migrate or delete them first', str(error))
        self.check_content(volume, {0: 2}, pool='two')
        self.check_content(clone, {0: 1})
        self.driver.delete_volume(clone)
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, volume, self.host('one'))
        )
        self.check_content(volume, {0: 2})
        self.assertEqual([], self.files('two'))

    def test_to_a_host_that_does_not_answer(self) -> None:
        volume = self.volume()
        foreign = self.host('two')
        foreign['capabilities'] |= {
            'location_info': f'PcowDriver:elsewhere:{uuid.uuid4()}:two',
            'pcow_migration_address': 'elsewhere.invalid',
        }
        error = self.assertRaises(
            exception.VolumeBackendAPIException,
            self.driver.migrate_volume,
            self.context,
            volume,
            foreign,
        )
        self.assertIn('elsewhere.invalid', str(error))
        self.assertEqual([f'{volume.name}.pcow'], self.files())

    def test_to_another_kind_of_backend(self) -> None:
        volume = self.volume()
        self.assertEqual(
            (False, None),
            self.driver.migrate_volume(
                self.context, volume, {'host': 'x@lvm#y', 'capabilities': {}}
            ),
        )

    def test_snapshots_would_be_lost(self) -> None:
        volume = self.volume()
        self.snapshot(volume)
        error = self.assertRaises(
            exception.InvalidVolume,
            self.driver.migrate_volume,
            self.context,
            volume,
            self.host('two'),
        )
        self.assertIn('delete them first', str(error))

    def test_a_second_image_goes_when_the_service_starts(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 1)
        device.create(self.pools['two'], volume.name, GIB)
        self.assertEqual((None, None), self.driver.update_provider_info([volume], []))
        self.assertEqual([], self.files('two'))
        self.check_content(volume, {0: 1})

    def test_retype(self) -> None:
        volume = self.volume()
        plain, shared = (
            objects.VolumeType.get_by_id(self.context, volume_types.create(self.context, *of)['id'])
            for of in (('other', {}), ('shared', {'multiattach': '<is> True'}))
        )
        here = {'host': f'{base.HOST}#one'}
        self.assertEqual((True, None), self.driver.retype(self.context, volume, plain, {}, here))
        foreign = {'host': 'x@lvm#y', 'capabilities': {}}
        self.assertEqual(
            (False, None), self.driver.retype(self.context, volume, plain, {}, foreign)
        )
        self.assertRaises(
            exception.InvalidVolume, self.driver.retype, self.context, volume, shared, {}, here
        )

    def test_retype_to_another_pool_keeps_the_volume_thin(self) -> None:
        """Cinder would copy it whole, if the types differ in what chooses the pool."""
        volume = self.volume()
        self.write(volume, 0, 1)
        made = volume_types.create(self.context, 'second', {'pool_name': 'two'})
        volume.update({'status': 'retyping', 'previous_status': 'available'})
        volume.save()
        self.manager.retype(
            self.context, volume, made['id'], self.host('two'), migration_policy='on-demand'
        )
        volume.refresh()
        self.assertEqual(
            (f'{base.HOST}#two', made['id'], 'available'),
            (volume.host, volume.volume_type_id, volume.status),
        )
        self.check_content(volume, {0: 1}, pool='two')
        self.assertLess(self.info(volume, 'two').actual_size, 8 << 20)
        self.assertEqual([], self.files())

    def test_retype_to_another_pool_while_it_is_attached_is_left_to_cinder(self) -> None:
        """Who asks Nova, also if the server is off and nobody has the image open."""
        volume = self.volume()
        utils.attach_volume(
            self.context, volume.id, uuid.uuid4().hex, socket.gethostname(), '/dev/pmem1'
        )
        volume = objects.Volume.get_by_id(self.context, volume.id)
        self.assertEqual(
            (False, None),
            self.driver.retype(self.context, volume, volume.volume_type, {}, self.host('two')),
        )
        self.assertEqual([f'{volume.name}.pcow'], self.files())

    def test_the_volume_goes_on_on_the_image_that_another_backend_filled(self) -> None:
        volume, new = self.volume(), self.volume()
        update = self.driver.update_migrated_volume(self.context, volume, new, 'available')
        volume.update(update)
        self.assertEqual(new.name, volume.name)
        self.assertEqual(fields.VolumeAttachStatus.DETACHED, volume.attach_status)
        self.driver.delete_volume(volume)
