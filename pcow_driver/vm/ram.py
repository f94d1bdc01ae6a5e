# SPDX-License-Identifier: Apache-2.0
"""The image that is the RAM of a domain. It belongs to its pool as any image: what it can come to
hold is provisioned, and it is not deleted while somebody has it open.
"""

from __future__ import annotations

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module


def name_of(domain_name: str) -> str:
    """Of the image, unless somebody chooses another one."""
    return f'{domain_name}{names.RAM_SUFFIX}'


def check_pool(found: pool_module.Pool) -> None:
    """:raises PoolInvalid: it is of a class that RAM cannot be on"""
    if found.persistence() == 'page-cache':
        raise exception.PoolInvalid(
            path=found.path, reason='guest RAM is not possible on class page-cache yet'
        )


def provide(found: pool_module.Pool, name: str, size: int) -> str:
    """Path of an image that RAM of ``size`` bytes can be, made if it does not exist.

    Two callers with one name get one image; who starts a VM on it first has it.

    :raises InvalidName:
    :raises InvalidSize:
    :raises PoolInvalid: as :func:`check_pool`
    :raises NoRoom: the operator's limits have no room for it
    :raises RamInvalid: an image of that name is a template, or has another size
    """
    check_pool(found)
    try:
        return found.create_image(name, size=image.check_virtual_size(size))
    except exception.ImageExists:
        path = found.image_path(name)
    info = image.info(path, force_share=True)
    if info.sealed:
        reason = 'it is a template'
    elif info.virtual_size != size:
        reason = (
            f'it has {units.format_size(info.virtual_size)}, and the RAM is to have '
            f'{units.format_size(size)}'
        )
    else:
        return path
    raise exception.RamInvalid(path=path, reason=reason)
