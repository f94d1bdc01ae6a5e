# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver on the host that a server leaves while it runs; see
:mod:`nova_pcow.migration.live_migration`.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import threading
from typing import Any

from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from oslo_log import log as logging

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import live_arrivals
from nova_pcow.migration import live_migration
from nova_pcow.records import notes
from nova_pcow.servers import storage
from pcow_driver.common import exception

LOG = logging.getLogger(__name__)

_JOB_RUNS = (1, 2)  # VIR_DOMAIN_JOB_BOUNDED, VIR_DOMAIN_JOB_UNBOUNDED
# of libvirt's call, when the migration itself has come to its end
_SECONDS_TO_END = 600


@dataclasses.dataclass
class _Operation:
    """libvirt's part of a live migration."""

    ended: threading.Event = dataclasses.field(default_factory=threading.Event)
    error: Exception | None = None


class _Leaver:
    """A guest (nova.virt.libvirt.guest.Guest) that finds its images on the new host where that has
    made them.
    """

    def __init__(self, guest: Any, uuid: str, prepared: live_migration.Prepared) -> None:
        self._guest, self._uuid, self._prepared = guest, uuid, prepared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._guest, name)

    def migrate(self, *args: Any, destination_xml: str, **kwargs: Any) -> None:
        xml = live_migration.rewritten(destination_xml, self._uuid, self._prepared)
        self._guest.migrate(*args, destination_xml=xml, **kwargs)


class LiveMigrationLibvirtDriver(live_arrivals.LiveArrivalLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.live_migrations`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._operations: dict[str, _Operation] = {}  # by server

    def check_can_live_migrate_source(
        self, context: Any, instance: Any, dest_check_data: Any, block_device_info: Any = None
    ) -> Any:
        if not flavor_module.is_pcow(instance):
            return super().check_can_live_migrate_source(
                context, instance, dest_check_data, block_device_info
            )
        with errors.refuse_live_migration():
            live_migration.check_carried(flavor_module.of(instance))
            self._emulator.check_migrates()
            if self._is_post_copy_enabled(self._block_migration_flags):
                raise live_migration.LiveMigrationRefused(
                    reason=(
                        'persistent memory is complete on the new host before the guest goes on '
                        'there: set [libvirt] '
                        'live_migration_permit_post_copy to false'
                    )
                )
            self._settle_leaving(instance)
            wanted = flavor_module.of(instance)
            storage.check_complete(instance.uuid, wanted)
            storage.check_sizes(instance.uuid, wanted, noted=False)
            images = live_migration.leaving(instance.uuid)
        found = super().check_can_live_migrate_source(
            context, instance, dest_check_data, block_device_info
        )
        live_migration.put(found, [dataclasses.asdict(item) for item in images])
        return found

    def live_migration(
        self,
        context: Any,
        instance: Any,
        dest: str,
        post_method: Callable[..., None],
        recover_method: Callable[..., None],
        block_migration: bool = False,
        migrate_data: Any = None,
    ) -> None:
        if not flavor_module.is_pcow(instance):
            super().live_migration(
                context, instance, dest, post_method, recover_method, block_migration, migrate_data
            )
            return
        operation = self._operations[instance.uuid] = _Operation()

        def recover(*args: Any, **kwargs: Any) -> None:
            # libvirt takes it away when it has arrived, and only then
            if self._domain(instance) is None:
                raise nova_exception.MigrationError(
                    reason=(
                        f'the server is not on this host any more: look on {dest}, where its data '
                        f'are (virsh list --all)'
                    )
                )
            recover_method(*args, **kwargs)
            operation.ended.wait(_SECONDS_TO_END)
            self._tell(context, instance, operation.error)

        def post(*args: Any, **kwargs: Any) -> None:
            """Nova takes a guest that does not run any more for one that has arrived, also if its
            QEMU was killed.
            """
            if not operation.ended.wait(_SECONDS_TO_END) and self._domain(instance) is not None:
                raise nova_exception.MigrationError(
                    reason=(
                        f'the guest has ended, and libvirt does not say whether the server is on '
                        f'{dest}: nothing is deleted'
                    )
                )
            if self._domain(instance) is not None:
                recover(context, instance, dest, migrate_data)
            else:
                post_method(*args, **kwargs)

        try:
            notes.put(notes.LEAVING, instance.uuid, dest)
        except exception.PcowError as e:
            del self._operations[instance.uuid]
            operation.error = e
            operation.ended.set()
            recover(context, instance, dest, migrate_data)
            return
        try:
            super().live_migration(
                context, instance, dest, post, recover, block_migration, migrate_data
            )
        finally:
            del self._operations[instance.uuid]

    def _live_migration_operation(
        self,
        context: Any,
        instance: Any,
        dest: str,
        block_migration: bool,
        migrate_data: Any,
        guest: Any,
        device_names: Any,
    ) -> None:
        if not flavor_module.is_pcow(instance):
            super()._live_migration_operation(
                context, instance, dest, block_migration, migrate_data, guest, device_names
            )
            return
        operation = self._operations.get(instance.uuid)
        if operation is None:  # whoever watches it has given up before it began
            return
        try:
            prepared = live_migration.Prepared.of(live_migration.get(migrate_data))
            super()._live_migration_operation(
                context,
                instance,
                dest,
                block_migration,
                migrate_data,
                _Leaver(guest, instance.uuid, prepared),
                device_names,
            )
        except (
            Exception
        ) as e:  # not raised: Nova would have the server in ERROR, which goes on where it is
            operation.error = e
        finally:
            operation.ended.set()

    def rollback_live_migration_at_source(
        self, context: Any, instance: Any, migrate_data: Any
    ) -> None:
        notes.forget(notes.LEAVING, uuid=instance.uuid)
        super().rollback_live_migration_at_source(context, instance, migrate_data)

    def _tell(self, context: Any, instance: Any, error: Exception | None) -> None:
        """Say in the events of the action why the server is where it was."""
        if error is not None:
            errors.tell(context, instance, self._service_host, 'compute_pcow_live_migration', error)

    def _settle_leaving(self, instance: Any) -> None:
        """Before a server goes on here, or goes elsewhere."""
        found = self._domain(instance)
        live_migration.settle(
            instance.uuid,
            is_here=found is not None,
            runs_here=found is not None and found.active() and not self._migrates(instance),
        )

    def _settle_stayed(self, *uuids: str) -> None:
        """Servers that were leaving when nova-compute was killed, and whose migration has been
        aborted since, run here.

        One that is paused may be what libvirt is in doubt about.
        """
        for uuid in uuids:
            try:
                if notes.get(notes.LEAVING, uuid) is not None and uuid not in self._operations:
                    server = objects.Instance(uuid=uuid)
                    found = self._domain(server)
                    if (
                        found is not None
                        and not self._migrates(server)
                        and self._host.get_guest(server).get_power_state(self._host)
                        == power_state.RUNNING
                        # asked again: libvirt may have taken its time
                        and uuid not in self._operations
                    ):
                        notes.forget(notes.LEAVING, uuid=uuid)
            except Exception:  # asked again later
                LOG.exception('Whether the server %s stays on this host is not known', uuid)

    def _migrates(self, instance: Any) -> bool:
        return self._host.get_guest(instance).get_job_info().type in _JOB_RUNS
