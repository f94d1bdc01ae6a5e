# SPDX-License-Identifier: Apache-2.0
"""The directories that root and the services share on a host, with their owners, groups
and modes.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import grp
import os
import stat

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import locks

_ROOTS = 0o755  # nobody else renames what root mounts or reads
_SHARED = 0o2770  # what is made there is the group's
# and QEMU passes, on its way to the socket of a volume
_PASSED = 0o2771
_SERVICES = {
    'locks': _SHARED,
    'lists': _SHARED,
    'frozen': _SHARED,
    'exports': _SHARED,
    'migrations': _SHARED,
    'live-migrations': _SHARED,
    'disks': _PASSED,
}


@dataclasses.dataclass(frozen=True)
class Prepared:
    path: str
    group: str
    mode: int
    done: str  # 'made', 'changed' or 'as it was'


def set_up(group: str | None) -> Iterator[Prepared]:
    """Make each directory, or put it right. What is in them is left alone: services may have put it
    there.

    :param group: of the services; None: root works on pools alone
    :raises RootNeeded:
    :raises PathRefused: somebody else could exchange a directory, or a link is in its place
    :raises NotFound: there is no such group
    :raises OSError:
    """
    if os.geteuid() != 0:
        raise exception.RootNeeded(what='directories of the host')
    gid = _gid(group)
    state = locks.state_path()
    for path in dict.fromkeys((state, os.path.abspath(conf.CONF.pcow.pools_path))):
        yield _prepare(path, 0, _ROOTS)
    if gid:
        for name, mode in _SERVICES.items():
            path = os.path.join(state, name)
            yield _prepare(path, gid, mode)


def _gid(group: str | None) -> int:
    try:
        return grp.getgrnam(group).gr_gid if group else 0
    except KeyError:
        raise exception.UsageInvalid(
            reason=f"there is no group '{group}': groupadd --system {group}"
        ) from None


def _prepare(path: str, gid: int, mode: int) -> Prepared:
    done = 'as it was'
    with contextlib.suppress(FileExistsError):
        descriptors.make(path)
        done = 'made'
    with descriptors.directory(path, trusted=True) as found:
        now = os.fstat(found)
        if (now.st_uid, now.st_gid, stat.S_IMODE(now.st_mode)) != (0, gid, mode):
            if done != 'made':
                done = 'changed'
            # The owner first: chown() takes the bit that gives what is made there to the group.
            os.chown(descriptors.place(found), 0, gid)
            os.chmod(descriptors.place(found), mode)
    return Prepared(path, grp.getgrgid(gid).gr_name, mode, done)
