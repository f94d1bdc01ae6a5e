# SPDX-License-Identifier: Apache-2.0
"""Regions, label areas and namespaces, changed by ndctl(1)."""

from __future__ import annotations

import os
from pathlib import Path
import tempfile

from pcow_driver import exception
from pcow_driver import tool
from pcow_driver import units
from pcow_driver.pmem import device as device_module
from pcow_driver.pmem import users
from pcow_driver.privileged import checks
from pcow_driver.privileged import context

ALIGNMENTS = (units.SLAB_SIZE, units.GIB)
_MOST = 1 << 56                                # bytes
_DEVICES = '/sys/bus/nd/devices'


def disable_region_command(region: str) -> tuple[str, ...]:
    return 'ndctl', 'disable-region', checks.region(region)


def enable_region_command(region: str) -> tuple[str, ...]:
    return 'ndctl', 'enable-region', checks.region(region)


def init_labels_command(dimms: tuple[str, ...], overwrite: bool) -> tuple[str, ...]:
    return 'ndctl', 'init-labels', *(('--force',) if overwrite else ()), *(checks.dimm(item) for item in dimms)


def create_command(region: str, size: int | None, align: int, name: str) -> tuple[str, ...]:
    """A new fsdax namespace; its struct pages live on it (1.6 % of the size), so that the host's DRAM is not used.

    :param size: bytes; None: all that is left
    """
    return ('ndctl', 'create-namespace', '--mode=fsdax', '--map=dev', f'--align={_align(align)}',
            f'--region={checks.region(region)}', f'--name={checks.label(name)}',
            *((f'--size={checks.number(size, 1, _MOST, "a size")}',) if size is not None else ()))


def reconfigure_command(namespace: str, align: int) -> tuple[str, ...]:
    """Make an existing namespace fsdax, giving up what is in it."""
    return ('ndctl', 'create-namespace', '--force', f'--reconfig={checks.namespace(namespace)}', '--mode=fsdax', '--map=dev',
            f'--align={_align(align)}')


def destroy_command(namespace: str) -> tuple[str, ...]:
    return 'ndctl', 'destroy-namespace', '--force', checks.namespace(namespace)


def _align(align: int) -> int:
    if align not in ALIGNMENTS:
        raise exception.UsageInvalid(reason='--align is 2M or 1G: mappings of 2 MiB need one of them')
    return align


def _ndctl(command: tuple[str, ...]) -> str:
    return tool.run(tool.find_system(command[0], 'ndctl'), *command[1:])


def _block_devices(namespace: str) -> list[str]:
    directory = f'{_DEVICES}/{checks.namespace(namespace)}/block'
    return [f'/dev/{name}' for name in os.listdir(directory)] if os.path.isdir(directory) else []


def _check_unused(namespace: str) -> None:
    """:raises DeviceRefused: its block device is mounted, or part of another device; a process uses its character device"""
    for device in _block_devices(namespace):
        device_module.check_unused(device)
    users.check_unused(namespace)


@context.entrypoint
def check_unused(namespace: str) -> None:
    """:raises DeviceRefused: it is in use"""
    _check_unused(namespace)


@context.entrypoint
def disable_region(region: str) -> None:
    """:raises DeviceRefused: one of its namespaces is in use, which ndctl would not mind
    :raises ToolFailed:
    """
    command = disable_region_command(region)
    for path in sorted(Path(_DEVICES, region).glob('namespace[0-9]*')):          # not namespace_seed
        _check_unused(path.name)
    _ndctl(command)


@context.entrypoint
def enable_region(region: str) -> None:
    """:raises ToolFailed:"""
    _ndctl(enable_region_command(region))


@context.entrypoint
def init_labels(dimms: list[str], overwrite: bool) -> None:
    """:raises ToolFailed: also if something is in them, unless ``overwrite``"""
    _ndctl(init_labels_command(tuple(dimms), overwrite))


@context.entrypoint
def create(region: str, size: int | None, align: int, name: str) -> str:
    """What ndctl prints of the new namespace.

    :raises ToolFailed:
    """
    return _ndctl(create_command(region, size, align, name))


@context.entrypoint
def reconfigure(namespace: str, align: int, force: bool) -> str:
    """What ndctl prints of the namespace as it is now.

    :param force: what it holds may be lost
    :raises DeviceRefused: it is in use; or, without ``force``, carries something or cannot be looked at
    :raises ToolFailed:
    """
    _check_unused(namespace)
    devices = _block_devices(namespace)
    if not devices and not force:
        raise exception.DeviceRefused(device=namespace, reason='it has no block device, so that nobody can see what it holds')
    for device in devices:
        device_module.check_formattable(device, force=bool(force))
    return _ndctl(reconfigure_command(namespace, align))


@context.entrypoint
def destroy(namespace: str) -> None:
    """:raises DeviceRefused: it is in use
    :raises ToolFailed:
    """
    _check_unused(namespace)
    _ndctl(destroy_command(namespace))


@context.entrypoint
def has_label_area(dimm: str) -> bool:
    """Whether the DIMM can keep labels, there are some or not."""
    try:
        return _ndctl(('ndctl', 'read-labels', '--json', checks.dimm(dimm))).strip() not in ('', '[]')
    except exception.ToolFailed:
        return False


@context.entrypoint
def label_area_holds_something(dimm: str) -> bool:
    """Something is in its label area that is neither zeros nor ones, as it is when it was never written."""
    checks.dimm(dimm)
    with tempfile.TemporaryDirectory(prefix='pcow-labels-') as directory:
        path = os.path.join(directory, dimm)
        try:
            _ndctl(('ndctl', 'read-labels', '--output', path, dimm))
        except exception.ToolFailed:
            return False                       # no label area
        with open(path, 'rb') as f:
            return bool(f.read().strip(b'\0').strip(b'\xff'))
