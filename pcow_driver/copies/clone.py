# SPDX-License-Identifier: Apache-2.0
"""New device images from snapshots and from the present state of others: thin where that is
possible, else copied.

Thin is what stands in the same pool, up to a number of files in its chain; each of them costs an
open file and a mapping.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import os

from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.copies import verify
from pcow_driver.export import nbd
from pcow_driver.images import image
from pcow_driver.images import image_locks
from pcow_driver.images import info_block
from pcow_driver.images import protection
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import provisioned
from pcow_driver.pools import staging
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash


def on_base(
    source_pool: pool_module.Pool,
    source: str,
    pool: pool_module.Pool,
    name: str,
    data_size: int,
    *,
    max_chain: int,
    snapshot: str | None = None,
) -> str:
    """Make a device of a template, or of a snapshot of another device, which may be in use; return
    the path of its image.

    :param data_size: bytes, a multiple of 2 MiB, not less than that of the source
    :param max_chain: longest chain of files, this one included, that may come out; a longer one is
        copied into one file
    :param snapshot: what to take; None: the present state, of a template
    :raises ImageNotFound: the source is not there
    :raises ImageExists:
    :raises InvalidSize:
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: there is no such snapshot, or the pool is full, for instance
    """
    path = source_pool.existing_path(source)
    if source_pool.uuid == pool.uuid and image.info(path, force_share=True).chain_depth < max_chain:
        verify.compare_if_due(pool, source)
        return device.create_on(pool, name, source, base_snapshot=snapshot, data_size=data_size)
    return copy(path, pool, name, data_size, snapshot=snapshot)


@dataclasses.dataclass(frozen=True)
class Clone:
    """A device that shall be made of what another holds now; ``data_size`` in bytes."""

    source_pool: pool_module.Pool
    source: str
    pool: pool_module.Pool
    name: str
    data_size: int

    @property
    def source_path(self) -> str:
        return self.source_pool.existing_path(self.source)

    @property
    def snapshot(self) -> str:
        """Of the source, on which the clone stands; it goes with the clone."""
        return names.check_snapshot_name(f'clone-{self.name}')


def clone(wanted: Sequence[Clone], *, max_chain: int) -> list[str]:
    """Make clones, of one moment if they are several; the sources may be in use. Return the paths
    of their images.

    :raises: as :func:`on_base`
    """
    made = []
    for one in wanted:  # not with the locks below, nor a snapshot that the guests pay for
        verify.compare_if_due(one.source_pool, one.source)
    with contextlib.ExitStack() as stack:
        sources = {(one.source_pool.uuid, one.source): one.source_pool for one in wanted}
        for key in sorted(sources):  # in one order, for those who clone the same ones
            stack.enter_context(trash.lock(sources[key], key[1]))
        for one in wanted:
            if os.path.lexists(one.pool.image_path(one.name)):
                raise exception.ImageExists(path=one.pool.image_path(one.name))
        to_collect = True
        try:
            for one in wanted:
                # first, so that a crash leaves nothing for ever
                trash.mark_snapshot(one.source_pool, one.source, one.snapshot)
                # of an attempt that was cut off
                trash.collect_snapshot(one.source_pool, one.source, one.snapshot)
                trash.mark_snapshot(one.source_pool, one.source, one.snapshot)
            attached.snapshot_create_all([(one.source_path, one.snapshot) for one in wanted])
            for one in wanted:
                made.append(
                    on_base(
                        one.source_pool,
                        one.source,
                        one.pool,
                        one.name,
                        one.data_size,
                        max_chain=max_chain,
                        snapshot=one.snapshot,
                    )
                )
        except exception.NoAnswer:
            to_collect = False  # QEMU may make it yet, and it goes with the next collection
            raise
        finally:
            # what was copied, or failed, does not need it any more
            for one in wanted if to_collect else ():
                trash.collect_snapshot(one.source_pool, one.source, one.snapshot)
    return made


def copy(
    path: str,
    pool: pool_module.Pool,
    name: str,
    data_size: int,
    *,
    snapshot: str | None = None,
    accept_damage: bool = False,
) -> str:
    """Make a device that stands on nothing, with the content of another image, and return the path
    of its image.

    :param snapshot: what to copy; also while somebody writes to the image.  None: its present state
    :param accept_damage: also if it is known to be damaged, as it is
    :raises: as :func:`on_base`
    """
    with staging.building(pool, name) as part:
        source = device.window(path, snapshot=snapshot, force_share=snapshot is not None)
        with pool.lock():
            pool.check_room(info_block.OFFSET + data_size)
            staging.reserve(pool, name, thin=provisioned.whole_size(info_block.OFFSET + data_size))
        if source.offset == info_block.OFFSET:
            with verify.keeping(path):
                image.convert(
                    path, image.FORMAT, part, snapshot=snapshot, accept_damage=accept_damage
                )
            device.grow(part, data_size)
        else:
            if not accept_damage:
                verify.check_chain(path)
            _copy_data(path, source, snapshot, part, data_size)
        target = pool.image_path(name)
        with pool.lock():
            staging.finish(pool, name, part)
    return target


def _copy_data(
    path: str, source: device.Window, snapshot: str | None, part: str, data_size: int
) -> None:
    """Leave behind what is in front of the data: a page map, of which only the template tells."""
    if data_size < source.size:
        raise exception.InvalidSize(
            size=data_size, reason=f'the device {path} has {source.size} bytes'
        )
    device.create_file(part, data_size)
    with (
        nbd.serve(path, window=source, snapshot=snapshot, read_only=True) as uri,
        nbd.serve(part, window=device.window(part)) as target,
    ):
        tool.run(
            tool.find('qemu_img'),
            'convert',
            '-f',
            'raw',
            '-O',
            'raw',
            '-n',
            '--target-is-zero',
            uri,
            target,
        )


def rename(pool: pool_module.Pool, name: str, new_name: str) -> str:
    """Give an image that nobody uses and nothing stands on another name, and return its path.

    :raises InvalidName:
    :raises ImageNotFound:
    :raises ImageExists: the new name is taken
    :raises ImageInUse: it has children, which know it by its name, or somebody has it open
    """
    path, target = (
        pool.existing_path(name),
        pool.image_path(names.check_new_name('image', new_name)),
    )
    with pool.lock():
        try:
            image.info(path)
        except exception.ToolFailed as e:
            raise exception.ImageInUse(path=path, reason=str(e)) from None
        children = pool.children(name)
        if children:
            raise exception.ImageInUse(
                path=path,
                reason=f'images stand on it, and know it by its name: {", ".join(children[:5])}',
            )
        with image_locks.alone(path):  # nobody opens it under a name that goes
            protected = immutable.is_set(path)
            if protected:
                protection.unprotect(path)
            staging.publish(path, target)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            if protected:
                protection.protect(target)
    return target
