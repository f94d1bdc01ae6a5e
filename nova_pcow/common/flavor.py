# SPDX-License-Identifier: Apache-2.0
"""What a flavor says about persistent memory: its extra specs ``pcow:*`` and the resources that it
claims; and what the image of a server says, which knows what its guest can do.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import difflib
import re
from typing import Any

from oslo_utils import strutils

from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.virt import disk_xml

RESOURCE_CLASS = 'CUSTOM_PCOW_MB'
TRAIT = 'CUSTOM_PCOW'
CLASS_TRAITS = {
    'pmem': 'CUSTOM_PCOW_PMEM',
    'page-cache': 'CUSTOM_PCOW_PAGE_CACHE',
    'volatile': 'CUSTOM_PCOW_VOLATILE',
}

PREFIX = 'pcow:'
ROOT_SPEC = f'{PREFIX}root'
DATA_SPEC = f'{PREFIX}data_mb'
FORMAT_SPEC = f'{PREFIX}data_format'
BUS_SPEC = f'{PREFIX}bus'  # a property of images as well
RAM_SPEC = f'{PREFIX}ram'
PERSIST_SPEC = f'{PREFIX}persist'
KNOWN_SPECS = (ROOT_SPEC, DATA_SPEC, FORMAT_SPEC, BUS_SPEC, RAM_SPEC, PERSIST_SPEC)
# in the system metadata of an instance, where Nova keeps the properties of its image
_IMAGE_BUS = f'image_{BUS_SPEC}'
FORMATS = ('none', 'ext4', 'xfs')
MAX_DATA_DEVICES = 8

_EVEN = r'(?:[2468]|[1-9][0-9]{0,8}[02468])'  # MiB; devices are multiples of 2 MiB
DATA_PATTERN = f'{_EVEN}(?:,{_EVEN}){{0,{MAX_DATA_DEVICES - 1}}}'
_FORMAT = f'(?:{"|".join(FORMATS)})'
FORMAT_PATTERN = f'{_FORMAT}(?:,{_FORMAT}){{0,{MAX_DATA_DEVICES - 1}}}'

_RESOURCE = re.compile(rf'resources[a-zA-Z0-9_-]{{0,64}}:{RESOURCE_CLASS}')
_REQUIRED = re.compile(rf'trait[a-zA-Z0-9_-]{{0,64}}:({TRAIT}(?:_[A-Z0-9_]+)?)')


class FlavorInvalid(exception.PcowError):
    is_of_host = False
    msg_fmt = 'the flavor %(flavor)s cannot be used: %(reason)s'


class ImagePropertyInvalid(exception.PcowError):
    is_of_host = False
    msg_fmt = (
        'the image has the property %(name)s=%(value)s, which is none of %(known)s: set it to one '
        'of them, or remove it (openstack image unset --property %(name)s)'
    )


@dataclasses.dataclass(frozen=True)
class DataDevice:
    size: int  # bytes
    format: str  # one of FORMATS


@dataclasses.dataclass(frozen=True)
class PcowFlavor:
    """The persistent memory of a server, sizes in bytes as the guest sees them."""

    name: str
    root_size: int | None  # None: the root is a disk
    data: tuple[DataDevice, ...]
    required_traits: frozenset[str]  # that a pool must have, of those in this module
    bus: str = disk_xml.PMEM  # one of disk_xml.BUSES: how the guest sees the root
    ram_size: int | None = None  # None: its RAM is the host's
    persists: bool = False  # goes on after the end of its host, or of its QEMU

    @property
    def root(self) -> bool:
        """Whether the root is a pcow image."""
        return self.root_size is not None

    @property
    def root_is_memory(self) -> bool:
        return self.root and self.bus == disk_xml.PMEM

    @property
    def root_is_disk(self) -> bool:
        """Whether the root is a pcow image that the guest sees as a disk."""
        return self.root and self.bus == disk_xml.VIRTIO

    @property
    def has_ram(self) -> bool:
        """Whether the guest's RAM is a pcow image."""
        return self.ram_size is not None

    @property
    def has_carrier(self) -> bool:
        """Whether there is a disk that only holds the state of a suspended server. With its RAM on
        an image there is none: a disk that the guest can write to is no part of a checkpoint.
        """
        return self.root_is_memory and not self.has_ram

    @property
    def has_memory(self) -> bool:
        return self.root_is_memory or bool(self.data)

    @property
    def uses_pcow(self) -> bool:
        return self.root or bool(self.data)


def uses_pcow(flavor: Any) -> bool:
    """Also of one that has become invalid: nothing of its servers is lost."""
    return any(key.startswith(PREFIX) for key in flavor.extra_specs or {})


def is_pcow(instance: Any) -> bool:
    """Whether a server (nova.objects.Instance) has a flavor that :func:`uses_pcow`."""
    return uses_pcow(instance.flavor)


def has_memory(instance: Any) -> bool:
    """Whether the guest of a server has persistent memory, and volumes can be that.

    Also if its flavor has become invalid.
    """
    try:
        return is_pcow(instance) and not of(instance).root_is_disk
    except exception.PcowError:
        return True


def check_known(flavor: Any) -> None:
    """Make sure that a flavor which a server is to get has no misspelt extra spec: the server would
    lack what was asked for.

    Nova's API finds them only at microversion 2.86 and later, and the openstack command asks for an
    earlier one by default. Servers that have such a flavor already go on with what they have:
    :func:`parse` does not look.

    :raises FlavorInvalid:
    """
    for key in flavor.extra_specs or {}:
        if key.startswith(PREFIX) and key not in KNOWN_SPECS:
            near = ', '.join(difflib.get_close_matches(key, KNOWN_SPECS, cutoff=0.75))
            raise FlavorInvalid(
                flavor=str(flavor.name),
                reason=(
                    f'it has the property {key}, which does not '
                    f'exist{f" ({near} is near)" if near else ""}: remove it (openstack '
                    f'flavor unset --property {key} {flavor.name}) and set the one that is meant; '
                    f'there are {", ".join(KNOWN_SPECS)}'
                ),
            )


def _claimed(extra_specs: Mapping[str, str]) -> int:
    """Bytes that the flavor has placement reserve in a pool."""
    return (
        sum(
            int(value)
            for key, value in extra_specs.items()
            if _RESOURCE.fullmatch(key) and value.isdigit()
        )
        * units.MIB
    )


def _data_devices(name: str, extra_specs: Mapping[str, str]) -> tuple[DataDevice, ...]:
    text, formats = extra_specs.get(DATA_SPEC, ''), extra_specs.get(FORMAT_SPEC, '')
    if not text:
        if formats:
            raise FlavorInvalid(flavor=name, reason=f'{FORMAT_SPEC} without {DATA_SPEC}')
        return ()
    if not re.fullmatch(DATA_PATTERN, text) or (
        formats and not re.fullmatch(FORMAT_PATTERN, formats)
    ):
        raise FlavorInvalid(flavor=name, reason=f'{DATA_SPEC} or {FORMAT_SPEC} is malformed')
    sizes, kinds = text.split(','), (formats or FORMATS[0]).split(',')
    if len(kinds) == 1:
        kinds *= len(sizes)
    if len(kinds) != len(sizes):
        raise FlavorInvalid(
            flavor=name, reason=f'{FORMAT_SPEC} has {len(kinds)} entries for {len(sizes)} devices'
        )
    return tuple(
        DataDevice(int(size) * units.MIB, kind) for size, kind in zip(sizes, kinds, strict=True)
    )


def _bus(name: str, extra_specs: Mapping[str, str], metadata: Mapping[str, str]) -> str:
    """How the guest sees its root. The image wins: it knows what its guest has drivers for."""
    bus = extra_specs.get(BUS_SPEC, disk_xml.PMEM)
    if bus not in disk_xml.BUSES:
        raise FlavorInvalid(flavor=name, reason=f'{BUS_SPEC} is one of {", ".join(disk_xml.BUSES)}')
    bus = metadata.get(_IMAGE_BUS, bus)
    if bus not in disk_xml.BUSES:
        raise ImagePropertyInvalid(name=BUS_SPEC, value=bus, known=', '.join(disk_xml.BUSES))
    return bus


def _is_true(name: str, extra_specs: Mapping[str, str], key: str) -> bool:
    try:
        return bool(strutils.bool_from_string(extra_specs.get(key, 'false'), strict=True))
    except ValueError:
        raise FlavorInvalid(flavor=name, reason=f'{key} is true or false') from None


def _check_root_of(name: str, extra_specs: Mapping[str, str], *, ram: bool) -> None:
    """Of a flavor whose root is none of ours."""
    if BUS_SPEC in extra_specs:
        raise FlavorInvalid(flavor=name, reason=f'{BUS_SPEC} without {ROOT_SPEC}')
    if ram:
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'{RAM_SPEC} without {ROOT_SPEC}: it is for checkpoints of the whole server, and a '
                f'root on a disk of Nova would be no part of them'
            ),
        )


def _check_bus(name: str, bus: str, *, data: bool, ram: bool) -> None:
    """A root that is a disk has not what goes with one in memory."""
    if bus != disk_xml.VIRTIO:
        return
    if data:
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'its data devices ({DATA_SPEC}) are persistent memory, which a guest with '
                f'{BUS_SPEC}={bus} (of the flavor or of the image) does not know: take a flavor '
                f'without them, and volumes in their place'
            ),
        )
    if ram:
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'{RAM_SPEC} is for checkpoints, and a root with {BUS_SPEC}={bus} (of the flavor '
                f'or of the image) would be no part of them: take a flavor without {RAM_SPEC}'
            ),
        )


def _ram_size(name: str, flavor: Any) -> int:
    size = int(flavor.memory_mb) * units.MIB
    try:
        image.check_virtual_size(size)
    except exception.InvalidSize as e:
        raise FlavorInvalid(
            flavor=name, reason=f'its RAM is to be an image ({RAM_SPEC}), and cannot be: {e}'
        ) from None
    # a flavor has '' for no swap where it comes from the API
    if flavor.ephemeral_gb or int(flavor.swap or 0):
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'it has ephemeral disks or swap, and {RAM_SPEC} is for checkpoints, which are '
                f'refused with a disk that the guest can write to: take {DATA_SPEC} in their place'
            ),
        )
    return size


def parse(flavor: Any, metadata: Mapping[str, str] | None = None) -> PcowFlavor:
    """The persistent memory that a flavor (nova.objects.Flavor) gives a server.

    The root has the flavor's disk size; if that is 0, what ``resources:CUSTOM_PCOW_MB`` leaves
    beside the data devices and the RAM.

    :param metadata: system metadata of the server (nova.objects.Instance.system_metadata), which
        has the properties of its image; None: of an image without any
    :raises FlavorInvalid: malformed, or the resources do not cover the sizes
    :raises ImagePropertyInvalid:
    """
    extra_specs: Mapping[str, str] = flavor.extra_specs or {}
    name = str(flavor.name)
    root, ram, persists = (
        _is_true(name, extra_specs, key) for key in (ROOT_SPEC, RAM_SPEC, PERSIST_SPEC)
    )
    if persists and not ram:
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'{PERSIST_SPEC} without {RAM_SPEC}: what its servers go on with is what is in '
                f'their RAM, so that has to be an image'
            ),
        )
    data = _data_devices(name, extra_specs)
    traits = frozenset(
        match[1]
        for key, value in extra_specs.items()
        if (match := _REQUIRED.fullmatch(key)) and value == 'required'
    )
    if not root:
        _check_root_of(name, extra_specs, ram=ram)
    if not root and not data:
        return PcowFlavor(name, None, (), traits)
    bus = _bus(name, extra_specs, metadata or {}) if root else disk_xml.PMEM
    _check_bus(name, bus, data=bool(data), ram=ram)
    ram_size = _ram_size(name, flavor) if ram else None
    claimed = _claimed(extra_specs)
    others = sum(device.size for device in data) + (ram_size or 0)
    root_size = None
    if root:
        root_size = (
            flavor.root_gb * units.GIB or (claimed - others) // units.SLAB_SIZE * units.SLAB_SIZE
        )
    if (root_size or 0) + others > claimed or root_size == 0 or (root_size or 0) < 0:
        raise FlavorInvalid(
            flavor=name,
            reason=(
                f'it takes {((root_size or 0) + others) // units.MIB} MiB of pools and claims '
                f'{claimed // units.MIB}: set its '
                f'property resources:{RESOURCE_CLASS} to what its '
                f'{"root, RAM" if ram else "root"} and data devices need'
            ),
        )
    return PcowFlavor(name, root_size, data, traits, bus, ram_size, persists)


def of(instance: Any) -> PcowFlavor:
    """The persistent memory of a server (nova.objects.Instance).

    :raises FlavorInvalid:
    :raises ImagePropertyInvalid:
    """
    return parse(instance.flavor, instance.system_metadata)


def check_resize(old: PcowFlavor, new: PcowFlavor) -> None:
    """Make sure that a server of the flavor ``old`` can become one of ``new`` without losing data.

    :raises FlavorInvalid:
    """

    def refuse(reason: str) -> None:
        raise FlavorInvalid(flavor=new.name, reason=reason)

    if old.root != new.root:
        refuse(
            'a root cannot move between a disk and persistent memory: make a snapshot, and a new '
            'server of it'
        )
    if (new.root_size or 0) < (old.root_size or 0):
        refuse('the root in persistent memory would shrink, and with it what it holds')
    if len(new.data) < len(old.data):
        refuse(f'{len(old.data) - len(new.data)} data device(s) would be lost')
    for number, (now, then) in enumerate(zip(old.data, new.data, strict=False)):
        if then.size < now.size:
            refuse(f'data device {number} would shrink')
