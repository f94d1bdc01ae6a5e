# SPDX-License-Identifier: Apache-2.0
"""What lies in a pool and nobody needs any more: found with reasons, deleted only on request."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import enum
import os
import re
import stat
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import workspace
from pcow_driver.export import nbd
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.images import protection
from pcow_driver.pools import bases
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging
from pcow_driver.snapshots import trash
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

# what pcow-img and template build write before they rename it
_UNFINISHED = re.compile(r'\..*\.(part|partial)')
# seconds since the last write; a younger one may be in the making
_MIN_AGE = 3600


class Kind(enum.StrEnum):
    UNFINISHED = 'unfinished'  # a file that an interrupted command left
    WORK = 'work'  # files of a conversion that was killed, not in the pool
    ORPHAN = 'orphan'  # an image whose base is gone: it cannot be opened
    UNUSED_TEMPLATE = 'unused-template'
    # no domain names it, nothing stands on it, and it is no server's and no volume
    UNUSED_IMAGE = 'unused-image'
    SNAPSHOT = 'snapshot'  # deleted for its owner, or of a command that was killed
    LEAK = 'leak'  # space in an image that nothing refers to
    RESCUE = 'rescue'  # what a repair has dropped; whether it is needed its owner knows


@dataclasses.dataclass(frozen=True)
class Finding:
    kind: Kind
    path: str
    size: int  # bytes that would come back
    reason: str
    snapshot: str | None = None  # of the image


def find(pool: pool_module.Pool, domain_images: libvirt_host.Files | None) -> list[Finding]:
    """Look at a pool; nothing is changed, nor locked so that a guest could not start.

    :param domain_images: of all domains; None if they are not known: then no image counts as unused
    :raises ToolNotFound: there is no pcow-img
    """
    items = pool.listed()
    findings = [*_unfinished(pool), *_work()]
    used = {
        item.summary.base_uuid
        for item in items
        if item.summary and item.summary.base_uuid and item.summary.base_uuid != item.summary.uuid
    }
    for item in items:
        if item.summary is None:
            continue
        size, base = item.summary.actual_size, item.summary.base_filename
        if base is not None and not os.path.lexists(
            os.path.join(pool.path, os.path.basename(base))
        ):
            findings.append(
                Finding(
                    Kind.ORPHAN,
                    item.path,
                    size,
                    f'its base {base} is gone: bring it back, or delete the image',
                )
            )
        elif item.summary.sealed and item.summary.uuid not in used:
            findings.append(
                Finding(Kind.UNUSED_TEMPLATE, item.path, size, 'nothing stands on this template')
            )
        elif (
            not item.summary.sealed
            and item.summary.uuid not in used
            and domain_images is not None
            and _why_used(item.path, domain_images) is None
        ):
            findings.append(
                Finding(
                    Kind.UNUSED_IMAGE,
                    item.path,
                    size,
                    ('no domain of this libvirt names it and nothing stands on it'),
                )
            )
        findings += _leaks(item)
    return [*findings, *_snapshots(pool, items), *_rescue_files(pool)]


def _why_used(path: str, domain_images: libvirt_host.Files) -> str | None:
    if names.may_be_of_service(os.path.basename(path)):  # without a domain here, too
        return 'it is of Nova or Cinder, who know whether they need it'
    if path in domain_images:
        return 'a domain of libvirt names it'
    return _why_young(path)


def _why_young(path: str) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        if time.time() - os.lstat(path).st_mtime > _MIN_AGE:
            return None
    return f'it was written less than {_MIN_AGE // 60} minutes ago'


def _unfinished(pool: pool_module.Pool) -> Iterator[Finding]:
    for name in sorted(filter(_UNFINISHED.fullmatch, os.listdir(pool.path))):
        path = os.path.join(pool.path, name)
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and _why_in_the_making(pool, path) is None:
                yield Finding(
                    Kind.UNFINISHED,
                    path,
                    status.st_blocks * 512,
                    (
                        f'an interrupted command left it '
                        f'{(time.time() - status.st_mtime) / 3600:.0f} hours ago'
                    ),
                )


def _why_in_the_making(pool: pool_module.Pool, path: str) -> str | None:
    """Not by its age alone: what comes through a pipe may pause for long, and clocks are set."""
    if staging.is_in_the_making(pool, os.path.basename(path)):
        return 'somebody makes it'
    try:
        if image_locks.is_in_use(path, writers_only=False):
            return 'somebody has it open'
    except OSError as e:
        return str(e.strerror)
    return _why_young(path)


def _rescue_files(pool: pool_module.Pool) -> Iterator[Finding]:
    for path, image_name in pool.rescue_files():
        with contextlib.suppress(FileNotFoundError):
            size = os.lstat(path).st_blocks * 512
            gone = not os.path.lexists(os.path.join(pool.path, image_name))
            yield Finding(
                Kind.RESCUE,
                path,
                size,
                f'a repair of {image_name} dropped it: see pcow-img rescue'
                + (f'; {image_name} is gone' if gone else ''),
            )


def _work() -> Iterator[Finding]:
    for path in workspace.left_over(*workspace.PLAIN, workspace.EXPORT):
        yield Finding(
            Kind.WORK,
            path,
            workspace.size(path),
            'a conversion that was killed left it ([pcow] conversion_dir)',
        )


def _leaks(item: bases.ListedImage) -> Iterator[Finding]:
    """Without a lock, which a guest that starts meanwhile could not get past; so only if nobody
    writes, before and after.
    """
    try:
        if image_locks.is_in_use(item.path):
            return  # it is looked at when that ends
        result = image.check(item.path, force_share=True)
        if result.leaks and not result.corruptions and not image_locks.is_in_use(item.path):
            reason = f'{result.leaks} slabs belong to nothing'
            if result.leaks_doubtful:
                reason += f'; {result.leaks_doubtful} of them may be data: see pcowctl image check'
            yield Finding(Kind.LEAK, item.path, 0, reason)
    except (exception.PcowError, OSError) as e:
        LOG.debug('%s is not looked at: %s', item.path, e)  # deleted meanwhile, for instance


def _snapshots(pool: pool_module.Pool, items: list[bases.ListedImage]) -> Iterator[Finding]:
    """What is marked as deleted, and nothing stands on it nor reads it."""
    bases = {
        (item.summary.base_uuid, item.summary.base_snapshot_id) for item in items if item.summary
    }
    images = {item.name: item.path for item in items if item.summary}
    try:
        marks = trash.marks(pool)
    except OSError as e:
        LOG.debug('%s: what is marked as deleted is not looked at: %s', pool.path, e)
        return
    for mark in marks:
        path = images.get(mark.image)
        if mark.snapshot is None or path is None:
            continue
        try:
            info = image.info(path, force_share=True)
            made = next((one for one in info.snapshots if one.name == mark.snapshot), None)
            if made is None or (
                (info.uuid, int(made.id)) not in bases
                and not image_locks.is_snapshot_in_use(path, int(made.id))
            ):
                yield Finding(
                    Kind.SNAPSHOT,
                    path,
                    made.delete_frees if made else 0,
                    (
                        f'its snapshot {mark.snapshot} is deleted, or a command that was killed '
                        f'left it'
                    ),
                    mark.snapshot,
                )
        except (exception.PcowError, OSError) as e:
            LOG.debug('%s is marked as deleted and not looked at: %s', path, e)


def _why_repairing(pool: pool_module.Pool, path: str) -> str | None:
    """The repair that has made this file may be under way, and name it at its end."""
    for found, image_name in pool.rescue_files():
        if found == path:
            with contextlib.suppress(FileNotFoundError):
                if image_locks.is_in_use(os.path.join(pool.path, image_name), writers_only=False):
                    return f'{image_name} is in use, and may be in repair'
    return _why_young(path)


def look_again(pool: pool_module.Pool, finding: Finding) -> None:
    """Find out whether what was found is needed by now; nothing is changed.

    :raises ImageInUse: it is
    :raises LibvirtFailed: whether a domain names it is not known any more
    """
    reason = None
    if finding.kind in (Kind.ORPHAN, Kind.UNUSED_IMAGE):
        reason = _why_used(finding.path, libvirt_host.all_images())
    elif finding.kind is Kind.UNFINISHED:
        reason = _why_in_the_making(pool, finding.path)
    elif finding.kind is Kind.RESCUE:
        reason = _why_repairing(pool, finding.path)
    if reason is not None:
        raise exception.ImageInUse(path=finding.path, reason=reason)


def delete(pool: pool_module.Pool, finding: Finding) -> None:
    """Delete what was found, unless it is needed by now.

    :raises ImageInUse: somebody has it open or makes it, something stands on it, its base is back,
        a domain names it, or it is of Nova or Cinder
    :raises ImageNotFound:
    :raises ToolFailed, QmpFailed: somebody reads the snapshot
    :raises ImageProtected: its immutable flag cannot be taken off
    :raises LibvirtFailed: whether a domain names it is not known any more
    """
    name = os.path.basename(finding.path).removesuffix(names.IMAGE_SUFFIX)
    if finding.kind in (Kind.UNFINISHED, Kind.RESCUE):
        with pool.lock():  # nobody begins to make an image meanwhile
            look_again(pool, finding)
            protection.unlink(finding.path)
        return
    look_again(pool, finding)
    if finding.kind is Kind.LEAK:
        result = image.check(finding.path, repair=True, leaks_only=True)
        if result.corruptions:
            raise exception.ImageInUse(
                path=finding.path, reason='it is damaged by now: see pcowctl image check'
            )
        if result.refused:
            raise exception.ImageInUse(
                path=finding.path,
                reason='some of what nothing refers to may be data: see pcowctl image check',
            )
    elif finding.kind is Kind.SNAPSHOT and finding.snapshot is not None:
        if not trash.delete_snapshot(pool, name, finding.snapshot):
            raise exception.ImageInUse(
                path=finding.path,
                reason=f'something stands on its snapshot {finding.snapshot} by now',
            )
    elif finding.kind is Kind.WORK:
        (nbd if workspace.purpose(finding.path) == workspace.EXPORT else workspace).discard(
            finding.path
        )
    elif finding.kind is Kind.UNUSED_TEMPLATE:
        pool.delete_template(name)
    elif finding.kind is Kind.ORPHAN:
        pool.delete_orphan(name)
    else:
        pool.delete_image(name)
