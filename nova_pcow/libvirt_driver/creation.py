# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver when a server is created, or begins anew."""

from __future__ import annotations

from typing import Any

from nova import exception as nova_exception
from nova.compute import task_states
from nova.compute import vm_states
from nova.virt import images as virt_images
from oslo_utils import excutils

from nova_pcow.common import emulator
from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import live_migrations
from nova_pcow.migration import leaving
from nova_pcow.placement import claims
from nova_pcow.placement import inventory
from nova_pcow.servers import config
from nova_pcow.servers import persistence
from nova_pcow.servers import ram
from nova_pcow.servers import rebuild as rebuild_module
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.templates import template_cache
from pcow_driver.virt import domain


class CreationLibvirtDriver(live_migrations.LiveMigrationLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.creation`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._emulator = emulator.Emulator()
        self._lost_claims = claims.LostClaims()

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
        if not flavor_module.is_pcow(instance):
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
            made = self._create_images(
                context,
                instance,
                allocations,
                block_device_info,
                may_be_warm=instance.vm_state == vm_states.BUILDING and not injected_files,
            )
            is_warm = instance.uuid in self._warm
            if instance.task_state == task_states.REBUILD_SPAWNING:
                rebuild_module.keep_image(instance)
                # a service that is killed from here on leaves the new root
                instance.save()
            try:
                super().spawn(*arguments)
            except Exception:
                with excutils.save_and_reraise_exception():
                    storage.discard(instance.uuid, made)  # Nova does not while libvirt is away
            finally:
                self._warm.pop(instance.uuid, None)
        if is_warm:
            # its clock stands where that of its parent did
            domain.Domain(self._host.get_connection(), instance.name).set_clock()
        rebuild_module.keep_image(instance)

    def _create_images(
        self,
        context: Any,
        instance: Any,
        allocations: Any,
        block_device_info: Any = None,
        *,
        may_be_warm: bool = False,
    ) -> list[str]:
        """The names of those that were not there.

        :param may_be_warm: whether the server may go on from a checkpoint
        :raises PcowError:
        """
        wanted = flavor_module.of(instance)
        self._emulator.path()
        if not storage.missing_roles(instance.uuid, wanted):
            return []
        source = self._checked_source(context, instance, wanted, block_device_info)
        pool = inventory.choose(self.provider_tree, self._host.get_hostname(), allocations, wanted)
        made: list[str] = []
        if source is not None and may_be_warm and not storage.find(instance.uuid):
            made = self._fork_warm(context, instance, wanted, pool, source)
        return made or storage.create(instance.uuid, wanted, pool, source)

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
        config.shim_files(instance)
        if wanted.root_is_memory:
            config.check_firmware(
                instance.flavor, instance.image_meta, has_kernel=bool(instance.kernel_id)
            )
        if wanted.has_ram:
            ram.check(instance.flavor, instance.image_meta)
        if wanted.persists:
            persistence.check(instance, instance.flavor, block_device_info)
        return self._root_source(context, instance, instance.image_ref)

    def _root_source(self, context: Any, instance: Any, image_id: str) -> storage.RootSource:
        """:raises SourceRejected: Glance does not have it"""
        try:
            found = self._image_api.get(context, image_id)
        except nova_exception.ImageNotFound as e:
            raise exception.SourceRejected(path=f'image {image_id}', reason=str(e)) from e
        return storage.RootSource(
            template_cache.SourceImage(
                image_id, storage.checksum(found), str(found.get('disk_format'))
            ),
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
        if flavor_module.is_pcow(instance) and not evacuate:
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
                    leaving.check_no_warm_images(instance.uuid)
                    allocations = self._lost_claims.check(context, instance, allocations)
                    wanted = flavor_module.of(instance)
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
