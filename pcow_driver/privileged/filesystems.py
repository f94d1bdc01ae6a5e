# SPDX-License-Identifier: Apache-2.0
"""File systems of pools: made, mounted, grown, and what their devices carry."""

from __future__ import annotations

import os

from pcow_driver import exception
from pcow_driver import tool
from pcow_driver.pmem import device as device_module
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.privileged import checks
from pcow_driver.privileged import context

# What a new file system may destroy.
NOTHING, UNKNOWN, ANYTHING = 'nothing', 'unknown', 'anything'


@context.entrypoint
def signature(device: str) -> str | None:
    """What blkid(8) finds on a block device; None: nothing.

    :raises ToolFailed:
    """
    return device_module.signature(checks.device(device))


@context.entrypoint
def check_formattable(device: str, force: bool) -> None:
    """:raises DeviceRefused: it is in use; or, without ``force``, carries anything"""
    device_module.check_formattable(checks.device(device), force=force)


@context.entrypoint
def uuid(device: str) -> str:
    """Of the file system on a device.

    :raises ToolFailed: there is none
    """
    return _uuid(checks.device(device))


def _uuid(device: str) -> str:
    return tool.run(tool.find_system('blkid', 'util-linux'), '--probe', '--match-tag', 'UUID', '--output', 'value', device).strip()


@context.entrypoint
def make(kind: str, device: str, label: str, destroy: str) -> None:
    """A new file system.

    :param destroy: what may be lost: NOTHING, UNKNOWN (what blkid does not know), ANYTHING
    :raises DeviceRefused: the device is in use, carries more than that, or has no DAX
    :raises ToolFailed:
    """
    if destroy not in (NOTHING, UNKNOWN, ANYTHING):
        raise exception.UsageInvalid(reason=f'what may be destroyed is not {destroy!r}')
    device_module.check_dax(checks.device(device))
    device_module.check_formattable(device, force=destroy == ANYTHING, unknown=destroy == UNKNOWN)
    filesystem.run(filesystem.make_command(_kind(kind), device, checks.label(label)))


@context.entrypoint
def make_directory(directory: str) -> None:
    os.makedirs(checks.mount_point(directory))


@context.entrypoint
def remove_directory(directory: str) -> None:
    """An empty one."""
    os.rmdir(checks.mount_point(directory))


@context.entrypoint
def mount(kind: str, device: str, directory: str) -> None:
    """With DAX.  What is mounted elsewhere already may be mounted here as well: one whose end failed comes back so.

    :raises DeviceRefused: it is no block device (mount(8) would take a file as well)
    :raises ToolFailed: also if another device holds it
    """
    device_module.check_block_device(checks.device(device))
    filesystem.run(filesystem.mount_command(_kind(kind), device, _empty(directory)))


@context.entrypoint
def mount_memory(name: str, size: int, directory: str, huge: bool) -> None:
    """A file system in DRAM of at most ``size`` bytes, of huge pages if there are any.

    :raises ToolFailed:
    """
    filesystem.run(filesystem.mount_memory_command(
        checks.label(name), checks.number(size, 1 << 20, 1 << 56, 'the size of a pool in DRAM'), _empty(directory),
        bool(huge)))


@context.entrypoint
def resize_memory(directory: str, size: int) -> None:
    """:raises UsageInvalid: it is not in DRAM
    :raises ToolFailed:
    """
    _check_mounted(directory, 'tmpfs')
    filesystem.run(filesystem.resize_memory_command(directory, checks.number(size, 1 << 20, 1 << 56, 'a size')))


@context.entrypoint
def grow(directory: str) -> None:
    """Up to the size of the device.

    :raises UsageInvalid: nothing is mounted there that can grow
    :raises ToolFailed:
    """
    kind, source = filesystem.mounted(checks.mount_point(directory))
    filesystem.run(filesystem.grow_command(_kind(kind), source, directory))


@context.entrypoint
def unmount(directory: str) -> None:
    """:raises ToolFailed: somebody uses it"""
    _check_mounted(directory, 'tmpfs', *filesystem.KINDS)
    filesystem.run(filesystem.umount_command(directory))


@context.entrypoint
def set_extent_hint(directory: str) -> None:
    """:raises ToolFailed:"""
    _check_mounted(directory, 'xfs')
    filesystem.run(filesystem.extent_hint_command(directory))


@context.entrypoint
def give(directory: str, user: int, group: int) -> None:
    """A new pool belongs to who asked for it; nothing may be in it yet.

    :raises DeviceRefused:
    """
    _check_mounted(directory, 'tmpfs', *filesystem.KINDS)
    if set(os.listdir(directory)) - {'lost+found'}:
        raise exception.DeviceRefused(device=directory, reason='something is in it already')
    os.chown(directory, checks.number(user, 0, 1 << 32, 'a user id'), checks.number(group, 0, 1 << 32, 'a group id'),
             follow_symlinks=False)


@context.entrypoint
def wipe(device: str, uuid: str) -> None:
    """Take the signatures of an unused device away, so that it is free; done also if it carries none.

    :param uuid: of the file system that may be lost
    :raises DeviceRefused: it is in use, or carries something else
    :raises ToolFailed:
    """
    device_module.check_unused(checks.device(device))
    found = device_module.signature(device)
    if found and not (uuid and uuid == _uuid(device)):
        raise exception.DeviceRefused(device=device, reason=f'it carries {found}, another file system than is to be wiped')
    filesystem.run(filesystem.wipe_command(device))


@context.entrypoint
def install_unit(name: str, device: str, directory: str, kind: str) -> None:
    """Have the file system on a device mounted at boot.

    :raises ToolFailed:
    """
    what = 'UUID=' + uuid(device)
    mount_unit.install(checks.mount_point(directory), mount_unit.text(
        checks.label(name), what, directory, _kind(kind), filesystem.MOUNT_OPTIONS))


@context.entrypoint
def uninstall_unit(directory: str) -> None:
    mount_unit.uninstall(checks.mount_point(directory))


@context.entrypoint
def reload_units() -> None:
    """:raises ToolFailed:"""
    filesystem.run(filesystem.RELOAD_COMMAND)


def _kind(kind: str) -> str:
    if kind not in filesystem.KINDS:
        raise exception.UsageInvalid(reason=f'the file system is one of {", ".join(filesystem.KINDS)}, not {kind!r}')
    return kind


def _empty(directory: str) -> str:
    """A mount point under which nothing would be hidden."""
    checks.mount_point(directory)
    if os.path.ismount(directory) or os.listdir(directory):
        raise exception.DeviceRefused(device=directory, reason='mounting something there would hide what is in it')
    return directory


def _check_mounted(directory: str, *kinds: str) -> None:
    found, _source = filesystem.mounted(checks.mount_point(directory))
    if found not in kinds:
        raise exception.UsageInvalid(reason=f'{directory} has {found or "nothing"} mounted, not {" or ".join(kinds)}')
