# SPDX-License-Identifier: Apache-2.0
"""What stands on an image protects it, also when images of the pool are damaged; pool and images
are real.
"""

import os
from pathlib import Path
import shutil
import struct
import tempfile
from typing import Any
from unittest import mock
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.copies import fork
from pcow_driver.health import doctor
from pcow_driver.health import garbage
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import list_cache
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from pcow_driver.virt import libvirt_host
from tests.unit.pcow_driver import base

_SERVER = 'server-0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11-root'
_VOLUME = 'volume-0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class ChildrenTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'), pcow_io=str(programs / 'pcow-io'))
        directory = tempfile.mkdtemp(prefix='pcow-test-', dir='/dev/shm')  # tells births
        self.addCleanup(shutil.rmtree, directory)
        self.pool = registry.PoolRegistry().create('p', directory)
        self.pool.create_image('parent', size=2 << 20)
        self.pool.create_image('fork', base='parent')

    def damage(self, name: str) -> None:
        with open(self.pool.existing_path(name), 'r+b') as f:
            f.write(bytes(4096))
        self.assertRaises(exception.ToolFailed, image.info, self.pool.existing_path(name))

    def forge(
        self,
        name: str,
        *,
        base: str = 'parent',
        uuid: str | None = None,
        base_uuid: str | None = None,
        base_file: str | None = None,
    ) -> str:
        """Make an image of which a QEMU that was taken over has written anew what it is and what it
        stands on; without the second copy of that. Its own UUID if none is given.
        """
        path = self.pool.image_path(name)
        tool.run(
            tool.find('pcow_img'),
            *('create', '-q', '-o', 'mirror=off', '-F', 'pcow'),
            *('-b', self.pool.existing_path(base), path),
        )
        own = uuid or image.info(path).uuid
        with open(path, 'r+b') as f:
            page = bytearray(f.read(4096))
            page[40:56] = uuidlib.UUID(own).bytes
            page[508:512] = struct.pack('<I', _crc32c(bytes(page[:508])))
            (at,) = (at for at in (1024, 1536) if any(page[at : at + 512]))
            if base_uuid is not None:
                page[at : at + 16] = uuidlib.UUID(base_uuid).bytes
            if base_file is not None:
                page[at + 40 : at + 296] = base_file.encode().ljust(256, b'\0')
            page[at + 508 : at + 512] = struct.pack('<I', _crc32c(bytes(page[at : at + 508])))
            f.seek(0)
            f.write(page)
        return own

    def uuid_of(self, name: str) -> str:
        return image.info(self.pool.existing_path(name), force_share=True).uuid

    def forget(self) -> None:
        """What images stood on is not known."""
        Path(f'{list_cache.path(self.pool.uuid)}.bases').unlink()

    def check_kept(self, name: str) -> None:
        self.assertRaisesRegex(
            exception.ImageHasChildren, 'is unknown', self.pool.delete_image, name
        )

    def test_name_that_is_not_printable(self) -> None:
        """It is found by its inode, and counts under the name that it has."""
        os.rename(self.pool.image_path('fork'), Path(self.pool.path, 'a\x1bb\n\udcff.pcow'))
        self.assertEqual(['a\x1bb\n\udcff'], self.pool.children('parent'))
        self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'parent')

    def test_force_beside_a_damaged_image(self) -> None:
        self.pool.create_image('another', size=2 << 20)
        self.damage('another')
        error = self.assertRaises(
            exception.ImageInUse, self.pool.delete_image, 'parent', force=True
        )
        self.assertIn('1 image(s) stand on it: fork', str(error))
        self.forget()
        # the damaged one may stand on it
        self.check_kept('fork')
        self.pool.delete_image('fork', force=True)
        self.pool.delete_image('parent', force=True)
        self.assertEqual(['another.pcow'], self.pool.entries())

    def test_beside_an_image_that_was_damaged(self) -> None:
        """It keeps what it stood on, and nobody else's."""
        self.pool.create_image('other', size=2 << 20)
        device.create(self.pool, 'volume-1', 2 << 20)
        device.create_on(self.pool, 'volume-2', 'volume-1')
        for name in ('fork', 'volume-2'):
            self.damage(name)
        self.pool.delete_image('other')
        for name in ('parent', 'volume-1'):
            self.check_kept(name)
        self.assertTrue(trash.delete_image(self.pool, 'fork'))
        self.pool.delete_image('parent')
        self.assertFalse(trash.delete_image(self.pool, 'volume-1'))
        self.assertTrue(trash.delete_image(self.pool, 'volume-2'))
        trash.collect(self.pool)  # as the next start of the service does
        self.assertEqual([], self.pool.entries())

    def test_child_that_becomes_unreadable_between_two_looks(self) -> None:
        self.pool.create_image('another', size=2 << 20)
        self.damage('another')
        self.forget()
        looked = type(self.pool).listed

        def listed(pool: Any, **options: Any) -> Any:
            found = looked(pool, **options)
            if 'base_uuid' in options:
                self.damage('fork')
                os.unlink(self.pool.existing_path('another'))
            return found

        with mock.patch.object(type(self.pool), 'listed', listed):
            self.assertEqual(['fork'], self.pool.children('parent'))

    def test_beside_an_image_whose_file_is_another_one(self) -> None:
        """By the time of its birth: its number alone may come again."""
        self.pool.create_image('other', size=2 << 20)
        path = self.pool.existing_path('fork')
        copy = f'{path}.copy'
        shutil.copyfile(path, copy)
        os.rename(copy, path)
        self.damage('fork')
        self.check_kept('other')

    def test_what_is_known_follows(self) -> None:
        """What an image stands on by now, also if it is open when that is seen."""
        self.pool.create_image('other', size=2 << 20)
        image.rebase(self.pool.existing_path('fork'), self.pool.existing_path('other'))
        self.pool.listed()
        self.damage('fork')
        self.check_kept('other')
        self.pool.delete_image('parent')

    def test_restore_in_place(self) -> None:
        """The file is the same one: what is known of it is of before, until somebody looks at it,
        or it is forgotten.
        """
        self.pool.create_image('other', size=2 << 20)
        path = Path(self.pool.existing_path('fork'))
        backup = path.read_bytes()
        for look, kept in ((self.pool.account, 'parent'), (lambda: None, 'other')):
            image.rebase(str(path), self.pool.existing_path('other'))
            self.pool.listed()
            path.write_bytes(backup)
            look()
            self.damage('fork')
            self.check_kept(kept)
            path.write_bytes(backup)
        self.damage('fork')
        self.forget()
        for name in ('parent', 'other'):
            self.check_kept(name)

    def test_open_image(self) -> None:
        """One that runs all the time is known as well."""
        program = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'), 'pcow-io')
        self.pool.create_image('other', size=2 << 20)
        self.forget()
        with base.opened(self.pool.existing_path('fork'), program):
            self.pool.listed()
        self.damage('fork')
        self.check_kept('parent')
        self.pool.delete_image('other')

    def test_damaged_notes(self) -> None:
        """Of what they do not say, nothing is known."""
        self.pool.create_image('other', size=2 << 20)
        self.damage('fork')
        notes = Path(f'{list_cache.path(self.pool.uuid)}.bases')
        good = notes.read_bytes()
        for bad in (
            b'',
            good[:4],
            good[:-1],
            good[:-112] + bytes(112),
            bytes(8) + good[8:],
            *(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(8, len(good))),
        ):
            notes.write_bytes(bad)
            items = self.pool.listed(base_uuid=image.info(self.pool.existing_path('parent')).uuid)
            self.assertEqual(['fork'], [item.name for item in items])
        notes.write_bytes(good)
        os.chown(notes, 65534, 65534)  # nobody else is believed
        self.check_kept('other')
        notes.unlink(missing_ok=True)
        notes.write_bytes(good)
        notes.chmod(0o666)
        self.check_kept('other')

    def test_notes_do_not_grow(self) -> None:
        notes = Path(f'{list_cache.path(self.pool.uuid)}.bases')
        self.pool.listed()
        before = notes.stat()
        self.pool.listed()
        self.pool.account()
        self.assertEqual(before.st_mtime_ns, notes.stat().st_mtime_ns)
        for _ in range(100):
            self.pool.create_image('other', size=2 << 20)
            self.pool.delete_image('other')
        self.assertLess(notes.stat().st_size, 8192)
        self.damage('fork')
        self.pool.create_image('other', size=2 << 20)
        self.pool.delete_image('other')

    def test_room_of_a_damaged_image(self) -> None:
        """What was promised to its guest stays promised."""
        self.pool.create_image('large', size=64 << 20)
        before = self.pool.account()
        self.damage('large')
        after = self.pool.account()
        self.assertGreaterEqual(after.provisioned, before.provisioned - (8 << 20))
        self.assertLessEqual(after.provisioned, before.provisioned)

    def test_fork_is_known_at_once(self) -> None:
        image.snapshot_create(self.pool.existing_path('parent'), 's')
        self.pool.create_image('other', size=2 << 20)
        fork.fork(self.pool.existing_path('parent'), 's', 'second')
        self.damage('second')
        self.pool.delete_image('other')
        self.pool.delete_image('fork')
        self.check_kept('parent')

    def test_size_of_an_image_that_grew_is_known_at_once(self) -> None:
        device.create(self.pool, 'volume-1', 2 << 20)
        device.extend(self.pool, 'volume-1', 64 << 20)
        self.damage('volume-1')
        self.assertGreaterEqual(self.pool.account().provisioned, 64 << 20)

    def test_service_image_that_says_it_is_a_template(self) -> None:
        """No service makes one of it, so it has been written there."""
        uuid = '0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
        server, volume = f'server-{uuid}-root', f'volume-{uuid}'
        self.configure(volume_name_template='ours_%s')
        ours = f'ours_{uuid}'  # as Cinder may be configured
        for name in (server, volume, ours, 'server-2022', 'volume-large'):
            self.pool.create_image(name, size=2 << 20)
            image.seal(self.pool.existing_path(name))
        self.pool.delete_image(server, force=True)
        self.assertTrue(trash.delete_image(self.pool, volume))
        self.assertTrue(trash.delete_image(self.pool, ours))
        for name in ('server-2022', 'volume-large'):
            self.assertRaises(exception.IsATemplate, self.pool.delete_image, name, force=True)
            self.pool.delete_template(name)

    def test_snapshot_of_a_volume_that_says_it_is_a_template(self) -> None:
        """It would stay, and the volume for Cinder with it."""
        for name, makes_one in ((_VOLUME, False), ('golden', True)):
            path = self.pool.create_image(name, size=2 << 20)
            image.snapshot_create(path, 's')
            image.seal(path)
            if makes_one:
                self.assertRaises(exception.ToolFailed, trash.delete_snapshot, self.pool, name, 's')
                self.assertTrue(image.info(path).sealed)
            else:
                self.assertTrue(trash.delete_snapshot(self.pool, name, 's'))
                self.assertEqual((), image.info(path).snapshots)

    def test_volume_that_cinder_calls_otherwise_is_no_garbage(self) -> None:
        """It is detached, and in no domain."""
        name = 'ours_0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
        os.utime(self.pool.create_image(name, size=2 << 20), (0, 0))
        for template, found in (('volume-%s', 1), ('ours_%s', 0)):
            self.configure(volume_name_template=template)
            named = [
                one
                for one in garbage.find(self.pool, libvirt_host.Files())
                if one.kind is garbage.Kind.UNUSED_IMAGE and name in one.path
            ]
            self.assertEqual(found, len(named))

    def test_volume_that_is_kept_for_its_children(self) -> None:
        name = 'volume-0d3c8a52-7f35-4f7a-9b43-6f0d0b1a5c11'
        self.pool.create_image(name, size=2 << 20)
        self.pool.create_image('child', base=name)
        self.assertFalse(trash.delete_image(self.pool, name))
        self.assertTrue(image.info(self.pool.existing_path(name)).sealed)
        self.assertRaises(exception.ImageHasChildren, self.pool.delete_image, name, force=True)

    def check_gone(self, *names: str) -> None:
        for name in names:
            self.assertFalse(os.path.lexists(self.pool.image_path(name)), name)
        self.assertEqual([], trash.marks(self.pool))

    def test_image_with_the_uuid_of_its_template(self) -> None:
        """What stands on the template does not stand on it, also beside what cannot be read."""
        image.seal(self.pool.existing_path('parent'))
        uuid = self.uuid_of('parent')
        self.forge(_SERVER, uuid=uuid)
        self.forge(_VOLUME, uuid=uuid)
        self.assertEqual(['fork', _SERVER, _VOLUME], self.pool.children('parent'))
        found = [one.found for one in doctor._check_images(self.pool)]
        self.assertTrue(any(f'have the UUID {uuid}' in one for one in found), found)
        self.pool.create_image('another', size=2 << 20)
        self.damage('another')
        self.assertEqual([], self.pool.children(_SERVER))
        self.pool.delete_image(_SERVER, force=True)
        self.assertTrue(trash.delete_image(self.pool, _VOLUME))
        self.check_gone(_SERVER, _VOLUME)
        self.assertRaises(exception.ImageHasChildren, self.pool.delete_template, 'parent')
        self.assertEqual(['fork'], self.pool.children('parent'))

    def test_image_that_stands_on_itself(self) -> None:
        for other in ({}, {'named': True}):
            for name in (_SERVER, _VOLUME):
                file = f'{name}.pcow' if other else None
                own = self.forge(name)
                os.unlink(self.pool.image_path(name))
                self.forge(name, uuid=own, base_uuid=own, base_file=file)
                self.assertEqual([name], [one.name for one in self.pool.listed(base_uuid=own)])
                self.assertEqual([], self.pool.children(name))
            self.pool.delete_image(_SERVER, force=True)
            self.assertTrue(trash.delete_image(self.pool, _VOLUME))
            self.check_gone(_SERVER, _VOLUME)

    def test_images_that_stand_on_each_other(self) -> None:
        for files in ((f'{_VOLUME}.pcow', f'{_SERVER}.pcow'), ('gone.pcow', 'gone.pcow')):
            one, two = (str(uuidlib.uuid4()) for _ in range(2))
            self.forge(_SERVER, uuid=one, base_uuid=two, base_file=files[0])
            self.forge(_VOLUME, uuid=two, base_uuid=one, base_file=files[1])
            self.assertTrue(trash.delete_image(self.pool, _VOLUME))
            self.pool.delete_image(_SERVER, force=True)
            self.check_gone(_SERVER, _VOLUME)

    def test_forged_image_that_was_marked(self) -> None:
        """By an earlier version perhaps, that kept it for what it took for its children."""
        own = str(uuidlib.uuid4())
        for forged in (
            {'uuid': self.uuid_of('parent')},
            {'uuid': own, 'base_uuid': own, 'base_file': f'{_VOLUME}.pcow'},
        ):
            self.forge(_VOLUME, **forged)
            trash._keep(self.pool, trash.Mark(_VOLUME))
            trash.collect(self.pool)
            self.check_gone(_VOLUME)

    def test_snapshot_of_an_image_that_stands_on_itself(self) -> None:
        own = self.forge(_VOLUME)
        os.unlink(self.pool.image_path(_VOLUME))
        self.forge(_VOLUME, uuid=own, base_uuid=own)
        self.assertEqual(set(), trash._stood_on(self.pool, _VOLUME, own))

    def test_image_without_uuid(self) -> None:
        """Bases of format 1, and those at which nobody looked, are recorded by their name alone."""
        none = str(uuidlib.UUID(int=0))
        self.forge('of-format-1', base_uuid=none, base_file='old.pcow')
        self.forge(_VOLUME, uuid=none)
        self.assertEqual([], self.pool.children(_VOLUME))

    def test_base_that_was_moved_by_hand(self) -> None:
        """What stands on it finds it again when it is moved back."""
        os.rename(self.pool.image_path('parent'), self.pool.image_path('moved'))
        self.assertEqual(['fork'], self.pool.children('moved'))
        self.assertRaises(exception.ImageHasChildren, self.pool.delete_image, 'moved', force=True)

    def test_force_on_a_damaged_parent(self) -> None:
        self.damage('parent')
        self.assertEqual(['fork'], self.pool.children('parent'))
        self.assertRaises(exception.ImageInUse, self.pool.delete_image, 'parent', force=True)
        self.pool.delete_image('fork')
        self.pool.delete_image('parent', force=True)
        self.assertEqual([], self.pool.entries())

    def test_damaged_parent_goes_with_the_last_child(self) -> None:
        self.pool.create_image('grandchild', base='fork')
        self.damage('parent')
        self.assertFalse(trash.delete_image(self.pool, 'parent'))
        self.assertFalse(trash.delete_image(self.pool, 'parent'))  # again, as after a crash
        self.assertEqual({'parent'}, trash.deleted_images(self.pool))
        self.assertFalse(trash.delete_image(self.pool, 'fork'))
        self.assertTrue(trash.delete_image(self.pool, 'grandchild'))
        self.assertEqual([], self.pool.entries())

    def test_two_damaged_images_do_not_keep_each_other(self) -> None:
        self.pool.delete_image('fork')
        self.pool.create_image('another', size=2 << 20)
        self.damage('parent')
        self.damage('another')
        self.assertTrue(trash.delete_image(self.pool, 'parent'))
        self.assertTrue(trash.delete_image(self.pool, 'another'))
        self.assertEqual([], self.pool.entries())
