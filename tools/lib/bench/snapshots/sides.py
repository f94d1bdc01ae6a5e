# SPDX-License-Identifier: Apache-2.0
"""The two sides of the comparison: the same writes and the same snapshot operations on a qcow2 and
on a pcow image.

Each operation is timed twice: as a command, from start to end, and inside a process that has the
image open, as a virtual machine has it.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
from pathlib import Path
import socket
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Protocol
from typing import Self

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units

OPERATIONS = ('create', 'revert', 'delete')
EXTENT = 2 * units.MIB  # what is written at a time
_SECONDS = 600.0
_START_SECONDS = 60.0
_OPTIONS = {'create': '-c', 'revert': '-a', 'delete': '-d'}


@dataclasses.dataclass(frozen=True)
class Work:
    """What is done on both sides; all sizes in bytes."""

    directory: Path
    virtual_size: int
    cluster_size: int
    # before the first snapshot, spread over the whole image
    written: int
    changed: int  # between two operations
    rounds: int

    def extents(self, amount: int, pattern: int) -> list[tuple[int, int, int]]:
        """(offset, length, byte) of writes that are spread evenly."""
        count = max(1, amount // EXTENT)
        stride = self.virtual_size // max(1, self.written // EXTENT) // EXTENT * EXTENT
        step = max(1, self.written // EXTENT // count)
        return [(number * step * stride, EXTENT, pattern) for number in range(count)]


Times = dict[str, list[float]]  # seconds of each round, by operation


def command(*words: str) -> float:
    """Run a program and return how long it took, in seconds.

    Not with :func:`tool.run`, which takes longer for itself than a command on a pcow image.

    :raises ToolFailed:
    """
    begun = time.perf_counter()
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        close_fds=False,
    )
    took = time.perf_counter() - begun
    if done.returncode:
        raise exception.ToolFailed(
            tool=Path(words[0]).name, exit_code=done.returncode, message=done.stderr.strip()
        )
    return took


class Session(Protocol):
    """A process that has an image open."""

    def write(self, extents: list[tuple[int, int, int]]) -> None: ...

    def snapshot(self, operation: str) -> float: ...

    def close(self) -> None: ...


class Side:
    """One format.  ``session`` opens the image, ``program`` works on it when nobody has it open."""

    name = ''

    def __init__(self, work: Work) -> None:
        self.work = work
        self.path = work.directory / f'image.{self.name}'

    def program(self) -> str:
        raise TypeError(type(self).__name__)

    def create(self) -> None:
        raise TypeError(type(self).__name__)

    def session(self) -> Session:
        raise TypeError(type(self).__name__)

    def command_times(self) -> Times:
        """Seconds of the commands; ``list`` is starting, opening and ending alone, ``start`` a
        program that does nothing.
        """
        times: Times = {operation: [] for operation in (*OPERATIONS, 'list', 'start')}
        for number in range(self.work.rounds):
            for operation in OPERATIONS:
                times[operation].append(
                    command(self.program(), 'snapshot', _OPTIONS[operation], 's', str(self.path))
                )
                times['list'].append(command(self.program(), 'snapshot', '-l', str(self.path)))
                times['start'].append(command('/bin/true'))
                self._change(number)
        return times

    def _change(self, number: int) -> None:
        with contextlib.closing(self.session()) as session:
            session.write(self.work.extents(self.work.changed, 2 + number % 200))

    def session_times(self, session: Session) -> Times:
        times: Times = {operation: [] for operation in OPERATIONS}
        with contextlib.closing(session):
            # all of it is in use by this process, as in a VM that has run for a while
            session.write(self.work.extents(self.work.written, 1))
            for number in range(self.work.rounds):
                for operation in OPERATIONS:
                    times[operation].append(session.snapshot(operation))
                    session.write(self.work.extents(self.work.changed, 2 + number % 200))
        return times

    def open_times(self) -> Times:
        """In a process that has the image open."""
        return self.session_times(self.session())

    def all_times(self) -> dict[str, Times]:
        """Times of each way.

        ``open``: in a process that has the image open; ``mapped``: and all that was written is in
        the VM's memory map; ``returned``: as ``open``, until the pool has got back what was
        dropped; ``command``: from start to end of a program.
        """
        raise TypeError(type(self).__name__)

    def measure(self) -> dict[str, Times]:
        """Make the image, measure, and delete it."""
        with self.made():
            return self.all_times()

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """There is an image meanwhile."""
        try:
            self.create()
            yield
        finally:
            self.path.unlink(missing_ok=True)


class _PcowIo:
    """pcow-io, which maps the image as QEMU does unless told otherwise."""

    def __init__(self, path: Path, *options: str, reclaim: bool = False) -> None:
        program = Path(tool.find('pcow_img')).with_name('pcow-io')
        self._reclaim = reclaim
        self._process = subprocess.Popen(
            (str(program), *options, str(path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )

    def _tell(self, line: str) -> str:
        if self._process.stdin is None or self._process.stdout is None:
            raise exception.PcowError(reason='pcow-io has no pipes')
        self._process.stdin.write(line + '\n')
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def write(self, extents: list[tuple[int, int, int]]) -> None:
        for offset, length, pattern in extents:
            answer = self._tell(f'write -C -P {pattern} {offset} {length}')
            if not answer.startswith(f'{length},'):
                raise exception.ToolFailed(tool='pcow-io', exit_code=1, message=answer.strip())

    def _timed(self, *words: str) -> float:
        answer = self._tell(f'snapshot -t {" ".join(words)}').split()
        if answer[:1] != [words[0]]:
            raise exception.ToolFailed(tool='pcow-io', exit_code=1, message=' '.join(answer))
        return float(answer[1])

    def snapshot(self, operation: str) -> float:
        took = self._timed(operation, 's')
        return took + self._timed('reclaim') if self._reclaim else took

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.wait(_SECONDS):
            raise exception.ToolFailed(
                tool='pcow-io', exit_code=self._process.returncode, message='pcow-io failed'
            )
        if self._process.stdout is not None:
            self._process.stdout.close()


class Pcow(Side):
    name = 'pcow'

    def program(self) -> str:
        return tool.find('pcow_img')

    def create(self) -> None:
        tool.run(
            self.program(),
            'create',
            '-q',
            '-o',
            f'cluster_size={max(self.work.cluster_size, 4096)}',
            str(self.path),
            str(self.work.virtual_size),
        )

    def session(self) -> Session:
        return _PcowIo(self.path)

    def open_times(self) -> Times:
        return self.session_times(_PcowIo(self.path, '--no-map'))

    def all_times(self) -> dict[str, Times]:
        return {
            'open': self.open_times(),
            'mapped': self.session_times(self.session()),
            'returned': self.session_times(_PcowIo(self.path, '--no-map', reclaim=True)),
            'command': self.command_times(),
        }


class Qemu:
    """A QEMU without a guest, which is told over QMP; 16 MiB of RAM."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._path = directory / 'qmp'
        self._process = subprocess.Popen(
            (
                tool.find('emulator', build_first=True),
                '-machine',
                'q35',
                '-accel',
                'qtest',
                '-m',
                '16M',
                '-nodefaults',
                '-no-user-config',
                '-display',
                'none',
                '-qmp',
                f'unix:{self._path},server=on,wait=off',
                *arguments,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._connect()
            self._answers = self._socket.makefile('rb')
            self.qmp('qmp_capabilities')  # its greeting is passed over
        except BaseException:
            self._kill()
            raise

    def _connect(self) -> None:
        limit = time.monotonic() + _START_SECONDS
        while True:
            try:
                self._socket.connect(str(self._path))
            except OSError:
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise self._failed() from None
                time.sleep(0.02)
            else:
                return

    def _failed(self) -> exception.ToolFailed:
        self._kill()
        said = self._process.stderr.read() if self._process.stderr is not None else ''
        return exception.ToolFailed(
            tool='QEMU',
            exit_code=self._process.returncode,
            message=said.strip() or 'QEMU does not answer',
        )

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def qmp(self, name: str, /, **arguments: Any) -> Any:
        """:raises QmpFailed:"""
        self._socket.sendall(json.dumps({'execute': name, 'arguments': arguments}).encode() + b'\n')
        while True:
            try:
                line = self._answers.readline()
            except ConnectionResetError:
                line = b''
            if not line:
                raise self._failed()
            reply = json.loads(line)
            if 'error' in reply:
                raise exception.QmpFailed(
                    command=name,
                    error_class=reply['error']['class'],
                    description=reply['error']['desc'],
                )
            if 'return' in reply:
                return reply['return']

    def hmp(self, line: str) -> str:
        return str(self.qmp('human-monitor-command', **{'command-line': line})).strip()

    def timed(self, name: str, /, **arguments: Any) -> float:
        begun = time.perf_counter()
        self.qmp(name, **arguments)
        return time.perf_counter() - begun

    def timed_hmp(self, line: str) -> float:
        """:raises QmpFailed: it printed something"""
        begun = time.perf_counter()
        said = self.hmp(line)
        took = time.perf_counter() - begun
        if said:
            raise exception.QmpFailed(command=line, error_class='GenericError', description=said)
        return took

    def close(self) -> None:
        with contextlib.suppress(OSError, exception.PcowError):
            self.qmp('quit')
        self._process.wait(_START_SECONDS)
        self._answers.close()
        self._kill()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def carrier(path: Path, discard: bool = False) -> tuple[str, ...]:
    """QEMU's options for a qcow2 disk. ``discard``: clusters that become free leave the file, which
    is no default.
    """
    how = ',discard=unmap,file.discard=unmap' if discard else ''
    return (
        '-blockdev',
        f'driver=qcow2,node-name=disk0,file.driver=file,file.filename={path}{how}',
        '-device',
        'virtio-blk-pci,drive=disk0,id=disk',
    )


class _QemuDisk:
    """A QEMU that has the qcow2 file as its disk.

    There is no command that reverts a disk alone: loadvm does, and the state of a machine of 16 MiB
    with it; ``baseline`` seconds, what the same takes with an empty disk, are taken off.
    """

    def __init__(self, path: Path, baseline: float, discard: bool) -> None:
        self._qemu = Qemu(path.parent, *carrier(path, discard))
        self._baseline = baseline

    def write(self, extents: list[tuple[int, int, int]]) -> None:
        for offset, length, pattern in extents:
            said = self._qemu.hmp(
                f'qemu-io -d /machine/peripheral/disk/virtio-backend "write -q -P {pattern} '
                f'{offset} {length}"'
            )
            if said:
                raise exception.ToolFailed(tool='QEMU', exit_code=1, message=said)

    def snapshot(self, operation: str) -> float:
        if operation == 'create':
            took = self._qemu.timed('blockdev-snapshot-internal-sync', device='disk0', name='s')
            # the same again with the machine's state, so that it can be reverted to
            self._qemu.qmp('blockdev-snapshot-delete-internal-sync', device='disk0', name='s')
            self._qemu.timed_hmp('savevm s')
            return took
        if operation == 'revert':
            return max(0.0, self._qemu.timed_hmp('loadvm s') - self._baseline)
        return self._qemu.timed('blockdev-snapshot-delete-internal-sync', device='disk0', name='s')

    def close(self) -> None:
        self._qemu.close()


class Qcow2(Side):
    name = 'qcow2'

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._baseline: float | None = None

    def program(self) -> str:
        return tool.find('qemu_img')

    def create(self) -> None:
        self._make(self.path, self.work.virtual_size)

    def _make(self, path: Path, size: int) -> None:
        options = f'cluster_size={self.work.cluster_size}'
        tool.run(self.program(), 'create', '-q', '-f', 'qcow2', '-o', options, str(path), str(size))

    def _measure_baseline(self) -> float:
        """loadvm with nothing on the disk, the fastest of a few."""
        path = self.work.directory / 'empty.qcow2'
        try:
            self._make(path, units.MIB)
            with Qemu(self.work.directory, *carrier(path)) as qemu:
                qemu.timed_hmp('savevm s')
                return min(qemu.timed_hmp('loadvm s') for _number in range(5))
        finally:
            path.unlink(missing_ok=True)

    def session(self) -> Session:
        return self._session(discard=False)

    def _session(self, *, discard: bool) -> Session:
        if self._baseline is None:
            self._baseline = self._measure_baseline()
        return _QemuDisk(self.path, self._baseline, discard)

    def all_times(self) -> dict[str, Times]:
        times = self.open_times()
        return {
            'open': times,
            'mapped': times,
            'returned': self.session_times(self._session(discard=True)),
            'command': self.command_times(),
        }
