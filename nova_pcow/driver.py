# SPDX-License-Identifier: Apache-2.0
"""The compute driver: Nova's libvirt driver, and what differs for servers whose root or data
devices are pcow images.

Only overrides are here, some of them in :mod:`nova_pcow.volume_driver`,
:mod:`nova_pcow.snapshot_driver`, :mod:`nova_pcow.resize_driver` and
:mod:`nova_pcow.live_migration_driver`; what they do is in the other modules of the package. A
server without ``pcow:*`` in its flavor takes Nova's own way everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import os
from typing import Any

from nova import exception as nova_exception
from nova.compute import task_states
from nova.compute import vm_states
import nova.conf
from nova.virt import images as virt_images
from nova.virt.libvirt import config as vconfig
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging
from oslo_utils import excutils

from nova_pcow import arrival
from nova_pcow import claims
from nova_pcow import config
from nova_pcow import emulator
from nova_pcow import errors
from nova_pcow import flavor as flavor_module
from nova_pcow import inventory
from nova_pcow import leaving
from nova_pcow import live_migration
from nova_pcow import live_migration_driver
from nova_pcow import migration as migration_module
from nova_pcow import notes
from nova_pcow import rebuild as rebuild_module
from nova_pcow import resize_claims
from nova_pcow import shared
from nova_pcow import snapshot as snapshot_module
from nova_pcow import storage
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.templates import template_cache

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF

_CARRIER_SIZE = units.MIB


def _wanted(instance: Any) -> flavor_module.PcowFlavor:
    return flavor_module.parse(instance.flavor)


def _uses_pcow(instance: Any) -> bool:
    return flavor_module.uses_pcow(instance.flavor)


class PcowLibvirtDriver(live_migration_driver.LiveMigrationLibvirtDriver):
    """See :mod:`nova_pcow.driver`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._emulator = emulator.Emulator()
        self._had_emulator = True
        self._lost_claims = claims.LostClaims()

    # ---- the host --------------------------------------------------------------------------------

    def init_host(self, host: str) -> None:
        super().init_host(host)
        self._service_host = host
        if not CONF.nova_pcow.pools:
            LOG.warning(
                '[nova_pcow] pools names no pool: servers with persistent memory are not scheduled '
                'to this host'
            )
        try:
            self._emulator.path()
            inventory.pools()
        except exception.PcowError as e:
            LOG.error('Servers with persistent memory will not start: %s', e)
        self._delete_leftovers()

    def update_provider_tree(
        self, provider_tree: Any, nodename: str, allocations: Any = None
    ) -> None:
        super().update_provider_tree(provider_tree, nodename, allocations)
        inventory.update_provider_tree(provider_tree, nodename, takes_servers=self._has_emulator())
        self.provider_tree = copy.deepcopy(provider_tree)
        self._lost_claims.put_back(self._service_host)
        self._settle_stayed(*notes.servers(notes.LEAVING))

    def _has_emulator(self) -> bool:
        """One warning each time that it goes."""
        had, self._had_emulator = self._had_emulator, True
        try:
            self._emulator.path()
        except exception.PcowError as e:
            self._had_emulator = False
            if had:
                LOG.warning('The pools of this host take no servers: %s', e)
        return self._had_emulator

    def manage_image_cache(self, context: Any, all_instances: Any) -> None:
        super().manage_image_cache(context, all_instances)
        self._delete_leftovers()  # first: templates that nothing stands on age
        if CONF.image_cache.remove_unused_base_images:
            for pool in inventory.pools():
                template_cache.TemplateCache(pool).age_out(
                    CONF.image_cache.remove_unused_original_minimum_age_seconds
                )

    # ---- creation and deletion -------------------------------------------------------------------

    def spawn(
        self,
        context: Any,
        instance: Any,
        image_meta: Any,
        injected_files: Any,
        admin_password: Any,
        allocations: Any,
        network_info: Any = None,
        block_device_info: Any = None,
        power_on: bool = True,
        accel_info: Any = None,
    ) -> None:
        allocations = allocations or self._lost_claims.noted(instance)
        arguments = (
            context,
            instance,
            image_meta,
            injected_files,
            admin_password,
            allocations,
            network_info,
            block_device_info,
            power_on,
            accel_info,
        )
        if not _uses_pcow(instance):
            super().spawn(*arguments)
            return
        # an evacuated server's is another still, and goes on with its images
        begins = instance.host == self._service_host
        with errors.build(context, instance, self._service_host):
            if begins:
                self._clear_for_spawn(instance)
        # A spawn that fails deletes the directory that it made, but no image that was there before:
        # an evacuated server's.
        with (
            errors.build(context, instance, self._service_host),
            self._keep_images(instance.uuid, storage.find(instance.uuid)),
        ):
            if instance.vm_state == vm_states.BUILDING:  # others have what they have
                flavor_module.check_known(instance.flavor)
            if begins:
                storage.check_none(instance.uuid)
            made = self._create_images(context, instance, allocations, block_device_info)
            if instance.task_state == task_states.REBUILD_SPAWNING:
                rebuild_module.keep_image(instance)
                # a service that is killed from here on leaves the new root
                instance.save()
            try:
                super().spawn(*arguments)
            except Exception:
                with excutils.save_and_reraise_exception():
                    storage.discard(instance.uuid, made)  # Nova does not while libvirt is away
        rebuild_module.keep_image(instance)

    def _create_images(
        self, context: Any, instance: Any, allocations: Any, block_device_info: Any = None
    ) -> list[str]:
        """The names of those that were not there.

        :raises PcowError:
        """
        wanted = _wanted(instance)
        self._emulator.path()
        if not storage.missing_roles(instance.uuid, wanted):
            return []
        source = self._checked_source(context, instance, wanted, block_device_info)
        pool = inventory.choose(self.provider_tree, self._host.get_hostname(), allocations, wanted)
        return storage.create(instance.uuid, wanted, pool, source)

    def _checked_source(
        self, context: Any, instance: Any, wanted: flavor_module.PcowFlavor, block_device_info: Any
    ) -> storage.RootSource | None:
        """What the root begins with, None if it is none of ours.

        :raises PcowError: it cannot be
        """
        if not wanted.root:
            return None
        if self._is_booted_from_volume(block_device_info):
            raise flavor_module.FlavorInvalid(
                flavor=wanted.name, reason='its root is in persistent memory, not in a volume'
            )
        if not instance.kernel_id:
            raise storage.ServerImpossible(
                reason=(
                    f'the image {instance.image_ref} has no property kernel_id: firmware cannot '
                    f'boot from persistent memory, so '
                    'give the image the properties kernel_id and ramdisk_id'
                )
            )
        return self._root_source(context, instance, instance.image_ref)

    def _root_source(self, context: Any, instance: Any, image_id: str) -> storage.RootSource:
        """:raises SourceRejected: Glance does not have it"""
        try:
            found = self._image_api.get(context, image_id)
        except nova_exception.ImageNotFound as e:
            raise exception.SourceRejected(path=f'image {image_id}', reason=str(e)) from e
        checksum = found.get('os_hash_value') or found.get('checksum') or ''
        return storage.RootSource(
            template_cache.SourceImage(image_id, checksum, str(found.get('disk_format'))),
            lambda path: virt_images.fetch(context, image_id, path, instance.trusted_certs),
        )

    def rebuild(
        self,
        context: Any,
        instance: Any,
        *_args: Any,
        allocations: Any = None,
        evacuate: bool = False,
        block_device_info: Any = None,
        preserve_ephemeral: bool = False,
        **_kwargs: Any,
    ) -> None:
        """Nova's own rebuild deletes all the server has before it finds out what cannot be: find
        that out first.

        :raises InstanceFaultRollback: it cannot be; the server goes on
        :raises NotImplementedError: it can be. By this a driver has Nova's compute manager rebuild
            in the general way, with ``destroy`` and ``spawn``
            (nova.virt.driver.ComputeDriver.rebuild).
        """
        if _uses_pcow(instance) and not evacuate:
            # to be able to begin anew once more, if this fails later
            self._lost_claims.note(instance, allocations)
            try:
                with errors.refuse_rebuild(instance):
                    if preserve_ephemeral:
                        raise storage.ServerStorageError(
                            reason=(
                                'the server has persistent memory, and nothing of it outlives a '
                                'rebuild: leave preserve_ephemeral out'
                            )
                        )
                    allocations = self._lost_claims.check(context, instance, allocations)
                    wanted = _wanted(instance)
                    self._emulator.path()
                    source = self._checked_source(context, instance, wanted, block_device_info)
                    pool = inventory.choose(
                        self.provider_tree, self._host.get_hostname(), allocations, wanted
                    )
                    storage.prepare_rebuild(instance.uuid, wanted, pool, source)
            except nova_exception.InstanceFaultRollback:
                with excutils.save_and_reraise_exception():
                    rebuild_module.put_back_image(context, instance)
        raise NotImplementedError

    def _create_and_inject_local_root(
        self,
        context: Any,
        instance: Any,
        disk_mapping: Any,
        booted_from_volume: bool,
        suffix: str,
        disk_images: Any,
        injection_info: Any,
        fallback_from_host: Any,
    ) -> bool:
        """The root is there already; in place of the disk there is one that only holds the state of
        a suspended server.
        """
        if suffix or not _uses_pcow(instance) or not _wanted(instance).root:
            return bool(
                super()._create_and_inject_local_root(
                    context,
                    instance,
                    disk_mapping,
                    booted_from_volume,
                    suffix,
                    disk_images,
                    injection_info,
                    fallback_from_host,
                )
            )
        path = self._carrier(instance)
        if os.path.exists(path):
            return False
        libvirt_utils.create_image(path, 'qcow2', _CARRIER_SIZE)
        return True

    @staticmethod
    def _carrier(instance: Any) -> str:
        return os.path.join(libvirt_utils.get_instance_path(instance), 'disk')

    def power_off(self, instance: Any, timeout: int = 0, retry_interval: int = 0) -> None:
        """The first that a server's host hears when it is shelved or offloaded, and nothing is
        changed yet.
        """
        if _uses_pcow(instance):
            # once it is off, libvirt cannot tell; rescue begins with this, too
            self._settle_stayed(instance.uuid)
            with errors.internal():
                leaving.check(instance)
        super().power_off(instance, timeout, retry_interval)

    # ---- the domain ------------------------------------------------------------------------------

    def _get_guest_storage_config(
        self,
        context: Any,
        instance: Any,
        image_meta: Any,
        disk_info: Any,
        rescue: Any,
        block_device_info: Any,
        flavor: Any,
        os_type: Any,
    ) -> list[Any]:
        devices = super()._get_guest_storage_config(
            context, instance, image_meta, disk_info, rescue, block_device_info, flavor, os_type
        )
        if (
            not _uses_pcow(instance)
            or not _wanted(instance).root
            or 'disk' not in disk_info['mapping']
        ):
            return list(devices)
        mapping = disk_info['mapping']['disk']
        return [
            self._carrier_config(instance, mapping)
            if isinstance(item, vconfig.LibvirtConfigGuestDisk)
            and item.target_dev == mapping['dev']
            else item
            for item in devices
        ]

    def _carrier_config(self, instance: Any, mapping: Any) -> vconfig.LibvirtConfigGuestDisk:
        """Whatever images_type is, its format is qcow2."""
        carrier = vconfig.LibvirtConfigGuestDisk()
        carrier.source_type, carrier.source_device, carrier.source_path = (
            'file',
            'disk',
            self._carrier(instance),
        )
        carrier.driver_name, carrier.driver_format = 'qemu', 'qcow2'
        carrier.target_dev, carrier.target_bus = mapping['dev'], mapping['bus']
        return carrier

    def _get_guest_config(
        self,
        instance: Any,
        network_info: Any,
        image_meta: Any,
        disk_info: Any,
        rescue: Any = None,
        block_device_info: Any = None,
        context: Any = None,
        mdevs: Any = None,
        accel_info: Any = None,
        share_info: Any = None,
        old_guest: Any = None,
    ) -> Any:
        guest = super()._get_guest_config(
            instance,
            network_info,
            image_meta,
            disk_info,
            rescue,
            block_device_info,
            context,
            mdevs,
            accel_info,
            share_info,
            old_guest,
        )
        if not _uses_pcow(instance):
            return guest
        with errors.internal():
            wanted = _wanted(instance)
            devices = [config.MemoryDevice(item) for item in storage.nvdimms(instance.uuid, wanted)]
            config.add_memory_devices(guest, devices)
            guest.add_device(config.Emulator(self._emulator.path()))
            if wanted.root and not rescue:
                config.boot_from_pmem(guest, image_meta)
        return guest

    def _hard_reboot(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        share_info: Any,
        block_device_info: Any = None,
        accel_info: Any = None,
    ) -> None:
        if _uses_pcow(instance):
            with errors.internal():  # before it gives up anything
                self._settle_leaving(instance)
                storage.check_not_sent(instance.uuid)
                storage.check_class(instance.uuid, _wanted(instance))
            if rebuild_module.is_rebuilt(instance) and storage.ROOT in (
                item.role for item in storage.find(instance.uuid)
            ):
                # no host was found for the rebuild: the root is the old one
                rebuild_module.put_back_image(context, instance)
            with contextlib.suppress(nova_exception.InstanceNotFound):
                snapshot_module.forget_suspended(self._host.get_guest(instance)._domain)
            if instance.vm_state not in (vm_states.RESIZED, vm_states.ERROR):
                migration_module.forget(instance.uuid, self._domain(instance))
            with errors.internal():
                self._receive(context, instance)
        super()._hard_reboot(
            context, instance, network_info, share_info, block_device_info, accel_info
        )

    # ---- other sizes and hosts -------------------------------------------------------------------

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
        if _uses_pcow(instance):
            self._settle_leaving(instance)
        with errors.roll_back_resize():
            # a resize; a migrated server has what it has
            if flavor.flavorid != instance.flavor.flavorid:
                flavor_module.check_known(flavor)
            old, new = flavor_module.parse(instance.flavor), flavor_module.parse(flavor)
            flavor_module.check_resize(old, new)
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
            stays = dest == self.get_host_ip_addr() or self._destination_sees_pool(
                context, instance
            )
            if stays:
                migration_module.check_stays(instance.uuid, new)
                pool = storage.find(instance.uuid)[0].pool  # a server lies in one
                resize_claims.follow(
                    context, instance.uuid, pool.name, self._destination_node(context, instance)
                )
            else:
                migration_module.check_travels(instance.uuid)
        try:
            with errors.roll_back_resize():
                disk_info = str(super().migrate_disk_and_power_off(*arguments))
                return self._mark_or_send(instance, None if stays else dest, disk_info)
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
        if _uses_pcow(instance):
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

    def _finish_images(
        self,
        context: Any,
        migration: Any,
        instance: Any,
        disk_info: str,
        allocations: Any,
        block_device_info: Any,
    ) -> str:
        wanted = _wanted(instance)
        disk_info, arrived = migration_module.unpack(disk_info)
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
        storage.check_complete(instance.uuid, flavor_module.parse(instance.old_flavor))
        migration_module.grow(instance.uuid, wanted)
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
            self.provider_tree, self._host.get_hostname(), allocations, _wanted(instance)
        )

        def template(cache: template_cache.TemplateCache, image_id: str) -> Any:
            source = self._root_source(context, instance, image_id)
            return cache.template(source.image, source.fetch)

        migration_module.receive(
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
                migration_module.revert(instance.uuid, _wanted(instance), migration.id)
        super().finish_revert_migration(
            context, instance, network_info, migration, block_device_info, power_on, **later
        )

    def _cleanup_resize(self, context: Any, instance: Any, network_info: Any) -> None:
        with contextlib.ExitStack() as always, errors.internal():  # Nova does not ask again
            always.callback(super()._cleanup_resize, context, instance, network_info)
            if flavor_module.uses_pcow(instance.old_flavor or instance.flavor):
                migration_module.confirm(
                    instance.uuid,
                    self._domain(instance),
                    is_here=instance.host == self._service_host,
                )

    def instance_on_disk(self, instance: Any) -> bool:
        """Asked by an evacuation: with False it would begin with empty images, so all or an error
        that changes nothing.
        """
        directory_is_there = super().instance_on_disk(instance)
        if not _uses_pcow(instance):
            return directory_is_there
        with errors.refuse_evacuation():
            wanted = _wanted(instance)
            migration_module.check_evacuation(instance.uuid, wanted)
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
