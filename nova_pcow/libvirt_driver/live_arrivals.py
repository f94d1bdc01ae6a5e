# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver on the new host of a server that changes its host while
it runs; see :mod:`nova_pcow.migration.live_migration`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from nova import exception as nova_exception
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import deletion
from nova_pcow.migration import leftovers
from nova_pcow.migration import live_migration
from nova_pcow.placement import inventory
from nova_pcow.placement import resize_claims
from nova_pcow.records import notes
from nova_pcow.servers import config
from nova_pcow.servers import storage
from pcow_driver.pools import pool as pool_module

LOG = logging.getLogger(__name__)

_PATIENCE = 60  # seconds, for who makes or deletes images of an arrival of the same server


class LiveArrivalLibvirtDriver(deletion.DeletionLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.live_arrivals`."""

    def check_can_live_migrate_destination(
        self, context: Any, instance: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if flavor_module.is_pcow(instance):
            with errors.refuse_live_migration():
                live_migration.check_carried(flavor_module.of(instance))
                self._emulator.check_migrates()
                config.shim_files(instance)
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

    def check_source_migrate_data_at_dest(
        self, ctxt: Any, instance: Any, migrate_data: Any, migration: Any, limits: Any, allocs: Any
    ) -> Any:
        if flavor_module.is_pcow(instance):
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
        wanted = flavor_module.of(instance)
        pool = inventory.choose(self.provider_tree, self._host.get_hostname(), allocations, wanted)
        if self._domain(instance) is None:
            try:
                leftovers.delete(instance.uuid)  # they would count as provisioned
            except storage.ServerStorageError as e:
                LOG.warning('%s', e, instance=instance)
        live_migration.check_arrival(instance.uuid, pool, there, images, wanted)
        return pool, images

    def pre_live_migration(
        self,
        context: Any,
        instance: Any,
        block_device_info: Any,
        network_info: Any,
        disk_info: Any,
        migrate_data: Any,
    ) -> Any:
        if not flavor_module.is_pcow(instance):
            return super().pre_live_migration(
                context, instance, block_device_info, network_info, disk_info, migrate_data
            )
        # else what is made here would be taken for what an earlier migration has left
        with contextlib.ExitStack() as stack:
            with errors.fail_migration():
                stack.enter_context(live_migration.arrival_lock(instance.uuid, seconds=_PATIENCE))
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
                    flavor_module.of(instance),
                    instance.host,
                    libvirt_utils.get_instance_path_at_destination(instance, migrate_data),
                )
                live_migration.put(
                    migrate_data,
                    live_migration.Prepared(
                        paths, self._emulator.path(), *config.shim_files(instance)
                    ).told(),
                )
        return migrate_data

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
        if not flavor_module.is_pcow(instance):
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
        if flavor_module.is_pcow(instance):
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
        if not flavor_module.is_pcow(instance):
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
