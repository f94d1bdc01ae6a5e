# SPDX-License-Identifier: Apache-2.0
"""What was written is there after a power cut: the file first, then its name, then the
directory.
"""

from __future__ import annotations

import os
from pathlib import Path
import stat
import sys
from typing import Any
from unittest import mock

from pcow_driver.common import durable
from pcow_driver.common import tool
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base


class Watch:
    """The calls of a block that decide about what is durable."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def fsync(self, fd: int) -> None:
        self.seen.append(('fsync', os.readlink(f'/proc/self/fd/{fd}')))

    def replace(self, source: Any, target: Any, real: Any = os.replace) -> None:
        real(source, target)
        self.seen.append(('replace', str(target)))

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
