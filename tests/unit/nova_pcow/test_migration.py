# SPDX-License-Identifier: Apache-2.0

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import io
import json
import os
from pathlib import Path
import shutil
from typing import Any
from unittest import mock

from nova.virt.libvirt import utils as libvirt_utils
from oslo_concurrency import processutils

from nova_pcow import conf as nova_conf
from nova_pcow.common import flavor
from nova_pcow.migration import arrival
from nova_pcow.migration import cold_migration
from nova_pcow.migration import live_migration
from nova_pcow.placement import inventory
from nova_pcow.servers import storage
from nova_pcow.snapshots import snapshot
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import transfer
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.pools import staging
from pcow_driver.pools import watermark
from pcow_driver.templates import template_cache
from tests.unit.nova_pcow import base as nova_base
from tests.unit.pcow_driver import base

_UUID = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
_IMAGE = template_cache.SourceImage(
    '11111111-2222-3333-4444-555555555555', '0123456789abcdef', 'raw'
)
_SMALL = flavor.PcowFlavor(
    'small', 16 * units.MIB, (flavor.DataDevice(4 * units.MIB, 'none'),), frozenset()
)
_LARGE = flavor.PcowFlavor(
    'large',
    32 * units.MIB,
    (flavor.DataDevice(8 * units.MIB, 'none'), flavor.DataDevice(2 * units.MIB, 'none')),
    frozenset(),
)


def write(path: str, offset: int, size: int, byte: int) -> None:
    """Store to the data of a device as a guest would."""
    tool.run(
        tool.find('pcow_io'),
        '-c',
        f'write -q -P {byte} {device.window(path).offset + offset} {size}',
        path,
    )


def holds(path: str, offset: int, size: int, byte: int) -> bool:
    try:
        tool.run(
            tool.find('pcow_io'),
            '-r',
            '-c',
            f'read -q -P {byte} {device.window(path).offset + offset} {size}',
            path,
        )
    except exception.ToolFailed:
        return False
    return True


class MigrationTest(base.TestCase):
    """The images of a server on two hosts, which have a pool each; copies between them are made as
    on a shared directory.
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
        self.fetches = 0
        self.on('here')
        storage.create(_UUID, _SMALL, self.pools['here'], storage.RootSource(_IMAGE, self.fetch))
        write(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x11)
        write(self.path('data0'), 0, 64 * units.KIB, 0x22)

    def on(self, host: str) -> pool_module.Pool:
        nova_conf.CONF.set_override('pools', [host], 'nova_pcow')
        return self.pools[host]

    def fetch(self, path: str) -> None:
        self.fetches += 1
        with open(path, 'wb') as f:
            f.write(b'\x5a' * units.MIB)
            f.truncate(16 * units.MIB)

    def path(self, role: str) -> str:
        return next(item.path for item in storage.find(_UUID) if item.role == role)

    def sizes(self) -> list[int]:
        return [device.window(item.path).size // units.MIB for item in storage.find(_UUID)]

    @contextlib.contextmanager
    def template(self, cache: template_cache.TemplateCache, image_id: str) -> Iterator[str]:
        self.assertEqual(_IMAGE.id, image_id)
        with cache.template(_IMAGE, self.fetch) as name:
            yield name

    @contextlib.contextmanager
    def no_template(self, cache: template_cache.TemplateCache, image_id: str) -> Iterator[str]:
        raise exception.SourceRejected(path=f'image {image_id}', reason='it was deleted')
        yield ''

    def check_contents(self) -> None:
        self.assertTrue(holds(self.path('root'), 0, units.MIB, 0x5A))
        self.assertTrue(holds(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x11))
        self.assertTrue(holds(self.path('data0'), 0, 64 * units.KIB, 0x22))

    def resize(self) -> None:
        cold_migration.mark(_UUID, 7)
        cold_migration.grow(_UUID, _LARGE)
        storage.create(_UUID, _LARGE, self.pools['here'], None)
        self.assertEqual([32, 8, 2], self.sizes())
        self.check_contents()

    def test_resize_that_the_pool_cannot_take(self) -> None:
        """Checked while the guest has its images."""
        with contextlib.closing(nova_base.Writer(self.path('root'))):
            cold_migration.check_stays(_UUID, _LARGE)
            registry.PoolRegistry().set('here', overcommit=0.0001)
            self.assertRaises(exception.NoRoom, cold_migration.check_stays, _UUID, _LARGE)
            cold_migration.check_stays(_UUID, _SMALL)  # only its memory or processors change
            registry.PoolRegistry().set('here', overcommit=0, draining=True)
            self.assertRaises(exception.PoolDraining, cold_migration.check_stays, _UUID, _LARGE)
            wanted = dataclasses.replace(
                _SMALL, required_traits=frozenset({'CUSTOM_PCOW', 'CUSTOM_PCOW_PMEM'})
            )
            error = self.assertRaises(
                inventory.PlacementMismatch, cold_migration.check_stays, _UUID, wanted
            )
            self.assertIn('lies in the pool here, which has not CUSTOM_PCOW_PMEM', str(error))

    def test_size_is_not_the_guests_to_choose(self) -> None:
        """The block of a device says that nearly all of it lies in front of its data."""
        path = self.path('data0')
        size = image.info(path).virtual_size
        device.write_info_block(path, size, size - 2 * units.MIB)
        self.assertRaises(exception.DeviceInvalid, cold_migration.check_stays, _UUID, _LARGE)
        self.assertRaises(exception.DeviceInvalid, cold_migration.grow, _UUID, _LARGE)
        self.assertEqual(size, image.info(path).virtual_size)

    def test_growth_that_was_interrupted(self) -> None:
        """Between the image and what its guest is told."""
        path = self.path('data0')
        image.resize(path, 10 * units.MIB)
        cold_migration.grow(_UUID, _LARGE)
        self.assertEqual(8 * units.MIB, device._look(path)[1])

    def test_resize_and_confirm(self) -> None:
        self.resize()
        cold_migration.confirm(_UUID, None, is_here=True)
        self.assertEqual(
            [[], [], []], [image.snapshot_list(item.path) for item in storage.find(_UUID)]
        )
        self.assertEqual([32, 8, 2], self.sizes())
        self.check_contents()

    def test_resize_and_revert(self) -> None:
        self.resize()
        write(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x33)
        write(self.path('root'), 31 * units.MIB, 64 * units.KIB, 0x44)
        cold_migration.revert(_UUID, _SMALL, 7)
        self.assertEqual([16, 4], self.sizes())
        self.assertEqual([[], []], [image.snapshot_list(item.path) for item in storage.find(_UUID)])
        self.check_contents()

    def test_revert_that_was_interrupted(self) -> None:
        self.resize()
        with mock.patch.object(
            image, 'snapshot_delete', side_effect=exception.ToolFailed(message='killed')
        ):
            self.assertRaises(exception.ToolFailed, cold_migration.revert, _UUID, _SMALL, 7)
        cold_migration.revert(_UUID, _SMALL, 7)
        self.assertEqual([16, 4], self.sizes())
        self.check_contents()

    def test_revert_after_a_resize_that_failed(self) -> None:
        """Its mark is still there, and the next resize goes back to where that one began."""
        cold_migration.mark(_UUID, 6)
        write(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x33)
        cold_migration.mark(_UUID, 7)
        write(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x44)
        cold_migration.revert(_UUID, _SMALL, 7)
        self.assertTrue(holds(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x33))

    def test_revert_of_a_resize_that_ended_before_its_mark(self) -> None:
        """The service was killed while the server still ran; the mark of an earlier resize is not
        that one's.
        """
        cold_migration.mark(_UUID, 6)
        write(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x33)
        cold_migration.revert(_UUID, _SMALL, 7)
        self.assertTrue(holds(self.path('root'), 8 * units.MIB, 64 * units.KIB, 0x33))
        cold_migration.mark(_UUID, 8)
        self.assertEqual(
            ['nova-resize-8'], [one.name for one in image.snapshot_list(self.path('root'))]
        )
        cold_migration.forget(_UUID, None)
        self.assertEqual([], image.snapshot_list(self.path('root')))

    def test_mark_that_fails(self) -> None:
        create = image.snapshot_create

        def full(path: str, name: str) -> None:
            if path == self.path('data0'):
                raise exception.ToolFailed(message='the pool is full')
            create(path, name)

        with mock.patch.object(image, 'snapshot_create', full):
            self.assertRaises(exception.ToolFailed, cold_migration.mark, _UUID, 7)
        self.assertEqual([[], []], [image.snapshot_list(item.path) for item in storage.find(_UUID)])
        self.check_contents()

    def test_hosts_of_other_versions(self) -> None:
        """They are upgraded one after another, and sometimes back."""
        first = {'role', 'path', 'base', 'base_path', 'base_uuid'}  # that each version knows
        plain = cold_migration.Transferred('root', '/x/root.pcow', None, None, None)
        damaged = dataclasses.replace(plain, role='data0', damaged=True)
        arrived = arrival.Arrival('source', [plain, damaged])
        arrival.note(str(self.instance), arrived)
        note = self.instance / 'pcow-arrived.json'
        packed = json.loads(cold_migration.pack('[]', [plain, damaged]))
        noted = json.loads(note.read_text())
        for one, other in ([item['pcow'] for item in packed], noted['images']):
            self.assertEqual(first, set(one))
            self.assertEqual(first | {'damaged'}, set(other))
            one['later'] = 'unknown here'
        self.assertEqual([plain, damaged], cold_migration.unpack(json.dumps(packed))[1])
        note.write_text(json.dumps(noted | {'later': 1}))
        self.assertEqual(arrived, arrival.noted(str(self.instance)))
        note.unlink()

    def move(self, template: object) -> None:
        sent = cold_migration.send(_UUID, str(self.instance), None)
        disks, arrived = cold_migration.unpack(cold_migration.pack('[{"path": "/x/disk"}]', sent))
        self.assertEqual(('[{"path": "/x/disk"}]', sent), (disks, arrived))
        there = self.on('there')
        cold_migration.receive(_UUID, there, arrived, '', str(self.instance), template)  # type: ignore[arg-type]
        self.assertEqual([], os.listdir(self.instance))

    def test_base_that_a_guest_has_named(self) -> None:
        """Its QEMU may write to the header, and another server's image would go along."""
        root = self.path('root')
        other = os.path.join(self.pools['here'].path, 'server-other-root.pcow')
        image.create(other, 16 * units.MIB)
        for named in (other, image.info(root).base_path):
            os.unlink(root)
            # what a header can say without knowing a UUID
            tool.run(tool.find('pcow_img'), 'create', '-q', '-u', '-b', str(named), root, '16M')
            for refused in (
                lambda: cold_migration.check_travels(_UUID),
                lambda: cold_migration.send(_UUID, str(self.instance), None),
                lambda: live_migration.leaving(_UUID),
                lambda: snapshot.export(
                    root, device.window(root), None, str(self.directory / 'upload'), 'raw'
                ),
                lambda: transfer.send(root, io.BytesIO()),
            ):
                self.assertRaisesRegex(exception.PcowError, 'rebase -u -b', refused)
        image.rebase(root, other, unsafe=True)  # it knows the UUID: that is no template
        self.assertRaisesRegex(
            storage.ServerStorageError, 'not the template', cold_migration.check_travels, _UUID
        )
        self.assertEqual([], os.listdir(self.instance))

    def pool_of(self, size: int) -> None:
        found = mock.patch.object(
            pool_module.Pool, 'capacity', return_value=watermark.Capacity(size, size)
        )
        found.start()
        self.addCleanup(found.stop)

    def test_file_that_was_made_longer(self) -> None:
        """Holes cost its guest nothing, and would be copied."""
        root = self.path('root')
        os.truncate(root, 1 << 40)
        self.pool_of(8 * units.GIB)
        for refused in (
            lambda: cold_migration.check_travels(_UUID, memory=units.GIB),
            lambda: cold_migration.send(_UUID, str(self.instance), None),
        ):
            error = self.assertRaises(storage.ServerStorageError, refused)
            self.assertIn(f'{root} is 1 TiB long', str(error))
        self.assertEqual([], os.listdir(self.instance))
        os.truncate(root, 10 * units.GIB)
        cold_migration.check_travels(_UUID, memory=5 * units.GIB)  # states of it were deleted
        # the way out
        base = image.info(root).base_path
        copy = f'{root}.copy.pcow'
        tool.run(tool.find('pcow_img'), 'convert', '-q', '-B', str(base), root, copy)
        os.rename(copy, root)
        cold_migration.check_travels(_UUID)
        self.check_contents()

    def test_file_of_snapshots_that_were_deleted(self) -> None:
        """It does not become shorter."""
        root = self.path('root')
        for number in range(8):
            image.snapshot_create(root, f's{number}')
            write(root, 0, 8 * units.MIB, number)
        for number in range(8):
            image.snapshot_delete(root, f's{number}')
        cold_migration.check_travels(_UUID)

    def test_file_with_many_snapshots(self) -> None:
        """That there are so many may be written there, too: the pool has no room for all."""
        root = self.path('root')
        for number in range(70):
            image.snapshot_create(root, f's{number}')
        os.truncate(root, 900 * units.MIB)
        cold_migration.check_travels(_UUID)
        self.pool_of(units.GIB // 2)
        self.assertRaisesRegex(
            storage.ServerStorageError, 'MiB long', cold_migration.check_travels, _UUID
        )

    def test_move_to_a_host_that_makes_the_template(self) -> None:
        self.move(self.template)
        self.assertEqual(2, self.fetches)
        self.check_contents()
        shutil.rmtree(self.pools['here'].path)  # nothing of it is needed any more
        self.check_contents()
        self.assertEqual([16, 4], self.sizes())

    def test_move_to_a_host_that_has_the_template(self) -> None:
        there = self.pools['there']
        with template_cache.TemplateCache(there).template(_IMAGE, self.fetch) as name:
            write_uuid = image.info(there.existing_path(name)).uuid
        self.move(self.no_template)
        self.assertEqual(write_uuid, image.info(self.path('root')).base_uuid)
        self.check_contents()

    def test_move_after_the_image_was_deleted(self) -> None:
        def copy(
            source: str,
            target: str,
            host: str | None = None,
            receive: bool = False,
            compression: bool = True,
        ) -> None:
            del host, receive, compression  # there is one file system here
            shutil.copyfile(source, target)

        with mock.patch.object(libvirt_utils, 'copy_image', copy):
            self.move(self.no_template)
        self.check_contents()

    def damaging(self, times: int) -> Callable[..., None]:
        """A copy that changes a byte of the template so often."""
        left = [times]

        def copy(source: str, target: str, *, receive: bool = False, **_options: Any) -> None:
            content = Path(source).read_bytes()
            if receive and left[0]:
                left[0] -= 1
                content = content.replace(b'\x5a' * 4096, b'\x5a' * 4095 + b'\x5b', 1)
            Path(target).write_bytes(content)

        return copy

    def test_template_that_is_damaged_on_its_way(self) -> None:
        with mock.patch.object(libvirt_utils, 'copy_image', self.damaging(1)):
            self.move(self.no_template)
        self.check_contents()

    def test_template_that_is_damaged(self) -> None:
        """The server goes on, as it did; nothing new is made on it."""
        with mock.patch.object(libvirt_utils, 'copy_image', self.damaging(2)):
            self.move(self.no_template)
        there, base = self.pools['there'], image.info(self.path('root')).base_filename
        assert base is not None
        error = self.assertRaises(
            exception.ImageDamaged, there.create_image, 'new', base=base.removesuffix('.pcow')
        )
        self.assertIn('it is not what its checksum was made of', str(error))

    def test_move_of_a_formatted_device(self) -> None:
        """The empty file systems of two hosts have one name, and differ."""
        formatted = dataclasses.replace(
            _SMALL, data=(_SMALL.data[0], flavor.DataDevice(64 * units.MIB, 'ext4'))
        )
        other = '00000000-0000-4000-8000-000000000001'
        storage.create(
            other, dataclasses.replace(formatted, root_size=None), self.on('there'), None
        )
        storage.create(_UUID, formatted, self.on('here'), None)
        write(self.path('data1'), 32 * units.MIB, 64 * units.KIB, 0x55)
        before = self.directory / 'before'
        shutil.copytree(self.pools['here'].path, before)
        self.move(self.template)
        self.assertTrue(
            image.compare(
                str(before / Path(self.path('data1')).name), 'pcow', self.path('data1'), 'pcow'
            )
        )
        self.check_contents()
        unchanged = next(item.path for item in storage.find(other) if item.role == 'data1')
        self.assertEqual('format-ext4-64-1.pcow', image.info(unchanged).base_filename)

    def test_confirm_a_move(self) -> None:
        self.move(self.template)
        self.on('here')
        cold_migration.confirm(_UUID, None, is_here=False)
        self.assertEqual([], storage.find(_UUID))
        self.on('there')
        self.check_contents()

    def test_confirm_again(self) -> None:
        """A call that died before it had told Nova."""
        self.test_confirm_a_move()
        self.on('here')
        cold_migration.confirm(_UUID, None, is_here=False)
        self.on('there')
        cold_migration.confirm(_UUID, None, is_here=True)
        self.check_contents()

    def test_confirm_in_a_shared_pool_again(self) -> None:
        """The first call deleted the marks and died; the images are those of the server on its new
        host.
        """
        cold_migration.mark(_UUID, 7)
        for _time in range(2):
            cold_migration.confirm(_UUID, None, is_here=False)
            self.assertEqual(
                [[], []], [image.snapshot_list(item.path) for item in storage.find(_UUID)]
            )
        self.check_contents()

    def test_confirm_in_a_shared_pool_while_it_runs_elsewhere(self) -> None:
        """What that QEMU has open is left alone; the mark goes with the next start."""
        cold_migration.mark(_UUID, 7)
        with contextlib.closing(nova_base.Writer(self.path('root'))):
            cold_migration.confirm(_UUID, None, is_here=False)
            cold_migration.forget(_UUID, None)
        self.assertEqual(
            ['nova-resize-7'], [one.name for one in image.snapshot_list(self.path('root'))]
        )
        self.assertEqual([], image.snapshot_list(self.path('data0')))
        cold_migration.forget(_UUID, None)
        self.assertEqual([], image.snapshot_list(self.path('root')))

    def test_move_that_was_reverted(self) -> None:
        """Nothing of it is left that a confirmation of the next could take for its own."""
        cold_migration.send(_UUID, str(self.instance), None)
        self.assertEqual(
            {'nova-sent'},
            {one.name for item in storage.find(_UUID) for one in image.snapshot_list(item.path)},
        )
        cold_migration.revert(_UUID, _SMALL, 7)
        storage.check_not_sent(_UUID)
        cold_migration.confirm(_UUID, None, is_here=False)
        self.check_contents()
        self.assertEqual([[], []], [image.snapshot_list(item.path) for item in storage.find(_UUID)])

    def test_nobody_goes_on_with_what_was_sent(self) -> None:
        """The server may have, on the other host; a start of the server, or its next resize, cannot
        know.
        """
        cold_migration.send(_UUID, str(self.instance), None)
        cold_migration.forget(_UUID, None)
        for use in (
            lambda: storage.check_not_sent(_UUID),
            lambda: cold_migration.check_evacuation(_UUID, _SMALL),
        ):
            error = self.assertRaises(storage.ServerStorageError, use)
            self.assertIn('if the server has run there since, this is old', str(error))

    def test_confirm_a_move_when_something_stands_on_the_old_root(self) -> None:
        image.snapshot_create(self.path('root'), 's')
        device.create_on(
            self.pools['here'], 'fork', storage.image_name(_UUID, 'root'), base_snapshot='s'
        )
        self.move(self.template)
        self.on('here')
        error = self.assertRaises(
            storage.ServerStorageError, cold_migration.confirm, _UUID, None, is_here=False
        )
        self.assertIn(f'{self.path("root")} was copied to the new host', str(error))
        self.assertEqual(['root'], [item.role for item in storage.find(_UUID)])
        self.pools['here'].delete_image('fork')
        cold_migration.confirm(_UUID, None, is_here=False)
        self.assertEqual([], storage.find(_UUID))

    def test_confirm_a_move_while_the_old_pool_is_not_there(self) -> None:
        self.move(self.template)
        self.on('here')
        marker = Path(self.pools['here'].path, '.pcow-pool')
        marker.rename(marker.with_name('.away'))
        self.assertRaises(
            storage.ServerStorageError, cold_migration.confirm, _UUID, None, is_here=False
        )
        marker.with_name('.away').rename(marker)
        cold_migration.confirm(_UUID, None, is_here=False)
        self.assertEqual([], storage.find(_UUID))

    def test_copies_are_durable(self) -> None:
        """Before the source is told that it may delete its own: those of templates, too."""
        synced, fsync = set(), os.fsync

        def record(descriptor: int) -> None:
            synced.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        with mock.patch.object(os, 'fsync', record):
            self.move(self.no_template)
        files = [item.path for item in storage.find(_UUID)]
        base = image.info(self.path('root')).base_path
        assert base is not None
        self.assertEqual(set(), {os.stat(path).st_ino for path in (*files, base)} - synced)

    def test_delete_after_a_build_was_killed(self) -> None:
        """Between the link to its name and the end of the other one; and in the middle
        of a copy.
        """
        directory = Path(self.pools['here'].path)
        os.link(self.path('root'), directory / f'.server-{_UUID}-root.pcow.part')
        (directory / f'.server-{_UUID}-data7.pcow.part').write_bytes(b'half')
        other = directory / '.server-00000000-0000-4000-8000-000000000001-root.pcow.part'
        other.write_bytes(b'of another server')
        self.assertTrue(storage.delete(_UUID))
        self.assertEqual([other], [path for path in directory.iterdir() if 'server-' in path.name])

    def test_pool_that_is_full_when_a_copy_arrives(self) -> None:
        sent = cold_migration.send(_UUID, str(self.instance), None)
        there, full = (
            self.on('there'),
            processutils.ProcessExecutionError(stderr='cp: No space left on device\n'),
        )
        with mock.patch.object(libvirt_utils, 'copy_image', side_effect=full):
            error = self.assertRaises(
                storage.ServerStorageError,
                cold_migration.receive,
                _UUID,
                there,
                sent,
                '',
                str(self.instance),
                self.template,
            )
        self.assertEqual(
            'what has arrived cannot be put into the pool: cp: No space left on device', str(error)
        )
        for _time in range(2):  # the second has nothing to do
            cold_migration.receive(_UUID, there, sent, '', str(self.instance), self.template)
        self.check_contents()

    def test_room_of_what_arrives(self) -> None:
        """Nobody else gets that space while it is copied."""
        there = self.pools['there']
        sent = cold_migration.send(_UUID, str(self.instance), None)
        before, seen = there.account().provisioned, []

        def copy(source: str, target: str) -> None:
            seen.append(there.account().provisioned)
            shutil.copyfile(source, target)

        with mock.patch.object(libvirt_utils, 'copy_image', copy):
            cold_migration.receive(
                _UUID, self.on('there'), sent, '', str(self.instance), self.template
            )
        self.assertEqual(
            [(18 + 6) * units.MIB, (18 + 6 + 6 + 6) * units.MIB],
            [provisioned - before for provisioned in seen],
        )

    def killed_at(self, step: str, *, after: bool) -> None:
        """A call that ends there, and those that go on."""
        sent = cold_migration.send(_UUID, str(self.instance), None)
        there = self.on('there')
        real = getattr(staging if step == 'finish' else cold_migration, step)

        def killed(*args: Any) -> None:
            if after:
                real(*args)
            raise KeyboardInterrupt

        with mock.patch(
            f'nova_pcow.migration.cold_migration.{"staging." if step == "finish" else ""}{step}',
            killed,
        ):
            self.assertRaises(
                KeyboardInterrupt,
                cold_migration.receive,
                _UUID,
                there,
                sent,
                '',
                str(self.instance),
                self.template,
            )
        for _time in range(2):
            cold_migration.receive(_UUID, there, sent, '', str(self.instance), self.template)
        self.check_contents()
        self.assertEqual(
            [], [path for item in sent for path in self.instance.glob(f'{Path(item.path).name}*')]
        )

    def test_killed_before_it_is_set_apart(self) -> None:
        self.killed_at('_set_apart', after=False)

    def test_killed_before_it_appears(self) -> None:
        self.killed_at('_set_apart', after=True)

    def test_killed_when_it_has_appeared(self) -> None:
        self.killed_at('finish', after=True)

    def _with_checksums(self) -> None:
        """Of what a snapshot of the root has."""
        path = self.path('root')
        image.snapshot_create(path, 'kept')
        tool.run(tool.find('pcow_img'), 'checksum', '-q', path)

    @staticmethod
    def _damage(path: str) -> None:
        content = Path(path).read_bytes()
        Path(path).write_bytes(content.replace(b'\x11' * 4096, b'\x11' * 4095 + b'\x12', 1))

    def test_data_that_are_damaged_on_their_way(self) -> None:
        self._with_checksums()
        original = self.path('root')
        sent = cold_migration.send(_UUID, str(self.instance), None)
        there = self.on('there')
        self._damage(sent[0].path)

        def receive() -> None:
            cold_migration.receive(_UUID, there, sent, 'source', str(self.instance), self.template)

        error = self.assertRaises(storage.ServerStorageError, receive)
        self.assertIn('was damaged on its way: the 2 MiB from guest byte', str(error))
        self.assertIn('hard reboot the server', str(error))
        self.assertEqual([], storage.find(_UUID))
        # the way out
        shutil.copyfile(original, sent[0].path)
        receive()
        self.check_contents()

    def test_data_that_were_damaged_before(self) -> None:
        """The server goes on, as it did. It is known on both hosts, as if scrubs had found it."""
        self._with_checksums()
        self._damage(self.path('root'))
        with self.assertLogs('nova_pcow.migration.cold_migration', 'ERROR') as log:
            self.move(self.template)
        self.assertIn('is sent as it is', log.output[0])
        self.assertIn('has arrived damaged', log.output[1])
        self.assertTrue(holds(self.path('data0'), 0, 64 * units.KIB, 0x22))
        name = Path(self.path('root')).stem
        for pool in self.pools.values():
            self.assertEqual([name], scrubs.read(pool.uuid).damaged())
        there = self.pools['there']
        self.assertRaises(exception.ImageDamaged, there.create_image, 'new', base=name)

    def test_copy_that_arrives_damaged(self) -> None:
        sent = cold_migration.send(_UUID, str(self.instance), None)
        os.truncate(sent[0].path, 8192)
        there = self.on('there')
        self.assertRaises(
            exception.PcowError,
            cold_migration.receive,
            _UUID,
            there,
            sent,
            '',
            str(self.instance),
            self.template,
        )
        self.assertEqual([], storage.find(_UUID))
        self.assertEqual([], [name for name in there.entries() if Path(name).suffix == '.part'])
