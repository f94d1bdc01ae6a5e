# SPDX-License-Identifier: Apache-2.0
"""Images that a guest's kernel takes as a persistent memory device of a given size, with DAX.

What an NVDIMM shows is longer than what ``/dev/pmemN`` in the guest shows: the DAX info block
(:mod:`pcow_driver.images.info_block`) stands in front of the data. A volume of 4 GiB is therefore
an image of 4 GiB and 2 MiB; everybody outside the guest who wants the bytes of the device needs the
:class:`Window` of the image.

The block is the guest's to write, so nothing in it decides about a size or an offset. What it says
of the offset counts only where pcow puts data: at :data:`pcow_driver.images.info_block.OFFSET`, or
where a template has them, which nobody writes to.
"""

import contextlib
import dataclasses
import errno
import os
import re
import tempfile
import uuid as uuidlib

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.images import model
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import staging


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of an image that is the data of the guest's device, in bytes."""

    offset: int
    size: int


def create(
    pool: pool_module.Pool, name: str, data_size: int, *, cluster_size: int | None = None
) -> str:
    """Make an empty device of ``data_size`` bytes and return the path of its image.

    :param data_size: a multiple of 2 MiB
    :raises InvalidName:
    :raises InvalidSize:
    :raises ImageExists:
    :raises PoolDraining:
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: the pool is full, for instance
    """
    size = info_block.namespace_size(_check_data_size(data_size), info_block.PageMap.RAM)
    with staging.building(pool, name) as part, pool.lock():
        pool.check_room(size)
        create_file(part, data_size, cluster_size=cluster_size)
        target = pool.image_path(name)
        staging.publish(part, target)
    return target


def create_file(path: str, data_size: int, *, cluster_size: int | None = None) -> None:
    """As :func:`create`, whatever the file is in, and whoever has looked for room."""
    size = info_block.namespace_size(_check_data_size(data_size), info_block.PageMap.RAM)
    image.create(path, size, cluster_size=cluster_size)
    write_info_block(path, size)


def create_on(
    pool: pool_module.Pool,
    name: str,
    base: str,
    *,
    base_snapshot: str | None = None,
    data_size: int | None = None,
    cluster_size: int | None = None,
) -> str:
    """Make a thin device on another of the pool, a template or a snapshot of an image, and return
    the path of its image.

    :param base: name of the image to stand on; it has an info block
    :param base_snapshot: the snapshot of it
    :param data_size: a multiple of 2 MiB, not less than that of the base; the same if not given
    :raises ImageNotFound: the base is not there
    :raises InvalidSize:
    :raises DeviceInvalid: the base has no info block
    :raises ImageDamaged: a scrub has found the base damaged
    :raises: as :func:`create`
    """
    with staging.building(pool, name) as part, pool.lock():
        path = pool.existing_path(base)
        below, told = _look(path, base_snapshot, force_share=True)
        if data_size is None:
            data_size = below.size
        if _check_data_size(data_size) < below.size:
            raise exception.InvalidSize(
                size=data_size, reason=f'the data of {path} has {below.size} bytes'
            )
        size = below.offset + data_size
        pool.check_room(size)
        pool.check_sound(base)
        image.create_overlay(
            part, path, size=size, base_snapshot=base_snapshot, cluster_size=cluster_size
        )
        if data_size != told:
            write_info_block(part, size, below.offset)
        target = pool.image_path(name)
        staging.publish(part, target)
    return target


def grow(path: str, data_size: int) -> None:
    """Make a device larger; the guest, which must not be running, finds the new size when it
    starts.

    A grow that was interrupted is completed by calling this again.

    :param data_size: a multiple of 2 MiB, not less than now
    :raises ImageNotFound:
    :raises InvalidSize:
    :raises DeviceInvalid: no info block
    """
    now, told = _look(path)
    if _check_data_size(data_size) < now.size:
        raise exception.InvalidSize(
            size=data_size, reason=f'the device {path} has {now.size} bytes and does not shrink'
        )
    size = now.offset + data_size
    # The image first: a block that promises more than there is would keep the guest from using any
    # of it.
    if data_size > now.size:
        image.resize(path, size)
    if data_size != told:
        write_info_block(path, size, now.offset)


def extend(pool: pool_module.Pool, name: str, data_size: int) -> None:
    """As :func:`grow`, if the operator's limits have room for it.

    :raises PoolDraining:
    :raises NoRoom:
    """
    with pool.lock():
        path = pool.existing_path(name)
        growth = data_size - window(path).size
        if growth > 0:
            pool.check_room(growth)
        grow(path, data_size)
    pool.remember(name)


def window(path: str, *, snapshot: str | None = None, force_share: bool = False) -> Window:
    """Where the data of a device lies in its image: from where pcow lets it begin to the end.

    :param snapshot: look at this snapshot rather than at the active layer
    :param force_share: also while somebody writes to the image
    :raises ImageNotFound:
    :raises DeviceInvalid: no valid info block, or one that does not fit the image
    """
    return _look(path, snapshot, force_share=force_share)[0]


def check_size(
    path: str, data_size: int, owner: str, way_out: str, *, snapshot: str | None = None
) -> None:
    """Make sure that an image has no more data than whoever it belongs to was given. Who has broken
    out of the QEMU of a guest can write any size into its image; nothing that a guest can write to
    is asked where the data begin.

    :param data_size: in bytes
    :param owner: what gives it that, for the message
    :param way_out: what else than to cut it off can be done, for the message
    :param snapshot: look at this snapshot rather than at the active layer
    :raises ImageNotFound:
    :raises DeviceTooLarge:
    """
    size = _virtual_size(image.info(path, force_share=True), snapshot)
    _check_end(path, size, data_size, owner, way_out)


def checked_window(
    path: str,
    data_size: int,
    owner: str,
    way_out: str,
    *,
    snapshot: str | None = None,
    force_share: bool = False,
) -> Window:
    """As :func:`window`, of no more data than that; who reads through it gets no more either,
    whatever is written to the image meanwhile.

    :raises: as :func:`window` and :func:`check_size`
    """
    found = window(path, snapshot=snapshot, force_share=force_share)
    _check_end(path, found.offset + found.size, data_size, owner, way_out)
    return found


def _check_end(path: str, size: int, data_size: int, owner: str, way_out: str) -> None:
    """:param size: of the image as a guest would see it"""
    if size <= info_block.OFFSET + data_size:
        return
    offset = _offset_below(path)
    if size > offset + data_size:
        raise exception.DeviceTooLarge(
            path=path,
            size=units.format_exact(size - offset),
            owner=owner,
            allowed=units.format_exact(data_size),
            way_out=way_out,
            end=offset + data_size,
        )


def _offset_below(path: str) -> int:
    """Where the data of an image begin, by what it stands on alone."""
    chain = image.chain(path, force_share=True)
    bottom = chain[-1]
    if len(chain) == 1 or names.may_be_of_service(os.path.basename(bottom.filename)):
        return info_block.OFFSET
    at = chain[-2].base_snapshot
    below = info_block.parse(_read_block(bottom.filename, at, force_share=True))
    return info_block.OFFSET if below is None else min(below.data_offset, _most_offset(bottom, at))


def check_movable(path: str) -> None:
    """Make sure that the image is a device under the name of a volume, too.

    :raises: as :func:`window`
    :raises DeviceInvalid: its data begin where those of a volume do not
    """
    if window(path).offset != info_block.OFFSET and image.info(path).base_filename is None:
        raise exception.DeviceInvalid(
            path=path, reason=('its data begin where those of a volume cannot (--page-map pmem)')
        )


def _look(
    path: str, snapshot: str | None = None, *, force_share: bool = False
) -> tuple[Window, int]:
    """As :func:`window`; with the bytes of data that the info block tells a guest of."""
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise exception.ImageNotFound(path=path)
    found = info_block.parse(_read_block(path, snapshot, force_share))
    if found is None:
        raise exception.DeviceInvalid(
            path=path, reason='it has no DAX info block (it was not made as a template or a device)'
        )
    size = _virtual_size(image.info(path, force_share=force_share), snapshot)
    if found.data_offset + found.data_size > size or found.data_size == 0:
        raise exception.DeviceInvalid(
            path=path, reason='its DAX info block promises more than the image has'
        )
    if found.data_offset != info_block.OFFSET:
        _check_offset(path, snapshot, found.data_offset)
    return Window(found.data_offset, size - found.data_offset), found.data_size


def _virtual_size(info: model.ImageInfo, snapshot: str | None) -> int:
    sizes = {one.name: one.virtual_size for one in info.snapshots}
    return info.virtual_size if snapshot is None else sizes.get(snapshot, info.virtual_size)


def _check_offset(path: str, snapshot: str | None, offset: int) -> None:
    """Find out whether the data begin where the template has them: behind the page map in it.

    A volume and a disk of a server stand on one, or have the usual offset: whoever had them could
    write another.  What an operator made by other means is believed as far as a page map of its
    size reaches.

    :raises DeviceInvalid: they do not
    """
    chain = image.chain(path, force_share=True)
    bottom = chain[-1]
    at = snapshot
    allowed = not names.may_be_of_service(os.path.basename(bottom.filename))
    if len(chain) > 1:
        at = chain[-2].base_snapshot
        below = info_block.parse(_read_block(bottom.filename, at, force_share=True))
        allowed = allowed and below is not None and below.data_offset == offset
    if not allowed or offset % info_block.ALIGNMENT or offset > _most_offset(bottom, at):
        raise exception.DeviceInvalid(
            path=path,
            reason=(
                f'its DAX info block lets the data begin at {offset}, where pcow puts none: '
                f'whoever has '
                'the device can write that block'
            ),
        )


def _most_offset(info: model.ImageInfo, snapshot: str | None) -> int:
    return info_block.data_offset(_virtual_size(info, snapshot), info_block.PageMap.PMEM)


def write_info_block(path: str, size: int, offset: int | None = None) -> None:
    """Write the block for an image of ``size`` bytes, whose data begins at ``offset``; durable on
    return.

    :raises ConversionDirUnusable:
    """
    block = info_block.info_block(size, info_block.PageMap.RAM, uuidlib.uuid4(), offset=offset)
    with contextlib.ExitStack() as stack:
        with workspace.errors():
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(
                    prefix='pcow-info-block-', dir=str(conf.CONF.pcow.conversion_dir), buffering=0
                )
            )
            if file.write(block) != len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if re.search(r'\s', file.name):
            raise exception.ConfigInvalid(
                reason=f'[pcow] conversion_dir {os.path.dirname(file.name)!r} holds white space'
            )
        command = f'write -q -f -s {file.name} {info_block.BLOCK_OFFSET} {info_block.BLOCK_SIZE}'
        tool.run(tool.find('pcow_io'), '--no-map', '-c', command, os.path.abspath(path))


def _check_data_size(size: int) -> int:
    if size <= 0 or size % units.SLAB_SIZE:
        raise exception.InvalidSize(size=size, reason='devices are multiples of 2 MiB')
    return size


def _read_block(path: str, snapshot: str | None, force_share: bool) -> bytes:
    options = ['-U'] if force_share else ['-r']
    if snapshot is not None:
        options += ['-s', snapshot]
    output = tool.run_json(
        tool.find('pcow_io'),
        '--no-map',
        *options,
        '-c',
        f'read -j {info_block.BLOCK_OFFSET} {info_block.BLOCK_SIZE}',
        path,
    )
    data = model.Reader(output, 'read', 'pcow-io')
    try:
        block = bytes.fromhex(data.string('data'))
    except ValueError:
        raise data.error('data is not hexadecimal') from None
    if len(block) != info_block.BLOCK_SIZE:
        raise data.error(f'{len(block)} bytes')
    return block
