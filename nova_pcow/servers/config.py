# SPDX-License-Identifier: Apache-2.0
"""Parts of the domain XML that Nova's configuration objects lack."""

from __future__ import annotations

from typing import Any

from lxml import etree
from nova import exception as nova_exception
from nova import objects
from nova.objects import fields
from nova.virt import hardware
from nova.virt.libvirt import config as vconfig

from nova_pcow import conf
from nova_pcow.common import flavor as flavor_module
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.virt import boot
from pcow_driver.virt import libvirt_xml

PMEM_CMDLINE = 'root=/dev/pmem0 rootflags=dax=always rw'
# Disks and interfaces that reach any address of the guest.
_REACH_ALL = frozenset({'virtio', 'sata'})
_OF_FIRMWARE = frozenset({'hw_firmware_type', 'hw_firmware_stateless', 'os_secure_boot'})


class FirmwareNeeded(exception.PcowError):
    is_of_host = False
    msg_fmt = (
        'image or flavor require %(what)s, which a guest on persistent memory has not '
        '(%(reason)s): leave %(option)s out, or take a flavor without pcow:root'
    )


class MemoryDevice(vconfig.LibvirtConfigGuestDevice):
    """A pcow image as a persistent memory device.

    Nova's own LibvirtConfigGuestVPMEM always has a label area and is written by QEMU through
    libpmem, both of which a pcow image has not.
    """

    driver_discard = None  # attach_volume looks at it

    def __init__(self, nvdimm: libvirt_xml.Nvdimm) -> None:
        super().__init__(root_name='memory')
        self.nvdimm = nvdimm
        self.alias = nvdimm.alias

    def format_dom(self) -> Any:
        return etree.fromstring(self.nvdimm.to_xml())


class Emulator(vconfig.LibvirtConfigObject):
    """The QEMU that runs the domain, in place of the one that libvirt chooses."""

    def __init__(self, path: str) -> None:
        super().__init__(root_name='emulator')
        self.path = path

    def format_dom(self) -> Any:
        element = super().format_dom()
        element.text = self.path
        return element


def add_memory_devices(guest: Any, devices: list[MemoryDevice]) -> None:
    """Put the devices of a server in front of those of its volumes, so that its root is always
    /dev/pmem0 in the guest.

    Room for volumes that are attached later is kept, and one NUMA node, which libvirt asks for.

    :param guest: LibvirtConfigGuest, which may have MemoryDevice of volumes already
    """
    volumes = [item for item in guest.devices if isinstance(item, MemoryDevice)]
    guest.devices = [item for item in guest.devices if not isinstance(item, MemoryDevice)]
    for item in (*devices, *volumes):
        guest.add_device(item)
    options = conf.CONF.nova_pcow
    size = sum(item.nvdimm.size for item in (*devices, *volumes)) + options.hotplug_gb * units.GIB
    guest.max_memory_size = guest.memory + size // units.KIB
    guest.max_memory_slots = len(devices) + max(options.volume_slots, len(volumes))
    if guest.cpu is None:
        guest.cpu = vconfig.LibvirtConfigGuestCPU()
    if not getattr(guest.cpu, 'numa', None):
        cell = vconfig.LibvirtConfigGuestCPUNUMACell()
        cell.id, cell.cpus, cell.memory = 0, set(range(guest.vcpus)), guest.memory
        guest.cpu.numa = vconfig.LibvirtConfigGuestCPUNUMA()
        guest.cpu.numa.cells.append(cell)


def shim_files(instance: Any) -> tuple[str | None, str | None]:
    """Kernel and initrd of the boot shim of this host, if the server boots by it.

    :raises BootShimMissing:
    """
    if instance.kernel_id or not flavor_module.of(instance).root_is_memory:
        return None, None
    start = boot.shim()
    return start.kernel, start.initrd


def check_firmware(flavor: Any, image_meta: Any, *, has_kernel: bool) -> None:
    """What a guest with its root in persistent memory cannot have.

    :param has_kernel: beside its image; firmware may verify that
    :raises FirmwareNeeded:
    :raises ServerImpossible: flavor and image contradict each other
    """
    try:
        secure_boot = hardware.get_secure_boot_constraint(flavor, image_meta)
        encryption = hardware.get_mem_encryption_constraint(flavor, image_meta)
    except nova_exception.NovaException as e:  # flavor and image want different things
        raise storage.ServerImpossible(reason=str(e)) from e
    if secure_boot == fields.SecureBoot.REQUIRED and not has_kernel:
        raise FirmwareNeeded(
            what='secure boot', reason='no firmware verifies what it boots', option='os_secure_boot'
        )
    if encryption is not None:
        raise FirmwareNeeded(
            what='memory encryption',
            reason='the host sees what is in it',
            option='hw_mem_encryption',
        )


def without_firmware(image_meta: Any) -> Any:
    """The same image, whatever firmware it was made for: the boot shim reads what that would have
    read, and is not started by EFI.
    """
    found, properties = image_meta.obj_clone(), image_meta.properties
    found.properties = objects.ImageMetaProps(
        **{
            name: getattr(properties, name)
            for name in properties.obj_fields
            if name not in _OF_FIRMWARE and properties.obj_attr_is_set(name)
        }
    )
    return found


def boot_from_pmem(guest: Any, image_meta: Any) -> None:
    """Give the guest a kernel that finds its root in persistent memory, as firmware does not: that
    which the image brings beside it, else the boot shim, which goes on in the one inside the image.

    The ``os_command_line`` of an image is all of the command line of its own kernel; of a kernel
    that the shim takes, words more.

    :raises BootShimMissing:
    """
    command_line = image_meta.properties.get('os_command_line')
    options = _options(guest, image_meta)
    if guest.os_kernel:
        if not command_line:
            _root, _space, rest = guest.os_cmdline.partition(' ')
            guest.os_cmdline = ' '.join(filter(None, (PMEM_CMDLINE, rest, options)))
        return
    start = boot.shim(' '.join(filter(None, (options, command_line))))
    guest.os_kernel, guest.os_initrd, guest.os_cmdline = start.kernel, start.initrd, start.cmdline
    guest.os_boot_dev = []


def _options(guest: Any, image_meta: Any) -> str:
    """See :func:`pcow_driver.virt.boot.memory_options`."""
    # an interface may come later, of this model
    if image_meta.properties.get('hw_vif_model', 'virtio') not in _REACH_ALL:
        return ''
    for item in guest.devices:
        if isinstance(item, vconfig.LibvirtConfigGuestDisk):
            reaches = item.target_bus in _REACH_ALL
        elif isinstance(item, vconfig.LibvirtConfigGuestInterface):
            reaches = item.model in _REACH_ALL
        else:
            reaches = not isinstance(item, vconfig.LibvirtConfigGuestHostdev)
        if not reaches:
            return ''
    return boot.memory_options(guest.memory * units.KIB)
