# SPDX-License-Identifier: Apache-2.0
"""What was written is there after a power cut: the file first, then its name, then the
directory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import stat
import sys
from typing import Any
from unittest import mock

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.fixation import records
from pcow_driver.pools import list_cache
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from tests.unit.pcow_driver import base

SERVICE = 65534
UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'


class Watch:
    """The calls of a block that decide about what is durable."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def fsync(self, fd: int) -> None:
        self.seen.append(('fsync', os.readlink(f'/proc/self/fd/{fd}')))

    def replace(self, source: Any, target: Any, real: Any = os.replace) -> None:
        real(source, target)
        directory, name = os.path.split(target)
        self.seen.append(('replace', os.path.join(os.path.realpath(directory), name)))

    def check(self, test: base.TestCase, path: Path) -> None:
        (kind, file), *rest = self.seen[-3:]
        test.assertEqual(('fsync', str(path.parent)), (kind, os.path.dirname(file)))
        test.assertEqual(str([('replace', str(path)), ('fsync', str(path.parent))]), str(rest))


class DurableTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.watch = Watch()
        for name in ('fsync', 'replace'):
            patch = mock.patch(f'os.{name}', getattr(self.watch, name))
            patch.start()
            self.addCleanup(patch.stop)

    def test_replaced(self) -> None:
        path = self.directory / 'file'
        durable.replace(str(path), 'new')
        self.watch.check(self, path)
        self.assertEqual(('new', 0o640), (path.read_text(), stat.S_IMODE(path.stat().st_mode)))

    def test_list_of_pools(self) -> None:
        pools = registry.PoolRegistry()
        pools.create('p', str(self.directory / 'p'))
        self.watch.check(self, Path(pools.path))
        # the marker's name
        self.assertIn(('fsync', str(self.directory / 'p')), self.watch.seen)

    def test_nothing_is_left_of_what_fails(self) -> None:
        with mock.patch('os.replace', side_effect=OSError(28, 'full')):
            self.assertRaises(OSError, durable.replace, str(self.directory / 'file'), 'new')
        self.assertEqual([], os.listdir(self.directory))


class StateOfOthersTest(base.TestCase):
    """Root keeps its state in a directory that the group of the services may write to, as host
    setup of an earlier version made it.
    """

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid():
            self.skipTest('only root is led astray')
        self.state, self.elsewhere = self.directory / 'state', self.directory / 'elsewhere'
        for path in (self.state, self.elsewhere):
            path.mkdir()
        os.chown(self.state, 0, SERVICE)
        self.state.chmod(0o2775)
        self.victim = self.elsewhere / f'{UUID}.json'
        self.victim.write_text('precious')

    def lead_astray(self, name: str, owner: int = SERVICE) -> None:
        (self.state / name).symlink_to(self.elsewhere)
        os.chown(self.state / name, owner, owner, follow_symlinks=False)

    def check_elsewhere(self) -> None:
        self.assertEqual([self.victim.name], os.listdir(self.elsewhere))
        self.assertEqual('precious', self.victim.read_text())

    def test_links_in_place_of_directories(self) -> None:
        for name in ('scrubs', 'protected', 'lists'):
            self.lead_astray(name)
        self.assertRaises(exception.StateInvalid, scrubs.write, UUID, scrubs.Scrub())
        self.assertRaises(
            exception.StateInvalid,
            records.write,
            '9e107d9d-372b-4bb6-9c9a-0f1c5d2e7a10',
            records.Record(records.State.RUNS),
        )
        self.assertEqual(scrubs.Scrub(), scrubs.read(UUID))
        scrubs.forget(UUID)
        list_cache.forget(UUID)
        path = str(self.state / 'protected' / self.victim.name)
        self.assertRaises(OSError, durable.remove, path)
        self.assertRaises(OSError, durable.read, path)
        self.assertRaises(OSError, durable.replace, path, 'text')
        self.check_elsewhere()

    def test_files_of_others(self) -> None:
        """Nobody waits for a FIFO, and what a link leads to is not taken for state."""
        place = self.state / 'scrubs'
        place.mkdir()
        for path in (place / f'{UUID}.json', self.state / 'pools.json'):
            for made in (lambda path: os.mkfifo(path), lambda path: path.symlink_to(self.victim)):
                made(path)
                os.chown(path, SERVICE, SERVICE, follow_symlinks=False)
                error = self.assertRaises(OSError, durable.read, str(path))
                self.assertEqual(str(path), error.filename)
                self.assertEqual(scrubs.Scrub(), scrubs.read(UUID))
                if path.parent == self.state:
                    self.assertRaises(exception.StateInvalid, registry.PoolRegistry().list)
                path.unlink()
        self.check_elsewhere()

    def test_links_of_root(self) -> None:
        """They lead where they did."""
        self.lead_astray('scrubs', 0)
        known = scrubs.Scrub(begun='2026')
        scrubs.write(UUID, known)
        self.assertEqual(known, scrubs.read(UUID))
        self.assertEqual(json.loads(self.victim.read_text())['begun'], '2026')
        self.state.rename(self.directory / 'real')
        self.state.symlink_to('real')
        self.assertEqual(known, scrubs.read(UUID))
        registry.PoolRegistry().create('p', str(self.directory / 'p'))
        self.assertEqual(['p'], [one.name for one in registry.PoolRegistry().list()])
        scrubs.forget(UUID)
        self.assertEqual([], os.listdir(self.elsewhere))

    def test_removed(self) -> None:
        path = self.state / 'file'
        path.touch()
        durable.remove(str(path))
        durable.remove(str(path))
        self.assertFalse(path.exists())
        self.assertRaises(FileNotFoundError, durable.read, str(path))
        durable.remove(str(self.state / 'none/file'))


class BuildDirTest(base.TestCase):
    def test_installed(self) -> None:
        """Programs are not looked for in site-packages/build/bin, nor in bin beside the
        environment: who owns /opt/bin?
        """
        installed = self.directory / 'opt/venv/lib/python3/site-packages/pcow_driver/common/tool.py'
        for directory in ('opt/bin', 'opt/venv/lib/python3/site-packages/build/bin'):
            (self.directory / directory).mkdir(parents=True)
        with (
            mock.patch.object(tool, '__file__', str(installed)),
            mock.patch.object(sys, 'prefix', str(self.directory / 'opt/venv')),
        ):
            self.assertEqual([], tool.build_dirs())
