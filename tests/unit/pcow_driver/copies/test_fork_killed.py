# SPDX-License-Identifier: Apache-2.0
"""Snapshots that forks and exports make for themselves in a pool: none stays for ever, however the
command ends.
"""

from collections.abc import Callable
import json
import os
from pathlib import Path
import signal
from typing import Any
from unittest import mock

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.copies import fork
from pcow_driver.health import garbage
from pcow_driver.images import image
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from tests.unit.pcow_driver import base
from tests.unit.pcow_driver.virt import test_domain


class _Guest(domain.Domain):
    """It runs, and its image does what QEMU would do; nothing has it open."""

    def active(self) -> bool:
        return True

    def snapshot_create(
        self,
        name: str,
        device: str | None = None,
        *,
        quiesce: bool = False,
        max_wait: int | None = None,
    ) -> None:
        image.snapshot_create(self.select(device).path, name)

    def snapshot_delete(self, name: str, device: str | None = None) -> int | None:
        return image.snapshot_delete(self.select(device).path, name)


class KilledTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        test_domain.record_libvirt(self)
        programs = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin'))
        self.configure(pcow_img=str(programs / 'pcow-img'))
        self.pool = registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.path = self.pool.create_image('vm', size=2 << 20)
        self.guest = _Guest(test_domain.RecordedDomain([self.path], True), 'vm')
        self.target = str(self.directory / 'export.raw')

    def snapshots(self) -> list[str]:
        return [one.name for one in image.snapshot_list(self.path)]

    def killed(self, function: Callable[..., Any], *args: Any, at: str) -> None:
        """Call it in a process that gets SIGKILL when it calls this function of the module
        ``image``.
        """
        process = os.fork()
        if process == 0:
            try:
                with mock.patch.object(
                    image, at, lambda *_args, **_kwargs: os.kill(os.getpid(), signal.SIGKILL)
                ):
                    function(*args)
            finally:
                os._exit(0)
        _pid, status = os.waitpid(process, 0)
        self.assertTrue(os.WIFSIGNALED(status))

    def find(self) -> list[garbage.Finding]:
        return [one for one in garbage.find(self.pool, None) if one.kind is garbage.Kind.SNAPSHOT]

    def test_export(self) -> None:
        self.killed(fork.export_domain, self.guest, self.target, 'raw', at='convert')
        (snapshot,) = self.snapshots()
        (found,) = self.find()
        self.assertEqual((self.path, True), (found.path, snapshot in found.reason))
        garbage.delete(self.pool, found)
        self.assertEqual(([], []), (self.snapshots(), self.find()))
        self.assertEqual(['vm.pcow'], self.pool.entries())

    def test_before_the_snapshot(self) -> None:
        self.killed(fork.export_domain, self.guest, self.target, 'raw', at='snapshot_create')
        for found in self.find():
            garbage.delete(self.pool, found)
        self.assertEqual(['vm.pcow'], self.pool.entries())

    def test_fork(self) -> None:
        self.killed(fork.fork_live, self.guest, 'new', at='create_overlay')
        self.assertEqual(['fork-new'], self.snapshots())
        trash.collect(self.pool)
        self.assertEqual([], self.snapshots())
        self.assertEqual(['vm.pcow'], self.pool.entries())

    def test_marks_of_somebody_else(self) -> None:
        """Whoever shares the pool may write there; the others' marks are collected all the same."""
        self.killed(fork.fork_live, self.guest, 'new', at='create_overlay')
        directory = os.path.join(self.pool.path, trash.DIRECTORY)
        hostile: tuple[object, ...] = (
            ['a' * 240, None],
            ['a\0b', None],
            ['../x', None],
            ['vm', '../x'],
            {},
            [None, None],
        )
        for number, text in enumerate(('[' * 4000, *map(json.dumps, hostile))):
            os.symlink(text, os.path.join(directory, f'-{number}'))
        trash.collect(self.pool)
        self.assertEqual([], self.snapshots())

    def test_fork_that_succeeds(self) -> None:
        """Its snapshot is the owner's from then on."""
        fork.fork_live(self.guest, 'new')
        self.assertEqual([], trash.marks(self.pool))
        self.pool.delete_image('new')
        trash.collect(self.pool)
        self.assertEqual(['fork-new'], self.snapshots())

    def test_a_snapshot_of_this_name_is_somebodys(self) -> None:
        image.snapshot_create(self.path, 'fork-new')
        self.assertRaises(exception.ToolFailed, fork.fork_live, self.guest, 'new')
        self.assertEqual((['fork-new'], []), (self.snapshots(), trash.marks(self.pool)))

    def test_nobody_collects_it_while_it_is_read(self) -> None:
        seen = []

        def convert(*_args: Any, **_kwargs: Any) -> None:
            trash.collect(self.pool)
            self.assertEqual([], self.find())
            seen.extend(self.snapshots())

        nobody = exception.LibvirtFailed(uri='', reason='nobody answers')
        with (
            mock.patch.object(image, 'convert', convert),
            mock.patch.object(libvirt_host, 'connect', side_effect=nobody),
        ):
            fork.export_domain(self.guest, self.target, 'raw')
        self.assertEqual(1, len(seen))
        self.assertEqual(([], []), (self.snapshots(), trash.marks(self.pool)))

    def test_interrupted(self) -> None:
        """As by Ctrl-C: no program is run any more but those that clear up; also where there is no
        pool.
        """
        for directory in (self.pool.path, str(self.directory)):
            path = os.path.join(directory, 'other.pcow')
            image.create(path, 2 << 20)
            guest = _Guest(test_domain.RecordedDomain([path], True), 'vm')

            def convert(*_args: Any, **_kwargs: Any) -> None:
                interrupt._received.append(signal.SIGTERM)
                interrupt.check()

            with (
                mock.patch.object(interrupt, '_received', []),
                mock.patch.object(image, 'convert', convert),
            ):
                self.assertRaises(SystemExit, fork.export_domain, guest, self.target, 'raw')
            self.assertEqual((), image.info(path).snapshots, directory)

    def test_guest_that_stays_frozen(self) -> None:
        """The export is given up, and its snapshot does not stay; also where there is no pool."""
        other = str(self.directory / 'other.pcow')
        image.create(other, 2 << 20)
        for path in (self.path, other):
            guest = _Guest(test_domain.RecordedDomain([path], True), 'vm')

            def create(
                name: str, device: str | None = None, *, quiesce: bool = False, path: str = path
            ) -> None:
                image.snapshot_create(path, name)
                raise exception.StillFrozen(domain='vm', reason='cannot be thawed')

            with mock.patch.object(guest, 'snapshot_create', create):
                self.assertRaises(
                    exception.StillFrozen,
                    fork.export_domain,
                    guest,
                    self.target,
                    'raw',
                    quiesce=True,
                )
            self.assertEqual(([], []), (image.snapshot_list(path), trash.marks(self.pool)), path)

    def test_marks_that_cannot_be_made(self) -> None:
        """As for somebody who may read the image and use libvirt, and not write to the pool."""
        with mock.patch.object(
            trash,
            'mark_snapshot',
            side_effect=exception.PoolInvalid(path='p', reason='Permission denied'),
        ):
            fork.export_domain(self.guest, self.target, 'raw')
        self.assertTrue(os.path.exists(self.target))
        self.assertEqual([], self.snapshots())

    def test_marks_belong_to_whom_the_pool_does(self) -> None:
        """Whoever serves the pool reads and deletes what root marks."""
        if os.geteuid() != 0:
            self.skipTest('only root makes files for others')
        os.chown(self.pool.path, 1234, 4321)
        os.chmod(self.pool.path, 0o2770)
        self.killed(fork.export_domain, self.guest, self.target, 'raw', at='convert')
        status = os.stat(os.path.join(self.pool.path, trash.DIRECTORY))
        self.assertEqual(
            (1234, 4321, 0o770), (status.st_uid, status.st_gid, status.st_mode & 0o777)
        )
