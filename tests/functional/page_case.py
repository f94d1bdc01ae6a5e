# SPDX-License-Identifier: Apache-2.0
"""What the tests of pages share: a host of its own in which their lines are typed."""

import contextlib
import json
import os
from pathlib import Path
import time
from typing import Any
import unittest

from pcow_driver.common import units
from tests.functional import own_host
from tests.functional import pages

OFFSET = 2 * units.MIB  # of the data in an image of a template
OLD = 7200  # seconds after which nobody is writing any more


class PageTestCase(unittest.TestCase):
    copies: tuple[str, ...] = ()  # further trees of the machine that the host has as its own

    def setUp(self) -> None:
        super().setUp()
        self.host = own_host.OwnHost(copies=self.copies)
        self.addCleanup(self.host.close)
        self.shell = self.host.shell()

    def do(self, line: str, exit_code: int | None = 0) -> str:
        """What is on no page, or what another test types."""
        return self.shell.type(line, exit_code)

    def ctl(self, words: str) -> Any:
        """What pcowctl prints, as JSON."""
        said = self.do(f'pcowctl {words} -f json 2>/dev/null')
        return json.loads(said)

    def refused(self, words: str) -> str:
        return self.do(f'pcowctl {words}', 1)

    def size(self, pool: str) -> int:
        """Bytes of its file system."""
        return int(self.do(f'df -B1 --output=size /var/lib/pcow/pools/{pool} | tail -n 1'))

    def make_image(self, path: str, size: str = '16M') -> None:
        self.do(f'pcow-img create -q {path} {size}')

    def make_disk(self, name: str, size: int = 8 * units.MIB) -> Path:
        """A qcow2 disk with some data."""
        raw = self.host.home / f'{name}.raw'
        with raw.open('wb') as file:
            file.truncate(size)
            file.write(b'\x11' * 65536)
            file.seek(units.MIB)
            file.write(b'\x22' * 65536)
        self.do(f'qemu-img convert -f raw -O qcow2 {raw.name} {name}')
        raw.unlink()
        return self.host.home / name

    def make_template(self, pool: str, name: str) -> None:
        self.make_disk(f'{name}.qcow2')
        self.do(f'pcowctl template build --source-format qcow2 {name}.qcow2 {pool}/{name}')

    def make_old(self, *paths: Path) -> None:
        for path in paths:
            when = time.time() - OLD
            os.utime(path, (when, when))

    def names(self, pool: str) -> set[str]:
        """Of its images."""
        return {str(row['name']) for row in self.ctl(f'image list {pool}')}


@contextlib.contextmanager
def typed(name: str, not_typed: dict[str, str] | None = None, only: str | None = None) -> Any:
    """The page; all of its lines were typed at the end, or are named."""
    page = pages.Page(name, not_typed, only)
    yield page
    page.check()
