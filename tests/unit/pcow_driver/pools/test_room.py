# SPDX-License-Identifier: Apache-2.0
"""Whatever makes an image or enlarges one keeps to what the operator decided for the pool; pool and
images are real.
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import socket
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import fork
from pcow_driver.export import control_socket
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import policy
from pcow_driver.images import image
from pcow_driver.pools import provisioned
from pcow_driver.pools import registry
from pcow_driver.pools import room
from pcow_driver.templates import template
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_xml
from pcow_driver.vm import checkpoint
from tests.unit.pcow_driver import base

MIB = units.MIB

# of which the state is that large: of the next one 4 MiB are reckoned
CHECKPOINT = {
    'name': 'c',
    'date-sec': 1795812953,
    'date-nsec': 0,
    'parent': None,
    'current': True,
    'state-size': 0,
    'data-size': 0,
    'shared-size': 0,
    'delete-frees': 0,
}


class RoomTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.config = self.directory / 'pcow.conf'
        self.config.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npcow_img = {programs}/pcow-img\n'
        )
        self.pools = registry.PoolRegistry()
        (self.directory / 'p').mkdir()
        subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=1g', 'none', self.directory / 'p'], check=True
        )
        self.addCleanup(subprocess.run, ['umount', '-l', self.directory / 'p'], check=True)
        self.pool = self.pools.create('p', str(self.directory / 'p'))
        self.path = self.pool.create_image('vm', size=8 * MIB)
        image.snapshot_create(self.path, 's')
        self.source = self.directory / 'source.raw'
        self.source.write_bytes(b'data'.ljust(2 * MIB))

    def leave(self, size: int) -> None:
        """Let no more than one image of this virtual size be provisioned."""
        now = self.pool.account()
        wanted = now.provisioned + provisioned.whole_size(size) + 4096
        self.pool = self.pools.set('p', overcommit=wanted / (now.total - now.fixed))

    def drain(self) -> None:
        self.pool = self.pools.set('p', draining=True)

    def resize(self, size: int, *args: str) -> str:
        """What pcowctl says of it."""
        done = subprocess.run(
            [
                sys.executable,
                '-m',
                'pcow_driver.cli.app',
                '--config-file',
                str(self.config),
                'image',
                'resize',
                *args,
                'p/vm',
                str(size),
            ],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stderr

    def test_fork(self) -> None:
        self.leave(6 * MIB)
        self.assertRaises(exception.NoRoom, fork.fork, self.path, 's', 'fork')
        self.assertEqual(['vm.pcow'], self.pool.entries())
        self.leave(8 * MIB)
        fork.fork(self.path, 's', 'fork')
        self.drain()
        self.assertRaises(exception.PoolDraining, fork.fork, self.path, 's', 'another')
        self.assertEqual(['fork.pcow', 'vm.pcow'], self.pool.entries())

    def test_fork_of_a_snapshot_of_another_size(self) -> None:
        image.resize(self.path, 16 * MIB)
        self.leave(8 * MIB)
        fork.fork(self.path, 's', 'fork')

    def test_fork_where_no_pool_is_known(self) -> None:
        self.drain()
        self.pools.remove('p', forget=True)
        fork.fork(self.path, 's', 'fork')

    def test_template(self) -> None:
        self.drain()
        self.assertRaises(
            exception.PoolDraining, template.build, self.pool, 't', '/no/such/file', 'raw'
        )
        self.pool = self.pools.set('p', draining=False)
        self.leave(0)
        self.assertRaises(exception.NoRoom, template.build, self.pool, 't', str(self.source), 'raw')
        self.leave(8 * MIB)
        template.build(self.pool, 't', str(self.source), 'raw')  # promises nothing

    def test_export_into_the_pool(self) -> None:
        self.drain()
        target = self.pool.image_path('t')
        self.assertRaises(exception.PoolDraining, fork.export, self.path, target, 'pcow')
        self.assertEqual(['vm.pcow'], self.pool.entries())
        fork.export(self.path, str(self.directory / 't.pcow'), 'pcow')

    def guest(self, meanwhile: Any) -> domain.Domain:
        """One that runs on the image; ``meanwhile`` is called as its agent, or its QEMU, works."""

        class Guest(domain.Domain):
            name, uuid = 'vm', '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'

            def __init__(self) -> None:
                pass

            def active(self) -> bool:
                return True

            def ram(self) -> str:
                return self.path

            def images(self) -> list[domain.Image]:
                return [libvirt_xml.Nvdimm(path=self.path, size=1, alias='a')]

            def writable(self) -> list[str]:
                return [self.path]

            @contextlib.contextmanager
            def _quiet(self) -> Iterator[None]:
                meanwhile()
                yield

            def qmp(self, command: str, **arguments: str | int) -> Any:
                if command.startswith('query-'):
                    return [CHECKPOINT] if command == 'query-pcow-checkpoints' else []
                meanwhile()
                return {'pause': 0, 'durable': 0, 'state-size': 0}

            path = self.path

        return Guest()

    def test_snapshot_of_a_guest_that_is_slow(self) -> None:
        """Others work on the pool meanwhile, and get nothing of what the guest can fill then."""
        self.leave(16 * MIB)
        seen = []

        def look() -> None:
            def lock() -> None:
                with self.pool.lock():
                    entered.set()

            entered = threading.Event()
            threading.Thread(target=lock, daemon=True).start()
            seen.append(entered.wait(5))
            self.assertRaises(exception.NoRoom, self.pool.check_room, 16 * MIB)

        self.guest(look).snapshot_create('s1', quiesce=True)
        checkpoint.take(self.guest(look), 's2')
        ours, servers = socket.socketpair()

        def answer() -> None:
            with servers:
                servers.recv(4096)
                look()
                servers.sendall(b'ok\n')

        server = threading.Thread(target=answer)
        server.start()
        with ours:
            ours.settimeout(60)
            control_socket.Server(self.path, ours).snapshot_create('s3')
        server.join()
        self.assertEqual([True] * 4, seen)
        self.pool.check_room(16 * MIB)
        self.leave(0)
        self.assertRaises(exception.NoRoom, self.guest(look).snapshot_create, 's1', quiesce=True)

    def test_state_of_a_guest(self) -> None:
        """It has room beside what the guest can fill once more: 4 MiB, and half more than that of
        the last one.
        """
        image.resize(self.path, 16 * MIB)
        guest: Any = self.guest(lambda: None)
        for size, needed in ((0, 4 * MIB), (4 * MIB, 10 * MIB)):
            with mock.patch.dict(CHECKPOINT, {'state-size': size}):
                self.pool = self.pools.set('p', overcommit=1.0)
                frozen = self.pool.check_snapshot_room('vm.pcow')
                for left, takes in ((needed - 4096, False), (needed, True)):
                    now = self.pool.account()
                    wanted = now.provisioned + frozen + left + 64  # it is rounded
                    self.pools.set('p', overcommit=wanted / (now.total - now.fixed))
                    if takes:
                        checkpoint.take(guest, 's')
                    else:
                        self.assertRaises(exception.NoRoom, checkpoint.take, guest, 's')

    def test_last_moment_of_a_guest(self) -> None:
        """What QEMU keeps for it: 4 MiB for a state, and a slab. It is set aside until QEMU has it,
        and a protection for which there is no room is refused. One that was protected gets what the
        file system has.
        """
        seen = []

        def look() -> None:
            seen.append(self.pool.account().building)

        guest: Any = self.guest(look)
        written = mock.Mock()
        self.leave(0)
        with self.assertLogs('pcow_driver.fixation.at_signal', 'WARNING') as said:
            at_signal.keep(guest, 'last-')
        self.assertIn('6 MiB more cannot be provisioned', said.output[0])
        self.assertEqual([0], seen)
        seen.clear()
        with (
            mock.patch.object(domain.Domain, 'set_metadata', written),
            mock.patch.object(domain.Domain, 'metadata', return_value=None),
            mock.patch.object(domain.Domain, 'autostart', return_value=False),
        ):
            error = self.assertRaises(exception.NoRoom, policy.put, guest, policy.Policy())
            self.assertIn('6 MiB more cannot be provisioned', str(error))
            written.assert_not_called()
            policy.put(guest, policy.Policy(on_shutdown=policy.STOP))
            self.leave(2 * MIB)
            policy.put(guest, policy.Policy())
        self.assertEqual((2, []), (written.call_count, seen))
        at_signal.keep(guest, 'last-')
        self.assertEqual(([6 * MIB], 0), (seen, self.pool.account().building))

    def test_snapshot_of_a_guest_whose_image_has_a_long_name(self) -> None:
        """As earlier versions allowed."""
        path = self.pool.image_path('x' * 235)
        os.rename(self.path, path)
        self.path = path
        self.leave(16 * MIB)
        self.guest(lambda: None).snapshot_create('s1')

    def test_what_is_given_up_for_a_moment(self) -> None:
        entered = threading.Event()

        def reserve() -> None:
            with self.pool.lock():
                entered.set()

        other = threading.Thread(target=reserve)
        with room.kept(self.path):
            other.start()
            self.assertFalse(entered.wait(0.3))
        other.join()
        self.assertTrue(entered.is_set())
        self.pools.remove('p', forget=True)
        with room.kept(self.path):  # of no pool that is known
            pass

    def test_resize(self) -> None:
        self.leave(8 * MIB)
        self.assertIn('provisioned', self.resize(18 * MIB))
        self.assertEqual('', self.resize(16 * MIB))
        self.assertEqual(16 * MIB, image.info(self.path).virtual_size)
        self.drain()
        self.assertIn('takes nothing new', self.resize(18 * MIB))
        self.assertEqual('', self.resize(8 * MIB, '--shrink'))
        self.assertEqual(8 * MIB, image.info(self.path).virtual_size)

    def test_resized_image_that_cannot_be_read(self) -> None:
        """Its size counts as it is now, though nobody has looked at the pool since."""
        self.assertEqual('', self.resize(64 * MIB))
        with open(self.path, 'r+b') as f:
            f.write(bytes(4096))
        self.assertGreaterEqual(self.pool.account().provisioned, 64 * MIB)
