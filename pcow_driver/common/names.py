# SPDX-License-Identifier: Apache-2.0
"""Names of pools, images and snapshots."""

from collections.abc import Sequence
import re

from pcow_driver.common import conf
from pcow_driver.common import exception

IMAGE_SUFFIX = '.pcow'
_SOME = 5  # of many names, that a sentence has
# of a file that keeps what a repair has dropped: the name of the image's file, and this
RESCUE_MARK = '.pcow.rescue'
RESCUE = re.compile(r'(?P<image>[^/]+\.pcow)\.rescue(-[0-9]+)?')
MARKER = '.pcow-pool'  # of a directory that is a pool
LOCK = '.pcow-lock'  # beside it, of whoever works on the pool, on any host
SERVER_PREFIX = 'server-'  # of the images that are disks of Nova's servers
VOLUME_PREFIX = (
    'volume-'  # of those that are Cinder's volumes, if it calls them as it does by default
)
RAM_SUFFIX = '-ram'  # of the image that is a domain's RAM, after the domain's name
_UUID = '[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}'
# of an image to which a VM migrates, until all of it is there; see migration/pcow/incoming.c
ARRIVING_MARK = '.arriving'
# see migration/pcow/carrier.c
SNAPSHOT_MARKS = (
    '.incomplete-',
    '.loading-',
    '.migrating-',
    '.checkpoint-',
    '.deleting-',
    ARRIVING_MARK,
)
# of a new image: of its locks pcow-template-UUID-NAME is the longest, and has 255
MAX_NAME_BYTES = 204
_MAX_EXISTING_BYTES = 240  # of what earlier versions made
MAX_SNAPSHOT_BYTES = 127  # PCOW_SNAPSHOT_NAME_SIZE without the NUL


def is_of_service(name: str) -> bool:
    """Whether an image is a disk of a server or a volume, of which no service makes a template: if
    it says that it is one, who has broken out of its QEMU has written that.
    """
    volume, _, end = str(conf.CONF.pcow.volume_name_template).partition('%s')
    known = (
        rf'{SERVER_PREFIX}{_UUID}-.+',
        f'{VOLUME_PREFIX}{_UUID}',
        f'{re.escape(volume)}{_UUID}{re.escape(end)}',
    )
    return re.fullmatch('|'.join(known), name) is not None


def may_be_of_service(file_name: str) -> bool:
    """Whether an image is one of :func:`is_of_service`, or has a name that begins as those do by
    default.

    :param file_name: of the image, or of one that is being made
    """
    name = file_name.lstrip('.')
    name = name.rpartition(IMAGE_SUFFIX)[0] or name
    return name.startswith((SERVER_PREFIX, VOLUME_PREFIX)) or is_of_service(name)


def shortened(text: str, most: int) -> str:
    """As much of the beginning as ``most`` bytes hold, in whole letters."""
    return text.encode()[:most].decode(errors='ignore')


def _reject(kind: str, name: str, reason: str) -> None:
    raise exception.InvalidName(kind=kind, name=name, reason=reason)


def _check_text(kind: str, name: str, max_bytes: int) -> None:
    if not name:
        _reject(kind, name, 'it is empty')
    if not name.isprintable():
        _reject(kind, name, 'it holds characters that cannot be printed')
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        _reject(kind, name, 'it is not valid UTF-8')
    if length > max_bytes:
        _reject(kind, name, f'it has more than {max_bytes} bytes')


def check_name(kind: str, name: str) -> str:
    """Return ``name`` if a pool or an image (``kind``, for the message) that exists may have it.

    :raises InvalidName:
    """
    _check_text(kind, name, _MAX_EXISTING_BYTES)
    if '/' in name:
        _reject(kind, name, "it holds a '/'")
    if name[0] in '.-':
        _reject(kind, name, f"it begins with '{name[0]}'")
    if name.endswith(IMAGE_SUFFIX):
        _reject(kind, name, f'leave out the {IMAGE_SUFFIX} at its end')
    return name


def check_new_name(kind: str, name: str) -> str:
    """Return ``name`` if a new image may have it.

    :raises InvalidName:
    """
    _check_text(kind, name, MAX_NAME_BYTES)
    return check_name(kind, name)


def check_snapshot_name(name: str) -> str:
    """Return ``name`` if a snapshot may be called so.

    :raises InvalidName:
    """
    _check_text('snapshot', name, MAX_SNAPSHOT_BYTES)
    if name.startswith('-'):
        _reject('snapshot', name, "it begins with '-'")
    return name


def check_new_snapshot_name(name: str) -> str:
    """Return ``name`` if somebody may give it to a snapshot.

    :raises InvalidName: also for the names by which QEMU knows what it has to finish, or to take
        back
    """
    if name.startswith(SNAPSHOT_MARKS):
        _reject(
            'snapshot',
            name,
            f'names that begin with {" or ".join(SNAPSHOT_MARKS)} are those of unfinished work',
        )
    return check_snapshot_name(name)


def some(found: Sequence[str]) -> str:
    """The first of these names, and whether there are more."""
    return ', '.join([*found[:_SOME], *(['...'] if found[_SOME:] else [])])
