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
import pwd
import stat

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import locks

_ROOTS = 0o755  # nobody else renames what root mounts or reads
_SHARED = 0o2770  # what is made there is the group's
# and QEMU passes, on its way to the socket of a volume
_PASSED = 0o2771
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SERVICES = {
    'locks': _SHARED,
    'lists': _SHARED,
    'frozen': _SHARED,
    'exports': _SHARED,
    'migrations': _SHARED,
    'live-migrations': _SHARED,
    'scrubs': _SHARED,
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
    for name, mode in locks.OWN_MODES.items():
        prepared = _prepare(os.path.join(state, name), 0, mode)
        if prepared.done == 'changed':
            _delete_of_others(prepared.path, all_of_it=name == locks.OWN)
        yield prepared
    if gid:
        for name, mode in _SERVICES.items():
            path = os.path.join(state, name)
            yield _prepare(path, gid, mode)


def differences() -> list[str]:
    """What is there and is not as :func:`set_up` makes it, in words.

    What this user, or root, has for itself alone may have another mode.
    """
    found, own, groups = [], {0, os.geteuid()}, service_groups()
    state = locks.state_path()
    roots = dict.fromkeys((state, os.path.abspath(conf.CONF.pcow.pools_path)))
    for path, mode, shared in (
        *((path, _ROOTS, False) for path in roots),
        *((os.path.join(state, name), mode, False) for name, mode in locks.OWN_MODES.items()),
        *((os.path.join(state, name), mode, bool(groups)) for name, mode in _SERVICES.items()),
    ):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            made = (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, mode)
            if not stat.S_ISDIR(status.st_mode):
                found.append(f'{path} is a link, or no directory')
            elif not made and (shared or status.st_uid not in own or status.st_mode & _OTHERS):
                found.append(f'{path}: {words(status)}')
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.join(state, locks.PROTECTED)):
            if entry.stat(follow_symlinks=False).st_uid not in own:
                found.append(f'{entry.path} is not of root, and is not believed: delete it')
    if len(groups) > 1:
        found.append(f'{state}: {", ".join(sorted(map(group_name, groups)))} share it')
    return found


def service_groups() -> set[int]:
    """To whom the directories of the services are given; nobody, if root works on pools alone."""
    found = set()
    for name in _SERVICES:
        with contextlib.suppress(OSError):
            status = os.lstat(os.path.join(locks.state_path(), name))
            if status.st_gid and status.st_mode & stat.S_IWGRP:
                found.add(status.st_gid)
    return found


def command() -> str:
    """That puts the directories right."""
    groups = service_groups()
    name = group_name(groups.pop()) if len(groups) == 1 else 'GROUP'
    return f'pcowctl host setup --group {name}'


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def words(status: os.stat_result) -> str:
    """Whose something is, and what its mode is."""
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    group = group_name(status.st_gid)
    return f'owner {owner}, group {group}, mode {stat.S_IMODE(status.st_mode):04o}'


def _delete_of_others(path: str, *, all_of_it: bool) -> None:
    """What could be put into a directory of root's when others might write to it.

    :param all_of_it: what is root's as well: somebody else may have it open, and hold its lock
    """
    with descriptors.directory_place(path) as place:
        for name in os.listdir(place):
            entry = os.path.join(place, name)
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                if all_of_it or os.lstat(entry).st_uid != 0:
                    os.unlink(entry)


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
    return Prepared(path, group_name(gid), mode, done)
