# SPDX-License-Identifier: Apache-2.0
"""What a device holds at one moment, for programs that read it for a while; its guest may go on
meanwhile.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import fcntl
import os
import stat
import uuid as uuidlib

from oslo_log import log as logging

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.export import nbd
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash

LOG = logging.getLogger(__name__)

_LOCK = '.lock'


Look = Callable[..., device.Window]  # as device.window()


@contextlib.contextmanager
def serve(pool: pool_module.Pool, name: str, look: Look = device.window) -> Iterator[str]:
    """The URI by which NBD clients read the data of a device as it is now, while the block runs.

    It is a snapshot of the image that goes afterwards; if this process is killed, with
    :func:`collect`.

    :param look: finds out where the data are, and raises what keeps them from being read
    :raises ImageNotFound:
    :raises DeviceInvalid: the image has no info block
    :raises ToolFailed: something that is no running domain writes to the image
    :raises PathRefused: this is root, and others may exchange the directory that it works in
    """
    path, snapshot = pool.existing_path(name), f'frozen-{uuidlib.uuid4()}'
    # the socket in it cannot have a long path
    directory = os.path.join(_directory(pool), snapshot[-12:])
    _make_directory(pool)
    with contextlib.ExitStack() as stack:
        release = stack.enter_context(contextlib.ExitStack())
        release.callback(_release, pool, name, snapshot)
        stack.enter_context(_held(directory + _LOCK))
        with trash.lock(pool, name):
            trash.mark_snapshot(pool, name, snapshot)
            try:
                attached.snapshot_create(path, snapshot)
            except exception.NoAnswer:
                release.pop_all()  # QEMU may make it yet, and it goes with the next collection
                raise
            window = look(path, snapshot=snapshot, force_share=True)
            stack.callback(nbd.stop, directory)
            uri = nbd.start(directory, path, window=window, snapshot=snapshot, with_parent=True)
        yield uri


def _make_directory(pool: pool_module.Pool) -> None:
    """Whoever is first: where the directory above is a group's, the group's services end what he
    leaves.
    """
    path = _directory(pool)
    descriptors.check_for_root(path)
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
        above = stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode)
        if above & stat.S_ISGID:
            os.chmod(path, above)


def collect(pool: pool_module.Pool) -> None:
    """End what processes that were killed left serving; errors are logged. Their snapshots are
    marked for removal.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        entries = sorted(os.listdir(_directory(pool)))
        try:
            # the files of locks are deleted by their paths
            descriptors.check_for_root(_directory(pool))
        except exception.PathRefused as e:
            LOG.warning('What a killed process left stays: %s', e)
            return
        for entry in entries:
            if not entry.endswith(_LOCK):
                continue
            path = os.path.join(_directory(pool), entry)
            try:
                with _held(path):
                    nbd.stop(path.removesuffix(_LOCK))
            except (BlockingIOError, PermissionError):  # in use; or of another user, who ends it
                LOG.debug('%s is in use', path)
            except (exception.PcowError, OSError) as e:
                LOG.warning('What a killed process left stays: %s', e)


@contextlib.contextmanager
def _held(path: str) -> Iterator[None]:
    """The lock file of a process that serves; gone at the end.

    :raises BlockingIOError: that process lives
    """
    with open(
        os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        ),
        'wb',
    ) as f:
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _directory(pool: pool_module.Pool) -> str:
    return os.path.join(locks.state_path(), 'frozen', pool.uuid[:8])


def _release(pool: pool_module.Pool, name: str, snapshot: str) -> None:
    with trash.lock(pool, name):
        trash.collect_snapshot(pool, name, snapshot)
