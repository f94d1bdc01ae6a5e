# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for volumes of type pcow, of servers with and without
persistent memory.

Such a volume is memory of the host that it lies on. Cinder gives it to no other, but Nova asks
Cinder late, when the server has left its host: whatever takes a server with one elsewhere is
refused here, before anything changes.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova.virt import driver as virt_driver
from nova.virt.libvirt import driver as libvirt_driver

from nova_pcow.common import flavor as flavor_module
from nova_pcow.servers import disk
from nova_pcow.servers import volume
from pcow_driver.virt import libvirt_call


class VolumeLibvirtDriver(libvirt_driver.LibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.volumes`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        libvirt_driver.VOLUME_DRIVERS.setdefault(
            volume.TYPE, f'{volume.__name__}.{volume.PcowVolumeDriver.__name__}'
        )

    def attach_volume(
        self,
        context: Any,
        connection_info: Any,
        instance: Any,
        mountpoint: str,
        disk_bus: Any = None,
        device_type: Any = None,
        encryption: Any = None,
    ) -> None:
        if volume.is_pcow(connection_info):
            volume.check_attach(connection_info)
        super().attach_volume(
            context, connection_info, instance, mountpoint, disk_bus, device_type, encryption
        )

    def detach_volume(
        self,
        context: Any,
        connection_info: Any,
        instance: Any,
        mountpoint: str,
        encryption: Any = None,
    ) -> None:
        if not volume.is_pcow(connection_info) or not flavor_module.has_memory(instance):
            super().detach_volume(context, connection_info, instance, mountpoint, encryption)
            return
        with contextlib.suppress(nova_exception.InstanceNotFound):
            guest = self._host.get_guest(instance)
            volume.check_detach(guest.is_active(), mountpoint)
            volume.unplug(libvirt_call.Proxy(guest._domain, guest.name), connection_info)
        self._disconnect_volume(context, connection_info, instance, encryption=encryption)

    def _get_guest_disk_device(
        self,
        guest: Any,
        disk_dev: str,
        volume_uuid: str | None = None,
        from_persistent_config: bool = False,
    ) -> Any:
        """What detach_volume gives libvirt back; Nova's own way to read it loses the socket."""
        found = super()._get_guest_disk_device(guest, disk_dev, volume_uuid, from_persistent_config)
        return found if found is None or volume_uuid is None else disk.complete(found, volume_uuid)

    def extend_volume(
        self, context: Any, connection_info: Any, instance: Any, requested_size: int
    ) -> None:
        if volume.is_pcow(connection_info):
            raise nova_exception.ExtendVolumeNotSupported()
        super().extend_volume(context, connection_info, instance, requested_size)

    def swap_volume(
        self,
        context: Any,
        old_connection_info: Any,
        new_connection_info: Any,
        instance: Any,
        mountpoint: str,
        resize_to: int,
    ) -> None:
        if volume.is_pcow(old_connection_info) or volume.is_pcow(new_connection_info):
            raise nova_exception.InvalidVolume(
                reason='a volume in persistent memory cannot be replaced while it is attached'
            )
        super().swap_volume(
            context, old_connection_info, new_connection_info, instance, mountpoint, resize_to
        )

    # ---- other hosts -----------------------------------------------------------------------------

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
        return str(
            super().migrate_disk_and_power_off(
                context,
                instance,
                dest,
                flavor,
                network_info,
                block_device_info,
                timeout,
                retry_interval,
            )
        )

    def check_volumes_stay(self, dest: str, block_device_info: Any) -> None:
        """:raises InstanceFaultRollback: a resize or cold migration to another host would leave a
        volume; the server goes on
        """
        found = None if dest == self.get_host_ip_addr() else _pcow_volume(block_device_info)
        if found is not None:
            raise nova_exception.InstanceFaultRollback(
                nova_exception.ResizeError(reason=_words(found))
            )

    def check_can_live_migrate_source(
        self, context: Any, instance: Any, dest_check_data: Any, block_device_info: Any = None
    ) -> Any:
        found = _pcow_volume(block_device_info)
        if found is not None:
            raise nova_exception.MigrationPreCheckError(reason=_words(found))
        return super().check_can_live_migrate_source(
            context, instance, dest_check_data, block_device_info
        )

    def instance_on_disk(self, instance: Any) -> bool:
        """Asked by an evacuation: the first that this host hears of it.

        :raises InstanceFaultRollback: the server stays what it is, and where it is
        """
        attached = objects.BlockDeviceMappingList.get_by_instance_uuid(
            nova_context.get_admin_context(), instance.uuid
        )
        for item in attached:
            if item.is_volume and volume.is_pcow(json.loads(item.connection_info or 'null')):
                raise nova_exception.InstanceFaultRollback(
                    nova_exception.MigrationError(
                        reason=(
                            f'the volume {item.volume_id} is memory of the host that is down, and '
                            f'cannot be attached on this one: bring '
                            'that host back, or delete the server'
                        )
                    )
                )
        return bool(super().instance_on_disk(instance))


def _pcow_volume(block_device_info: Any) -> str | None:
    """The ID of an attached volume that does not leave its host."""
    connections = (
        item['connection_info']
        for item in virt_driver.block_device_info_get_mapping(block_device_info)
    )
    return next(
        (str(found['data'].get('volume_id')) for found in connections if volume.is_pcow(found)),
        None,
    )


def _words(volume_id: str) -> str:
    return (
        f'the volume {volume_id} is memory of this host, and cannot be attached on another: detach '
        f'it first; it does not move '
        'with the server'
    )
