# SPDX-License-Identifier: Apache-2.0
"""A rebuild that is refused leaves the server as it was.

Nova's API gives the server its new image, and what else a rebuild may change, before it asks the
scheduler and the host: that is put back, as far as it is kept. User data are too large for that;
host name, name and metadata may have been changed otherwise.
"""

from __future__ import annotations

from typing import Any

from nova import exception as nova_exception
from nova import objects
from nova import utils
from nova.compute import vm_states
from oslo_log import log as logging
import oslo_messaging

from nova_pcow.common import pieces

LOG = logging.getLogger(__name__)

# What the API changes of an instance, and how it is kept in its system metadata, which Nova leaves
# alone there.
_ATTRIBUTES = ('image_ref', 'kernel_id', 'ramdisk_id', 'os_type', 'architecture', 'vm_mode')
_BASE_IMAGE = 'image_base_image_ref'  # the API alone changes it after the creation
_KEPT_ATTRIBUTE = 'pcow:is:'
_KEPT_ACCESS = 'pcow:access:'  # key pairs and certificates
_KEPT_PROPERTY = 'pcow:'


def keep_image(instance: Any) -> None:
    """Remember what a server has begun with, which a rebuild may change; the caller saves the
    instance.
    """
    metadata = instance.system_metadata
    if instance.vm_state == vm_states.SHELVED_OFFLOADED and _is_kept(instance):
        # it is given the image of a moment, and then its own again
        return
    for key in [key for key in metadata if key.startswith(_KEPT_PROPERTY)]:
        del metadata[key]
    metadata.update(
        {
            _KEPT_PROPERTY + key: value
            for key, value in metadata.items()
            if key.startswith(utils.SM_IMAGE_PROP_PREFIX)
        }
    )
    metadata.update(
        {_KEPT_ATTRIBUTE + name: str(getattr(instance, name) or '') for name in _ATTRIBUTES}
    )
    pieces.put(
        metadata,
        _KEPT_ACCESS,
        {
            'key_name': instance.key_name,
            'key_data': instance.key_data,
            'keypairs': instance.keypairs.obj_to_primitive(),
            'trusted_certs': instance.trusted_certs.ids if instance.trusted_certs else None,
        },
    )


def _is_kept(instance: Any) -> bool:
    return _KEPT_ATTRIBUTE + _ATTRIBUTES[0] in instance.system_metadata


def is_rebuilt(instance: Any) -> bool:
    """Whether the API has given a server another image since :func:`keep_image`.

    An operator, or Nova itself when it starts, may have changed other properties, which are to
    stay.
    """
    metadata = instance.system_metadata
    return _is_kept(instance) and (
        any(
            metadata[_KEPT_ATTRIBUTE + name] != str(getattr(instance, name) or '')
            for name in _ATTRIBUTES
        )
        or metadata.get(_KEPT_PROPERTY + _BASE_IMAGE) != metadata.get(_BASE_IMAGE)
    )


def put_back_image(context: Any, instance: Any) -> None:
    """Undo what the API has changed since :func:`keep_image`."""
    metadata = instance.system_metadata
    if not _is_kept(instance):
        return
    for key in [key for key in metadata if key.startswith(utils.SM_IMAGE_PROP_PREFIX)]:
        del metadata[key]
    prefix = _KEPT_PROPERTY + utils.SM_IMAGE_PROP_PREFIX
    metadata.update(
        {
            key.removeprefix(_KEPT_PROPERTY): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
    )
    for name in _ATTRIBUTES:
        setattr(
            instance,
            name,
            metadata[_KEPT_ATTRIBUTE + name] or (None if name in _ATTRIBUTES[3:] else ''),
        )
    _put_back_access(instance)
    instance.save()
    try:
        request = objects.RequestSpec.get_by_instance_uuid(context, instance.uuid)
        request.image = instance.image_meta
        request.save()
    except (nova_exception.NovaException, oslo_messaging.MessagingException) as e:
        LOG.warning(
            'Moves of the server %s are scheduled by the properties of an image that it has not: '
            '%s',
            instance.uuid,
            e,
        )


def _put_back_access(instance: Any) -> None:
    access = pieces.get(instance.system_metadata, _KEPT_ACCESS)
    if access is None:
        return
    instance.key_name, instance.key_data = access['key_name'], access['key_data']
    instance.keypairs = objects.KeyPairList.obj_from_primitive(access['keypairs'])
    ids = access['trusted_certs']
    instance.trusted_certs = None if ids is None else objects.TrustedCerts(ids=ids)
