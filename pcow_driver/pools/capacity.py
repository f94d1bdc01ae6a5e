# SPDX-License-Identifier: Apache-2.0
"""Space: what is provisioned for images, what they hold, what they share, and whether a pool is
running out. Bytes throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
import dataclasses
import os

from pcow_driver.common import exception
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned
from pcow_driver.pools import scrubs
from pcow_driver.pools import watermark

State = watermark.State
judge = watermark.judge


@dataclasses.dataclass(frozen=True)
class ImageUsage:
    name: str
    template: bool
    virtual: int  # what the guest sees
    allocated: int  # blocks that the pool holds for the file
    own: int  # guest data in it, snapshots included
    # blocks allocated ahead of need, and metadata: allocated without being data
    reserved: int
    shared: int  # what the guest reads from its bases


@dataclasses.dataclass(frozen=True)
class PoolUsage:
    """A pool at one moment; ``unreadable`` images are in none of the sums but those of ``account``:
    as they were when they could be read, or ``fixed``.
    """

    name: str
    total: int  # of the file system
    free: int
    reserved: int  # by the pool's reserve: never provisioned for images
    images: tuple[ImageUsage, ...]
    unreadable: tuple[str, ...]
    account: provisioned.Account
    state: State
    reason: str  # of the state
    read_only: bool = False
    scrubbed: int = 0  # when the last scrub came to its end, in seconds since the epoch
    damaged: tuple[str, ...] = ()  # images of which that, or a later one, says so

    @property
    def provisioned(self) -> int:
        """What images that guests can fill may come to hold; templates are full already."""
        return self.account.provisioned

    @property
    def limit(self) -> int | None:
        """What may be provisioned in all; None: no limit."""
        return self.account.limit

    @property
    def others(self) -> int:
        """What the file system holds beside images: its own metadata, other files, and what cannot
        be read.
        """
        return max(self.total - self.free - self.allocated, 0)

    @property
    def allocated(self) -> int:
        return sum(item.allocated for item in self.images)


def _shared(path: str) -> int:
    return sum(
        extent.length
        for extent in image.map_extents(path, force_share=True)
        if extent.present and extent.depth
    )


def _details(item: ImageUsage, path: str) -> ImageUsage:
    info = image.info(path, force_share=True)
    own = info.data_size + sum(
        snapshot.data_size + snapshot.vm_state_size for snapshot in info.snapshots
    )
    shared = _shared(path) if info.base_filename is not None else 0
    return dataclasses.replace(item, own=own, reserved=max(item.allocated - own, 0), shared=shared)


def usage(pool: pool_module.Pool, *, with_shared: bool = True) -> PoolUsage:
    """Look at a pool and everything in it.

    :param with_shared: also find out what images hold of their own and what they read from their
        bases, for which a program reads the index of each; else those figures are 0
    :raises ToolNotFound: there is no pcow-img
    """
    found: list[ImageUsage] = []
    unreadable: list[str] = []
    for item in pool.listed():
        try:
            if item.summary is None:
                unreadable.append(item.name)
                continue
            one = ImageUsage(
                name=item.name,
                template=item.summary.sealed,
                virtual=item.summary.virtual_size,
                allocated=item.summary.actual_size,
                own=0,
                reserved=0,
                shared=0,
            )
            found.append(_details(one, item.path) if with_shared else one)
        except exception.ImageNotFound:
            continue  # it was deleted meanwhile
        except exception.ToolFailed:
            unreadable.append(item.name)
    account, capacity, settings = pool.account(), pool.capacity(), pool.settings
    state, reason = judge(capacity, settings)
    scrub = scrubs.read(pool.uuid)
    return PoolUsage(
        name=pool.name,
        total=account.total,
        free=account.free,
        reserved=account.reserved,
        images=tuple(found),
        unreadable=tuple(unreadable),
        account=account,
        state=state,
        reason=reason,
        read_only=capacity.read_only,
        scrubbed=scrub.ended_seconds,
        damaged=tuple(scrub.damaged()),
    )


_STATE, _STATE_HELP = (
    'pcow_pool_state',
    '0 ok, 1 low on space, 2 critically low or read-only, 3 it cannot be looked at.',
)
_METRICS: tuple[tuple[str, str, Callable[[PoolUsage], int]], ...] = (
    ('pcow_pool_size_bytes', 'Size of the file system of a pool.', lambda p: p.total),
    ('pcow_pool_free_bytes', 'Free space of a pool.', lambda p: p.free),
    (
        'pcow_pool_reserved_bytes',
        'Space that is never provisioned for images.',
        lambda p: p.reserved,
    ),
    (
        'pcow_pool_provisioned_bytes',
        'What images that guests can fill may come to hold.',
        lambda p: p.provisioned,
    ),
    (
        'pcow_pool_provisioned_limit_bytes',
        'What may be provisioned for images; 0: no limit.',
        lambda p: p.limit or 0,
    ),
    ('pcow_pool_allocated_bytes', 'Blocks that images and templates hold.', lambda p: p.allocated),
    ('pcow_pool_images', 'Images and templates in a pool.', lambda p: len(p.images)),
    ('pcow_pool_unreadable_images', 'Images that could not be read.', lambda p: len(p.unreadable)),
    (
        'pcow_pool_damaged_images',
        'Images that a scrub has found damaged.',
        lambda p: len(p.damaged),
    ),
    (
        'pcow_pool_scrubbed_time_seconds',
        'When the last scrub came to its end, since the epoch; 0: never.',
        lambda p: p.scrubbed,
    ),
    (_STATE, _STATE_HELP, lambda p: int(p.state)),
)
_IMAGE_METRICS: tuple[tuple[str, str, Callable[[ImageUsage], int]], ...] = (
    ('pcow_image_virtual_bytes', 'Size that the guest sees.', lambda i: i.virtual),
    ('pcow_image_allocated_bytes', 'Blocks that the image holds.', lambda i: i.allocated),
    ('pcow_image_own_bytes', 'Guest data in the image, snapshots included.', lambda i: i.own),
    (
        'pcow_image_shared_bytes',
        'Guest data that the image reads from its bases.',
        lambda i: i.shared,
    ),
)


def _label(value: str) -> str:
    """File names need not be UTF-8, the format is."""
    return (
        os.fsencode(value)
        .decode(errors='backslashreplace')
        .replace('\\', '\\\\')
        .replace('"', '\\"')
        .replace('\n', '\\n')
    )


def prometheus(
    pools: Sequence[PoolUsage], *, unknown: Sequence[str] = (), list_is_unknown: bool = False
) -> str:
    """The text format that a Prometheus node exporter collects from files.

    :param unknown: names of pools that could not be looked at
    :param list_is_unknown: nobody knows which pools there are
    """
    lines = [
        '# HELP pcow_pools_unknown 1: the list of pools cannot be read.',
        '# TYPE pcow_pools_unknown gauge',
        f'pcow_pools_unknown {int(list_is_unknown)}',
    ]
    for name, help_text, value in _METRICS:
        lines += [f'# HELP {name} {help_text}', f'# TYPE {name} gauge']
        lines += [f'{name}{{pool="{_label(pool.name)}"}} {value(pool)}' for pool in pools]
        if name == _STATE:
            lines += [f'{name}{{pool="{_label(pool)}"}} {int(State.UNKNOWN)}' for pool in unknown]
    for name, help_text, of_image in _IMAGE_METRICS:
        lines += [f'# HELP {name} {help_text}', f'# TYPE {name} gauge']
        lines += [
            f'{name}{{pool="{_label(pool.name)}",image="{_label(item.name)}"}} {of_image(item)}'
            for pool in pools
            for item in pool.images
        ]
    return '\n'.join(lines) + '\n'
