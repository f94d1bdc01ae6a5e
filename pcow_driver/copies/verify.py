# SPDX-License-Identifier: Apache-2.0
"""Data are compared with their checksums before they are copied to where they have none: damage
would pass as health there.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import itertools
import math
import os
import threading
import time

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import bases
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.virt import notices

LOG = logging.getLogger(__name__)

_OPTION = '--accept-damage'  # with it pcow-img copies what it refuses as damaged

# Device, inode and UUID of the top of a chain: another file may have the inode of one that is gone.
_Key = tuple[int, int, str | None]
_LOOKED_AT: dict[_Key, float] = {}  # time.monotonic()
_COMPARES: dict[_Key, threading.Lock] = {}


@dataclasses.dataclass(frozen=True)
class Damaged:
    path: str
    finding: str


def _chain(path: str) -> Iterator[tuple[str, model.ImageInfo]]:
    """An image and what it stands on, top first; without those of format 1, which tell nothing."""
    at: str | None = path
    for one in image.chain(path, force_share=True):
        if at is not None and one.format != 1:
            yield at, one
        at = one.base_path


def _compare(path: str, info: model.ImageInfo) -> scrubs.Result:
    result = scrubs.compare(path, sealed=info.sealed)
    if result.problem:
        LOG.info('Whether %s is damaged cannot be told: %s', path, result.problem)
    return result


def damaged_in_chain(path: str) -> Damaged | None:
    """The first file of a chain that is damaged. A guest may write to one that is not sealed: of
    that only what cannot be his work counts. What is found is kept, and domains that run on it are
    told.

    :raises ImageNotFound:
    """
    for at, info in _chain(path):
        result = _compare(at, info)
        if result.is_damaged:
            keep(at, result)
            return Damaged(at, result.findings[0])
    return None


def keep(path: str, result: scrubs.Result) -> None:
    """What was found damaged, as a scrub keeps it, if it is an image of a pool; domains that run on
    it are told. Who has found it goes on, or says so, whether that succeeds or not.
    """
    try:
        pool, name = _pool_of(path)
        if pool is not None:
            notices.keep(pool, name, result)
    except (exception.PcowError, OSError) as e:
        LOG.warning('That %s is damaged is not kept: %s', path, e)


@contextlib.contextmanager
def keeping(path: str) -> Iterator[None]:
    """While pcow-img copies what an image, or a snapshot of it, holds. It may refuse damage, of
    this file or of one below; which one it is, and all that is damaged there, is looked for then.
    """
    try:
        yield
    except exception.ToolFailed as e:
        if _OPTION in str(e):
            try:
                damaged_in_chain(path)
            except (exception.PcowError, OSError) as other:
                LOG.warning('What is damaged of %s is not kept: %s', path, other)
        raise


def check_chain(path: str) -> None:
    """Before a service copies what an image, or a snapshot of it, holds. What is found is kept, and
    domains that run on it are told.

    :raises DataDamaged: a file of the chain is damaged, and no operator has accepted that
    :raises ImageNotFound:
    """
    for at, info in _chain(path):
        result = _compare(at, info)
        if not result.is_damaged:
            continue
        pool, name = _pool_of(at)
        if pool is None:
            raise exception.DataDamaged(
                path=at, finding=result.findings[0], otherwise='copy it by hand (pcow-img convert)'
            )
        if _is_accepted(pool, name, result):
            LOG.warning('%s is copied although it is damaged, as that is accepted', at)
            continue
        keep(at, result)
        raise exception.DataDamaged(
            path=at,
            finding=result.findings[0],
            otherwise=f'scrub the pool and accept it as it is (pcowctl pool scrub {pool.name} '
            f'--accept {name})',
        )


def note_damage(path: str) -> None:
    """After a command has found one file damaged: what is found of it is kept, and domains that
    run on it are told. Nothing is raised for damage.

    :raises ImageNotFound:
    """
    for at, info in itertools.islice(_chain(path), 1):
        result = _compare(at, info)
        pool, name = _pool_of(at)
        if pool is not None and result.is_damaged and not _is_accepted(pool, name, result):
            keep(at, result)


def _is_accepted(pool: pool_module.Pool, name: str, result: scrubs.Result) -> bool:
    known = scrubs.read(pool.uuid).images.get(name)
    return known is not None and known.accepted and known.same_damage(result)


def check_chain_for_command(path: str) -> None:
    """As :func:`check_chain`, for a command that has an option for it.

    :raises DataDamaged:
    :raises ImageNotFound:
    """
    damaged = damaged_in_chain(path)
    if damaged is not None:
        raise exception.DataDamaged(
            path=damaged.path, finding=damaged.finding, otherwise=f'give {_OPTION}'
        )


def compare_if_due(pool: pool_module.Pool, name: str) -> None:
    """Before something is made on an image: templates of its chain that nobody has compared for
    ``[pcow] compare_templates_after`` are, and what is found is kept, so that it is refused. Not
    with the pool locked: it takes a while.
    """
    counts, path = int(conf.CONF.pcow.compare_templates_after), pool.image_path(name)
    key = _key(path)
    if not counts or key is None or _was_looked_at(key, counts):
        return
    with _COMPARES.setdefault(key, threading.Lock()):  # others wait for what this one finds
        if not _was_looked_at(key, counts) and _compare_templates(pool, path, counts):
            _LOOKED_AT[key] = time.monotonic()


def _compare_templates(pool: pool_module.Pool, path: str, counts: int) -> bool:
    """Whether all of the chain are known, and whole."""
    is_whole = True
    known, own = scrubs.read(pool.uuid), os.path.basename(os.path.realpath(path))
    items = {item.name: item for item in pool.listed()}
    for item in bases.chain(items, own.removesuffix(names.IMAGE_SUFFIX)):
        before = known.images.get(item.name)
        try:
            status = os.stat(item.path)
            is_known = before is not None and before.inode == status.st_ino
            # one that could not be read was not compared
            is_known = is_known and before is not None and not before.problem
            age = before.age() if before is not None and is_known else math.inf
            if item.summary is None or not item.summary.sealed or 0 <= age < counts:
                continue
            is_whole &= _compare_now(pool, item, before if is_known else None)
        except (FileNotFoundError, exception.ImageNotFound):  # who makes something of it says so
            is_whole = False
    return is_whole


def _key(path: str) -> _Key | None:
    """None: it cannot be read, as who makes something on it says."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), 'rb') as top:
            status = os.fstat(top.fileno())
            return status.st_dev, status.st_ino, immutable.uuid_of(top.fileno())
    except OSError:
        return None


def _was_looked_at(key: _Key, counts: int) -> bool:
    """By this process, which may be about to make a hundred forks, or be a service that may note
    nothing.
    """
    before = _LOOKED_AT.get(key)
    return before is not None and time.monotonic() - before < counts


def _compare_now(
    pool: pool_module.Pool, item: bases.ListedImage, before: scrubs.Result | None
) -> bool:
    """:return: whether it is whole"""
    result = scrubs.compare(item.path, sealed=True)
    if result.is_damaged or (before is not None and before.is_damaged):
        notices.keep(pool, item.name, result)
        return not result.is_damaged
    try:
        scrubs.put(pool.uuid, item.name, result)
    except exception.PcowError as e:  # it is root's: a service compares once more the next time
        LOG.debug('That %s was compared is not noted: %s', item.path, e)
    return not result.problem


def _pool_of(path: str) -> tuple[pool_module.Pool | None, str]:
    """The pool of an image, and its name there: the list of images has no symbolic links. None also
    where nobody can tell: that keeps no damage from being refused.
    """
    directory, file = os.path.split(os.path.realpath(path))
    name = file.removesuffix(names.IMAGE_SUFFIX)
    try:
        return registry.PoolRegistry().find(directory), name
    except exception.PcowError as e:
        LOG.info('The pool of %s cannot be told: %s', path, e)
        return None, name
