# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image that nbdkit serves for writing, as the disk of a guest for instance:
commands on a socket beside it.

The commands are those of nbdkit-pcow-plugin(1), ``control=true``.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import socket
import stat

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.pools import room

# for an answer: a snapshot waits for the request that is being done
_SECONDS = 60.0
_MAX_ANSWER = 4096
_SUFFIX = '.control'


def socket_path(path: str) -> str:
    """Where the server of an image listens."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f'.{name}{_SUFFIX}')


class Server:
    """A server of one image, which answers; close it, or use it as a context."""

    def __init__(self, path: str, connection: socket.socket) -> None:
        self.name = path
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def _command(self, *words: str) -> None:
        """:raises ToolFailed: it refuses, or does not answer"""
        try:
            self._connection.sendall('\t'.join(words).encode() + b'\n')
            answer = b''
            while not answer.endswith(b'\n') and len(answer) < _MAX_ANSWER:
                data = self._connection.recv(_MAX_ANSWER)
                if not data:
                    break
                answer += data
        except OSError as e:
            raise self._failed(f'its server does not answer: {e}') from None
        outcome, _tab, message = answer.decode(errors='replace').strip().partition('\t')
        if outcome != 'ok':
            raise self._failed(message or 'its server hung up')

    def _failed(self, message: str) -> exception.ToolFailed:
        named = message if self.name in message else f'{self.name}: {message}'
        return exception.ToolFailed(tool='nbdkit', exit_code=1, message=named)

    def snapshot_create(self, name: str, _device: str | None = None) -> None:
        """:raises ToolFailed: the name exists, for instance
        :raises NoRoom: the operator's limits have no room for what clients can then write once more
        """
        with room.for_long_snapshot(self.name):
            self._command('snapshot-create', names.check_snapshot_name(name))

    def snapshot_delete(self, name: str, _device: str | None = None) -> None:
        """:raises ToolFailed: an image stands on it, for instance"""
        self._command('snapshot-delete', names.check_snapshot_name(name))

    def snapshot_rename(self, name: str, new_name: str, _device: str | None = None) -> None:
        """:raises ToolFailed: there is none, for instance"""
        self._command(
            'snapshot-rename',
            names.check_snapshot_name(name),
            names.check_new_snapshot_name(new_name),
        )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Requests of its clients wait meanwhile; also if this process is killed, they go on
        afterwards.
        """
        self._command('pause')
        try:
            yield
        finally:
            self._command('resume')


def find(path: str) -> Server | None:
    """The server of an image, if there is one that takes commands from this user."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_SECONDS)
    try:
        _connect(connection, socket_path(os.path.realpath(path)))
    except OSError:  # no socket, one of a server that was killed, or not for this user
        connection.close()
        return None
    return Server(path, connection)


def _connect(connection: socket.socket, path: str) -> None:
    directory, name = os.path.split(path)
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        connection.connect(f'/proc/self/fd/{descriptor}/{name}')  # a path of any length
    finally:
        os.close(descriptor)


def remove_dead(path: str) -> None:
    """Take the socket away that a server of this user has left which was killed.

    A file refuses connections as well, and whoever has the directory puts there what he likes.
    """
    directory, name = os.path.split(path)
    if not name.startswith('.') or not name.endswith(_SUFFIX):
        return
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connection.setblocking(False)  # a full queue is somebody alive
        try:
            descriptor = stack.enter_context(descriptors.directory(directory))
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
                return
            connection.connect(f'{descriptors.place(descriptor)}/{name}')
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=descriptor)
        except (OSError, exception.PathRefused):
            return  # it is gone, or serves
