# SPDX-License-Identifier: Apache-2.0
"""How often the file system below a pool commits its journal, and which thread waits for it."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import re
import socket
import subprocess
from typing import IO
from typing import Any

from tests.vm import machine

_EXT4 = Path('/proc/fs/jbd2')
_XFS = Path('/sys/fs/xfs')
_LOG = '/dev/log'
_TRACING = Path('/sys/kernel/tracing')
# A store to a mapping with MAP_SYNC that changes the file's extents commits them by way of the file
# system's fsync.
_EVENTS = {'ext4': 'ext4/ext4_sync_file_enter', 'xfs': 'xfs/xfs_file_fsync'}
_TRACE_LINE = re.compile(r'^\s*(.+)-\d+\s+(?:\(.*?\)\s+)?\[\d+\]', re.MULTILINE)
_SLABS = 8  # stored to in every step, all pages
_PAGES = _SLABS * 512
_PREPARED = 16
_RAW_SLABS = 1


def writes(place: machine.Place) -> int:
    """How often the pool's file system has written its journal.

    :raises Failure: it is not mounted
    """
    for line in Path('/proc/mounts').read_text().splitlines():
        device, directory, kind = line.split()[:3]
        if directory == str(place.pool):
            name = os.path.basename(device)
            text = (
                next(_EXT4.glob(f'{name}-*/info'))
                if kind == 'ext4'
                else _XFS / name / 'stats/stats'
            ).read_text()
            # ext4: "N transactions (...)", XFS: "log N ..." of several lines
            match = re.search(r'^(\d+) transactions|^log (\d+) ', text, re.MULTILINE)
            if match:
                return int(match[1] or match[2])
    raise machine.Failure(
        f'{place.pool} is not mounted, or its file system does not count what it writes to its '
        f'journal'
    )


@contextlib.contextmanager
def traced(kind: str) -> Iterator[dict[str, int]]:
    """Afterwards: how often threads of which name made the file system commit a file."""
    if not (_TRACING / 'events').exists():
        machine.run('mount', '-t', 'tracefs', 'tracefs', _TRACING)
    enable = _TRACING / 'events' / _EVENTS[kind] / 'enable'
    (_TRACING / 'trace').write_text('')
    enable.write_text('1')
    found: dict[str, int] = {}
    try:
        yield found
    finally:
        enable.write_text('0')
    for match in _TRACE_LINE.finditer((_TRACING / 'trace').read_text()):
        found[match[1]] = found.get(match[1], 0) + 1


class _Stores:
    """Talks to dax_stores."""

    def __init__(self, place: machine.Place, kind: str, *arguments: object) -> None:
        self._place = place
        self._kind = kind
        self._process = subprocess.Popen(
            [str(place.binaries / 'dax_stores'), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise machine.Failure('dax_stores has no such pipe')
        return pipe

    def _answer(self) -> str:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            raise machine.Failure(f'dax_stores: {self._pipe(self._process.stderr).read()}')
        return line.strip()

    def say(self, command: str) -> str:
        self._pipe(self._process.stdin).write(command + '\n')
        self._pipe(self._process.stdin).flush()
        return self._answer()

    def count(self, command: str, pages: int) -> dict[str, Any]:
        """What a command makes the file system do."""
        before = writes(self._place)
        with traced(self._kind) as threads:
            answer = self.say(command)
        return {
            'pages': pages,
            'journal-writes': writes(self._place) - before,
            'answer': answer,
            'commits-by-storing-thread': threads.get('dax_stores', 0),
            'commits-ahead': threads.get('pcow-ahead', 0),
        }

    def end(self) -> None:
        """:raises Failure: it did not end well"""
        _output, errors = self._process.communicate(timeout=machine.COMMAND_SECONDS)
        if self._process.returncode:
            raise machine.Failure(f'dax_stores: {errors}')

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _check_left_alone(image: Path) -> None:
    """xfs_fsr says what it does to the system's log.

    :raises Failure: it does something
    """
    said = ''
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as log,
        contextlib.suppress(BlockingIOError),
    ):
        log.bind(_LOG)
        try:
            machine.run('xfs_fsr', '-v', image)
        finally:
            os.unlink(_LOG)
        while True:
            said += log.recv(4096).decode() + '\n'
    if "marked as don't defrag" not in said:
        raise machine.Failure(f'xfs_fsr does not leave alone an image that is mapped: {said}')


def commits(place: machine.Place, kind: str) -> dict[str, Any]:
    """Commits of the journal for first touches and copy-on-write: who stores waits for none, if
    slabs are prepared.

    That holds as long as nobody moves blocks of the file: ext4 does not with DAX, on XFS xfs_fsr
    has to leave the image alone.
    """
    directory = place.pool / 'journal'
    directory.mkdir()
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> _Stores:
            stores = _Stores(place, kind, *arguments)
            stack.callback(stores.kill)
            return stores

        raw = start('raw', directory / 'raw', _RAW_SLABS)
        figures['raw file, never written'] = raw.count(f'store 0 {_RAW_SLABS} 1', _RAW_SLABS * 512)
        figures['raw file, second time'] = raw.count(f'store 0 {_RAW_SLABS} 2', _RAW_SLABS * 512)
        raw.end()
        stores = start('image', directory / 'unprepared.pcow', _SLABS, 0)
        figures['first touch, nothing prepared'] = stores.count(f'store 0 {_SLABS} 1', _PAGES)
        stores.end()
        stores = start('image', directory / 'prepared.pcow', 4 * _SLABS, _PREPARED)
        stores.say('wait')
        figures['first touch'] = stores.count(f'store 0 {_SLABS} 1', _PAGES)
        stores.say('wait')
        figures['second touch'] = stores.count(f'store 0 {_SLABS} 2', _PAGES)
        figures['snapshot'] = stores.count('snapshot one', 0)
        stores.say('wait')
        figures['copy-on-write'] = stores.count(f'store 0 {_SLABS} 3', _PAGES)
        stores.say('wait')
        if kind == 'xfs':
            _check_left_alone(directory / 'prepared.pcow')
        stores.end()
        machine.run(place.binaries / 'pcow-img', 'check', directory / 'prepared.pcow')
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    if figures['raw file, never written']['journal-writes'] < _RAW_SLABS * 256:
        raise machine.Failure(
            f'stores to unwritten blocks commit nothing here, so that the count says nothing: '
            f'{figures}'
        )
    for what in ('first touch', 'second touch', 'copy-on-write'):
        if figures[what]['commits-by-storing-thread']:
            raise machine.Failure(
                f'{what}: the storing thread waited for commits of the journal: {figures}'
            )
    if figures['first touch, nothing prepared']['journal-writes'] > _PAGES // 8:
        raise machine.Failure(f'without prepared slabs the journal is written too often: {figures}')
    return figures
