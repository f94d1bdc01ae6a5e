# SPDX-License-Identifier: Apache-2.0
"""The immutable flag of files (chattr +i): while it is set nobody, root included, changes, renames
or deletes them.

Templates have it where the file system has it, so that no base goes or changes under its children.
Whoever must change something about one (an ACL, the mark of a pinned snapshot, its time) takes the
flag off and sets it again, holding a lock of the directory (flock) that the libvirt hook takes as
well.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import stat

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.privileged import services

LOG = logging.getLogger(__name__)


def _change(path: str, wanted: bool) -> None:
    """As this user, or by the daemon for it if that was set up ([pcow_privileged] helper_command).

    :raises OSError:
    :raises PcowError:
    """
    try:
        immutable.set_flag(path, wanted)
    except PermissionError:
        if os.geteuid() == 0 or not services.context.conf.helper_command:
            raise
        directory, name = os.path.split(os.path.abspath(path))
        services.set_immutable(os.path.join(os.path.realpath(directory), name), wanted)


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Nobody else changes flags of this directory."""
    with contextlib.ExitStack() as stack:
        # who cannot list it changes no flags in it, nor anything else
        with contextlib.suppress(OSError):
            stack.enter_context(locks.lock_directory(os.path.dirname(os.path.abspath(path))))
        yield


def protect(path: str) -> bool:
    """Set the flag of a template, if that is wanted and can be done; whether it is set."""
    if not conf.CONF.pcow.protect_templates:
        return False
    try:
        with _locked(path):
            if not immutable.is_set(path):
                _change(path, True)
    except (OSError, exception.PcowError) as e:
        LOG.debug('%s is not made immutable: %s', path, e)
        return False
    return True


def unprotect(path: str) -> None:
    """Take the flag off for good.

    :raises ImageProtected: this user may not
    """
    with _locked(path):
        if immutable.is_set(path):
            _take_off(path)


@contextlib.contextmanager
def lifted(path: str) -> Iterator[None]:
    """Meanwhile the file can be changed or deleted; if it is still there, it has the flag again
    afterwards.

    :raises ImageProtected: this user may not
    """
    with _locked(path):
        was_set = immutable.is_set(path)
        if was_set:
            _take_off(path)
        try:
            yield
        finally:
            if was_set and os.path.lexists(path):
                _change(path, True)


def unlink(path: str) -> None:
    """Delete one name of a file, whose other names keep the flag; a name that is not there is no
    error.

    A build that was killed while it gave its file the final name leaves two, and the flag belongs
    to both.

    :raises ImageProtected: this user may not
    """
    with contextlib.suppress(FileNotFoundError), _locked(path):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or not immutable.is_set(path):
            os.unlink(path)
            return
        other = _other_name(path, status)
        _take_off(other or path)
        try:
            os.unlink(path)
        finally:
            if other is not None:
                _change(other, True)


def _other_name(path: str, status: os.stat_result) -> str | None:
    """Of the same file in the same directory, as an image."""
    directory = os.path.dirname(os.path.abspath(path))
    for name in os.listdir(directory) if status.st_nlink > 1 else ():
        other = os.path.join(directory, name)
        if (
            name.endswith(names.IMAGE_SUFFIX)
            and other != os.path.abspath(path)
            and os.path.samestat(status, os.lstat(other))
        ):
            return other
    return None


def _take_off(path: str) -> None:
    try:
        _change(path, False)
    except (OSError, exception.PcowError) as e:
        raise exception.ImageProtected(path=path, reason=str(e)) from None
