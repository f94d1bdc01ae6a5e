# SPDX-License-Identifier: Apache-2.0
"""The process nbdkit of an export: its command, its start, its end.

The directory of an export holds its socket, and a pid file and a log for each process.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
import selectors
import signal
import stat
import subprocess
import time
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.pools import device

PLUGIN_DIRECTORIES = '/usr/lib/*/nbdkit/plugins'

SOCKET = 'socket'  # in the directory of an export
_TIMEOUT = 30  # seconds
_MAX_PID = 32  # bytes of a pid file


@dataclasses.dataclass(frozen=True)
class Export:
    """What nbdkit serves, and to whom."""

    path: str
    window: device.Window | None = None
    snapshot: str | None = None
    read_only: bool = False
    control: bool = False
    peer: str | None = None

    def command(self, directory: str, *options: str) -> tuple[str, ...]:
        """nbdkit with its socket and pid file in a directory.

        :raises ToolNotFound:
        """
        more, parameters = [*options], [f'file={self.path}']
        if self.window is not None:
            more.append('--filter=offset')
            parameters += [f'offset={self.window.offset}', f'range={self.window.size}']
        if self.snapshot is not None:
            parameters.append(f'snapshot={self.snapshot}')
        if self.peer is not None:
            parameters.append(f'peer={self.peer}')
        if self.read_only or self.snapshot is not None:
            more.append('-r')
            parameters.append('readonly=true')
        elif self.control:
            parameters.append('control=true')
        return (
            tool.find('nbdkit'),
            '-U',
            os.path.join(directory, SOCKET),
            '-P',
            os.path.join(directory, 'nbdkit.pid'),
            *more,
            tool.find_module('nbdkit_plugin', PLUGIN_DIRECTORIES),
            *parameters,
        )

    def dump(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Export:
        """What :meth:`dump` gave.

        :raises ExportFailed: it did not
        """
        try:
            window = fields.pop('window', None)
            export = cls(**fields, window=None if window is None else device.Window(**window))
        except TypeError:
            raise exception.ExportFailed(
                path=str(fields.get('path')), reason='the request is of another version'
            ) from None
        texts = (export.path, export.snapshot or '', export.peer or '')
        numbers = () if export.window is None else dataclasses.astuple(export.window)
        if not all(isinstance(item, str) and '\0' not in item for item in texts) or not all(
            type(item) is int for item in numbers
        ):
            raise exception.ExportFailed(path=str(export.path), reason='the request is none')
        return export


def wait_written(pid_file: str) -> None:
    """A daemon's parent ends before it has written this; who ended the export meanwhile would find
    nobody to end.

    :raises ToolFailed: it was not written in time
    """
    deadline = time.monotonic() + _TIMEOUT
    while not _is_written(pid_file):
        if time.monotonic() > deadline:
            raise exception.ToolFailed(
                tool='nbdkit', exit_code=0, message=f'it has not written {pid_file}'
            )
        time.sleep(0.002)


def _is_written(pid_file: str) -> bool:
    try:
        return os.path.getsize(pid_file) > 0  # a few bytes, written at once
    except FileNotFoundError:
        return False


def start_child(directory: str, command: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """nbdkit as a child of this process, in the foreground; when this returns it can be used.

    :raises ToolFailed: with what nbdkit said
    """
    log = os.path.join(directory, 'nbdkit.log')
    with open(log, 'wb') as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        wait_ready(process, os.path.join(directory, 'nbdkit.pid'))
    except TimeoutError:
        raise exception.ToolFailed(
            tool='nbdkit', exit_code=process.returncode, message=said(log, 'nbdkit')
        ) from None
    return process


def wait_ready(process: subprocess.Popen[bytes], pid_file: str) -> None:
    """Wait for the pid file, which is written when what is served can be used; somebody else may
    end the process then.

    :raises TimeoutError: it has ended, or was ended because there was none in time
    """
    deadline = time.monotonic() + _TIMEOUT
    while not _is_written(pid_file):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise TimeoutError
        time.sleep(0.01)


def said(log: str, name: str) -> str:
    lines = [
        line.removeprefix(f'{name}: error: ')
        for line in Path(log).read_text(errors='replace').splitlines()
        if line.strip()
    ]
    return '; '.join(lines) or f'{name} ended without a message'


def end(directory: str, descriptor: int) -> None:
    """End the nbdkit of a directory, if it is still the one that wrote the pid file there.

    :param descriptor: of the directory
    :raises ExportFailed: it does not end
    """
    end_process(directory, descriptor, 'nbdkit')


def end_process(directory: str, descriptor: int, name: str) -> None:
    """End the process of a pid file, if it is still the one that wrote it.

    :raises ExportFailed: it does not end
    """
    pid = _read_pid(descriptor, f'{name}.pid')
    if pid is None:
        return
    try:
        process = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):  # more than any process has
        return
    try:
        # The number may belong to somebody else by now: ours has the directory in its arguments.
        # One that is ending has none any more, but still its sockets and the image for a moment; a
        # thread of the kernel never has any.
        arguments = Path(f'/proc/{pid}/cmdline').read_bytes()
        if arguments and not _names(arguments, directory, name):
            return
        if arguments:
            signal.pidfd_send_signal(process, signal.SIGTERM)
        with selectors.DefaultSelector() as selector:  # under eventlet there is no select.poll
            selector.register(process, selectors.EVENT_READ)
            if not selector.select(_TIMEOUT) and arguments:
                raise exception.ExportFailed(
                    path=directory, reason=f'{name} (process {pid}) does not end'
                )
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended meanwhile
    finally:
        os.close(process)


def _names(arguments: bytes, directory: str, name: str) -> bool:
    """Whether these are the arguments of a process that was started for a directory.

    Earlier versions gave it the path as they got it. Of a relative one only the end can be
    compared: in the background nbdkit is in the root directory.
    """
    own = [os.path.join(directory, file) for file in (SOCKET, f'{name}.pid')]
    for argument in os.fsdecode(arguments).split('\0'):
        path = os.path.normpath(argument)
        if path in own:
            return True
        tail = path
        while tail.startswith('../'):
            tail = tail.removeprefix('../')
        if '/' in tail and not os.path.isabs(path):
            if any(item.endswith(f'/{tail}') for item in own):
                return True
    return False


def _read_pid(directory: int, name: str) -> int | None:
    """None: there is no such file, or no number in it."""
    try:
        descriptor = os.open(
            name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory
        )
    except FileNotFoundError:
        return None
    with open(descriptor, 'rb') as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = file.read(_MAX_PID).strip()
    # 0 and negative numbers are groups of processes, or this one
    return int(text) if text.isdigit() and int(text) else None
