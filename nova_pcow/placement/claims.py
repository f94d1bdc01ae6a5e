# SPDX-License-Identifier: Apache-2.0
"""What a server claims in placement outlives a rebuild that fails.

Nova's compute manager takes it away then, whatever the reason, and claims nothing for the next
rebuild.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.scheduler.client import report
from oslo_log import log as logging

from nova_pcow.common import pieces
from pcow_driver.common import exception

LOG = logging.getLogger(__name__)

_KEPT = 'pcow-claim:'  # in system metadata: a restart of the service forgets none


class ClaimLost(exception.PcowError):
    msg_fmt = (
        'a rebuild that failed has cost the server what it claims in placement, which does not '
        'give it back: make room on '
        'this host, or delete the server'
    )


class LostClaims:
    """Claims of servers on this host that are rebuilt, until they are, or are back in placement."""

    def __init__(self) -> None:
        self._noted: dict[str, dict[str, Any]] = {}
        self._has_read = False  # what an earlier service has noted

    def note(self, instance: Any, allocations: Mapping[str, Any] | None) -> None:
        if allocations:
            self._noted[instance.uuid] = {
                'allocations': {
                    uuid: {'resources': dict(item['resources'])}
                    for uuid, item in allocations.items()
                },
                'project_id': instance.project_id,
                'user_id': instance.user_id,
                'consumer_generation': None,
            }
            pieces.put(instance.system_metadata, _KEPT, self._noted[instance.uuid])
            instance.save()

    def noted(self, instance: Any) -> dict[str, Any] | None:
        """What a server claims, if :meth:`note` has heard of it."""
        claim = self._noted.get(instance.uuid)
        return claim and claim['allocations']

    def check(
        self, context: Any, instance: Any, allocations: Mapping[str, Any] | None
    ) -> Mapping[str, Any] | None:
        """What a server claims, which an earlier rebuild may have cost it just now.

        :raises ClaimLost: it did, and somebody else has got it
        :raises NovaException: placement does not answer
        """
        claim = None if allocations else self._noted.get(instance.uuid)
        if claim is None:
            return allocations
        if not report.report_client_singleton().put_allocations(context, instance.uuid, claim):
            raise ClaimLost()
        return self.noted(instance)

    def put_back(self, host: str) -> None:
        """To be called whenever placement is told of this host: after a failed rebuild, and every
        minute.
        """
        if not self._has_read:
            for instance in objects.InstanceList.get_by_host(
                nova_context.get_admin_context(), host, ['system_metadata']
            ):
                claim = pieces.get(instance.system_metadata, _KEPT)
                if claim is not None:
                    self._noted.setdefault(instance.uuid, claim)
            self._has_read = True
        for uuid, claim in list(self._noted.items()):
            try:
                if self._is_back(uuid, claim, host):
                    del self._noted[uuid]
            except nova_exception.NovaException as e:
                LOG.warning(
                    'What the server %s claims is not in placement, and tried again: %s', uuid, e
                )

    @staticmethod
    def _is_back(uuid: str, claim: dict[str, Any], host: str) -> bool:
        """Whether there is nothing more to do."""
        context, client = nova_context.get_admin_context(), report.report_client_singleton()
        try:
            instance = objects.Instance.get_by_uuid(context, uuid, ['system_metadata'])
        except nova_exception.InstanceNotFound:
            return True
        if instance.task_state is not None:
            return False  # the rebuild has not ended yet
        if (
            instance.host == host
            and not client.get_allocs_for_consumer(context, uuid)['allocations']
            and not client.put_allocations(context, uuid, claim)
        ):
            return False
        if pieces.remove(instance.system_metadata, _KEPT):
            # else the API is writing metadata, too
            instance.save(expected_task_state=[None])
        return True
