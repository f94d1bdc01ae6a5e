# SPDX-License-Identifier: Apache-2.0
"""The systemd unit that mounts a pool at boot (systemd.mount(5)), before libvirt starts guests."""

from __future__ import annotations

import os
import re

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.pmem import filesystem

DIRECTORY = '/etc/systemd/system'
FSTAB = '/etc/fstab'
_WANTS = 'multi-user.target.wants'
_MAX_NAME = 255  # of a file
_PLAIN = re.compile(r'[A-Za-z0-9:_.]')

_FIRST_WORDS = '# Written by pcowctl '  # of every unit of ours
_TEMPLATE = (
    _FIRST_WORDS
    + """\
for the pool {name}; 'pcowctl pool remove --destroy' deletes it.
[Unit]
Description=pcow pool {name}
Documentation=man:pcowctl(1)
Before=libvirtd.service virtqemud.service

[Mount]
What={what}
Where={where}
Type={kind}
Options={options}

[Install]
WantedBy=multi-user.target
"""
)


def unit_name(directory: str) -> str:
    """Name of the unit for a mount point, by the rules of systemd-escape(1) --path."""
    path = os.path.normpath(directory).strip('/')
    escaped = ''.join(
        '-'
        if character == '/'
        else character
        if _PLAIN.match(character) and not (character == '.' and at == 0)
        else ''.join(f'\\x{byte:02x}' for byte in character.encode())
        for at, character in enumerate(path)
    )
    return f'{escaped or "-"}.mount'


def check_name(directory: str) -> None:
    """:raises UsageInvalid: a unit for this mount point would have too long a name"""
    if len(unit_name(directory)) > _MAX_NAME:
        raise exception.UsageInvalid(
            reason=(
                f'no systemd unit can be called after {directory} (each byte that is no ASCII '
                f'letter takes four there): take a shorter '
                'directory'
            )
        )


def text(name: str, what: str, where: str, kind: str, options: str) -> str:
    """The unit; ``%`` is systemd's own mark and is doubled."""
    values = {
        key: value.replace('%', '%%')
        for key, value in (
            ('name', name),
            ('what', what),
            ('where', where),
            ('kind', kind),
            ('options', options),
        )
    }
    return _TEMPLATE.format(**values)


def paths(directory: str) -> tuple[str, str]:
    """The unit's file, and the link that has it started at boot (what 'systemctl enable' makes)."""
    unit = unit_name(directory)
    return os.path.join(DIRECTORY, unit), os.path.join(DIRECTORY, _WANTS, unit)


def _is_ours(path: str) -> bool:
    """Something is there, and pcowctl wrote it."""
    try:
        with open(path, encoding='utf-8', errors='replace') as f:
            return f.read(len(_FIRST_WORDS)) == _FIRST_WORDS
    except OSError:
        return False


def what(directory: str) -> str | None:
    """What the unit of ours for this mount point mounts, 'UUID=...'; None: there is none."""
    path, _link = paths(directory)
    if not _is_ours(path):
        return None
    with open(path, encoding='utf-8', errors='replace') as f:
        return _what(f.read())


def _what(content: str) -> str:
    found = re.search('^What=(.*)$', content, re.MULTILINE)
    return found[1].replace('%%', '%') if found else ''


def mounted_at_boot(directory: str) -> bool:
    """A unit, ours or one that somebody else wrote, or fstab(5) mounts something there at boot."""
    path, link = paths(directory)
    if os.path.lexists(link) or (os.path.lexists(path) and not _is_ours(path)):
        return True
    try:
        with open(FSTAB, encoding='utf-8', errors='surrogateescape') as f:
            entries = [line.split() for line in f if not line.lstrip().startswith('#')]
    except OSError:
        return False
    return any(
        len(fields) > 1
        and os.path.realpath(filesystem.unescape(fields[1])) == os.path.realpath(directory)
        for fields in entries
    )


def check_ours(directory: str) -> None:
    """A unit that somebody else wrote is neither replaced nor deleted.

    :raises DeviceRefused: there is one for this mount point
    """
    path, _link = paths(directory)
    if os.path.lexists(path) and not _is_ours(path):
        raise exception.DeviceRefused(
            device=directory,
            reason=(
                f'{path} mounts something there, and pcowctl did not write it: move it away, or '
                f'take another directory'
            ),
        )


def check_free(directory: str, but: str | None = None) -> None:
    """Nor is one that mounts another pool there: that would not come back at the next boot.

    :param but: what may be mounted there already
    :raises DeviceRefused: there is one for this mount point
    """
    check_ours(directory)
    found = what(directory)
    if found is not None and found != but:
        raise exception.DeviceRefused(
            device=directory,
            reason=(
                f'a pool ({found}) is mounted there at boot: take another directory, or if that '
                f'pool is gone for good, '
                f'"rm {" ".join(path for path in paths(directory) if os.path.lexists(path))}"'
            ),
        )


def install(directory: str, content: str) -> None:
    """Write and enable the unit.

    :raises DeviceRefused: somebody else's is there, or one that mounts something else
    """
    check_free(directory, _what(content))
    path, link = paths(directory)
    os.makedirs(os.path.dirname(link), exist_ok=True)
    durable.replace(path, content, mode=0o644)  # half a unit would be nobody's
    if not os.path.lexists(link):
        os.symlink(path, link)
        durable.sync(os.path.dirname(link))


def uninstall(directory: str) -> None:
    """Undo :func:`install`; a unit that is not there is no error.

    :raises DeviceRefused: it is somebody else's
    """
    check_ours(directory)
    for path in reversed(paths(directory)):  # what a kill leaves is still a unit of ours
        if os.path.lexists(path):
            os.unlink(path)


def installed(directory: str) -> bool:
    """A unit of ours is there."""
    return _is_ours(paths(directory)[0])
