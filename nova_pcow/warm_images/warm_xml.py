# SPDX-License-Identifier: Apache-2.0
"""The domain of a server that goes on from a checkpoint of another one.

It is the one that Nova makes for it, with all that the host gives to it. To the guest its devices
have to be those of the parent, at the same addresses, as their state is loaded. Its interfaces are
plugged in behind that.
"""

from __future__ import annotations

import copy
import xml.etree.ElementTree as ET

from pcow_driver.common import exception
from pcow_driver.virt import libvirt_xml

# of a device: what the host has behind it, which its guest does not see
_BEHIND = ('source', 'log', 'protocol', 'backend', 'rate', 'stats', 'seclabel', 'address', 'boot')
# what no guest sees, or is looked at apart
_NONE = ('emulator', 'graphics', 'audio', 'interface', 'controller')
_CONSOLES = ('serial', 'console', 'parallel', 'channel')
_NOW = {'channel': 'state', 'disk': 'tray'}  # attribute of <target> that only a running one has
# of the domain: what the guest was booted with
_MACHINE = ('vcpu', 'memory', 'maxMemory', 'os', 'cpu', 'features', 'clock', 'iothreads')
# of <os>: what a boot reads
_BOOT = ('kernel', 'initrd', 'cmdline', 'boot')


# of a host's <cpu>: what a guest can be shown of it, and not how fast or how full it is
_HOST_CPU = ('arch', 'model', 'vendor', 'microcode', 'maxphysaddr', 'feature')


class MachineDiffers(exception.PcowError):
    msg_fmt = 'its machine would not be that of the checkpoint: %(reason)s'


def describe(definition: str) -> str:
    """What a definition says of the machine, without passwords.

    :raises XmlInvalid:
    """
    root = libvirt_xml.parse(definition)
    for item in list(root):
        if item.tag not in (*_MACHINE, 'devices'):
            root.remove(item)
    devices = _devices(root)
    for graphics in devices.findall('graphics'):
        devices.remove(graphics)
    return libvirt_xml.to_string(root)


def check_unchanged(running: str, definition: str) -> None:
    """Make sure that a guest has the devices that its definition says.

    :raises MachineDiffers:
    :raises XmlInvalid:
    """
    now, then = (
        [
            (_form(item), _address(item))
            for item in _guest_devices(libvirt_xml.parse(one))
            # its base is known when it runs
            if item.tag != 'memory'
        ]
        for one in (running, definition)
    )
    if sorted(now) != sorted(then):
        raise MachineDiffers(
            reason='it was defined with other devices since it was started: reboot it hard first'
        )


def processor(running: str) -> tuple[str, bool]:
    """The CPU of a guest that runs; whether libvirt tells all that the guest sees of it. It does
    not of a model that is the host's, and of one that it does not check.

    :raises XmlInvalid:
    """
    found = libvirt_xml.parse(running).find('cpu')
    if found is None:
        return 'none', False
    return _text(found), found.get('mode') == 'custom' and found.get('check') == 'full'


def host_processor(capabilities: str) -> str:
    """That of a host.

    :param capabilities: XML
    :raises XmlInvalid:
    """
    parts = libvirt_xml.parse(capabilities).findall('host/cpu/*')
    return ''.join(sorted(_text(part) for part in parts if part.tag in _HOST_CPU))


def split(definition: str) -> tuple[str, list[str]]:
    """A definition without its interfaces, and these.

    :raises XmlInvalid:
    """
    root = libvirt_xml.parse(definition)
    devices, found = _devices(root), []
    for item in devices.findall('interface'):
        devices.remove(item)
        found.append(libvirt_xml.to_string(item))
    return libvirt_xml.to_string(root), found


def adopt(definition: str, machine: str) -> str:
    """A definition whose devices are where those of another one are.

    :param definition: as libvirt has completed it
    :param machine: of the other one, by :func:`describe`
    :raises MachineDiffers:
    :raises XmlInvalid:
    """
    root, other = libvirt_xml.parse(definition), libvirt_xml.parse(machine)
    for tag in _MACHINE:
        if _part(root, tag) != _part(other, tag):
            raise MachineDiffers(reason=f'<{tag}> is {_part(root, tag)}, not {_part(other, tag)}')
    places: dict[str, list[ET.Element]] = {}
    for item in _guest_devices(other):
        places.setdefault(_form(item), []).append(item)
    for item in _guest_devices(root):
        same = places.get(_form(item))
        if not same:
            raise MachineDiffers(reason=f'the other one has not the device {_form(item)}')
        _move(item, same.pop(0))
    for left in places.values():
        for item in left:
            raise MachineDiffers(reason=f'the other one has the device {_form(item)}')
    _replace_controllers(_devices(root), _devices(other))
    return libvirt_xml.to_string(root)


def _devices(root: ET.Element) -> ET.Element:
    found = root.find('devices')
    if found is None:
        raise exception.XmlInvalid(reason='it has no devices')
    return found


def _guest_devices(root: ET.Element) -> list[ET.Element]:
    return [item for item in _devices(root) if item.tag not in _NONE]


def _move(item: ET.Element, other: ET.Element) -> None:
    """Of memory QEMU says where it is."""
    if item.tag == 'memory':
        return
    for own in item.findall('address'):
        item.remove(own)
    item.extend(copy.deepcopy(other.findall('address')))


def _replace_controllers(devices: ET.Element, other: ET.Element) -> None:
    for item in devices.findall('controller'):
        devices.remove(item)
    devices.extend(copy.deepcopy(other.findall('controller')))


def _form(item: ET.Element) -> str:
    """What a guest sees of a device, but its address."""
    form = copy.deepcopy(item)
    if form.tag in _CONSOLES:
        form.attrib.pop('type', None)
        form.attrib.pop('tty', None)
    # what the guest itself does: its agent listens, it ejects a medium
    target = form.find('target')
    if target is not None and form.tag in _NOW:
        target.attrib.pop(_NOW[form.tag], None)
    if form.tag == 'disk':
        form.attrib.pop('type', None)
        behind: tuple[str, ...] = (*_BEHIND, 'driver', 'backingStore')
    else:
        behind = _BEHIND
    for child in list(form):
        # those that a user chooses name parts of what is loaded
        is_own = child.tag == 'alias' and not child.get('name', '').startswith('ua-')
        if child.tag in behind or is_own:
            form.remove(child)
    return _text(form)


def _address(item: ET.Element) -> str:
    return ''.join(map(_text, item.findall('address')))


def _part(root: ET.Element, tag: str) -> str:
    found = root.find(tag)
    if found is None:
        return 'none'
    part = copy.deepcopy(found)
    part.attrib.pop('cpuset', None)
    for name in _BOOT if tag == 'os' else ():
        for child in part.findall(name):
            part.remove(child)
    return _text(part)


def _text(element: ET.Element) -> str:
    return ET.canonicalize(ET.tostring(element, encoding='unicode'), strip_text=True)
