# SPDX-License-Identifier: Apache-2.0
"""The template below an image that goes to another host, which goes there as well."""

from __future__ import annotations

import dataclasses
import os

from nova_pcow.servers import storage
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.images import model


@dataclasses.dataclass(frozen=True)
class Base:
    name: str | None  # of the template; None: the image stands on none
    path: str | None
    uuid: str | None  # as the image has it


def of(path: str, info: model.ImageInfo) -> Base:
    """What an image of a server stands on, by its header, to which the server's QEMU may write.

    A name that a guest has put there would have another server's image sent as its template. No
    guest knows the UUID of an image that is not below its own.

    :param info: of the image
    :raises ServerStorageError: it is not the template that the image was made on
    :raises PcowError: it cannot be looked at
    """
    if info.base_path is None:
        return Base(None, None, None)
    found = image.info(info.base_path, force_share=True)
    if not found.sealed or found.uuid != info.base_uuid:
        raise storage.ServerStorageError(
            reason=(
                f'{path} says that it stands on {info.base_path}, which is not the template that '
                'it was made on, and does not travel with it: compare their UUIDs (pcow-img info), '
                'and accept that one with pcow-img rebase -u -b if it is right'
            )
        )
    name = os.path.basename(info.base_path).removesuffix(names.IMAGE_SUFFIX)
    return Base(name, info.base_path, info.base_uuid)
