# SPDX-License-Identifier: Apache-2.0
"""Images that a guest's kernel takes as a persistent memory device of a given size, with DAX.

What an NVDIMM shows is longer than what ``/dev/pmemN`` in the guest shows: the DAX info block (:mod:`pcow_driver.dax`)
stands in front of the data.  A volume of 4 GiB is therefore an image of 4 GiB and 2 MiB; everybody outside the guest who
wants the bytes of the device needs the :class:`Window` of the image.
"""

import contextlib
import dataclasses
import errno
import os
import re
import tempfile
import uuid as uuidlib

from pcow_driver import conf
from pcow_driver import dax
from pcow_driver import exception
from pcow_driver import image
from pcow_driver import pool as pool_module
from pcow_driver import staging
from pcow_driver import tool
from pcow_driver import units
from pcow_driver import workspace

_DUMP_LINE = re.compile(r'[0-9a-f]{8,16}:  ((?:[0-9a-f]{2} ){1,16}) ')


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of an image that is the data of the guest's device, in bytes."""

    offset: int
    size: int


def create(pool: pool_module.Pool, name: str, data_size: int, *, cluster_size: int | None = None) -> str:
    """Make an empty device of ``data_size`` bytes and return the path of its image.

    :param data_size: a multiple of 2 MiB
    :raises InvalidName:
    :raises InvalidSize:
    :raises ImageExists:
    :raises PoolDraining:
    :raises NoRoom: the operator's limits have no room for it
    :raises ToolFailed: the pool is full, for instance
    """
    size = dax.namespace_size(_check_data_size(data_size), dax.PageMap.RAM)
    with staging.building(pool, name) as part, pool.lock():
        pool.check_room(size)
        image.create(part, size, cluster_size=cluster_size)
        write_info_block(part, size)
        target = pool.image_path(name)
        staging.publish(part, target)
    return target


def create_on(pool: pool_module.Pool, name: str, base: str, *, base_snapshot: str | None = None, data_size: int | None = None,
              cluster_size: int | None = None) -> str:
    """Make a thin device on another of the pool, a template or a snapshot of an image, and return the path of its image.

    :param base: name of the image to stand on; it has an info block
    :param base_snapshot: the snapshot of it
    :param data_size: a multiple of 2 MiB, not less than that of the base; the same if not given
    :raises ImageNotFound: the base is not there
    :raises InvalidSize:
    :raises DeviceInvalid: the base has no info block
    :raises: as :func:`create`
    """
    with staging.building(pool, name) as part, pool.lock():
        path = pool.existing_path(base)
        below = window(path, snapshot=base_snapshot, force_share=True)
        if data_size is None:
            data_size = below.size
        if _check_data_size(data_size) < below.size:
            raise exception.InvalidSize(size=data_size, reason=f'the data of {path} has {below.size} bytes')
        size = below.offset + data_size
        pool.check_room(size)
        image.create_overlay(part, path, size=size, base_snapshot=base_snapshot, cluster_size=cluster_size)
        if data_size > below.size:
            write_info_block(part, size, below.offset)
        target = pool.image_path(name)
        staging.publish(part, target)
    return target


def grow(path: str, data_size: int) -> None:
    """Make a device larger; the guest, which must not be running, finds the new size when it starts.

    A grow that was interrupted is completed by calling this again.

    :param data_size: a multiple of 2 MiB, not less than now
    :raises ImageNotFound:
    :raises InvalidSize:
    :raises DeviceInvalid: no info block
    """
    now = window(path)
    if _check_data_size(data_size) < now.size:
        raise exception.InvalidSize(size=data_size, reason=f'the device {path} has {now.size} bytes and does not shrink')
    size = now.offset + data_size
    # The image first: a block that promises more than there is would keep the guest from using any of it.
    if image.info(path).virtual_size < size:
        image.resize(path, size)
    if data_size > now.size:
        write_info_block(path, size, now.offset)


def extend(pool: pool_module.Pool, name: str, data_size: int) -> None:
    """As :func:`grow`, if the operator's limits have room for it.

    :raises PoolDraining:
    :raises NoRoom:
    """
    with pool.lock():
        path = pool.existing_path(name)
        growth = window(path).offset + data_size - image.info(path).virtual_size
        if growth > 0:
            pool.check_room(growth)
        grow(path, data_size)


def window(path: str, *, snapshot: str | None = None, force_share: bool = False) -> Window:
    """Where the data of a device lies in its image, as the info block says.

    :param snapshot: look at this snapshot rather than at the active layer
    :param force_share: also while somebody writes to the image
    :raises ImageNotFound:
    :raises DeviceInvalid: no valid info block, or one that does not fit the image
    """
    path = os.path.abspath(path)
    if not os.path.exists(path):
        raise exception.ImageNotFound(path=path)
    block = _read_block(path, snapshot, force_share)
    found = dax.parse(block)
    if found is None:
        raise exception.DeviceInvalid(path=path, reason='it has no DAX info block (it was not made as a template or a device)')
    virtual_size = image.info(path, force_share=force_share).virtual_size
    if found.data_offset % dax.ALIGNMENT or found.data_offset + found.data_size > virtual_size or found.data_size == 0:
        raise exception.DeviceInvalid(path=path, reason='its DAX info block promises more than the image has')
    return Window(found.data_offset, found.data_size)


def write_info_block(path: str, size: int, offset: int | None = None) -> None:
    """Write the block for an image of ``size`` bytes, whose data begins at ``offset``; durable on return.

    :raises ConversionDirUnusable:
    """
    block = dax.info_block(size, dax.PageMap.RAM, uuidlib.uuid4(), offset=offset)
    with contextlib.ExitStack() as stack:
        with workspace.errors():
            file = stack.enter_context(tempfile.NamedTemporaryFile(
                prefix='pcow-info-block-', dir=str(conf.CONF.pcow.conversion_dir), buffering=0))
            if file.write(block) != len(block):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if re.search(r'\s', file.name):
            raise exception.ConfigInvalid(reason=f'[pcow] conversion_dir {os.path.dirname(file.name)!r} holds white space')
        tool.run(tool.find('pcow_io'), '--no-map', '-c', f'write -q -f -s {file.name} {dax.BLOCK_OFFSET} {dax.BLOCK_SIZE}',
                 os.path.abspath(path))


def _check_data_size(size: int) -> int:
    if size <= 0 or size % units.SLAB_SIZE:
        raise exception.InvalidSize(size=size, reason='devices are multiples of 2 MiB')
    return size


def _read_block(path: str, snapshot: str | None, force_share: bool) -> bytes:
    options = ['-U'] if force_share else ['-r']
    if snapshot is not None:
        options += ['-s', snapshot]
    output = tool.run(tool.find('pcow_io'), '--no-map', *options, '-c', f'read -q -v {dax.BLOCK_OFFSET} {dax.BLOCK_SIZE}', path)
    block = bytes.fromhex(''.join(match[1] for line in output.splitlines() if (match := _DUMP_LINE.match(line))))
    if len(block) != dax.BLOCK_SIZE:
        raise exception.ToolOutputInvalid(tool='pcow-io', reason=f'a dump of {len(block)} bytes')
    return block
