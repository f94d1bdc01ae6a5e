# SPDX-License-Identifier: Apache-2.0
"""What entry points take: everything else is refused before anything is run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import re
import stat

from pcow_driver.common import conf
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import names

_REGION = re.compile(r'region\d{1,6}')
_NAMESPACE = re.compile(r'namespace\d{1,6}\.\d{1,6}')
_DIMM = re.compile(r'nmem\d{1,6}')
_DEVICE = re.compile(r'/dev(/[A-Za-z0-9_][A-Za-z0-9_.:+-]*)+')
# besides [pcow] pools_path: where administrators mount
MOUNT_ROOTS = ('/mnt', '/media', '/srv')


def _named(pattern: re.Pattern[str], kind: str, name: str, example: str) -> str:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise exception.InvalidName(kind=kind, name=name, reason=f'it is like {example}')
    return name


def region(name: str) -> str:
    """:raises InvalidName:"""
    return _named(_REGION, 'region', name, "region0 ('ndctl list -R')")


def namespace(name: str) -> str:
    """:raises InvalidName:"""
    return _named(_NAMESPACE, 'namespace', name, "namespace0.0 ('ndctl list -N')")


def dimm(name: str) -> str:
    """:raises InvalidName:"""
    return _named(_DIMM, 'DIMM', name, "nmem0 ('ndctl list -D')")


def label(text: str) -> str:
    """:raises InvalidName:"""
    if not isinstance(text, str):
        raise exception.InvalidName(kind='label', name=text, reason='it is no text')
    return names.check_name('label', text)


def device(path: str) -> str:
    """:raises InvalidName: it is not a plain path below /dev"""
    _named(_DEVICE, 'device', path, '/dev/pmem0')
    real = os.path.realpath(path)
    if '..' in path.split('/') or not real.startswith('/dev/'):
        raise exception.InvalidName(kind='device', name=path, reason='it leads out of /dev')
    # What is there may be changed between this look and the next where others may write: /dev/shm.
    for directory in {
        parent
        for name in (path, real)
        for parent in Path(name).parents
        if parent.is_relative_to('/dev')
    }:
        with contextlib.suppress(FileNotFoundError):
            found = directory.stat()
            if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise exception.InvalidName(
                    kind='device', name=path, reason=f'others than root may write to {directory}'
                )
    return path


def number(value: int, least: int, most: int, what: str) -> int:
    """:raises UsageInvalid:"""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise exception.UsageInvalid(reason=f'{what} is {least} to {most}, not {value!r}')
    return value


def mount_point(directory: str) -> str:
    """A directory, made or not, over which something may be mounted without hiding a part of the
    system.

    Neither it nor the roots are resolved: whoever may write where they lie would choose what they
    mean.

    :raises UsageInvalid: it is not below [pcow] pools_path, /mnt, /media or /srv
    :raises PathRefused: on the way there is a link, or a step that others than root and this user
        could exchange
    """
    roots = (os.path.normpath(str(conf.CONF.pcow.pools_path)), *MOUNT_ROOTS)
    plain = (
        isinstance(directory, str)
        and os.path.isabs(directory)
        and os.path.normpath(directory) == directory
    )
    if not plain or '\n' in directory or not any(_is_below(directory, root) for root in roots):
        raise exception.UsageInvalid(
            reason=(
                f'{directory} cannot be a mount point of a pool: take a directory below '
                f'{", ".join(roots)}, or set [pcow] pools_path'
            )
        )
    descriptors.check(directory)
    return directory


def _is_below(path: str, root: str) -> bool:
    return root != '/' and path.startswith(root + '/')
