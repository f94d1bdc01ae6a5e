# SPDX-License-Identifier: Apache-2.0
"""Images over NBD, and as plain files, for programs that cannot map them: qemu-img, backup tools,
Cinder's generic paths.

nbdkit with the plug-in of pcow serves an image on a Unix socket; its filter shows only the
:class:`~pcow_driver.pools.device.Window` if that is wanted; nbdfuse shows what the socket serves as
a file. One directory holds socket, mount point and pid files of one export, so that any process can
end it, also one that was started after the death of the one that began it.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import shutil
import stat
import subprocess
import threading
import urllib.parse

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import tool
from pcow_driver.common import workspace
from pcow_driver.export import control_socket
from pcow_driver.export import nbdkit
from pcow_driver.export import nbdkit_unit
from pcow_driver.pools import device

FUSE_CONF = '/etc/fuse.conf'

EXPORT = 'export'  # in a directory of :mod:`workspace`
_MOUNT = 'mount'
_FILE = 'data'
_MAX_SOCKET = 107  # unix(7), without the NUL
_CONTROL = 'control'  # a link to the socket beside the image
_UNIT = 'unit'  # nbdkit runs in a unit of systemd, see nbdkit_unit
# all that is in its directory, and as what: nothing else is taken away
_TYPES = {
    nbdkit.SOCKET: stat.S_IFSOCK,
    _MOUNT: stat.S_IFDIR,
    _CONTROL: stat.S_IFLNK,
    _UNIT: stat.S_IFREG,
    'nbdkit.pid': stat.S_IFREG,
    'nbdkit.log': stat.S_IFREG,
    'nbdfuse.pid': stat.S_IFREG,
    'nbdfuse.log': stat.S_IFREG,
}


def start(
    directory: str,
    path: str,
    *,
    window: device.Window | None = None,
    snapshot: str | None = None,
    read_only: bool = False,
    with_parent: bool = False,
    peer: str | None = None,
) -> str:
    """Serve an image on a socket in ``directory``, which is made if it is missing, and return the
    URI for NBD clients.

    What an earlier export in the directory has left is ended first.

    :param window: the part to serve; None: all of the image
    :param snapshot: serve this snapshot, read-only, also while somebody writes to the image
    :param peer: profile of AppArmor of the only one who may connect
    :param with_parent: end with the thread that called this, also if that is killed
    :raises ImageNotFound:
    :raises ToolFailed: nbdkit cannot serve it, because somebody else has it open for instance
    :raises ExportFailed: the directory is not one of an export, what is left in it cannot be
        ended, or its path is too long for a socket
    :raises PathRefused: this is root, and others could put another directory in its place
    """
    directory, path = os.path.abspath(directory), os.path.abspath(path)
    if not os.path.exists(path):
        raise exception.ImageNotFound(path=path)
    tool.find_module('nbdkit_plugin', nbdkit.PLUGIN_DIRECTORIES)
    socket = os.path.join(directory, nbdkit.SOCKET)
    if len(os.fsencode(socket)) > _MAX_SOCKET:
        raise exception.ExportFailed(
            path=directory,
            reason=(
                f'the path of a socket in it is longer than the {_MAX_SOCKET} bytes that there can '
                f'be: choose a shorter one (what pcow exports for a while lies below [pcow] '
                f'conversion_dir)'
            ),
        )
    stop(directory)
    _make(directory)
    control = not read_only and snapshot is None and os.access(os.path.dirname(path), os.W_OK)
    export = nbdkit.Export(
        path, window=window, snapshot=snapshot, read_only=read_only, control=control, peer=peer
    )
    if control:
        beside = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        os.symlink(control_socket.socket_path(beside), os.path.join(directory, _CONTROL))
    try:
        if with_parent:
            process = nbdkit.start_child(directory, export.command(directory, '--exit-with-parent'))
            # nobody else would: whoever ends it may be another process
            threading.Thread(target=process.wait, daemon=True).start()
        elif nbdkit_unit.is_there():
            # stays if there is no answer: only the unit can end what may have begun
            Path(directory, _UNIT).touch()
            nbdkit_unit.start(directory, export)
        else:
            # it goes into the background when it serves, and says what is wrong before
            tool.run(*export.command(directory))
            nbdkit.wait_written(os.path.join(directory, 'nbdkit.pid'))
    except BaseException:
        with interrupt.clearing_up():
            stop(directory)
        raise
    return f'nbd+unix:///?socket={urllib.parse.quote(socket)}'


def _make(directory: str) -> None:
    """Where nobody else can exchange it, if this is root: what is done in it is done by its path
    then.
    """
    if os.geteuid():
        os.makedirs(directory, mode=0o700)
        return
    with contextlib.suppress(FileExistsError):
        descriptors.make(os.path.dirname(directory))
    descriptors.make(directory, 0o700)


def let_in(directory: str, group: str | None = None) -> None:
    """Let others connect to what :func:`start` serves in ``directory``, which only its user may
    until then.

    :param group: to these only; None: to all who can get to the directory
    :raises OSError: this user may not
    :raises LookupError: there is no such group
    """
    modes = (0o666, 0o711) if group is None else (0o660, 0o710)
    paths = os.path.join(directory, nbdkit.SOCKET), directory
    for path, mode in zip(paths, modes, strict=True):
        if group is not None:
            shutil.chown(path, group=group)
        os.chmod(path, mode)


def root_may_read() -> bool:
    """Whether root can use the files that this user's :func:`mount` shows, which FUSE keeps from
    everybody else by default.
    """
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
    point, pid_file, log = (
        os.path.join(directory, name) for name in (_MOUNT, 'nbdfuse.pid', 'nbdfuse.log')
    )
    os.mkdir(point, 0o700)
    command = [
        tool.find('nbdfuse'),
        '-P',
        pid_file,
        os.path.join(point, _FILE),
        '--unix',
        os.path.join(directory, nbdkit.SOCKET),
    ]
    if os.geteuid() and root_may_read():
        command[1:1] = '-o', 'allow_other'
    with open(log, 'wb') as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        nbdkit.wait_ready(process, pid_file)
    except TimeoutError:
        raise exception.ExportFailed(path=directory, reason=nbdkit.said(log, 'nbdfuse')) from None
    threading.Thread(target=process.wait, daemon=True).start()
    return os.path.join(point, _FILE)


def stop(directory: str) -> None:
    """End the export in a directory, if there is one; what was written to it is durable then, and
    the directory is gone.

    :raises ExportFailed: somebody uses the file, a process does not end, or the directory is
        another one
    :raises PathRefused: this is root, and others could put another directory in its place
    """
    directory = os.path.abspath(directory)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:
        try:
            above, name = stack.enter_context(descriptors.parent_for_root(directory))
            descriptor = os.open(name, flags, dir_fd=above)
        except FileNotFoundError:
            return
        except OSError:  # a link, or no directory
            raise _no_export(directory) from None
        stack.callback(os.close, descriptor)
        try:
            _clear(directory, descriptor)
            os.rmdir(name, dir_fd=above)
        except (OSError, exception.ToolFailed) as e:
            raise exception.ExportFailed(
                path=directory, reason=f'it cannot be taken away: {e}'
            ) from None


def _no_export(directory: str, strange: str | None = None) -> exception.ExportFailed:
    """:param strange: a name in it"""
    because = '' if strange is None else f" ('{strange}' in it was not made by pcow)"
    return exception.ExportFailed(
        path=directory,
        reason=f'it is no directory of an export{because}; choose one that is not there yet',
    )


def _clear(directory: str, descriptor: int) -> None:
    """What is in it is believed (which process to end, which socket to take away), so nobody else
    may have written it.
    """
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise exception.ExportFailed(
            path=directory, reason='it belongs to another user, or others may write to it'
        )
    for name in os.listdir(descriptor):
        if not _is_ours(descriptor, name):
            raise _no_export(directory, name)
    _unmount(directory, descriptor)
    nbdkit.end_process(directory, descriptor, 'nbdfuse')
    if _UNIT in os.listdir(descriptor) and nbdkit_unit.is_there():
        # which can see its process, also if this is in a container
        nbdkit_unit.stop(directory)
    else:
        nbdkit.end(directory, descriptor)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(_MOUNT, dir_fd=descriptor)
    with contextlib.suppress(FileNotFoundError):
        control_socket.remove_dead(os.readlink(_CONTROL, dir_fd=descriptor))
    for name in os.listdir(descriptor):
        if not _is_ours(descriptor, name):  # it came meanwhile
            raise _no_export(directory, name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=descriptor)


def _is_ours(descriptor: int, name: str) -> bool:
    """Whether something in the directory of an export is what :func:`start` and :func:`mount` put
    there, so that it can be taken away.
    """
    try:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return True  # a process that has ended meanwhile
    except OSError:
        return name == _MOUNT  # what showed the file there was killed
    return stat.S_IFMT(status.st_mode) == _TYPES.get(name)


def _unmount(directory: str, descriptor: int) -> None:
    """Also what was left mounted by a process that was killed: every access to that fails,
    ``os.path.ismount`` says no.
    """
    options: tuple[str, ...] = ('-u',)
    try:
        device_number = os.stat(_MOUNT, dir_fd=descriptor, follow_symlinks=False).st_dev
        if device_number == os.fstat(descriptor).st_dev:
            return
    except FileNotFoundError:
        return
    except OSError:
        options = ('-u', '-z')  # whoever has its file open can do nothing with it any more
    try:
        # in the directory itself, whatever its path leads to by now
        tool.run(
            tool.find_system('fusermount3', 'fuse3'),
            *options,
            _MOUNT,
            cwd=descriptors.place(descriptor),
        )
    except exception.ToolFailed as e:
        raise exception.ExportFailed(path=directory, reason=f'its file is in use: {e}') from None


@contextlib.contextmanager
def serve(
    path: str,
    *,
    window: device.Window | None = None,
    snapshot: str | None = None,
    read_only: bool = False,
) -> Iterator[str]:
    """The URI of an image while the block runs; parameters and errors as :func:`start`."""
    with _temporary() as directory:
        yield start(
            directory, path, window=window, snapshot=snapshot, read_only=read_only, with_parent=True
        )


@contextlib.contextmanager
def as_file(
    path: str,
    *,
    window: device.Window | None = None,
    snapshot: str | None = None,
    read_only: bool = False,
) -> Iterator[str]:
    """An image as a plain file while the block runs; parameters and errors as :func:`start` and
    :func:`mount`.
    """
    with _temporary() as directory:
        start(directory, path, window=window, snapshot=snapshot, read_only=read_only)
        yield mount(directory)


@contextlib.contextmanager
def _temporary() -> Iterator[str]:
    collect()
    with workspace.directory(workspace.EXPORT) as parent:
        directory = os.path.join(parent, EXPORT)
        try:
            yield directory
        finally:
            with interrupt.clearing_up():
                stop(directory)


def discard(path: str) -> None:
    """Delete a directory of :mod:`workspace` that a killed process left, and end what it served
    there.

    :raises ImageInUse: somebody works in it
    :raises ExportFailed: as :func:`stop`
    """
    workspace.discard(path, first=lambda: stop(os.path.join(path, EXPORT)))


def collect() -> None:
    """As :func:`workspace.collect`, for exports."""
    workspace.collect((workspace.EXPORT,), discard)
