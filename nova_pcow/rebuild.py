# SPDX-License-Identifier: Apache-2.0
"""A rebuild that is refused leaves the server as it was.

Nova's API gives the server its new image before it asks the host: that is put back.
"""

from __future__ import annotations

from typing import Any

from nova import utils

# What the API changes of an instance, and how it is kept in its system metadata, which Nova leaves alone there.
_ATTRIBUTES = ('image_ref', 'kernel_id', 'ramdisk_id', 'os_type', 'architecture', 'vm_mode')
_KEPT_ATTRIBUTE = 'pcow:is:'
_KEPT_PROPERTY = 'pcow:'


def keep_image(instance: Any) -> None:
    """Remember which image a server has begun with; the caller saves the instance."""
    metadata = instance.system_metadata
    for key in [key for key in metadata if key.startswith(_KEPT_PROPERTY)]:
        del metadata[key]
    metadata.update({_KEPT_PROPERTY + key: value for key, value in metadata.items() if key.startswith(utils.SM_IMAGE_PROP_PREFIX)})
    metadata.update({_KEPT_ATTRIBUTE + name: str(getattr(instance, name) or '') for name in _ATTRIBUTES})


def put_back_image(instance: Any) -> None:
    """Undo what the API has changed since :func:`keep_image`."""
    metadata = instance.system_metadata
    if _KEPT_ATTRIBUTE + _ATTRIBUTES[0] not in metadata:
        return
    for key in [key for key in metadata if key.startswith(utils.SM_IMAGE_PROP_PREFIX)]:
        del metadata[key]
    prefix = _KEPT_PROPERTY + utils.SM_IMAGE_PROP_PREFIX
    metadata.update({key.removeprefix(_KEPT_PROPERTY): value for key, value in metadata.items() if key.startswith(prefix)})
    for name in _ATTRIBUTES:
        setattr(instance, name, metadata[_KEPT_ATTRIBUTE + name] or (None if name in _ATTRIBUTES[3:] else ''))
    instance.save()
