# SPDX-License-Identifier: Apache-2.0
"""nbdkit outside of the service that wants it: in a unit of systemd of its own, which outlives it.

nova-compute asks on a socket (pcow-nbd.socket). systemd starts ``pcow-nbd-unit`` for each
request, as root and outside of any container (pcow-nbd@.service), and that becomes the one who
asked, with its groups, before it reads a word. So who may ask gets no right from it: what runs is
nbdkit with pcow's plug-in, as the user who wants it.

The unit ends with nbdkit. An nbdkit that is killed is started again on a socket with the same owner
and mode: QEMU connects to it again by itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.export import nbdkit

SOCKET = '/run/pcow/nbd.sock'
_SECONDS = 60.0
_MAX_REQUEST = 65536
_MOST_STARTS, _IN_SECONDS = 5, 60.0  # an nbdkit that is killed more often stays dead
_CREDENTIALS = struct.Struct('iII')  # struct ucred, unix(7)
_SO_PEERGROUPS = 59  # Linux, asm-generic/socket.h
_MAX_GROUPS = 256  # Python takes no more


def is_there() -> bool:
    """Whether systemd starts nbdkit here."""
    return os.path.exists(SOCKET)


def start(directory: str, export: nbdkit.Export) -> None:
    """:raises ToolFailed: with what nbdkit said"""
    _ask({'start': directory, **export.dump()})


def stop(directory: str) -> None:
    """End the nbdkit of a directory; for who cannot see its process, being in a container.

    :raises ToolFailed:
    """
    _ask({'stop': directory})


def _ask(request: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        try:
            connection.connect(SOCKET)
            connection.sendall(json.dumps(request).encode() + b'\n')
            answer = _read_line(connection)
        except PermissionError:
            raise _failed(
                f'{SOCKET}: user {os.geteuid()} may not connect to it: add him to the group of the '
                f'socket (pcow), or give the image to a user who is in it'
            ) from None
        except OSError as e:
            raise _failed(f'{SOCKET}: {e}') from None
    if answer.get('error') is not None or not answer.get('done'):
        raise _failed(answer.get('error') or f'{SOCKET}: no answer: see journalctl -u "pcow-nbd@*"')


def _failed(message: str) -> exception.ToolFailed:
    return exception.ToolFailed(tool='nbdkit', exit_code=1, message=message)


def _read_line(connection: socket.socket) -> dict[str, Any]:
    """Nothing, if it is no line of JSON."""
    data = b''
    while not data.endswith(b'\n') and len(data) < _MAX_REQUEST:
        more = connection.recv(_MAX_REQUEST)
        if not more:
            break
        data += more
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- in the unit ---------------------------------------------------------------------------------


def _become_peer(connection: socket.socket) -> None:
    """The one who asked, for good; the kernel says who that is.

    :raises OSError:
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, group = _CREDENTIALS.unpack(credentials)
    if os.geteuid() != 0 and user == os.geteuid():
        return  # a unit of the user's own
    groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS * 4)
    os.setgroups(struct.unpack(f'{len(groups) // 4}I', groups))
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)


def _checked_directory(name: Any) -> str:
    """:raises ExportFailed: a directory that somebody else made
    :raises PathRefused: root asks, and others could put another one in its place
    """
    if not isinstance(name, str) or not os.path.isabs(name) or '\0' in name:
        raise exception.ExportFailed(path=str(name), reason='that is no absolute path')
    descriptors.check_for_root(name)
    status = os.lstat(name)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise exception.ExportFailed(path=name, reason='it is no directory of the one who asks')
    return name


def _start_again(directory: str, export: nbdkit.Export) -> subprocess.Popen[bytes]:
    """On a socket with owner and mode of the one that the dead one has left."""
    path, pid_file = os.path.join(directory, nbdkit.SOCKET), os.path.join(directory, 'nbdkit.pid')
    before = os.lstat(path)
    for name in (path, pid_file):
        os.unlink(name)
    process = nbdkit.start_child(directory, export.command(directory, '-f'))
    os.chown(path, -1, before.st_gid, follow_symlinks=False)
    os.chmod(path, stat.S_IMODE(before.st_mode))
    return process


def _watch(process: subprocess.Popen[bytes], directory: str, export: nbdkit.Export) -> int:
    """Until nbdkit has ended by itself, or because it was asked to."""
    starts: list[float] = []
    while (code := process.wait()) < 0:
        starts = [moment for moment in starts if moment > time.monotonic() - _IN_SECONDS]
        print(f'nbdkit of {export.path} was ended by signal {-code}', file=sys.stderr, flush=True)
        if len(starts) == _MOST_STARTS:
            return 1
        starts.append(time.monotonic())
        process = _start_again(directory, export)
    return code


def _serve(connection: socket.socket, request: dict[str, Any]) -> int:
    """:raises PcowError: :raises OSError: nothing was started, and nothing was ended"""
    if 'stop' in request:
        directory = _checked_directory(request['stop'])
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
        try:
            nbdkit.end(directory, descriptor)
        finally:
            os.close(descriptor)
        connection.sendall(b'{"done": true}\n')
        return 0
    directory = _checked_directory(request.pop('start', None))
    export = nbdkit.Export.load(request)
    process = nbdkit.start_child(directory, export.command(directory, '-f'))
    signal.signal(signal.SIGTERM, lambda *_arguments: process.terminate())
    connection.sendall(b'{"done": true}\n')
    connection.close()
    return _watch(process, directory, export)


def main() -> int:
    """Entry point of pcow-nbd@.service: the connection is stdin."""
    with socket.socket(fileno=os.dup(0)) as connection:
        connection.settimeout(_SECONDS)
        try:
            conf.CONF([], project='pcow', default_config_dirs=[])  # which only root may read
            _become_peer(connection)
            return _serve(connection, _read_line(connection))
        except (exception.PcowError, OSError) as e:
            print(e, file=sys.stderr, flush=True)
            connection.sendall(json.dumps({'error': str(e)}).encode() + b'\n')
            return 0  # it was told to whoever can do something about it
