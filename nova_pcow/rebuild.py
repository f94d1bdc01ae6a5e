# SPDX-License-Identifier: Apache-2.0
"""A rebuild that is refused leaves the server as it was.

Nova's API gives the server its new image before it asks the host, and the compute manager takes away what the server claims in
placement when its rebuild fails, whatever the reason: both are put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova import utils
from nova.scheduler.client import report
from oslo_log import log as logging

LOG = logging.getLogger(__name__)

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


class LostClaims:
    """Claims of servers on this host whose rebuild was refused, until they are back in placement."""

    def __init__(self) -> None:
        self._noted: dict[str, dict[str, Any]] = {}

    def note(self, instance: Any, allocations: Mapping[str, Any] | None) -> None:
        if allocations:
            self._noted[instance.uuid] = {
                'allocations': {uuid: {'resources': dict(item['resources'])} for uuid, item in allocations.items()},
                'project_id': instance.project_id, 'user_id': instance.user_id, 'consumer_generation': None}

    def put_back(self, host: str) -> None:
        """To be called whenever placement is told of this host: after a failed rebuild, and every minute."""
        for uuid, claim in list(self._noted.items()):
            try:
                if self._is_back(uuid, claim, host):
                    del self._noted[uuid]
            except nova_exception.NovaException as e:
                LOG.warning('What the server %s claims is not in placement, and tried again: %s', uuid, e)

    @staticmethod
    def _is_back(uuid: str, claim: dict[str, Any], host: str) -> bool:
        """Whether there is nothing more to do."""
        context, client = nova_context.get_admin_context(), report.report_client_singleton()
        try:
            instance = objects.Instance.get_by_uuid(context, uuid)
        except nova_exception.InstanceNotFound:
            return True
        if instance.host != host:
            return True
        if instance.task_state is not None:
            return False                       # the rebuild has not ended yet
        if client.get_allocs_for_consumer(context, uuid)['allocations']:
            return True
        return bool(client.put_allocations(context, uuid, claim))
