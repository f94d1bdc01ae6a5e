# SPDX-License-Identifier: Apache-2.0
"""Cinder volumes on pcow images as persistent memory of a server, or as a disk of one that has no
persistent memory.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from nova import exception as nova_exception
from nova.virt import block_device
from nova.virt.libvirt import config as vconfig
from nova.virt.libvirt.volume import volume

from nova_pcow.common import errors
from nova_pcow.common import flavor
from nova_pcow.servers import config
from nova_pcow.servers import confinement
from nova_pcow.servers import disk
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.virt import libvirt_xml

TYPE = 'pcow'
_IS_DISK = 'pcow_disk'  # in the data of a connection


def is_pcow(connection_info: Any) -> bool:
    return bool(connection_info) and connection_info.get('driver_volume_type') == TYPE


def alias(connection_info: Any) -> str:
    """Of the device in the domain XML."""
    return str(vconfig.make_libvirt_device_alias(block_device.get_volume_id(connection_info)))


def check_attach(connection_info: Any) -> None:
    """:raises InvalidVolume: a kind that memory cannot be"""
    data = connection_info.get('data', {})
    if connection_info.get('multiattach') or data.get('multiattach'):
        raise nova_exception.InvalidVolume(
            reason='a volume in persistent memory is attached to one server at a time'
        )
    if data.get('encrypted'):
        raise nova_exception.InvalidVolume(
            reason='a volume in persistent memory is mapped as it is and cannot be encrypted'
        )
    if data.get('access_mode', 'rw') != 'rw':
        raise nova_exception.InvalidVolume(
            reason='a volume in persistent memory cannot be attached read-only'
        )


class PcowVolumeDriver(volume.LibvirtBaseVolumeDriver):
    """The entry 'pcow' of Nova's libvirt volume drivers."""

    def __init__(self, host: Any) -> None:
        super().__init__(host, is_block_dev=False)

    def connect_volume(self, connection_info: Any, instance: Any) -> None:
        """
        :raises InvalidVolume: it does not lie in a pool of this host, cannot be read, or is larger
            than the volume
        """
        data = connection_info['data']
        data[_IS_DISK] = not flavor.has_memory(instance)
        profile = confinement.profile(self.host, instance)
        volume_id = block_device.get_volume_id(connection_info)
        with _invalid_volume():
            path, _pool = self._image(connection_info)
            if data[_IS_DISK]:
                disk.start(path, volume_id, profile)
            if profile is not None:
                confinement.let_in(
                    disk.socket_path(volume_id) if data[_IS_DISK] else path, instance
                )

    def disconnect_volume(self, connection_info: Any, instance: Any, force: bool = False) -> None:
        """:raises InternalError: what serves it does not end"""
        with errors.internal():
            disk.stop(block_device.get_volume_id(connection_info))

    def get_config(
        self, connection_info: Any, disk_info: Any
    ) -> config.MemoryDevice | disk.NbdDisk:
        """
        :raises InvalidVolume: as :meth:`connect_volume`
        """
        check_attach(connection_info)
        if connection_info['data'].get(_IS_DISK):
            return disk.NbdDisk(
                super().get_config(connection_info, disk_info),
                disk.socket_path(block_device.get_volume_id(connection_info)),
            )
        with _invalid_volume():
            return config.MemoryDevice(
                storage.nvdimm(*self._image(connection_info), alias(connection_info))
            )

    @staticmethod
    def _image(connection_info: Any) -> tuple[str, pool_module.Pool]:
        """
        :raises InvalidVolume: it does not lie in a pool of this host
        :raises PcowError: it cannot be read, or is larger than Cinder said when it was attached
        """
        data = connection_info['data']
        path = str(data.get('device_path'))
        pool = registry.PoolRegistry().find(os.path.dirname(path)) if os.path.isabs(path) else None
        if pool is None or not path.endswith(names.IMAGE_SUFFIX) or os.path.islink(path):
            raise nova_exception.InvalidVolume(
                reason=(
                    f'{path} is no image in a pool of this host: memory is where it is, so put the '
                    f'server on the volume\'s host'
                )
            )
        if 'size' in data:  # of earlier versions there may be none
            device.check_size(
                path,
                int(data['size']),
                f'the volume {block_device.get_volume_id(connection_info)}',
                'Detach the volume and extend it to as much',
            )
        return path, pool


@contextlib.contextmanager
def _invalid_volume() -> Iterator[None]:
    try:
        yield
    except exception.PcowError as e:
        raise nova_exception.InvalidVolume(reason=str(e)) from None


def plugged(domain_xml: str, connection_info: Any) -> libvirt_xml.Nvdimm | None:
    """The device of a volume in a domain."""
    wanted = alias(connection_info)
    return next((item for item in libvirt_xml.nvdimms(domain_xml) if item.alias == wanted), None)


def check_detach(guest_is_active: bool, mountpoint: str) -> None:
    """:raises DeviceDetachFailed: the server has to be stopped first"""
    if guest_is_active:
        raise nova_exception.DeviceDetachFailed(
            device=mountpoint,
            reason=(
                'persistent memory cannot be taken out of a running server: stop it (openstack '
                'server stop), detach the volume, and '
                'start it again'
            ),
        )


def unplug(virtual_domain: Any, connection_info: Any) -> None:
    """Take the device of a volume out of the configuration of a domain that is off.

    :raises libvirtError:
    """
    found = plugged(virtual_domain.XMLDesc(2), connection_info)  # VIR_DOMAIN_XML_INACTIVE
    if found is not None:
        # VIR_DOMAIN_AFFECT_CONFIG
        virtual_domain.detachDeviceFlags(config.MemoryDevice(found).to_xml(), 2)
