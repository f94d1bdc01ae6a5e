# SPDX-License-Identifier: Apache-2.0
"""File systems of pools: made, mounted, grown, and what their devices carry."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os

from pcow_driver.common import access
from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.pmem import block_device as device_module
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.privileged import administration
from pcow_driver.privileged import checks

# What a new file system may destroy.
NOTHING, UNKNOWN, ANYTHING = 'nothing', 'unknown', 'anything'


@administration.entrypoint
def signature(device: str) -> str | None:
    """What blkid(8) finds on a block device; None: nothing.

    :raises ToolFailed:
    """
    return device_module.signature(checks.device(device))


@administration.entrypoint
def check_formattable(device: str, force: bool) -> None:
    """:raises DeviceRefused: it is in use; or, without ``force``, carries anything"""
    device_module.check_formattable(checks.device(device), force=force)


@administration.entrypoint
def uuid(device: str) -> str:
    """Of the file system on a device.

    :raises ToolFailed: there is none
    """
    return _uuid(checks.device(device))


def _uuid(device: str) -> str:
    return tool.run(
        tool.find_system('blkid', 'util-linux'),
        '--probe',
        '--match-tag',
        'UUID',
        '--output',
        'value',
        device,
    ).strip()


@administration.entrypoint
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


@administration.entrypoint
def make_directory(directory: str) -> None:
    """Make a mount point.

    :raises PathRefused:
    """
    descriptors.make(checks.mount_point(directory))


@administration.entrypoint
def remove_directory(directory: str) -> None:
    """Remove an empty mount point.

    :raises PathRefused:
    """
    with descriptors.parent(checks.mount_point(directory), trusted=True) as (above, name):
        os.rmdir(name, dir_fd=above)


@administration.entrypoint
def mount(kind: str, device: str, directory: str) -> None:
    """With DAX. What is mounted elsewhere already may be mounted here as well: one whose end failed
    comes back so.

    :raises DeviceRefused: it is no block device (mount(8) would take a file as well)
    :raises ToolFailed: also if another device holds it
    """
    device_module.check_block_device(checks.device(device))
    with _empty(directory) as place:
        filesystem.run(filesystem.mount_command(_kind(kind), device, '.'), cwd=place)
    with _mounted(directory, kind) as root:
        if not _entries(root) - {'lost+found'}:
            access.close(descriptors.place(root))


@administration.entrypoint
def mount_memory(name: str, size: int, directory: str, huge: bool) -> None:
    """A file system in DRAM of at most ``size`` bytes, of huge pages if there are any.

    :raises ToolFailed:
    """
    checks.label(name)
    checks.number(size, 1 << 20, 1 << 56, 'the size of a pool in DRAM')
    with _empty(directory) as place:
        filesystem.run(filesystem.mount_memory_command(name, size, '.', bool(huge)), cwd=place)
    with _mounted(directory, 'tmpfs') as root:
        access.close(descriptors.place(root))


@administration.entrypoint
def resize_memory(directory: str, size: int) -> None:
    """:raises UsageInvalid: it is not in DRAM
    :raises ToolFailed:
    """
    checks.number(size, 1 << 20, 1 << 56, 'a size')
    with _mounted(directory, 'tmpfs') as root:
        filesystem.run(filesystem.resize_memory_command('.', size), cwd=descriptors.place(root))


@administration.entrypoint
def grow(directory: str) -> None:
    """Up to the size of the device.

    :raises UsageInvalid: nothing is mounted there that can grow
    :raises ToolFailed:
    """
    with _mounted(directory, *filesystem.KINDS) as root:
        found = filesystem.mount_of(root)
        filesystem.run(
            filesystem.grow_command(found.kind, found.source, '.'), cwd=descriptors.place(root)
        )


@administration.entrypoint
def unmount(directory: str) -> None:
    """:raises ToolFailed: somebody uses it"""
    with _mounted(directory, 'tmpfs', *filesystem.KINDS):
        pass  # a descriptor of it would keep it busy
    with descriptors.parent(directory, trusted=True) as (above, name):
        filesystem.run(filesystem.umount_command(f'./{name}'), cwd=descriptors.place(above))


@administration.entrypoint
def set_extent_hint(directory: str) -> None:
    """:raises ToolFailed:"""
    with _mounted(directory, 'xfs') as root:
        filesystem.run(filesystem.extent_hint_command('.'), cwd=descriptors.place(root))


@administration.entrypoint
def give(directory: str, user: int, group: int) -> None:
    """Give a new pool to somebody; nothing may be in it yet.

    :param group: which may write there too, and has what is made there; -1: QEMU passes, as before,
        and nobody else

    :raises DeviceRefused:
    """
    checks.number(user, 0, 1 << 32, 'a user id')
    checks.number(group, -1, 1 << 32, 'a group id')
    with _mounted(directory, 'tmpfs', *filesystem.KINDS) as root:
        if _entries(root) - {'lost+found', names.MARKER, names.LOCK}:
            raise exception.DeviceRefused(device=directory, reason='something is in it already')
        os.chown(descriptors.place(root), user, group)
        if group >= 0:
            os.chmod(descriptors.place(root), 0o2771)  # noqa: S103 - QEMU passes, and nobody lists


@administration.entrypoint
def wipe(device: str, uuid: str) -> None:
    """Take the signatures of an unused device away, so that it is free; done also if it carries
    none.

    :param uuid: of the file system that may be lost
    :raises DeviceRefused: it is in use, or carries something else
    :raises ToolFailed:
    """
    device_module.check_unused(checks.device(device))
    found = device_module.signature(device)
    if found and not (uuid and uuid == _uuid(device)):
        raise exception.DeviceRefused(
            device=device, reason=f'it carries {found}, another file system than is to be wiped'
        )
    filesystem.run(filesystem.wipe_command(device))


@administration.entrypoint
def install_unit(name: str, device: str, directory: str, kind: str) -> None:
    """Have the file system on a device mounted at boot.

    :raises ToolFailed:
    """
    what = 'UUID=' + uuid(device)
    mount_unit.install(
        checks.mount_point(directory),
        mount_unit.text(checks.label(name), what, directory, _kind(kind), filesystem.MOUNT_OPTIONS),
    )


@administration.entrypoint
def uninstall_unit(directory: str) -> None:
    mount_unit.uninstall(checks.mount_point(directory))


@administration.entrypoint
def reload_units() -> None:
    """:raises ToolFailed:"""
    filesystem.run(filesystem.RELOAD_COMMAND)


def _kind(kind: str) -> str:
    if kind not in filesystem.KINDS:
        raise exception.UsageInvalid(
            reason=f'the file system is one of {", ".join(filesystem.KINDS)}, not {kind!r}'
        )
    return kind


@contextlib.contextmanager
def _empty(directory: str) -> Iterator[str]:
    """A mount point under which nothing would be hidden; a path of it that nobody can lead
    elsewhere.
    """
    with _opened(directory) as (above, found):
        if filesystem.mount_of(found) != filesystem.mount_of(above) or _entries(found):
            raise exception.DeviceRefused(
                device=directory, reason='mounting something there would hide what is in it'
            )
        yield descriptors.place(found)


@contextlib.contextmanager
def _mounted(directory: str, *kinds: str) -> Iterator[int]:
    """A descriptor of the root of what is mounted there."""
    with _opened(directory) as (above, found):
        mount = filesystem.mount_of(found)
        kind = mount.kind if mount != filesystem.mount_of(above) else ''
        if kind not in kinds:
            raise exception.UsageInvalid(
                reason=f'{directory} has {kind or "nothing"} mounted, not {" or ".join(kinds)}'
            )
        yield found


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[tuple[int, int]]:
    """Descriptors of the directory above a mount point, and of the mount point.

    :raises PathRefused:
    :raises UsageInvalid: it is not there
    """
    checks.mount_point(directory)
    with contextlib.ExitStack() as stack:
        try:
            above, _name = stack.enter_context(descriptors.parent(directory, trusted=True))
            found = stack.enter_context(descriptors.directory(directory, trusted=True))
        except FileNotFoundError:
            raise exception.UsageInvalid(reason=f'{directory} is not there') from None
        yield above, found


def _entries(directory: int) -> set[str]:
    readable = os.open('.', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return set(os.listdir(readable))
    finally:
        os.close(readable)
