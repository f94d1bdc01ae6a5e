# SPDX-License-Identifier: Apache-2.0
"""A scrub: the data of all images of a pool are compared with their checksums, as politely as it
goes.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.pools import bases
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import scrubs
from pcow_driver.virt import notices

LOG = logging.getLogger(__name__)


def be_polite() -> None:
    """This process and those that it starts wait for all others."""
    tool.run(tool.find_system('ionice', 'util-linux'), '-c', '3', '-p', str(os.getpid()))
    os.nice(max(19 - os.nice(0), 0))


def _check(item: bases.ListedImage, rate: int) -> scrubs.Result:
    if item.summary is None:
        inode = os.stat(item.path).st_ino
        return scrubs.Result(inode, scrubs.now(), problem=item.error or 'it cannot be read')
    return scrubs.compare(item.path, sealed=item.summary.sealed, rate=rate)


def _is_done(known: scrubs.Scrub, item: bases.ListedImage) -> bool:
    one = known.images.get(item.name)
    return one is not None and one.checked >= known.begun and one.inode == os.stat(item.path).st_ino


def scrub(
    pool: pool_module.Pool,
    *,
    rate: int = 0,
    resume: bool = False,
    tell: Callable[[str, scrubs.Result], None],
) -> scrubs.Scrub:
    """Look at the images of a pool one after the other; each result is kept at once.

    :param rate: bytes a second at most; 0: as fast as it goes
    :param resume: go on where the last one was interrupted
    :raises StateInvalid: results cannot be kept
    """
    with scrubs.changing(pool.uuid) as known:
        if not (resume and known.is_interrupted):
            known = dataclasses.replace(known, begun=scrubs.now())
            scrubs.write(pool.uuid, known)
    names = set()
    for item in pool.listed():
        names.add(item.name)
        try:
            if _is_done(known, item):
                continue
            result = _check(item, rate)
        except (FileNotFoundError, exception.ImageNotFound):  # deleted meanwhile
            continue
        known = scrubs.put(pool.uuid, item.name, result)
        result = known.images[item.name]
        if result.is_damaged:
            LOG.error('%s is damaged: %s', item.path, '; '.join(result.findings))
            notices.tell(pool)
        tell(item.name, result)
    with scrubs.changing(pool.uuid) as known:
        # and what a migration has brought meanwhile
        left = {
            name: one
            for name, one in known.images.items()
            if name in names or one.checked >= known.begun
        }
        known = dataclasses.replace(known, ended=scrubs.now(), images=left)
        scrubs.write(pool.uuid, known)
    notices.tell(pool)
    return known


def accept(pool: pool_module.Pool, name: str) -> None:
    """Let an image be used although it is damaged, until it is damaged in another way.

    :raises UsageInvalid: no scrub has found damage of it
    """
    with scrubs.changing(pool.uuid) as known:
        result = known.images.get(name)
        if result is None or not result.is_damaged:
            raise exception.UsageInvalid(
                reason=f'no scrub of pool {pool.name} has found {name} damaged'
            )
        LOG.info('%s of pool %s is used although it is damaged', name, pool.name)
        accepted = dataclasses.replace(result, accepted=True)
        known = dataclasses.replace(known, images=known.images | {name: accepted})
        scrubs.write(pool.uuid, known)
    notices.tell(pool)
