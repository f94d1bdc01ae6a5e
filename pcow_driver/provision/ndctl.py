# SPDX-License-Identifier: Apache-2.0
"""Regions and namespaces of persistent memory, as ndctl(1) lists them.  Sizes are bytes."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from typing import Any

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.images import model
from pcow_driver.privileged import namespaces

_REGION = re.compile(r'region\d+')
_NAMESPACE = re.compile(r'namespace\d+\.\d+')
_SYSFS = '/sys/bus/nd/devices'


@dataclasses.dataclass(frozen=True)
class Namespace:
    dev: str  # namespace0.0
    mode: str  # fsdax, devdax, sector, raw
    size: int
    uuid: str | None  # None: without a label
    align: int | None
    map: str | None  # dev or mem: where struct pages live
    blockdev: str | None  # pmem0
    enabled: bool
    badblocks: int  # sectors of 512 bytes

    @property
    def device(self) -> str | None:
        """Path of the block device."""
        return f'/dev/{self.blockdev}' if self.blockdev else None


@dataclasses.dataclass(frozen=True)
class Region:
    dev: str  # region0
    provider: str  # ACPI.NFIT, e820, cxl_test, ...: who told the kernel of it
    size: int
    available: int  # the largest namespace that still fits
    dimms: tuple[str, ...]  # nmem0, ...: it is interleaved over these
    align: int  # sizes of namespaces are multiples of it
    persistence_domain: str  # cpu_cache, memory_controller, unknown
    namespaces: tuple[Namespace, ...]  # those with a size

    @property
    def labelled(self) -> bool:
        """Its namespaces are kept in label areas: there may be several, and they have names."""
        kind = _read(f'{_SYSFS}/{self.dev}/nstype')
        return kind is not None and kind.isdigit() and int(kind) != _NSTYPE_IO


_NSTYPE_IO = 4  # ND_DEVICE_NAMESPACE_IO, Linux include/uapi/linux/ndctl.h


def _read(path: str) -> str | None:
    try:
        with open(path, encoding='ascii', errors='replace') as f:
            return f.read().strip()
    except OSError:
        return None


def _parse(output: str) -> list[Any]:
    """ndctl prints one object, an array, or nothing."""
    if not output.strip():
        return []
    try:
        value = json.loads(output)
    except ValueError as e:
        raise exception.ToolOutputInvalid(tool='ndctl', reason=f'not JSON: {e}') from None
    return value if isinstance(value, list) else [value]


def _namespace(value: Any) -> Namespace:
    data = model.Reader(value, 'namespace', 'ndctl')
    return Namespace(
        dev=data.string('dev'),
        mode=data.optional_string('mode') or 'raw',
        size=data.integer('size', 0),
        uuid=data.optional_string('uuid'),
        align=data.integer('align', 0) or None,
        map=data.optional_string('map'),
        blockdev=data.optional_string('blockdev'),
        enabled=data.optional_string('state') != 'disabled',
        badblocks=data.integer('badblock_count', 0),
    )


def _region(value: Any, provider: str) -> Region:
    data = model.Reader(value, 'region', 'ndctl')
    mappings = [
        model.Reader(item, 'mapping', 'ndctl').string('dimm') for item in data.array('mappings')
    ]
    namespaces = [_namespace(item) for item in data.array('namespaces')]
    available = data.integer('available_size', 0)
    return Region(
        dev=data.string('dev'),
        provider=provider,
        size=data.integer('size'),
        available=min(available, data.integer('max_available_extent', available)),
        dimms=tuple(dict.fromkeys(mappings)),
        align=data.integer('align', 0) or units.SLAB_SIZE,
        persistence_domain=data.optional_string('persistence_domain') or 'unknown',
        namespaces=tuple(
            sorted((item for item in namespaces if item.size), key=lambda item: item.dev)
        ),
    )


def _ndctl(*args: str) -> str:
    return tool.run(tool.find_system('ndctl', 'ndctl'), *args)


def regions() -> list[Region]:
    """All regions of persistent memory of this host with what is in them.

    :raises ToolNotFound: ndctl is not installed
    :raises ToolFailed:
    """
    output = _ndctl('list', '--buses', '--regions', '--namespaces', '--dimms', '--idle', '-vv')
    found: list[Region] = []
    for bus in _parse(output):
        data = model.Reader(bus, 'bus', 'ndctl')
        found += [_region(item, data.string('provider')) for item in data.array('regions')]
    return sorted(found, key=lambda region: region.dev)


def find_region(name: str) -> Region:
    """:raises RegionNotFound:"""
    _check(_REGION, 'region', name)
    known = regions()
    for region in known:
        if region.dev == name:
            return region
    raise exception.RegionNotFound(
        name=name, known=', '.join(region.dev for region in known) or 'none'
    )


def find_namespace(name: str) -> tuple[Region, Namespace]:
    """:raises NamespaceNotFound:"""
    _check(_NAMESPACE, 'namespace', name)
    known = [(region, item) for region in regions() for item in region.namespaces]
    for region, item in known:
        if item.dev == name:
            return region, item
    raise exception.NamespaceNotFound(
        name=name, known=', '.join(item.dev for _region, item in known) or 'none'
    )


def of_blockdev(device: str) -> tuple[Region, Namespace] | None:
    """Whose block device this is."""
    name = os.path.basename(os.path.realpath(device))
    for region in regions():
        for item in region.namespaces:
            if item.blockdev == name:
                return region, item
    return None


def of_uuid(uuid: str) -> Namespace | None:
    """The namespace that has it, under whatever name it is found after a boot."""
    return next(
        (item for region in regions() for item in region.namespaces if item.uuid == uuid), None
    )


def _check(pattern: re.Pattern[str], kind: str, name: str) -> None:
    if not pattern.fullmatch(name):
        raise exception.InvalidName(
            kind=kind,
            name=name,
            reason=f"'ndctl list -RN' names them, like {kind}0"
            + ('.0' if kind == 'namespace' else ''),
        )


def has_label_areas(region: Region) -> bool:
    """Every DIMM of the region can keep labels, whether there are some yet or not."""
    return bool(region.dimms) and all(namespaces.has_label_area(dimm) for dimm in region.dimms)


def labels_are_damaged(region: Region) -> bool:
    """Something is in the label areas of a region without labels: they hold no namespaces that the
    kernel understands.
    """
    return not region.labelled and any(
        namespaces.label_area_holds_something(dimm) for dimm in region.dimms
    )


def created(output: str) -> Namespace:
    """The namespace that create-namespace printed (its sizes are for people: look it up
    for them).
    """
    objects = _parse(output)
    if len(objects) != 1:
        raise exception.ToolOutputInvalid(
            tool='ndctl', reason='create-namespace named no namespace'
        )
    return find_namespace(model.Reader(objects[0], 'namespace', 'ndctl').string('dev'))[1]
