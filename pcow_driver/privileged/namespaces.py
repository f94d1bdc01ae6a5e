# SPDX-License-Identifier: Apache-2.0
"""Regions, label areas and namespaces, changed by ndctl(1)."""

from __future__ import annotations

import json
import os
from pathlib import Path
import tempfile

from pcow_driver.common import exception
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.pmem import block_device as device_module
from pcow_driver.pmem import users
from pcow_driver.privileged import administration
from pcow_driver.privileged import checks

ALIGNMENTS = (units.SLAB_SIZE, units.GIB)
_MOST = 1 << 56  # bytes
_DEVICES = Path('/sys/bus/nd/devices')
# Namespaces that this process made, and their uuids: they hold nothing that anybody put there.
_created: dict[str, str] = {}


def disable_region_command(region: str) -> tuple[str, ...]:
    return 'ndctl', 'disable-region', checks.region(region)


def enable_region_command(region: str) -> tuple[str, ...]:
    return 'ndctl', 'enable-region', checks.region(region)


def init_labels_command(dimms: tuple[str, ...], overwrite: bool) -> tuple[str, ...]:
    return (
        'ndctl',
        'init-labels',
        *(('--force',) if overwrite else ()),
        *(checks.dimm(item) for item in dimms),
    )


def create_command(region: str, size: int | None, align: int, name: str) -> tuple[str, ...]:
    """A new fsdax namespace; its struct pages live on it (1.6 % of the size), so that the host's
    DRAM is not used.

    :param size: bytes; None: all that is left
    """
    return (
        'ndctl',
        'create-namespace',
        '--mode=fsdax',
        '--map=dev',
        f'--align={_align(align)}',
        f'--region={checks.region(region)}',
        f'--name={checks.label(name)}',
        *((f'--size={checks.number(size, 1, _MOST, "a size")}',) if size is not None else ()),
    )


def reconfigure_command(namespace: str, align: int) -> tuple[str, ...]:
    """Make an existing namespace fsdax, giving up what is in it."""
    return (
        'ndctl',
        'create-namespace',
        '--force',
        f'--reconfig={checks.namespace(namespace)}',
        '--mode=fsdax',
        '--map=dev',
        f'--align={_align(align)}',
    )


def destroy_command(namespace: str) -> tuple[str, ...]:
    return 'ndctl', 'destroy-namespace', '--force', checks.namespace(namespace)


def _align(align: int) -> int:
    if align not in ALIGNMENTS:
        raise exception.UsageInvalid(
            reason='--align is 2M or 1G: mappings of 2 MiB need one of them'
        )
    return align


def _ndctl(command: tuple[str, ...]) -> str:
    return tool.run(tool.find_system(command[0], 'ndctl'), *command[1:])


def _read(path: Path) -> str:
    """What an attribute says; '' if it is not there."""
    try:
        return path.read_text(encoding='ascii').strip()
    except OSError:
        return ''


def _block_devices(namespace: str) -> list[str]:
    """In mode fsdax or sector they are those of another device, which has the namespace (pfn0.0,
    btt0.0).
    """
    owners = (
        path
        for kind in ('pfn*', 'btt*')
        for path in _DEVICES.glob(kind)
        if _read(path / 'namespace') == namespace
    )
    found = (path / 'block' for path in (_DEVICES / checks.namespace(namespace), *owners))
    return [
        f'/dev/{name}'
        for directory in found
        if directory.is_dir()
        for name in os.listdir(directory)
    ]


def _check_unused(namespace: str) -> None:
    """:raises DeviceRefused: its block device is mounted, or part of another device; a process uses
    its character device
    """
    for device in _block_devices(namespace):
        device_module.check_unused(device)
    users.check_unused(namespace)


@administration.entrypoint
def check_unused(namespace: str) -> None:
    """:raises DeviceRefused: it is in use"""
    _check_unused(namespace)


@administration.entrypoint
def disable_region(region: str) -> None:
    """:raises DeviceRefused: one of its namespaces is in use, which ndctl would not mind
    :raises ToolFailed:
    """
    command = disable_region_command(region)
    # not namespace_seed
    for path in sorted((_DEVICES / region).glob('namespace[0-9]*')):
        _check_unused(path.name)
    _ndctl(command)


@administration.entrypoint
def enable_region(region: str) -> None:
    """:raises ToolFailed:"""
    _ndctl(enable_region_command(region))


@administration.entrypoint
def init_labels(dimms: list[str], overwrite: bool) -> None:
    """:raises DeviceRefused: a region that maps one of the DIMMs is active; or, without
    ``overwrite``, something is in one of them
    :raises ToolFailed: also if they cannot be read
    """
    command = init_labels_command(tuple(dimms), bool(overwrite))
    for region in sorted(_DEVICES.glob('region[0-9]*')):
        mapped = {_read(path).split(',')[0] for path in region.glob('mapping[0-9]*')} & set(dimms)
        if mapped and (region / 'driver').exists():
            raise exception.DeviceRefused(
                device=', '.join(sorted(mapped)),
                reason=(
                    f"{region.name} is active, which lies on it: 'ndctl disable-region "
                    f"{region.name}' first"
                ),
            )
    for dimm in () if overwrite else dimms:
        if _holds_something(_label_area(dimm)):
            raise exception.DeviceRefused(
                device=dimm, reason='something is in its label area: give --force to lose that'
            )
    _ndctl(command)


@administration.entrypoint
def create(region: str, size: int | None, align: int, name: str) -> str:
    """What ndctl prints of the new namespace.

    :raises ToolFailed:
    """
    output = _ndctl(create_command(region, size, align, name))
    try:
        made = checks.namespace(json.loads(output)['dev'])
    except (ValueError, LookupError, TypeError, exception.InvalidName):
        return output  # the caller says what is wrong with it
    _created[made] = _uuid(made)
    return output


def _uuid(namespace: str) -> str:
    return _read(_DEVICES / namespace / 'uuid')


@administration.entrypoint
def reconfigure(namespace: str, align: int, force: bool) -> str:
    """What ndctl prints of the namespace as it is now.

    :param force: what it holds may be lost
    :raises DeviceRefused: it is in use; or, without ``force``, carries something or cannot be
    looked at :raises ToolFailed:
    """
    _check_unused(namespace)
    devices = _block_devices(namespace)
    if not devices and not force:
        raise exception.DeviceRefused(
            device=namespace, reason='it has no block device, so that nobody can see what it holds'
        )
    for device in devices:
        device_module.check_formattable(device, force=bool(force))
    return _ndctl(reconfigure_command(namespace, align))


@administration.entrypoint
def destroy(namespace: str) -> None:
    """End a namespace that carries nothing, or that :func:`create` has just made.

    :raises DeviceRefused: it is in use, or carries something
    :raises ToolFailed:
    """
    _check_unused(namespace)
    if not _is_new(namespace):
        devices = _block_devices(namespace)
        if not devices:
            raise exception.DeviceRefused(
                device=namespace,
                reason='it has no block device, so that nobody can see what it holds',
            )
        for device in devices:
            found = device_module.signature(device)
            if found:
                raise exception.DeviceRefused(
                    device=namespace, reason=f"it carries {found}: 'wipefs --all {device}' first"
                )
    _ndctl(destroy_command(namespace))
    _created.pop(namespace, None)


def _is_new(namespace: str) -> bool:
    """Names are given again: another namespace may have this one by now."""
    uuid = _created.get(namespace)
    return bool(uuid) and uuid == _uuid(namespace)


@administration.entrypoint
def has_label_area(dimm: str) -> bool:
    """Whether the DIMM can keep labels, there are some or not."""
    try:
        return _ndctl(('ndctl', 'read-labels', '--json', checks.dimm(dimm))).strip() not in (
            '',
            '[]',
        )
    except exception.ToolFailed:
        return False


@administration.entrypoint
def label_area_holds_something(dimm: str) -> bool:
    """Something is in its label area that is neither zeros nor ones, as it is when it was never
    written.
    """
    checks.dimm(dimm)
    try:
        return _holds_something(_label_area(dimm))
    except exception.ToolFailed:
        return False  # no label area


def _label_area(dimm: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix='pcow-labels-') as directory:
        path = os.path.join(directory, dimm)
        _ndctl(('ndctl', 'read-labels', '--output', path, dimm))
        with open(path, 'rb') as f:
            return f.read()


def _holds_something(area: bytes) -> bool:
    return bool(area.strip(b'\0').strip(b'\xff'))
