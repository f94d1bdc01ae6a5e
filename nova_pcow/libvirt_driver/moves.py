# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for servers that get another size, or another host while
they are off.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any

from nova import exception as nova_exception
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging
from oslo_utils import excutils

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import creation
from nova_pcow.migration import arrival
from nova_pcow.migration import cold_migration
from nova_pcow.migration import live_migration
from nova_pcow.placement import inventory
from nova_pcow.placement import resize_claims
from nova_pcow.placement import shared
from nova_pcow.records import notes
from nova_pcow.servers import config
from nova_pcow.servers import persistence
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.templates import template_cache

LOG = logging.getLogger(__name__)


class MoveLibvirtDriver(creation.CreationLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.moves`."""

    def migrate_disk_and_power_off(
        self,
        context: Any,
        instance: Any,
        dest: str,
        flavor: Any,
        network_info: Any,
        block_device_info: Any = None,
        timeout: int = 0,
        retry_interval: int = 0,
    ) -> str:
        self.check_volumes_stay(dest, block_device_info)
        if flavor_module.is_pcow(instance):
            self._settle_leaving(instance)
        with errors.roll_back_resize():
            # a resize; a migrated server has what it has
            if flavor.flavorid != instance.flavor.flavorid:
                flavor_module.check_known(flavor)
            old = flavor_module.of(instance)
            new = flavor_module.parse(flavor, instance.system_metadata)
            flavor_module.check_resize(old, new)
            if new.root_is_memory:
                config.check_firmware(
                    flavor, instance.image_meta, has_kernel=bool(instance.kernel_id)
                )
            if new.has_ram:
                ram.check(flavor, instance.image_meta)
            if new.persists:
                persistence.check(instance, flavor, block_device_info)
            ram.check_no_checkpoints(instance.uuid)
            storage.check_complete(instance.uuid, old)
        arguments = (
            context,
            instance,
            dest,
            flavor,
            network_info,
            block_device_info,
            timeout,
            retry_interval,
        )
        if not old.uses_pcow:
            return str(super().migrate_disk_and_power_off(*arguments))
        with errors.roll_back_resize():
            is_here = dest == self.get_host_ip_addr()
            stays = is_here or self._destination_sees_pool(context, instance)
            storage.check_sizes(instance.uuid, old, new, noted=is_here)
            if stays:
                cold_migration.check_stays(instance.uuid, new)
                pool = storage.find(instance.uuid)[0].pool  # a server lies in one
                resize_claims.follow(
                    context, instance.uuid, pool.name, self._destination_node(context, instance)
                )
            else:
                cold_migration.check_travels(instance.uuid, memory=instance.memory_mb * units.MIB)
                if new.has_ram:
                    ram.check_new_host(context, instance.uuid)
        try:
            with errors.roll_back_resize():
                disk_info = str(super().migrate_disk_and_power_off(*arguments))
                return self._mark_or_send(
                    instance, None if stays else dest, disk_info, old, new, noted=is_here
                )
        except nova_exception.InstanceFaultRollback:
            self._start_again(context, instance, network_info, block_device_info)
            raise

    def finish_migration(
        self,
        context: Any,
        migration: Any,
        instance: Any,
        disk_info: str,
        network_info: Any,
        image_meta: Any,
        resize_instance: bool,
        allocations: Any,
        block_device_info: Any = None,
        power_on: bool = True,
        **later: Any,
    ) -> None:
        """``later``: Nova 34 and later give ``share_info`` as well."""
        with self._noting_growth(instance):
            if flavor_module.is_pcow(instance):
                with errors.fail_migration():
                    disk_info = self._finish_images(
                        context, migration, instance, disk_info, allocations, block_device_info
                    )
            super().finish_migration(
                context,
                migration,
                instance,
                disk_info,
                network_info,
                image_meta,
                resize_instance,
                allocations,
                block_device_info,
                power_on,
                **later,
            )

    @staticmethod
    @contextlib.contextmanager
    def _noting_growth(instance: Any) -> Iterator[None]:
        """Nova gives a server its old flavor again if this fails, and its images stay as they are
        then.
        """
        try:
            yield
        except Exception:
            with excutils.save_and_reraise_exception():
                if flavor_module.is_pcow(instance):
                    try:
                        old = flavor_module.parse(instance.old_flavor, instance.system_metadata)
                        storage.note_growth(instance.uuid, old, flavor_module.of(instance))
                    except exception.PcowError:
                        LOG.exception(
                            'The server will not start with what the resize has left',
                            instance=instance,
                        )

    def _finish_images(
        self,
        context: Any,
        migration: Any,
        instance: Any,
        disk_info: str,
        allocations: Any,
        block_device_info: Any,
    ) -> str:
        wanted = flavor_module.of(instance)
        disk_info, arrived = cold_migration.unpack(disk_info)
        if arrived:
            if self._domain(instance) is None:
                # what an earlier attempt to move it here has left
                live_migration.discard(instance.uuid)
            arrival.note(
                libvirt_utils.get_instance_path(instance),
                arrival.Arrival(migration.source_compute, arrived),
            )
            self._receive(context, instance, allocations)
        # what is made below is only new
        old = flavor_module.parse(instance.old_flavor, instance.system_metadata)
        storage.check_complete(instance.uuid, old)
        storage.check_sizes(instance.uuid, wanted, old)
        cold_migration.grow(instance.uuid, wanted)
        # data devices that the old flavor had not
        self._create_images(context, instance, allocations, block_device_info)
        return disk_info

    def _receive(self, context: Any, instance: Any, allocations: Any = None) -> None:
        """Take over what has arrived from another host, if anything has that is not in a
        pool yet.
        """
        directory = libvirt_utils.get_instance_path(instance)
        found = arrival.noted(directory)
        if found is None:
            return
        allocations = allocations or resize_claims.of_server(context, instance.uuid)
        pool = inventory.choose(
            self.provider_tree, self._host.get_hostname(), allocations, flavor_module.of(instance)
        )

        def template(cache: template_cache.TemplateCache, image_id: str) -> Any:
            source = self._root_source(context, instance, image_id)
            return cache.template(source.image, source.fetch)

        cold_migration.receive(
            instance.uuid, pool, found.images, found.source_host, directory, template
        )
        arrival.forget(directory)

    def finish_revert_migration(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        migration: Any,
        block_device_info: Any = None,
        power_on: bool = True,
        **later: Any,
    ) -> None:
        if storage.find(instance.uuid):
            with errors.fail_migration():
                cold_migration.revert(instance.uuid, flavor_module.of(instance), migration.id)
                notes.forget(notes.RESIZING, uuid=instance.uuid)
        super().finish_revert_migration(
            context, instance, network_info, migration, block_device_info, power_on, **later
        )

    def _cleanup_resize(self, context: Any, instance: Any, network_info: Any) -> None:
        with contextlib.ExitStack() as always, errors.internal():  # Nova does not ask again
            always.callback(super()._cleanup_resize, context, instance, network_info)
            if flavor_module.uses_pcow(instance.old_flavor or instance.flavor):
                cold_migration.confirm(
                    instance.uuid,
                    self._domain(instance),
                    is_here=instance.host == self._service_host,
                )
            notes.forget(notes.RESIZING, uuid=instance.uuid)
            if instance.host != self._service_host:
                notes.forget(notes.GROWN, uuid=instance.uuid)
            elif flavor_module.is_pcow(instance):
                storage.forget_growth(instance.uuid, flavor_module.of(instance))

    def instance_on_disk(self, instance: Any) -> bool:
        """Asked by an evacuation: with False it would begin with empty images, so all or an error
        that changes nothing.
        """
        directory_is_there = super().instance_on_disk(instance)
        if not flavor_module.is_pcow(instance):
            return directory_is_there
        with errors.refuse_evacuation():
            wanted = flavor_module.of(instance)
            cold_migration.check_evacuation(instance.uuid, wanted)
            storage.check_sizes(instance.uuid, wanted)
            config.shim_files(instance)
            if not wanted.root and not directory_is_there:
                raise storage.ServerStorageError(
                    reason=(
                        'the disk of the server is on the host that is down: bring that host back, '
                        'or delete the server'
                    )
                )
        return True

    def check_instance_shared_storage_local(self, context: Any, instance: Any) -> Any:
        images = storage.find(instance.uuid)
        if images:
            return shared.begin(images[0].pool)
        return super().check_instance_shared_storage_local(context, instance)

    def check_instance_shared_storage_remote(self, context: Any, data: Any) -> bool:
        if shared.is_ours(data):
            return shared.sees(data)
        return bool(super().check_instance_shared_storage_remote(context, data))
