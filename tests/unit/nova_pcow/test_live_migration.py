# SPDX-License-Identifier: Apache-2.0

from collections.abc import Iterator
import contextlib
import dataclasses
import os
from pathlib import Path
import shutil
from typing import Any
from unittest import mock

from nova.virt.libvirt import utils as libvirt_utils

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.migration import cold_migration
from nova_pcow.migration import live_migration
from nova_pcow.records import notes
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.templates import template_cache
from pcow_driver.virt import notices
from tests.unit.nova_pcow.test_migration import holds
from tests.unit.nova_pcow.test_migration import write
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
_OTHER = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c12'
_IMAGE = template_cache.SourceImage(
    '11111111-2222-3333-4444-555555555555', '0123456789abcdef', 'raw'
)
_FLAVOR = flavor.PcowFlavor(
    'small', 16 * units.MIB, (flavor.DataDevice(4 * units.MIB, 'none'),), frozenset()
)


class LiveMigrationTest(base.TestCase):
    """The images of a server on two hosts, which have a pool each; copies between them are made as
    on one file system.
    """

    def setUp(self) -> None:
        super().setUp()
        self.pools = {
            name: registry.PoolRegistry().create(name, str(self.directory / name))
            for name in ('here', 'there')
        }
        self.addCleanup(nova_conf.CONF.clear_override, 'pools', 'nova_pcow')
        self.instance = self.directory / 'instance'
        self.instance.mkdir()
        self.copied: list[str] = []
        self.damaging = 0  # so many copies of a template have a byte changed
        patch = mock.patch.object(libvirt_utils, 'copy_image', self.copy)
        patch.start()
        self.addCleanup(patch.stop)
        self.on('here')
        self.create(_UUID)

    def copy(
        self,
        source: str,
        target: str,
        host: str | None = None,
        receive: bool = False,
        compression: bool = True,
    ) -> None:
        if host is not None:
            self.copied.append(os.path.basename(source))
        content = Path(source).read_bytes()
        if receive and self.damaging:
            self.damaging -= 1
            content = content.replace(b'\x5a' * 4096, b'\x5a' * 4095 + b'\x5b', 1)
        # as scp does: what was a hole takes space
        Path(target).write_bytes(content)

    def create(self, uuid: str) -> None:
        storage.create(uuid, _FLAVOR, self.pools['here'], storage.RootSource(_IMAGE, self.fetch))
        write(self.path('root', uuid), 8 * units.MIB, 64 * units.KIB, 0x11)
        write(self.path('data0', uuid), 0, 64 * units.KIB, 0x22)

    def on(self, host: str) -> pool_module.Pool:
        nova_conf.CONF.set_override('pools', [host], 'nova_pcow')
        return self.pools[host]

    def fetch(self, path: str) -> None:
        with open(path, 'wb') as f:
            f.write(b'\x5a' * units.MIB)
            f.truncate(16 * units.MIB)

    def path(self, role: str, uuid: str = _UUID) -> str:
        return next(item.path for item in storage.find(uuid) if item.role == role)

    def prepare(
        self, uuid: str = _UUID, source: str = 'here', target: str = 'there'
    ) -> list[storage.ServerImage]:
        self.on(source)
        images = live_migration.leaving(uuid)
        pool = self.on(target)
        live_migration.check_arrival(uuid, pool, [pool], images, _FLAVOR)
        paths = live_migration.prepare(uuid, pool, images, _FLAVOR, 'address', str(self.instance))
        self.assertEqual([], os.listdir(self.instance))
        made = storage.find(uuid)
        self.assertEqual({item.role: item.path for item in made}, paths)
        return made

    def arrive(self, uuid: str = _UUID, source: str = 'here', target: str = 'there') -> None:
        """All of it; what QEMU carries is the top file without its name of a base."""
        made = self.prepare(uuid, source, target)
        bases = [image.info(item.path).base_path for item in made]
        self.on(source)
        for left, come, below in zip(storage.find(uuid), made, bases, strict=True):
            shutil.copyfile(left.path, come.path)
            if below is not None:
                image.rebase(come.path, below, unsafe=True)
        self.assertTrue(storage.delete(uuid))
        self.on(target)
        notes.forget(notes.ARRIVING, uuid=uuid)
        for role, offset, size, byte in (
            ('root', 0, units.MIB, 0x5A),
            ('root', 8 * units.MIB, 64 * units.KIB, 0x11),
            ('data0', 0, 64 * units.KIB, 0x22),
        ):
            self.assertTrue(holds(self.path(role, uuid), offset, size, byte))

    def templates(self, host: str) -> list[str]:
        return sorted(item.name for item in self.pools[host].templates())

    def test_empty_images_on_the_same_base(self) -> None:
        before = [image.info(item.path) for item in storage.find(_UUID)]
        for old, item in zip(before, self.prepare(), strict=True):
            new = image.info(item.path)
            self.assertEqual(
                (old.virtual_size, old.base_uuid, 0, [names.ARRIVING_MARK]),
                (
                    new.virtual_size,
                    new.base_uuid,
                    new.data_size,
                    [one.name for one in new.snapshots],
                ),
            )
            self.assertNotEqual(old.uuid, new.uuid)
        self.assertEqual(
            (self.pools['there'].uuid, 2),
            (notes.get(notes.ARRIVING, _UUID), len(live_migration.arriving(_UUID))),
        )

    def test_template_that_is_damaged_on_its_way(self) -> None:
        self.damaging = 1
        self.arrive()
        self.assertEqual(2, len(self.copied))
        (template,) = self.templates('there')
        self.pools['there'].create_image('new', base=template)

    def test_template_that_is_damaged(self) -> None:
        """The server goes on, as it did; nothing new is made on what has come."""
        self.damaging = 2
        with (
            self.assertLogs('nova_pcow.migration.cold_migration', 'ERROR') as log,
            mock.patch.object(notices, 'tell') as tell,
        ):
            made = self.prepare()
        tell.assert_called_once_with(self.pools['there'])
        self.assertIn('Servers on it go on as they did', log.output[0])
        self.assertEqual(2, len(made))
        (template,) = self.templates('there')
        error = self.assertRaises(
            exception.ImageDamaged, self.pools['there'].create_image, 'new', base=template
        )
        self.assertIn('it is not what its checksum was made of', str(error))

    def test_there_and_back(self) -> None:
        """The template goes along once, under a name that tells which it is, and stands for others
        beside the host's own.
        """
        self.create(_OTHER)
        (own,) = self.templates('here')
        with template_cache.TemplateCache(self.pools['there']).template(_IMAGE, self.fetch):
            pass
        self.arrive()
        self.arrive(_OTHER)
        uuid = image.info(self.pools['here'].existing_path(own)).uuid
        self.assertEqual([own, f'{own}-{uuid}'], self.templates('there'))
        self.assertEqual([f'{own}.pcow'], self.copied)
        sizes = [
            image.info(self.pools[host].existing_path(name)).actual_size // units.MIB
            for host, name in (('here', own), ('there', f'{own}-{uuid}'))
        ]
        self.assertEqual(sizes[0], sizes[1])
        self.assertEqual(_IMAGE.id, template_cache.image_id(f'{own}-{uuid}'))
        self.arrive(source='there', target='here')
        self.arrive(_OTHER, source='there', target='here')
        self.assertEqual([own], self.templates('here'))
        self.assertEqual(
            [own, f'{own}-{uuid}'],
            sorted(template_cache.TemplateCache(self.pools['there']).age_out(-1)),
        )

    def test_copy_of_a_template_is_as_good_as_its_own_for_a_cold_migration(self) -> None:
        self.arrive()
        sent = cold_migration.send(_UUID, str(self.instance), None)

        @contextlib.contextmanager
        def template(cache: template_cache.TemplateCache, image_id: str) -> Iterator[str]:
            self.assertEqual(_IMAGE.id, image_id)
            with cache.template(_IMAGE, self.fetch) as name:
                yield name

        cold_migration.receive(_UUID, self.on('here'), sent, '', str(self.instance), template)
        self.assertTrue(holds(self.path('root'), 0, units.MIB, 0x5A))
        self.assertEqual(1, len(self.templates('here')))

    def test_something_else_has_the_name(self) -> None:
        (own,) = self.templates('here')
        uuid = image.info(self.pools['here'].existing_path(own)).uuid
        with template_cache.TemplateCache(self.pools['there']).template(_IMAGE, self.fetch) as name:
            path = self.pools['there'].existing_path(name)
        os.rename(path, path.replace(own, f'{own}-{uuid}'))
        error = self.assertRaises(live_migration.LiveMigrationRefused, self.prepare)
        self.assertIn('is another file than', str(error))

    def test_snapshots_would_stay_behind(self) -> None:
        image.snapshot_create(self.path('data0'), 'before-upgrade')
        error = self.assertRaises(
            live_migration.LiveMigrationRefused, live_migration.leaving, _UUID
        )
        self.assertIn(
            'data0.pcow has snapshots, which would stay behind (before-upgrade): delete them',
            str(error),
        )

    def test_fork_of_a_snapshot(self) -> None:
        image.snapshot_create(self.path('root'), 's')
        name = storage.image_name(_OTHER, 'root')
        device.create_on(
            self.pools['here'], name, storage.image_name(_UUID, 'root'), base_snapshot='s'
        )
        error = self.assertRaises(
            live_migration.LiveMigrationRefused, live_migration.leaving, _OTHER
        )
        self.assertIn('is a fork of a snapshot', str(error))

    def check_refused(self, words: str) -> None:
        self.on('here')
        images = live_migration.leaving(_UUID)
        pool = self.on('there')
        error = self.assertRaises(
            exception.PcowError, live_migration.check_arrival, _UUID, pool, [pool], images, _FLAVOR
        )
        self.assertIn(words, str(error))

    def test_shared_pool(self) -> None:
        images, pool = live_migration.leaving(_UUID), self.pools['there']
        error = self.assertRaises(
            live_migration.LiveMigrationRefused,
            live_migration.check_arrival,
            _UUID,
            pool,
            list(self.pools.values()),
            images,
            _FLAVOR,
        )
        self.assertIn('both hosts see the pool of the server', str(error))

    def test_pool_without_room(self) -> None:
        registry.PoolRegistry().set('there', overcommit=0.00001)
        self.pools['there'] = registry.PoolRegistry().get('there')
        self.check_refused('more cannot be provisioned in the pool there')

    def test_more_than_the_flavor_gives(self) -> None:
        for role, size in (('data0', 8), ('root', 20)):
            image.resize(self.path(role), size * units.MIB)
            self.check_refused(f'{storage.image_name(_UUID, role)} has {size} MiB on its host, and')
            self.on('here')
            image.resize(self.path(role), (size - 2) * units.MIB, shrink=True)
        self.arrive()

    def test_more_than_the_flavor_gives_behind_a_page_map(self) -> None:
        """Whether there is one, what the image stands on tells."""
        wanted = dataclasses.replace(_FLAVOR, root_size=256 * units.MIB)
        (root, _data), pool = live_migration.leaving(_UUID), self.on('there')
        images = [dataclasses.replace(root, size=260 * units.MIB)]
        live_migration.check_arrival(_UUID, pool, [pool], images, wanted)
        error = self.assertRaises(
            live_migration.LiveMigrationRefused,
            live_migration.prepare,
            _UUID,
            pool,
            images,
            wanted,
            'address',
            str(self.instance),
        )
        self.assertIn('has 260 MiB on its host, and the flavor small gives 256 MiB', str(error))
        self.assertEqual([], storage.find(_UUID))

    def test_pool_of_another_class(self) -> None:
        with mock.patch.object(
            pool_module.Pool,
            'persistence',
            lambda pool: 'page-cache' if pool.name == 'there' else 'volatile',
        ):
            self.check_refused(
                'another kind of device than it would have in the pool there, of class page-cache'
            )

    def test_image_that_is_still_there(self) -> None:
        """Whatever it holds; but not one that is of a migration which failed."""
        self.prepare()
        self.on('here')
        images = live_migration.leaving(_UUID)
        pool = self.on('there')
        live_migration.check_arrival(_UUID, pool, [pool], images, _FLAVOR)
        notes.forget(notes.ARRIVING, uuid=_UUID)
        live_migration.check_arrival(_UUID, pool, [pool], images, _FLAVOR)  # each says it itself
        self.assertEqual(2, len(live_migration.arriving(_UUID)))
        for item in live_migration.arriving(_UUID):
            # as QEMU does when all has arrived
            image.snapshot_delete(item.path, names.ARRIVING_MARK)
        self.check_refused(
            f'{names.SERVER_PREFIX}{_UUID}-root.pcow of an earlier time of the server is still on '
            f'the new host'
        )
        self.assertEqual([], live_migration.arriving(_UUID))

    def test_server_that_left_when_the_service_was_killed(self) -> None:
        """Nobody goes on with what it left, unless libvirt still has its domain, which goes when it
        has arrived.
        """
        notes.put(notes.LEAVING, _UUID, 'host2')
        live_migration.settle(_UUID, is_here=True, runs_here=False)
        error = self.assertRaises(storage.ServerStorageError, storage.nvdimms, _UUID, _FLAVOR)
        self.assertIn(
            f'it runs there, with its data, and what is here is old; if it does not (virsh list '
            f'--all), delete '
            f'{notes.path(notes.LEAVING, _UUID)}',
            str(error),
        )
        live_migration.settle(_UUID, is_here=True, runs_here=True)
        self.assertEqual(2, len(storage.nvdimms(_UUID, _FLAVOR)))

    def test_note_that_cannot_be_written(self) -> None:
        Path(notes.path(notes.LEAVING, _UUID)).parent.parent.mkdir(parents=True, exist_ok=True)
        Path(notes.path(notes.LEAVING, _UUID)).parent.write_text('')
        self.assertRaises(exception.StateInvalid, notes.put, notes.LEAVING, _UUID, 'host2')

    def test_domain_on_the_new_host(self) -> None:
        devices: list[Any] = storage.nvdimms(_UUID, _FLAVOR)
        elements = ''.join(one.to_xml() for one in devices)
        xml = f'<domain><devices><emulator>/old/qemu</emulator>{elements}</devices></domain>'
        prepared = live_migration.Prepared(
            {'root': '/there/a.pcow', 'data0': '/there/b.pcow'}, '/new/qemu'
        )
        expected = (
            xml.replace('/old/', '/new/')
            .replace(devices[0].path, '/there/a.pcow')
            .replace(devices[1].path, '/there/b.pcow')
        )
        self.assertEqual(
            expected.replace(' />', '/>'), live_migration.rewritten(xml, _UUID, prepared)
        )
        start = '<os><type>hvm</type><kernel>%s/k</kernel><initrd>%s/i</initrd></os>'
        self.assertEqual(
            f'<domain>{start % ("/new", "/new")}</domain>',
            live_migration.rewritten(
                f'<domain>{start % ("/old", "/old")}</domain>',
                _UUID,
                live_migration.Prepared({}, '/new/qemu', '/new/k', '/new/i'),
            ),
        )
        own = f'<domain><os><kernel>/instances/{_UUID}/kernel</kernel></os></domain>'
        shim = live_migration.Prepared({}, '/new/qemu', '/new/k', '/new/i')
        self.assertEqual(own, live_migration.rewritten(own, _UUID, shim))
        self.assertEqual(shim, live_migration.Prepared.of(shim.told() | {'later': 1}))
        self.assertEqual({'paths', 'emulator'}, set(prepared.told()))
        del prepared.paths['data0']
        error = self.assertRaises(
            live_migration.LiveMigrationRefused, live_migration.rewritten, xml, _UUID, prepared
        )
        self.assertIn('data0.pcow has no image on the new host', str(error))
