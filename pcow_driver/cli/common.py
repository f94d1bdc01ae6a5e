# SPDX-License-Identifier: Apache-2.0
"""What the commands share: naming images, showing sizes."""

import argparse
import grp
import math
import os
import pwd
import re

from cliff import columns
from cliff import command as cliff_command

from pcow_driver.cli import hints
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


def milliseconds(nanoseconds: int) -> str:
    return f'{nanoseconds / 1e6:.1f} ms'


class Duration(columns.FormattableColumn[int]):
    """Nanoseconds: '4.2 ms' in tables, the number in machine-readable output."""

    def human_readable(self) -> str:
        return milliseconds(self._value)


def seconds_argument(text: str) -> float:
    """'20s', '0.5s' or '20'."""
    try:
        seconds = float(text.removesuffix('s'))
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r} is no time: give seconds, as 20s')
    return seconds


def takes_sizes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Have '-5G' told from an option: that it is no size is said better than that it is no
    option.
    """
    parser._negative_number_matcher = re.compile(r'-\d')
    return parser


def size_argument(text: str) -> int:
    try:
        size = units.parse_size(text)
    except exception.InvalidSize as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    if not size:
        raise argparse.ArgumentTypeError(f'the size {text!r} cannot be used: it is zero')
    return size


def add_max_wait(parser: argparse.ArgumentParser, disks: str) -> None:
    """:param disks: which ones"""
    parser.add_argument(
        '--max-wait',
        type=_milliseconds,
        metavar='MS',
        help=f'Milliseconds to wait for requests of disks {disks}; default: 100. If they take '
        'longer, nothing is changed, and the guest has run on.',
    )


def _milliseconds(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 32:
        raise argparse.ArgumentTypeError(f'{text!r} is no number of milliseconds')
    return int(text)


def image_size(command: cliff_command.Command, size: int) -> int:
    """A virtual size, rounded up to what an image can have, as pcow-img does and says it."""
    rounded = units.round_up(size, units.SLAB_SIZE)
    if rounded != size and command.app_args is not None and command.app_args.verbose_level:
        command.app.stderr.write(
            f'note: image size {size} rounded up to {rounded}, a multiple of 2 MiB\n'
        )
    return rounded


def check_words(words: list[str], wanted: str) -> None:
    """Refuse words that are less, or more, than those wanted, and name which.

    :raises UsageInvalid:
    """
    expected = wanted.split()
    missing, more = expected[len(words) :], words[len(expected) :]
    if not missing and not more:
        return
    reason = f'{more[0]!r} is one word too many' if more else f'{" and ".join(missing)} '
    if missing:
        reason += 'is missing' if len(missing) == 1 else 'are missing'
    raise exception.UsageInvalid(reason=f'{reason}, expected: {wanted or "no further words"}')


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
        hint = hints.anywhere(reference)
        raise exception.InvalidName(kind='image', name=reference, reason=f'write POOL/NAME{hint}')
    return registry.PoolRegistry().get(pool_name), names.check_name(
        'image', name.removesuffix(names.IMAGE_SUFFIX)
    )


def existing_image(reference: str) -> tuple[pool.Pool, str]:
    """As :func:`split_reference`; the image exists.

    :raises ImageNotFound:
    """
    found, name = split_reference(reference)
    existing_path(found, name)
    return found, name


def existing_path(found: pool.Pool, name: str) -> str:
    """As that of the pool, for people.

    :raises ImageNotFound: names the image that was probably meant
    """
    try:
        return found.existing_path(name)
    except exception.ImageNotFound as e:
        raise exception.ImageNotFound(e.details, hint=hints.in_pool(found, name)) from None


def base_name(found: pool.Pool, reference: str) -> str:
    """Name of the template, or image, for a new image of the pool, given as NAME or as POOL/NAME.

    :raises UsageInvalid: it is in another pool
    :raises ImageNotFound:
    """
    pool_name, slash, name = reference.rpartition('/')
    if slash and pool_name != found.name:
        raise exception.UsageInvalid(
            reason=f'the template {reference} is not in the pool of the image, {found.name}'
        )
    name = name.removesuffix(names.IMAGE_SUFFIX)
    existing_path(found, name)
    return name


def image_path(reference: str) -> str:
    """Path of an existing image given as ``POOL/NAME`` or as a path (``./a/b`` for a path that
    looks like a pool's).

    :raises ImageNotFound:
    """
    pool_name, slash, _name = reference.partition('/')
    if slash and pool_name not in ('', '.', '..'):
        try:
            found, name = split_reference(reference)
            return existing_path(found, name)
        except exception.PoolNotFound:
            if not os.path.exists(reference):
                raise
    path = os.path.abspath(reference)
    if not os.path.isfile(path):
        hint = '' if slash else hints.anywhere(reference)
        raise exception.ImageNotFound(path=path, hint=hint)
    return path


def same_directory(directory: str, path: str) -> bool:
    """Whether the file at ``path`` lies in ``directory``."""
    return os.path.samefile(directory, os.path.dirname(os.path.abspath(path)))
