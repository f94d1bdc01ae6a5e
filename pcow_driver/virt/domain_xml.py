# SPDX-License-Identifier: Apache-2.0
"""A complete libvirt domain with its root on a pcow image: on an NVDIMM, with a kernel that QEMU
loads, or on a disk, from which firmware boots.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import os
import string
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_xml
from pcow_driver.virt import seed

DEFAULT_CMDLINE = 'root=/dev/pmem0 rootflags=dax=always rw console=ttyS0'
TYPES = ('kvm', 'qemu')
NETWORKS = ('none', 'user')
FIRMWARES = ('bios', 'efi')
MIN_HOTPLUG_SLOTS = 16
_DISK_NAMES = tuple(f'vd{letter}' for letter in string.ascii_lowercase)
ACCEPT_VOLATILE = ('-global', 'nvdimm.pcow-volatile=on')
ET.register_namespace('qemu', libvirt_xml.QEMU_NAMESPACE)


def default_type() -> str:
    """KVM where this host has it, else emulation."""
    return 'kvm' if os.path.exists('/dev/kvm') else 'qemu'


@dataclasses.dataclass(frozen=True)
class Domain:
    """What goes into the XML; sizes in bytes.

    An NVDIMM needs ACPI, a NUMA node to sit on, and ``<maxMemory slots>`` with room for it; these
    are always written, so that more can be plugged in later (out of a running guest they do not
    come: QEMU cannot unplug them).
    """

    name: str
    memory: int  # the guest's RAM
    nvdimms: Sequence[libvirt_xml.Nvdimm] = ()
    # each has its place by the UUID of the domain, which is needed then
    disks: Sequence[disk_xml.Disk] = ()
    kernel: str | None = None  # None: firmware boots from the first disk
    firmware: str = FIRMWARES[0]  # one of FIRMWARES; for a guest without kernel
    initrd: str | None = None
    cmdline: str = DEFAULT_CMDLINE
    vcpus: int = 1
    type: str = 'qemu'  # one of TYPES; 'qemu' is emulation (TCG)
    emulator: str | None = None
    machine: str = 'q35'
    uuid: str | None = None
    serial_file: str | None = None  # console log; a pty if None
    # qcow2 file that holds VM state for virsh snapshots
    carrier_disk: str | None = None
    seed: str | None = None  # file with what cloud-init makes of the guest; read-only
    network: str = 'none'  # one of NETWORKS
    hotplug_memory: int = 64 * units.GIB  # address space kept for later NVDIMMs
    # a host crash may lose what the guest flushed: nvdimm on class page-cache
    volatile: bool = False
    ram: str | None = None  # path of the image that is the guest's RAM, of its size

    def check(self) -> None:
        """:raises XmlInvalid: something in it that libvirt would refuse or misread"""
        if not self.name or '/' in self.name or not self.name.isprintable():
            raise exception.XmlInvalid(reason=f'{self.name!r} is not a domain name')
        for value, known in (
            (self.type, TYPES),
            (self.network, NETWORKS),
            (self.firmware, FIRMWARES),
        ):
            if value not in known:
                raise exception.XmlInvalid(reason=f'{value} is none of {", ".join(known)}')
        if self.vcpus < 1:
            raise exception.XmlInvalid(reason=f'{self.vcpus} vCPUs')
        if self.memory < 16 * units.MIB or self.memory % units.MIB:
            raise exception.XmlInvalid(
                reason=f'{self.memory} bytes of RAM: give whole MiB, at least 16'
            )
        self._check_images()
        if self.ram is not None and self.memory % units.SLAB_SIZE:
            raise exception.XmlInvalid(
                reason=f'{self.memory} bytes of RAM: an image has a multiple of 2 MiB'
            )
        for path in (
            *(self.kernel, self.initrd, self.emulator),
            *(self.serial_file, self.carrier_disk, self.seed),
        ):
            if path is not None and not os.path.isabs(path):
                raise exception.XmlInvalid(reason=f'the path {path} is not absolute')

    def _check_images(self) -> None:
        if not self.nvdimms and not self.disks:
            raise exception.XmlInvalid(reason='it has no pcow image')
        if self.kernel is None and not self.disks:
            raise exception.XmlInvalid(reason='no firmware boots from persistent memory')
        if self.disks and self.uuid is None:
            raise exception.XmlInvalid(reason='a domain with disks needs a UUID')

    def to_element(self) -> ET.Element:
        """:raises XmlInvalid:"""
        self.check()
        domain = ET.Element('domain', type=self.type)
        ET.SubElement(domain, 'name').text = self.name
        if self.uuid is not None:
            ET.SubElement(domain, 'uuid').text = self.uuid
        if self.ram is not None:
            # another one after each revert, and for each fork
            ET.SubElement(domain, 'genid')
        if self.disks:
            ET.SubElement(domain, 'metadata').append(disk_xml.metadata(self.disks))
        self._add_memory(domain)
        if self.ram is not None:
            libvirt_xml.add_ram(domain, self.ram)
        ET.SubElement(domain, 'vcpu').text = str(self.vcpus)
        self._add_boot(domain)
        # without it libvirt 9 passes -no-acpi, which QEMU 10 does not know, and the guest finds no
        # NVDIMM
        features = ET.SubElement(domain, 'features')
        ET.SubElement(features, 'acpi')
        if self.kernel is None:
            # There is no display, and GRUB looks for one in the memory of a VGA: where the BIOS
            # uses SMM it then calls a handler that is zeros, and the guest does nothing for ever.
            ET.SubElement(features, 'smm', state='off')
        self._add_cpu(domain)
        # Linux uses it until it has a better timer and leaves it running, for which QEMU wakes up
        # 250 times a second, and takes 1.5 % of a CPU for a guest that does nothing.
        clock = ET.SubElement(domain, 'clock', offset='utc')
        ET.SubElement(clock, 'timer', name='hpet', present='no')
        ET.SubElement(domain, 'on_reboot').text = 'restart'
        ET.SubElement(domain, 'on_crash').text = 'destroy'
        self._add_devices(domain)
        if self.volatile:
            command_line = ET.SubElement(domain, f'{{{libvirt_xml.QEMU_NAMESPACE}}}commandline')
            for word in ACCEPT_VOLATILE:
                ET.SubElement(command_line, f'{{{libvirt_xml.QEMU_NAMESPACE}}}arg', value=word)
        return domain

    def to_xml(self) -> str:
        """:raises XmlInvalid:"""
        return libvirt_xml.to_string(self.to_element())

    def _add_boot(self, domain: ET.Element) -> None:
        boot = ET.SubElement(domain, 'os')
        ET.SubElement(boot, 'type', arch='x86_64', machine=self.machine).text = 'hvm'
        if self.kernel is not None:
            ET.SubElement(boot, 'kernel').text = self.kernel
            if self.initrd is not None:
                ET.SubElement(boot, 'initrd').text = self.initrd
            ET.SubElement(boot, 'cmdline').text = self.cmdline
            return
        if self.firmware == 'efi':
            # libvirt chooses the file; without this it may choose one that boots what is signed
            # only
            boot.set('firmware', self.firmware)
            firmware = ET.SubElement(boot, 'firmware')
            ET.SubElement(firmware, 'feature', enabled='no', name='secure-boot')
        ET.SubElement(boot, 'boot', dev='hd')
        if self.firmware == 'bios':
            # what a boot loader would show on a display
            ET.SubElement(boot, 'bios', useserial='yes')

    def _add_memory(self, domain: ET.Element) -> None:
        if not self.nvdimms:
            libvirt_xml.add_size(domain, 'memory', self.memory)
            return
        total = self.memory + sum(nvdimm.size for nvdimm in self.nvdimms)
        slots = max(MIN_HOTPLUG_SLOTS, len(self.nvdimms))
        libvirt_xml.add_size(domain, 'maxMemory', total + self.hotplug_memory).set(
            'slots', str(slots)
        )
        libvirt_xml.add_size(domain, 'memory', self.memory)

    def _add_cpu(self, domain: ET.Element) -> None:
        if not self.nvdimms and self.type != 'kvm':
            return
        cpu = ET.SubElement(domain, 'cpu')
        if self.type == 'kvm':
            cpu.set('mode', 'host-passthrough')
        if not self.nvdimms:
            return
        cpus = '0' if self.vcpus == 1 else f'0-{self.vcpus - 1}'
        ET.SubElement(
            ET.SubElement(cpu, 'numa'),
            'cell',
            id='0',
            cpus=cpus,
            memory=str(self.memory // units.KIB),
            unit='KiB',
        )

    def _add_devices(self, domain: ET.Element) -> None:
        devices = ET.SubElement(domain, 'devices')
        if self.emulator is not None:
            ET.SubElement(devices, 'emulator').text = self.emulator
        if self.carrier_disk is not None:
            disk = ET.SubElement(devices, 'disk', type='file', device='disk')
            ET.SubElement(disk, 'driver', name='qemu', type='qcow2')
            ET.SubElement(disk, 'source', file=self.carrier_disk)
            ET.SubElement(disk, 'target', dev='vda', bus='virtio')
        if self.uuid is not None:
            devices.extend([disk.to_element(self.uuid) for disk in self.disks])
        if self.seed is not None:
            used = {target.get('dev') for target in devices.iterfind('disk/target')}
            free = next(name for name in _DISK_NAMES if name not in used)
            devices.append(seed.to_element(self.seed, free))
        ET.SubElement(devices, 'controller', type='usb', model='none')
        if self.network == 'user':
            ET.SubElement(ET.SubElement(devices, 'interface', type='user'), 'model', type='virtio')
        self._add_console(devices)
        self._add_balloon(devices)
        devices.extend([nvdimm.to_element() for nvdimm in self.nvdimms])

    def _add_balloon(self, devices: ET.Element) -> None:
        """The guest says which of its RAM is free, and the host gets that back; an image keeps it
        (its bases and snapshots would be damaged).
        """
        if self.ram is None:
            ET.SubElement(devices, 'memballoon', model='virtio', freePageReporting='on')
        else:
            ET.SubElement(devices, 'memballoon', model='none')

    def _add_console(self, devices: ET.Element) -> None:
        kind = 'pty' if self.serial_file is None else 'file'
        for tag, port_type in (('serial', None), ('console', 'serial')):
            device = ET.SubElement(devices, tag, type=kind)
            if self.serial_file is not None:
                ET.SubElement(device, 'source', path=self.serial_file, append='on')
            target = ET.SubElement(device, 'target', port='0')
            if port_type is not None:
                target.set('type', port_type)
