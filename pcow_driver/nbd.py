# SPDX-License-Identifier: Apache-2.0
"""Images over NBD, and as plain files, for programs that cannot map them: qemu-img, backup tools, Cinder's generic paths.

nbdkit with the plug-in of pcow serves an image on a Unix socket; its filter shows only the :class:`~pcow_driver.device.Window`
if that is wanted; nbdfuse shows what the socket serves as a file.  One directory holds socket, mount point and pid files of
one export, so that any process can end it, also one that was started after the death of the one that began it.
"""

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import selectors
import signal
import subprocess
import threading
import time
import urllib.parse

from pcow_driver import device
from pcow_driver import exception
from pcow_driver import interrupt
from pcow_driver import served
from pcow_driver import tool
from pcow_driver import workspace

FUSE_CONF = '/etc/fuse.conf'
PLUGIN_DIRECTORIES = '/usr/lib/*/nbdkit/plugins'

EXPORT = 'export'                      # in a directory of :mod:`workspace`
_SOCKET = 'socket'
_MOUNT = 'mount'
_FILE = 'data'
_CONTROL = 'control'            # a link to the socket beside the image
# all that is in its directory
_NAMES = frozenset((_SOCKET, _MOUNT, _CONTROL, 'nbdkit.pid', 'nbdkit.log', 'nbdfuse.pid', 'nbdfuse.log'))
_TIMEOUT = 30                      # seconds


def start(directory: str, path: str, *, window: device.Window | None = None, snapshot: str | None = None,
          read_only: bool = False, with_parent: bool = False) -> str:
    """Serve an image on a socket in ``directory``, which is made if it is missing, and return the URI for NBD clients.

    What an earlier export in the directory has left is ended first.

    :param window: the part to serve; None: all of the image
    :param snapshot: serve this snapshot, read-only, also while somebody writes to the image
    :param with_parent: end with the thread that called this, also if that is killed
    :raises ImageNotFound:
    :raises ToolFailed: nbdkit cannot serve it, because somebody else has it open for instance
    :raises ExportFailed: the directory is not one of an export, or what is left in it cannot be ended
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise exception.ImageNotFound(path=path)
    plugin = tool.find_module('nbdkit_plugin', PLUGIN_DIRECTORIES)
    stop(directory)
    os.makedirs(directory, mode=0o700)
    options, parameters = [], [f'file={path}']
    if window is not None:
        options.append('--filter=offset')
        parameters += [f'offset={window.offset}', f'range={window.size}']
    if snapshot is not None:
        parameters.append(f'snapshot={snapshot}')
    if read_only or snapshot is not None:
        options.append('-r')
        parameters.append('readonly=true')
    elif os.access(os.path.dirname(path), os.W_OK):
        parameters.append('control=true')
        os.symlink(served.socket_path(path), os.path.join(directory, _CONTROL))
    socket = os.path.join(directory, _SOCKET)
    try:
        command = (tool.find('nbdkit'), '-U', socket, '-P', os.path.join(directory, 'nbdkit.pid'), *options, plugin, *parameters)
        if with_parent:
            _start_child(directory, command)
        else:
            tool.run(*command)                 # it goes into the background when it serves, and says what is wrong before
            _wait_written(os.path.join(directory, 'nbdkit.pid'))
    except BaseException:
        with interrupt.clearing_up():
            stop(directory)
        raise
    return f'nbd+unix:///?socket={urllib.parse.quote(socket)}'


def _wait_written(pid_file: str) -> None:
    """A daemon's parent ends before it has written this; who ended the export meanwhile would find nobody to end.

    :raises ToolFailed: it was not written in time
    """
    deadline = time.monotonic() + _TIMEOUT
    while not _is_written(pid_file):
        if time.monotonic() > deadline:
            raise exception.ToolFailed(tool='nbdkit', exit_code=0, message=f'it has not written {pid_file}')
        time.sleep(0.002)


def _is_written(pid_file: str) -> bool:
    try:
        return os.path.getsize(pid_file) > 0       # a few bytes, written at once
    except FileNotFoundError:
        return False


def _start_child(directory: str, command: tuple[str, ...]) -> None:
    """:raises ToolFailed: with what nbdkit said"""
    log = os.path.join(directory, 'nbdkit.log')
    program, *arguments = command
    with open(log, 'wb') as output:
        process = subprocess.Popen((program, '--exit-with-parent', *arguments), stdin=subprocess.DEVNULL, stdout=output,
                                   stderr=output)
    try:
        _wait_ready(process, os.path.join(directory, 'nbdkit.pid'))
    except TimeoutError:
        raise exception.ToolFailed(tool='nbdkit', exit_code=process.returncode, message=_said(log, 'nbdkit')) from None


def _wait_ready(process: subprocess.Popen[bytes], pid_file: str) -> None:
    """Wait for the pid file, which is written when what is served can be used; somebody else may end the process then.

    :raises TimeoutError: it has ended, or was ended because there was none in time
    """
    deadline = time.monotonic() + _TIMEOUT
    while not _is_written(pid_file):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            raise TimeoutError
        time.sleep(0.01)
    threading.Thread(target=process.wait, daemon=True).start()     # nobody else would: whoever ends it may be another process


def _said(log: str, name: str) -> str:
    lines = [line.removeprefix(f'{name}: error: ') for line in Path(log).read_text(errors='replace').splitlines() if line.strip()]
    return '; '.join(lines) or f'{name} ended without a message'


def root_may_read() -> bool:
    """Whether root can use the files that this user's :func:`mount` shows, which FUSE keeps from everybody else by default."""
    if os.geteuid() == 0:
        return True
    with contextlib.suppress(OSError):
        lines = Path(FUSE_CONF).read_text(errors='replace').splitlines()
        return any(line.partition('#')[0].strip() == 'user_allow_other' for line in lines)
    return False


def mount(directory: str) -> str:
    """Show what :func:`start` serves in ``directory`` as a file, and return its path.

    The directory keeps all but this user and root out (:func:`root_may_read`).

    :raises ExportFailed: FUSE is not available
    """
    point, pid_file, log = (os.path.join(directory, name) for name in (_MOUNT, 'nbdfuse.pid', 'nbdfuse.log'))
    os.mkdir(point, 0o700)
    command = [tool.find('nbdfuse'), '-P', pid_file, os.path.join(point, _FILE), '--unix', os.path.join(directory, _SOCKET)]
    if os.geteuid() and root_may_read():
        command[1:1] = '-o', 'allow_other'
    with open(log, 'wb') as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_ready(process, pid_file)
    except TimeoutError:
        raise exception.ExportFailed(path=directory, reason=_said(log, 'nbdfuse')) from None
    return os.path.join(point, _FILE)


def stop(directory: str) -> None:
    """End the export in a directory, if there is one; what was written to it is durable then, and the directory is gone.

    :raises ExportFailed: somebody uses the file, a process does not end, or the directory is another one
    """
    if not os.path.lexists(directory):
        return
    try:
        if not os.path.isdir(directory) or not _NAMES.issuperset(os.listdir(directory)):
            raise exception.ExportFailed(path=directory, reason='it is no directory of an export; choose one that is not there yet')
        point = os.path.join(directory, _MOUNT)
        _unmount(directory, point)
        for name in ('nbdfuse', 'nbdkit'):
            _end(directory, name)
        if os.path.isdir(point):
            os.rmdir(point)
        control = os.path.join(directory, _CONTROL)
        if os.path.islink(control):
            served.remove_dead(os.readlink(control))
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError as e:
        raise exception.ExportFailed(path=directory, reason=f'it cannot be taken away: {e}') from None


def _unmount(directory: str, point: str) -> None:
    """Also what was left mounted by a process that was killed: every access to that fails, ``os.path.ismount`` says no."""
    options: tuple[str, ...] = ('-u',)
    try:
        if os.lstat(point).st_dev == os.lstat(directory).st_dev:
            return
    except FileNotFoundError:
        return
    except OSError:
        options = ('-u', '-z')         # whoever has its file open can do nothing with it any more
    try:
        tool.run(tool.find_system('fusermount3', 'fuse3'), *options, point)
    except exception.ToolFailed as e:
        raise exception.ExportFailed(path=directory, reason=f'its file is in use: {e}') from None


@contextlib.contextmanager
def serve(path: str, *, window: device.Window | None = None, snapshot: str | None = None,
          read_only: bool = False) -> Iterator[str]:
    """The URI of an image while the block runs; parameters and errors as :func:`start`."""
    with _temporary() as directory:
        yield start(directory, path, window=window, snapshot=snapshot, read_only=read_only, with_parent=True)


@contextlib.contextmanager
def as_file(path: str, *, window: device.Window | None = None, snapshot: str | None = None,
            read_only: bool = False) -> Iterator[str]:
    """An image as a plain file while the block runs; parameters and errors as :func:`start` and :func:`mount`."""
    with _temporary() as directory:
        start(directory, path, window=window, snapshot=snapshot, read_only=read_only)
        yield mount(directory)


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    with workspace.directory('nbd') as parent:
        directory = os.path.join(parent, EXPORT)
        try:
            yield directory
        finally:
            with interrupt.clearing_up():
                stop(directory)


def _end(directory: str, name: str) -> None:
    """End the process of a pid file, if it is still the one that wrote it."""
    try:
        pid = int(Path(directory, f'{name}.pid').read_text())
        descriptor = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    try:
        # The number may belong to somebody else by now: ours has the directory in its arguments.  One that is ending has none any
        # more, but still its sockets and the image for a moment; a thread of the kernel never has any.
        arguments = Path(f'/proc/{pid}/cmdline').read_bytes()
        if arguments and os.fsencode(directory) not in arguments:
            return
        if arguments:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        with selectors.DefaultSelector() as selector:      # under eventlet there is no select.poll
            selector.register(descriptor, selectors.EVENT_READ)
            if not selector.select(_TIMEOUT) and arguments:
                raise exception.ExportFailed(path=directory, reason=f'{name} (process {pid}) does not end')
    except (FileNotFoundError, ProcessLookupError):
        return                         # it has ended meanwhile
    finally:
        os.close(descriptor)
