# SPDX-License-Identifier: Apache-2.0
"""Sources of templates that were images of pcow: an export has a DAX info block already, and a
guest that found that one behind another would look for its file system in the wrong place.

Whoever has the device can write its block, so that it is believed only where pcow puts data.
"""

import os

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.common import workspace
from pcow_driver.images import info_block
from pcow_driver.templates import limits

_END = info_block.BLOCK_OFFSET + info_block.BLOCK_SIZE


def data_offset(path: str, image_format: str, size: int) -> int:
    """Where the data of a source begin: behind its info block and the page map, or, if it has none,
    at 0.

    :param path: of an image that was found to be of this format, whole, and without other files
    :param size: its virtual size in bytes
    :raises SourceRejected: the block lets the data begin where pcow puts none
    """
    found = info_block.parse(_block(path, image_format)) if size > _END else None
    if found is None:
        return 0
    offset = found.data_offset
    most = info_block.data_offset(
        units.round_up(size, info_block.ALIGNMENT), info_block.PageMap.PMEM
    )
    if not info_block.OFFSET <= offset <= min(most, size - 1) or offset % info_block.ALIGNMENT:
        raise exception.SourceRejected(
            path=path,
            reason=f'its DAX info block lets the data begin at {offset}, where pcow puts none',
        )
    return offset


def options(path: str, image_format: str, offset: int, size: int | None = None) -> str:
    """For ``--image-opts`` of qemu-img: what lies behind ``offset`` of a raw or a qcow2 file.

    :param size: bytes of it; all if not given
    """
    name = path.replace(',', ',,')
    node, drivers = 'file', f'driver=raw,offset={offset}'
    if size is not None:
        drivers += f',size={size}'
    if image_format != 'raw':
        node, drivers = 'file.file', f'{drivers},file.driver={image_format}'
    return f'{drivers},{node}.driver=file,{node}.filename={name}'


def read(path: str, image_format: str, offset: int, length: int, target: str) -> None:
    """Copy bytes of an image, multiples of 4 KiB, to the new file ``target``; what is behind its
    end is left out.
    """
    skip = offset // units.PAGE_SIZE
    tool.run(
        tool.find('qemu_img'),
        'dd',
        '-f',
        image_format,
        '-O',
        'raw',
        f'bs={units.PAGE_SIZE}',
        f'skip={skip}',
        f'count={skip + length // units.PAGE_SIZE}',  # of the input, what is skipped too
        f'if={path}',
        f'of={target}',
        limits=limits.of_look(0),
    )


def _block(path: str, image_format: str) -> bytes:
    if image_format == 'raw':
        with open(path, 'rb') as file:
            file.seek(info_block.BLOCK_OFFSET)
            return file.read(info_block.BLOCK_SIZE)
    with workspace.directory('template') as directory:
        target = os.path.join(directory, 'info-block')
        read(path, image_format, info_block.BLOCK_OFFSET, info_block.BLOCK_SIZE, target)
        with open(target, 'rb') as file:
            return file.read(info_block.BLOCK_SIZE)
