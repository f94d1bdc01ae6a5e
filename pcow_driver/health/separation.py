# SPDX-License-Identifier: Apache-2.0
"""Whether guests, services and root are kept apart on this host, as far as owners, groups and modes
say it (doc/source/explanation/security.rst).
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import grp
import os
import pwd
import re
import stat

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common.finding import ADVICE
from pcow_driver.common.finding import OK
from pcow_driver.common.finding import Finding
from pcow_driver.export import nbdkit_unit
from pcow_driver.provision import host

QEMU_CONF = '/etc/libvirt/qemu.conf'
QEMU_USERS = ('libvirt-qemu', 'qemu')  # of Debian, of Fedora
_UNIT = 'pcow-nbd.socket'


def qemu_setting(name: str) -> str | None:
    """Of libvirt's configuration; None: it has no such line, or cannot be read."""
    try:
        with open(QEMU_CONF, encoding='utf-8', errors='replace') as f:
            found = re.search(rf'^\s*{name}\s*=\s*"([^"]+)"', f.read(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def qemu_user() -> pwd.struct_passwd | None:
    """As whom libvirt runs QEMU: what its configuration says, else the user that the distribution
    made for that.
    """
    said = qemu_setting('user')
    for name in (said,) if said else QEMU_USERS:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    return None


def check_directories() -> Iterator[Finding]:
    """What is there is as ``pcowctl host setup`` makes it; what is missing is made when it is
    needed.
    """
    check, wrong = 'directories of the host', host.differences()
    if not wrong:
        yield Finding(check, OK, locks.state_path())
        return
    yield Finding(
        check,
        ADVICE,
        '; '.join(wrong),
        (
            f'root refuses to work where others may exchange a directory, and services may be kept '
            f"out: as root, '{host.command()}', with the group of the services; it changes none of "
            f'what is in them'
        ),
    )


def check_disk_units() -> Iterator[Finding]:
    """Where services and the libvirt hook ask for nbdkit."""
    path = nbdkit_unit.SOCKET
    try:
        status = os.lstat(path)
    except OSError:
        yield Finding(
            _UNIT,
            ADVICE,
            f'{path} is not there',
            (
                f'an image that is the disk of a guest is served by a child of the service, and '
                f'ends with it: install etc/systemd/system/{_UNIT} and pcow-nbd@.service, then: '
                f'systemctl enable --now {_UNIT}'
            ),
        )
        return
    found = f'{path}: {host.words(status)}'
    advice = _advice_on_socket(path, status)
    yield Finding(_UNIT, ADVICE, found, advice) if advice else Finding(_UNIT, OK, found)


def _advice_on_socket(path: str, status: os.stat_result) -> str | None:
    """None: nothing has to be done."""
    try:
        with descriptors.parent(path, trusted=True):
            pass
    except exception.PathRefused as e:
        return f'others could listen in its place: {e}'
    except OSError:
        pass  # this user may not look
    again = f'put etc/systemd/system/{_UNIT} in place again, and restart it'
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != 0:
        return f'systemd did not make it: {again}'
    if status.st_mode & stat.S_IWOTH:
        return f'every user of the host may start processes with it: {again}'
    groups = host.service_groups()
    if groups and status.st_gid not in groups:
        names = ', '.join(sorted(map(host.group_name, groups)))
        return f'the services are in another group ({names}): set SocketGroup= to that of them'
    if not os.access(path, os.W_OK):
        return f'this user may not ask: add it to the group {host.group_name(status.st_gid)}'
    return None


def check_qemu_group() -> Iterator[Finding]:
    """QEMU reaches the disks that services serve by its group, and nothing else of theirs."""
    check, user = 'group of QEMU', qemu_user()
    if user is None:
        yield Finding(
            check,
            ADVICE,
            'the user of QEMU is not known here',
            f'install libvirt, or set user and group in {QEMU_CONF}',
        )
        return
    try:
        group = _qemu_group(user)
    except KeyError as e:
        yield Finding(
            check, ADVICE, f'{QEMU_CONF}: {e.args[0]}', 'make the group, or name another one there'
        )
        return
    found = f'{group.gr_name} (user {user.pw_name})'
    advice = _advice_on_qemu(user, group)
    yield Finding(check, ADVICE, found, advice) if advice else Finding(check, OK, found)


def _qemu_group(user: pwd.struct_passwd) -> grp.struct_group:
    """:raises KeyError: there is no such group"""
    said = qemu_setting('group')
    if said is None:
        # libvirt is built with the group that is called as the user, where there is one
        with contextlib.suppress(KeyError):
            return grp.getgrnam(user.pw_name)
        return grp.getgrgid(user.pw_gid)
    number = said.removeprefix('+')
    return grp.getgrgid(int(number)) if number.isdigit() else grp.getgrnam(said)


def _advice_on_qemu(user: pwd.struct_passwd, group: grp.struct_group) -> str | None:
    """None: nothing has to be done."""
    if user.pw_uid == 0:
        return f'a guest that breaks out of QEMU is root: take the line user from {QEMU_CONF}'
    groups = {group.gr_gid, *os.getgrouplist(user.pw_name, user.pw_gid)}
    for shared in groups & host.service_groups():
        name = host.group_name(shared)
        return (
            f'a guest that breaks out of QEMU may do what services may, as QEMU is in their group: '
            f"give them one of their own ('pcowctl host setup --group ...'), or 'gpasswd -d "
            f"{user.pw_name} {name}'"
        )
    for path, status in _disks():
        if not status.st_mode & stat.S_IXGRP or status.st_gid not in groups:
            return (
                f'QEMU cannot get to the disk {path} ({host.words(status)}): set [nova_pcow] '
                f'qemu_group = {group.gr_name}, and let the service be a member of it'
            )
    return None


def _disks() -> Iterator[tuple[str, os.stat_result]]:
    """Directories of volumes that are served just now."""
    place = os.path.join(locks.state_path(), 'disks')
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(place)):
            path = os.path.join(place, name)
            with contextlib.suppress(OSError):
                yield path, os.lstat(path)
