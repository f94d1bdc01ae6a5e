# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for servers that change their host while they run; see
:mod:`nova_pcow.live_migration`.

With the methods that delete what a server has: on both hosts Nova calls them in the course of it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
import os
import threading
from typing import Any

from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import task_states
from nova.virt.libvirt import utils as libvirt_utils
from oslo_concurrency import lockutils
from oslo_log import log as logging

from nova_pcow import errors
from nova_pcow import flavor as flavor_module
from nova_pcow import inventory
from nova_pcow import leftovers
from nova_pcow import live_migration
from nova_pcow import notes
from nova_pcow import resize_claims
from nova_pcow import resize_driver
from nova_pcow import storage
from pcow_driver.common import exception
from pcow_driver.pools import pool as pool_module
from pcow_driver.virt import domain

LOG = logging.getLogger(__name__)

_SHELVING = (
    task_states.SHELVING,
    task_states.SHELVING_IMAGE_UPLOADING,
    task_states.SHELVING_OFFLOADING,
)
_JOB_RUNS = (1, 2)  # VIR_DOMAIN_JOB_BOUNDED, VIR_DOMAIN_JOB_UNBOUNDED
# of libvirt's call, when the migration itself has come to its end
_SECONDS_TO_END = 600


def _uses_pcow(instance: Any) -> bool:
    return flavor_module.uses_pcow(instance.flavor)


def _arrival(uuid: str, *, blocking: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Hold while images are made for the arrival of a server, and while those of an earlier one are
    deleted.
    """
    return lockutils.lock(f'pcow-arrival-{uuid}', blocking=blocking)


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


class LiveMigrationLibvirtDriver(resize_driver.ResizeLibvirtDriver):
    """See :mod:`nova_pcow.live_migration_driver`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        # by server: roles of images that outlive its other files
        self._kept: dict[str, frozenset[str]] = {}
        self._operations: dict[str, _Operation] = {}  # by server

    # ---- before anything changes -----------------------------------------------------------------

    def check_can_live_migrate_destination(
        self, context: Any, instance: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _uses_pcow(instance):
            with errors.refuse_live_migration():
                self._emulator.check_migrates()
                if self._domain(instance) is not None:
                    raise live_migration.LiveMigrationRefused(
                        reason=(
                            f'the new host has a domain {instance.name} of the server already: it '
                            f'has arrived there once, and its data '
                            'may be there; look (virsh list --all) before you have libvirt forget '
                            'it'
                        )
                    )
        return super().check_can_live_migrate_destination(context, instance, *args, **kwargs)

    def check_can_live_migrate_source(
        self, context: Any, instance: Any, dest_check_data: Any, block_device_info: Any = None
    ) -> Any:
        if not _uses_pcow(instance):
            return super().check_can_live_migrate_source(
                context, instance, dest_check_data, block_device_info
            )
        with errors.refuse_live_migration():
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
            storage.check_complete(instance.uuid, flavor_module.parse(instance.flavor))
            images = live_migration.leaving(instance.uuid)
        found = super().check_can_live_migrate_source(
            context, instance, dest_check_data, block_device_info
        )
        live_migration.put(found, [dataclasses.asdict(item) for item in images])
        return found

    def check_source_migrate_data_at_dest(
        self, ctxt: Any, instance: Any, migrate_data: Any, migration: Any, limits: Any, allocs: Any
    ) -> Any:
        if _uses_pcow(instance):
            with errors.refuse_live_migration():
                self._check_arrival(instance, migrate_data, allocs)
        return super().check_source_migrate_data_at_dest(
            ctxt, instance, migrate_data, migration, limits, allocs
        )

    def _check_arrival(
        self, instance: Any, migrate_data: Any, allocations: Any
    ) -> tuple[pool_module.Pool, list[live_migration.Leaving]]:
        """Where the server would lie here, and what it brings.

        :raises PcowError:
        """
        told = live_migration.get(migrate_data)
        if told is None:
            raise live_migration.LiveMigrationRefused(
                reason=(
                    f'nova-compute on {instance.host} has an earlier driver, which tells nothing '
                    f'of the images: upgrade pcow there'
                )
            )
        images = [live_migration.Leaving(**item) for item in told]
        there = inventory.pools()
        if migrate_data.is_shared_instance_path and not {item.pool for item in images} & {
            one.uuid for one in there
        }:
            raise live_migration.LiveMigrationRefused(
                reason=(
                    'both hosts see one instances_path, and not the pool of the server: stop the '
                    'server and migrate it then '
                    '(openstack server migrate)'
                )
            )
        pool = inventory.choose(
            self.provider_tree,
            self._host.get_hostname(),
            allocations,
            flavor_module.parse(instance.flavor),
        )
        if self._domain(instance) is None:
            try:
                leftovers.delete(instance.uuid)  # they would count as provisioned
            except storage.ServerStorageError as e:
                LOG.warning('%s', e, instance=instance)
        live_migration.check_arrival(instance.uuid, pool, there, images)
        return pool, images

    # ---- the new host ----------------------------------------------------------------------------

    def pre_live_migration(
        self,
        context: Any,
        instance: Any,
        block_device_info: Any,
        network_info: Any,
        disk_info: Any,
        migrate_data: Any,
    ) -> Any:
        if not _uses_pcow(instance):
            return super().pre_live_migration(
                context, instance, block_device_info, network_info, disk_info, migrate_data
            )
        # else what is made here would be taken for what an earlier migration has left
        with _arrival(instance.uuid):
            with errors.fail_migration():
                was_cut_short = self._was_cut_short(instance.uuid)
                pool, images = self._check_arrival(
                    instance, migrate_data, resize_claims.of_server(context, instance.uuid)
                )
                if was_cut_short:
                    self.delete_instance_files(instance)
            migrate_data = super().pre_live_migration(
                context, instance, block_device_info, network_info, disk_info, migrate_data
            )
            with errors.fail_migration():
                paths = live_migration.prepare(
                    instance.uuid,
                    pool,
                    images,
                    instance.host,
                    libvirt_utils.get_instance_path_at_destination(instance, migrate_data),
                )
                live_migration.put(
                    migrate_data,
                    dataclasses.asdict(live_migration.Prepared(paths, self._emulator.path())),
                )
        return migrate_data

    @staticmethod
    def _was_cut_short(uuid: str) -> bool:
        """Whether an earlier migration of the server to this host, which has not ended, has left
        something here.
        """
        return notes.get(notes.ARRIVING, uuid) is not None or bool(live_migration.arriving(uuid))

    def _try_fetch_image(
        self,
        context: Any,
        path: str,
        image_id: str,
        instance: Any,
        fallback_from_host: str | None = None,
    ) -> None:
        """Of kernel and ramdisk. Nova's own takes the boot sector of a kernel for that of a disk,
        and finds it unsafe.
        """
        if not _uses_pcow(instance):
            super()._try_fetch_image(context, path, image_id, instance, fallback_from_host)
            return
        try:
            libvirt_utils.fetch_raw_image(context, path, image_id, instance.trusted_certs)
        except nova_exception.ImageNotFound:
            if fallback_from_host is None:
                raise
            libvirt_utils.copy_image(path, path, host=fallback_from_host, receive=True)

    def post_live_migration_at_destination(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        block_migration: bool = False,
        block_device_info: Any = None,
    ) -> None:
        if _uses_pcow(instance):
            # it is here, and they are its own now
            notes.forget(notes.ARRIVING, notes.LEAVING, uuid=instance.uuid)
        super().post_live_migration_at_destination(
            context, instance, network_info, block_migration, block_device_info
        )

    def rollback_live_migration_at_destination(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        block_device_info: Any,
        destroy_disks: bool = True,
        migrate_data: Any = None,
    ) -> None:
        """Also called if nothing was made here: what the host had of the server before is nobody's
        to delete.
        """
        if not _uses_pcow(instance):
            super().rollback_live_migration_at_destination(
                context, instance, network_info, block_device_info, destroy_disks, migrate_data
            )
            return
        # libvirt takes that of a migration that failed away itself
        if self._domain(instance) is not None:
            LOG.error(
                'A live migration failed, and there is a domain %s here, of a later one: nothing '
                'is deleted',
                instance.name,
                instance=instance,
            )
            return
        made = live_migration.arriving(instance.uuid)
        try:
            with self._keep_images(
                instance.uuid, [item for item in storage.find(instance.uuid) if item not in made]
            ):
                super().rollback_live_migration_at_destination(
                    context, instance, network_info, block_device_info, destroy_disks, migrate_data
                )
        finally:  # Nova leaves the files of a server alone if none of its disks was copied
            live_migration.discard(instance.uuid)

    # ---- what was cut short ----------------------------------------------------------------------

    def _delete_leftovers(self) -> None:
        """What migrations to this host have left of servers that are elsewhere now, or no more."""
        for uuid in notes.servers(notes.ARRIVING):
            try:
                with _arrival(uuid, blocking=False):
                    self._delete_leftover(uuid)
            except lockutils.AcquireLockFailedException:
                continue  # it is just being prepared
            except exception.PcowError as e:
                LOG.warning('%s', e)
            except Exception:  # libvirt, the database, ...: tried again later
                LOG.exception(
                    'What a live migration of the server %s to this host has left stays for now',
                    uuid,
                )

    def _delete_leftover(self, uuid: str) -> None:
        server = leftovers.abandoned(uuid, self._service_host)
        if server is None or self._domain(server) is not None:
            return
        leftovers.delete(uuid)
        if storage.find(uuid):
            leftovers.warn_of_unmarked(uuid)
            return
        if not (storage.discard_unfinished(uuid) and inventory.all_there()):
            return
        # else, should the hosts share instances_path by now, the directory would be its own
        if server.deleted:
            super().delete_instance_files(server)
        if not os.path.lexists(libvirt_utils.get_instance_path(server)):
            notes.forget(notes.ARRIVING, uuid=uuid)

    def _clear_for_spawn(self, instance: Any) -> None:
        """A server that begins on this host has nothing elsewhere: what an earlier migration to it
        has left is nothing.

        :raises ServerStorageError: an image of it stays
        """
        if not self._was_cut_short(instance.uuid) or self._domain(instance) is not None:
            return
        leftovers.delete(instance.uuid)
        for item in storage.find(instance.uuid):
            raise storage.ServerStorageError(reason=leftovers.unmarked(item))
        super().delete_instance_files(instance)
        notes.forget(notes.ARRIVING, uuid=instance.uuid)

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

    # ---- the host that it leaves -----------------------------------------------------------------

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
        if not _uses_pcow(instance):
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
        if not _uses_pcow(instance):
            super()._live_migration_operation(
                context, instance, dest, block_migration, migrate_data, guest, device_names
            )
            return
        operation = self._operations.get(instance.uuid)
        if operation is None:  # whoever watches it has given up before it began
            return
        try:
            prepared = live_migration.Prepared(**live_migration.get(migrate_data))
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

    def _migrates(self, instance: Any) -> bool:
        return self._host.get_guest(instance).get_job_info().type in _JOB_RUNS

    def _domain(self, instance: Any) -> domain.Domain | None:
        try:
            guest = self._host.get_guest(instance)
        except nova_exception.InstanceNotFound:
            return None
        return domain.Domain(self._host.get_connection(), guest.name)

    # ---- deletion --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _keep_images(self, uuid: str, images: list[storage.ServerImage]) -> Iterator[None]:
        """Whatever deletes the files of a server meanwhile leaves these."""
        self._kept[uuid] = frozenset(item.role for item in images)
        try:
            yield
        finally:
            del self._kept[uuid]

    def delete_instance_files(self, instance: Any) -> bool:
        kept = self._kept.get(instance.uuid, frozenset())
        images_are_gone = storage.delete(instance.uuid, keep=kept) and not kept
        if (
            not (images_are_gone or kept)
            and _uses_pcow(instance)
            and instance.task_state in _SHELVING
        ):
            # Nova asks again for servers that are deleted here, and for no others
            raise nova_exception.InternalError(
                'images of the server stay on its host (the log of nova-compute says why): have it '
                'offloaded again'
            )
        files_are_gone = bool(super().delete_instance_files(instance))
        if not _uses_pcow(instance):
            return files_are_gone
        if images_are_gone:
            notes.forget(notes.ARRIVING, notes.LEAVING, uuid=instance.uuid)
        # what Nova notes by the answer is of servers that end
        return files_are_gone and images_are_gone and instance.task_state != task_states.MIGRATING
