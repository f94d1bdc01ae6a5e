# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver in the domains of servers, and in the disk that only
holds the state of a suspended one.
"""

from __future__ import annotations

import os
from typing import Any

from nova.compute import vm_states
from nova.virt.libvirt import config as vconfig
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import moves
from nova_pcow.migration import cold_migration
from nova_pcow.migration import leaving
from nova_pcow.servers import config
from nova_pcow.servers import ram
from nova_pcow.servers import rebuild as rebuild_module
from nova_pcow.servers import root_disk
from nova_pcow.servers import storage
from pcow_driver.common import units

LOG = logging.getLogger(__name__)

_CARRIER_SIZE = units.MIB


class DomainLibvirtDriver(moves.MoveLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.domains`."""

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
        """The root is there already; where it is memory, there may be a disk in its place that only
        holds the state of a suspended server.
        """
        if suffix or not flavor_module.is_pcow(instance) or not flavor_module.of(instance).root:
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
        if not flavor_module.of(instance).has_carrier or os.path.exists(path):
            return False
        libvirt_utils.create_image(path, 'qcow2', _CARRIER_SIZE)
        return True

    @staticmethod
    def _carrier(instance: Any) -> str:
        return os.path.join(libvirt_utils.get_instance_path(instance), 'disk')

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
            not flavor_module.is_pcow(instance)
            or not flavor_module.of(instance).root
            or 'disk' not in disk_info['mapping']
        ):
            return list(devices)
        mapping, found = disk_info['mapping']['disk'], []
        for item in devices:
            is_root = (
                isinstance(item, vconfig.LibvirtConfigGuestDisk)
                and item.target_dev == mapping['dev']
            )
            found += self._root_config(instance, mapping, item) if is_root else [item]
        return found

    def _root_config(
        self, instance: Any, mapping: Any, item: vconfig.LibvirtConfigGuestDisk
    ) -> list[vconfig.LibvirtConfigGuestDisk]:
        """What the server has in place of the disk that Nova gives it."""
        wanted = flavor_module.of(instance)
        if wanted.root_is_disk:
            with errors.internal():
                path = storage.root(instance.uuid).path
            return [root_disk.RootDisk(item, instance.uuid, path)]
        return [self._carrier_config(instance, mapping)] if wanted.has_carrier else []

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
        by_shim = (
            flavor_module.is_pcow(instance)
            and flavor_module.of(instance).root_is_memory
            and not (instance.kernel_id or rescue)
        )
        guest = super()._get_guest_config(
            instance,
            network_info,
            config.without_firmware(image_meta) if by_shim else image_meta,
            disk_info,
            rescue,
            block_device_info,
            context,
            mdevs,
            accel_info,
            share_info,
            old_guest,
        )
        if not flavor_module.is_pcow(instance):
            return guest
        with errors.internal():
            wanted = flavor_module.of(instance)
            guest.add_device(config.Emulator(self._emulator.path()))
            if wanted.root_is_disk:
                storage.check_startable(instance.uuid, wanted)
                root_disk.add_metadata(guest, storage.root(instance.uuid).virtual_size())
                return guest
            devices = [config.MemoryDevice(item) for item in storage.nvdimms(instance.uuid, wanted)]
            config.add_memory_devices(guest, devices)
            if wanted.root and not rescue:
                config.boot_from_pmem(guest, image_meta)
            # The RAM of a rescue is the host's: its disks are no part of a checkpoint, and a revert
            # would tear what it mends.
            if wanted.ram_size is not None and rescue:
                ram.check_not_reverting(instance.uuid)
            elif wanted.ram_size is not None:
                return ram.RamGuest(guest, ram.provide(instance.uuid, wanted.ram_size))
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
        if flavor_module.is_pcow(instance):
            with errors.internal():  # before it gives up anything
                self._settle_leaving(instance)
                storage.check_not_sent(instance.uuid)
            if rebuild_module.is_rebuilt(instance) and storage.ROOT in (
                item.role for item in storage.find(instance.uuid)
            ):
                # no host was found for the rebuild: the root is the old one
                rebuild_module.put_back_image(context, instance)
            with errors.internal():  # of which the new one may have been none for the flavor
                storage.check_class(instance.uuid, flavor_module.of(instance))
                storage.check_sizes(instance.uuid, flavor_module.of(instance))
                self._emulator.path()
                config.shim_files(instance)
            self._forget_suspended(instance)
            if instance.vm_state not in (vm_states.RESIZED, vm_states.ERROR):
                cold_migration.forget(instance.uuid, self._domain(instance))
            with errors.internal():
                self._receive(context, instance)
        super()._hard_reboot(
            context, instance, network_info, share_info, block_device_info, accel_info
        )
        if flavor_module.is_pcow(instance):
            try:
                self._forget_suspended(instance)  # what only a QEMU has given its name
            except Exception:  # the server runs, and is said to
                LOG.exception('What it was suspended at stays for now', instance=instance)

    def power_off(self, instance: Any, timeout: int = 0, retry_interval: int = 0) -> None:
        """The first that a server's host hears when it is shelved or offloaded, and nothing is
        changed yet.
        """
        if flavor_module.is_pcow(instance):
            # once it is off, libvirt cannot tell; rescue begins with this, too
            self._settle_stayed(instance.uuid)
            with errors.internal():
                leaving.check(instance)
        super().power_off(instance, timeout, retry_interval)
