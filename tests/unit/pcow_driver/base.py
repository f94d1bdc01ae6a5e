# SPDX-License-Identifier: Apache-2.0
"""Base of the unit tests: a configuration and a state directory of their own."""

import collections
from collections.abc import Iterator
import contextlib
import ctypes
import importlib.machinery
import importlib.util
import os
from pathlib import Path
import struct
import subprocess
import sys
from types import ModuleType
from typing import Any

import fixtures
from oslo_config import fixture as config_fixture
from oslotest import base

from pcow_driver.common import conf
from pcow_driver.common import units
from pcow_driver.images import protection

# oslotest: show the log of tests that fail, not of all
os.environ.setdefault('OS_LOG_CAPTURE', '1')

_IN_OPEN, _IN_Q_OVERFLOW = 0x20, 0x4000
_DATA = 3 * units.SLAB_SIZE  # where that of an image begins: behind the metadata and its mirror

TOP = Path(__file__).resolve().parents[3]


def load_script(path: Path) -> ModuleType:
    """A Python program without a suffix, as a module; nothing is written beside it."""
    name = 'script_' + path.name.replace('-', '_')
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    dont_write = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = dont_write
    return module


def flip(path: str) -> None:
    """A bit of an image: of the first page of its data that is no zeros."""
    with protection.lifted(path), open(path, 'r+b') as f:
        at = f.seek(_DATA)
        while not any(page := f.read(4096)):
            assert page
            at += 4096
        f.seek(at)
        f.write(bytes([page[0] ^ 1]))


@contextlib.contextmanager
def opened(path: str, program: Path) -> Iterator[None]:
    """Somebody has an image open for writing meanwhile, as QEMU has; ``program`` is pcow-io."""
    with subprocess.Popen(
        [program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write('read 0 4k\n')
        process.stdin.flush()
        process.stdout.readline()
        yield
        process.stdin.close()


@contextlib.contextmanager
def count_opened(directory: str) -> Iterator[collections.Counter[str]]:
    """How often which files of a directory are opened meanwhile, by anybody (inotify(7))."""
    libc, head = ctypes.CDLL(None, use_errno=True), struct.Struct('iIII')
    queue = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if queue < 0 or libc.inotify_add_watch(queue, os.fsencode(directory), _IN_OPEN) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), directory)
    found: collections.Counter[str] = collections.Counter()
    try:
        yield found
        with contextlib.suppress(BlockingIOError):
            while events := os.read(queue, 1 << 16):
                at = 0
                while at < len(events):
                    _, mask, _, length = head.unpack_from(events, at)
                    assert not mask & _IN_Q_OVERFLOW
                    name = events[at + head.size : at + head.size + length].rstrip(b'\0')
                    if name:
                        found[os.fsdecode(name)] += 1
                    at += head.size + length
    finally:
        os.close(queue)


class TestCase(base.BaseTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(self.useFixture(fixtures.TempDir()).path)
        self.configuration = self.useFixture(config_fixture.Config(conf.CONF))
        conf.CONF([], project='pcow', default_config_files=[])
        self.configure(
            state_path=str(self.directory / 'state'),
            conversion_dir=str(self.directory),
            # or the directory could not be deleted afterwards
            protect_templates=False,
        )

    def configure(self, **options: Any) -> None:
        self.configuration.config(group='pcow', **options)

    def script(self, name: str, text: str) -> str:
        """An executable file of this name; its path."""
        path = self.directory / name
        path.write_text(text, encoding='utf-8')
        path.chmod(0o755)
        return str(path)
