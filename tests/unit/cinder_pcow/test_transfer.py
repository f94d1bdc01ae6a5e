# SPDX-License-Identifier: Apache-2.0
"""Volumes that go to a pool of another host, the stream in which they go, and what a killed
migration leaves.

The other host has a list of pools of its own and is reached by a program named ssh that runs
pcowctl with it; the real one is between the nodes of the all-in-one
(tests/functional/test_openstack.py).
"""

from collections.abc import Iterator
from concurrent import futures
import contextlib
import fcntl
import hashlib
import io
import json
import os
from pathlib import Path
import shlex
import shutil
import struct
import sys
import tempfile
import threading
from typing import Any
from unittest import mock

from cinder import exception as cinder_exception
import eventlet

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import transfer
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from tests.unit.cinder_pcow import base
from tests.unit.cinder_pcow import test_images
from tests.unit.cinder_pcow import test_kill

GIB = units.GIB


class TwoHosts:
    """The other host: its pool is ``away``."""

    def __init__(self, case: base.PcowTestCase) -> None:
        directory = Path(case.directory)
        state = directory / 'other-state'
        state.mkdir()
        self._state, self._own_state = str(state), os.path.join(case.directory, 'state')
        with self.registry() as pools:
            self.pool = pools.create('away', str(directory / 'away'))
        configuration = directory / 'other.conf'
        configuration.write_text(
            f"[pcow]\nstate_path = {state}\nconversion_dir = {directory}\n"
            f"pcow_img = {tool.find('pcow_img')}\n"
        )
        programs = directory / 'bin'
        programs.mkdir()
        self.ssh = programs / 'ssh'
        (programs / 'pcowctl').write_text(
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pcow_driver.cli.app --config-file '
            f'{configuration} "$@"\n'
        )
        (programs / 'pcowctl').chmod(0o755)
        self.up()
        patcher = mock.patch.dict(os.environ, PATH=f'{programs}:{os.environ["PATH"]}')
        patcher.start()
        case.addCleanup(patcher.stop)

    @contextlib.contextmanager
    def registry(self) -> Iterator[registry.PoolRegistry]:
        """Its list of pools."""
        base.CONF.set_override('state_path', self._state, 'pcow')
        try:
            yield registry.PoolRegistry()
        finally:
            base.CONF.set_override('state_path', self._own_state, 'pcow')

    def up(self) -> None:
        self.script('while [ "$1" = -o ]; do shift 2; done; shift; exec sh -c "$*"')

    def down(self) -> None:
        self.script('echo "ssh: connect to host other: No route to host" >&2; exit 255')

    def script(self, text: str) -> None:
        self.ssh.write_text(f'#!/bin/sh\n{text}\n')
        self.ssh.chmod(0o755)

    def host(self) -> dict[str, Any]:
        """As the scheduler describes it."""
        return {
            'host': 'other@pcow-backend#away',
            'capabilities': {
                'location_info': f'PcowDriver:other:{self.pool.uuid}:away',
                'pcow_migration_address': 'other',
            },
        }

    def path(self, volume: Any) -> str:
        return self.pool.image_path(volume.name)

    def entries(self) -> list[str]:
        return sorted(self.pool.entries())


class MigrateAwayTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.other = TwoHosts(self)

    def migrate(self, volume: Any) -> None:
        self.assertEqual(
            (True, None), self.driver.migrate_volume(self.context, volume, self.other.host())
        )

    def test_a_volume_that_stands_on_a_template_takes_it_along_once(self) -> None:
        service = test_images.ImageService(os.path.join(self.directory, 'glance'))
        disk = Path(self.directory, 'disk')
        disk.write_bytes(b'\x33' * (16 << 20))
        meta = service.add(disk, 'raw')
        volumes = [self.record(), self.record()]
        for number, volume in enumerate(volumes):
            self.driver.clone_image(self.context, volume, None, meta, service)
            self.write(volume, 1 << 20, 4 + number)
        for number, volume in enumerate(volumes):
            self.migrate(volume)
            self.io(self.other.path(volume), f'read -q -P {4 + number} {3 << 20} 65536')
            self.io(self.other.path(volume), f'read -q -P 51 {2 << 20} 65536')
            self.assertEqual(2, image.info(self.other.path(volume)).chain_depth)
            self.assertLess(image.info(self.other.path(volume)).actual_size, 8 << 20)
            self.assertFalse(os.path.exists(self.path(volume)))
        (template,) = (name for name in self.other.entries() if name.startswith('image-'))
        self.assertTrue(image.info(os.path.join(self.other.pool.path, template)).sealed)
        self.assertEqual(3, len(self.other.entries()))
        self.assertEqual([template], self.files())

    def test_a_clone_comes_as_one_file(self) -> None:
        parent, clone = self.volume(), self.record()
        self.write(parent, 0, 1)
        self.driver.create_cloned_volume(clone, parent)
        self.write(clone, 1 << 20, 2)
        self.migrate(clone)
        self.assertEqual(1, image.info(self.other.path(clone)).chain_depth)
        for offset, fill in {2 << 20: 1, 3 << 20: 2, 4 << 20: 0}.items():
            self.io(self.other.path(clone), f'read -q -P {fill} {offset} 65536')
        self.assertEqual(GIB, device.window(self.other.path(clone)).size)
        self.assertEqual(GIB, image.info(self.other.path(clone)).virtual_size - (2 << 20))
        self.migrate(parent)  # nothing stands on it any more
        self.assertEqual([], self.files())

    def test_what_others_stand_on_stays_for_them(self) -> None:
        parent, clone = self.volume(), self.record()
        self.write(parent, 0, 1)
        self.driver.create_cloned_volume(clone, parent)
        self.migrate(parent)
        self.check_content(clone, {0: 1})
        self.io(self.other.path(parent), f'read -q -P 1 {2 << 20} 65536')
        self.assertEqual([], image.snapshot_list(self.other.path(parent)))
        self.driver.delete_volume(clone)
        self.assertEqual([], self.files())

    def test_refused(self) -> None:
        volume = self.volume()
        self.snapshot(volume)
        error = self.assertRaises(
            cinder_exception.InvalidVolume,
            self.driver.migrate_volume,
            self.context,
            volume,
            self.other.host(),
        )
        self.assertIn('has snapshots, which do not move with it', str(error))
        elsewhere = {
            'host': 'x@lvm#lvm',
            'capabilities': {'location_info': 'LVMVolumeDriver:x:vg:default:0'},
        }
        self.assertEqual((False, None), self.driver.migrate_volume(self.context, volume, elsewhere))
        hostile = self.other.host()
        hostile['capabilities']['pcow_migration_address'] = '-oProxyCommand=true'
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException,
            self.driver.migrate_volume,
            self.context,
            self.volume(),
            hostile,
        )
        self.assertIn('is no address of a host', str(error))
        self.assertEqual([], self.other.entries())

    def test_the_other_host_is_away(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 3)
        self.other.down()
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException,
            self.driver.migrate_volume,
            self.context,
            volume,
            self.other.host(),
        )
        self.assertIn('No route to host', str(error))
        self.check_content(volume, {0: 3})
        self.other.up()
        self.migrate(volume)
        self.assertEqual([f'{volume.name}.pcow'], self.other.entries())

    def test_the_other_host_ends_early(self) -> None:
        """When more was to be sent than it has read: it is said what it says, and nobody waits for
        ever.
        """
        volume = self.volume()
        self.write(volume, 0, 3, length=32 << 20)
        self.other.script(
            'case "$*" in *" --discard "*) exit ;; esac; head -c 100 >/dev/null; echo "no '
            'receiver" >&2; exit 1'
        )
        with eventlet.Timeout(60):
            error = self.assertRaises(
                cinder_exception.VolumeBackendAPIException,
                self.driver.migrate_volume,
                self.context,
                volume,
                self.other.host(),
            )
        self.assertIn('no receiver', str(error))
        self.check_content(volume, {0: 3})

    def test_no_room_there(self) -> None:
        volume = self.volume()
        self.write(volume, 0, 3)
        with self.other.registry() as pools:
            pools.set('away', draining=True)
        error = self.assertRaises(
            cinder_exception.VolumeBackendAPIException,
            self.driver.migrate_volume,
            self.context,
            volume,
            self.other.host(),
        )
        self.assertIn('takes nothing new', str(error))
        self.check_content(volume, {0: 3})
        self.assertEqual([], self.other.entries())

    def leave_a_clone(self, volume: Any) -> None:
        """On what an image on the other host has been."""
        image.snapshot_create(self.other.path(volume), 'clone-x')
        device.create_on(self.other.pool, 'volume-x', volume.name, base_snapshot='clone-x')

    def refuse(self, volume: Any) -> str:
        return str(
            self.assertRaises(
                cinder_exception.VolumeBackendAPIException,
                self.driver.migrate_volume,
                self.context,
                volume,
                self.other.host(),
            )
        )

    def test_what_clones_need_there_is_not_the_volume(self) -> None:
        volume = self.volume()
        self.migrate(volume)
        self.leave_a_clone(volume)
        self.assertFalse(trash.delete_image(self.other.pool, volume.name))
        self.assertIn('no image', self.refuse(volume))

    def test_what_was_deleted_there_is_not_the_volume(self) -> None:
        """The deletion was killed when it had been noted, before what clones need was sealed."""
        volume = self.volume()
        self.migrate(volume)
        self.leave_a_clone(volume)
        trash._mark(self.other.pool, trash.Mark(volume.name))
        self.assertIn('no image', self.refuse(volume))

    def test_what_clones_need_there_is_in_the_way(self) -> None:
        """Of an earlier stay on that host."""
        volume = self.volume()
        self.write(volume, 0, 3)
        with tempfile.TemporaryDirectory() as directory:
            saved = shutil.copy(self.path(volume), directory)
            self.migrate(volume)
            self.leave_a_clone(volume)
            shutil.copy(saved, self.path(volume))
        self.assertIn(f'still has what clones of {volume.name} need', self.refuse(volume))
        self.check_content(volume, {0: 3})


class KilledMigrationTest(test_kill.KillCase):
    """As the others: killed after parts of its time."""

    def test_migrate_to_another_host(self) -> None:
        other = TwoHosts(self)

        def prepare() -> Any:
            volume = self.volume()
            self.write(volume, 0, 6)
            return volume

        def afterwards(volume: Any) -> None:
            self.driver.update_provider_info([volume], [])  # as the manager does when it starts
            self.assertEqual(1, self.exists(volume) + os.path.exists(other.path(volume)))
            self.assertEqual(
                (True, None), self.driver.migrate_volume(self.context, volume, other.host())
            )
            self.io(other.path(volume), f'read -q -P 6 {2 << 20} 65536')
            self.assertEqual([f'{volume.name}.pcow'], other.entries())
            self.driver.delete_volume(volume)  # the database still has it here
            self.assertEqual([], other.entries())

        self.each_kill(
            prepare,
            lambda volume: self.driver.migrate_volume(self.context, volume, other.host()),
            afterwards,
        )

    def test_migrate_to_another_host_beside_a_clone(self) -> None:
        other = TwoHosts(self)

        def afterwards(subject: Any) -> None:
            volume, clone = subject
            for _time in range(2):
                self.driver.update_provider_info([volume, clone], [])
                self.assertEqual(
                    (True, None), self.driver.migrate_volume(self.context, volume, other.host())
                )
                self.io(other.path(volume), f'read -q -P 7 {2 << 20} 65536')
            self.check_content(clone, {0: 6})
            self.driver.delete_volume(volume)  # the database still has it here
            self.assertEqual([], other.entries())
            self.driver.delete_volume(clone)

        self.each_kill(
            self.cloned,
            lambda subject: self.driver.migrate_volume(self.context, subject[0], other.host()),
            afterwards,
        )


class StreamTest(base.PcowTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.source = device.create(self.pools['one'], 'web1', 64 << 20)
        self.io(self.source, f'write -q -P 7 {2 << 20} 65536')
        output = io.BytesIO()
        transfer.send(self.source, output)
        self.stream = output.getvalue()

    def receive(self, stream: bytes) -> str:
        return transfer.receive(self.pools['two'], 'web2', io.BytesIO(stream))

    def test_there_and_back(self) -> None:
        self.io(self.receive(self.stream), f'read -q -P 7 {2 << 20} 65536')
        self.assertLess(len(self.stream), 8 << 20)  # holes do not travel
        self.assertRaises(exception.ImageExists, self.receive, self.stream)
        self.assertTrue(transfer.discard(self.pools['two'], 'web2'))
        self.assertTrue(transfer.discard(self.pools['two'], 'web2'))
        self.assertEqual([], self.files('two'))

    def test_what_is_cut_or_changed_does_not_appear(self) -> None:
        for length in (
            0,
            5,
            60,
            100,
            len(self.stream) // 2,
            len(self.stream) - 33,
            len(self.stream) - 1,
        ):
            self.assertRaises(exception.TransferFailed, self.receive, self.stream[:length])
        line = self.stream.index(b'\n') + 1
        for position in (3, line + 2, line + 9, line + 5000, len(self.stream) - 1):
            changed = bytearray(self.stream)
            changed[position] ^= 0x40
            self.assertRaises(exception.TransferFailed, self.receive, bytes(changed))
        self.assertEqual([], self.files('two'))

    def test_a_stream_that_lies(self) -> None:
        told, body = self.stream[:-32].split(b'\n', 1)
        header = json.loads(told)
        for lie in (
            {'base': '../one/web1'},
            {'base': 'volume-of-another'},
            {'sealed': True},
            {'format': 'pcow-stream-0'},
            {'virtual': 32 << 20},
            {'virtual': 1 << 50},
            {'virtual': True},
            {'stored': header['stored'] - 1},
            {'stored': -1},
            {'stored': None},
        ):
            error = self.assertRaises(
                exception.TransferFailed, self.receive, self.signed(self.line(header | lie) + body)
            )
            self.assertIn('web2', str(error))
        for line in (b'[]\n', b'[' * 4000 + b'\n', b'x' * 5000, b'{"format": "pcow-stream-1"}\n'):
            self.assertRaises(exception.TransferFailed, self.receive, self.signed(line + body))
        # the header tells no base, the file has one: of another owner in this pool
        secret = device.create(self.pools['two'], 'secret', 64 << 20)
        crafted = os.path.join(self.directory, 'crafted.pcow')
        image.create_overlay(os.path.join(self.pools['two'].path, 'x.pcow'), secret)
        os.rename(os.path.join(self.pools['two'].path, 'x.pcow'), crafted)
        data = Path(crafted).read_bytes()
        pieces = (
            (0).to_bytes(8, 'big')
            + len(data).to_bytes(8, 'big')
            + data
            + len(data).to_bytes(8, 'big')
            + bytes(8)
        )
        error = self.assertRaises(
            exception.TransferFailed,
            self.receive,
            self.signed(self.line(header | {'stored': len(data)}) + pieces),
        )
        self.assertIn('not what the stream said', str(error))
        self.assertEqual(['secret.pcow'], self.files('two'))

    def test_room_is_set_aside_first(self) -> None:
        """While one image arrives, another has only the room that is left; what is refused has not
        stored a byte.
        """
        registry.PoolRegistry().set('two', overcommit=1.0)
        pool = registry.PoolRegistry().get('two')
        account = pool.account()
        size = (
            ((account.limit or 0) - account.provisioned)
            // 3
            * 2
            // units.SLAB_SIZE
            * units.SLAB_SIZE
        )
        header = self.line(json.loads(self.stream.split(b'\n', 1)[0]) | {'virtual': size})
        begun, wait = threading.Event(), threading.Event()

        class Slow(io.BytesIO):
            def read(self, length: int | None = -1) -> bytes:
                begun.set()  # of the first piece: the header has been read
                wait.wait(60)
                return super().read(length)

        with futures.ThreadPoolExecutor() as executor:
            first = executor.submit(transfer.receive, pool, 'first', Slow(header))
            self.assertTrue(begun.wait(60))
            self.assertRaises(
                exception.NoRoom, transfer.receive, pool, 'second', io.BytesIO(header + b'x')
            )
            self.assertEqual(['.first.pcow.part'], pool.entries())
            wait.set()
            self.assertRaises(exception.TransferFailed, first.result)
        self.assertRaises(
            exception.TransferFailed, transfer.receive, pool, 'second', io.BytesIO(header)
        )
        self.assertEqual(account.provisioned, pool.account().provisioned)

    @staticmethod
    def line(header: dict[str, Any]) -> bytes:
        return json.dumps(header).encode() + b'\n'

    @staticmethod
    def signed(stream: bytes) -> bytes:
        return stream + hashlib.sha256(stream).digest()

    def test_not_while_somebody_writes(self) -> None:
        with open(self.source, 'r+b') as writer:
            fcntl.fcntl(
                writer,
                fcntl.F_OFD_SETLK,
                struct.pack('hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 12288, 1, 0),
            )
            self.assertRaises(
                (exception.ImageInUse, exception.ToolFailed),
                transfer.send,
                self.source,
                io.BytesIO(),
            )
