# SPDX-License-Identifier: Apache-2.0
"""What the commands share: naming images, showing sizes."""

import argparse
import grp
import os
import pwd

from cliff import columns

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.pools import pool
from pcow_driver.pools import registry

IMAGE_HELP = 'Image: POOL/NAME, or the path of a file.'
POOL_IMAGE_HELP = 'POOL/NAME.'


class Size(columns.FormattableColumn[int]):
    """Bytes: '1.5 GiB' in tables, the number in machine-readable output."""

    def human_readable(self) -> str:
        return units.format_size(self._value)


class OptionalSize(columns.FormattableColumn[int | None]):
    def human_readable(self) -> str:
        return '-' if self._value is None else units.format_size(self._value)


def size_argument(text: str) -> int:
    try:
        return units.parse_size(text)
    except exception.InvalidSize as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def owner_argument(text: str) -> tuple[int, int]:
    """User and group of 'USER:GROUP'; of 'USER', whose group does not matter, -1."""
    user, colon, group = text.partition(':')
    try:
        entry = pwd.getpwnam(user)
        return entry.pw_uid, grp.getgrnam(group).gr_gid if colon else -1
    except KeyError as e:
        raise argparse.ArgumentTypeError(f'{text}: {e.args[0]}') from None


def split_reference(reference: str) -> tuple[pool.Pool, str]:
    """The pool and the image name of ``POOL/NAME``; the image need not exist.

    :raises InvalidName: not of this form
    :raises PoolNotFound:
    """
    pool_name, slash, name = reference.partition('/')
    if not slash or not pool_name:
        raise exception.InvalidName(kind='image', name=reference, reason='write POOL/NAME')
    return registry.PoolRegistry().get(pool_name), names.check_name(
        'image', name.removesuffix(names.IMAGE_SUFFIX)
    )


def image_path(reference: str) -> str:
    """Path of an existing image given as ``POOL/NAME`` or as a path (``./a/b`` for a path that
    looks like a pool's).

    :raises ImageNotFound:
    """
    pool_name, slash, _name = reference.partition('/')
    if slash and pool_name not in ('', '.', '..'):
        try:
            found, name = split_reference(reference)
            return found.existing_path(name)
        except exception.PoolNotFound:
            if not os.path.exists(reference):
                raise
    path = os.path.abspath(reference)
    if not os.path.isfile(path):
        raise exception.ImageNotFound(path=path)
    return path


def same_directory(directory: str, path: str) -> bool:
    """Whether the file at ``path`` lies in ``directory``."""
    return os.path.samefile(directory, os.path.dirname(os.path.abspath(path)))
