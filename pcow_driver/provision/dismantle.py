# SPDX-License-Identifier: Apache-2.0
"""Plans that end a pool, and with it what it stands on.

What ends everything is written to the list of pools first, and the name goes last: whatever is left
by a kill is found by the same command.
"""

from __future__ import annotations

import os
import shutil

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import namespaces
from pcow_driver.provision import boot
from pcow_driver.provision import ndctl
from pcow_driver.provision import plan as plan_module


def plan_remove(name: str, *, forget: bool) -> plan_module.Plan:
    """Forget a pool and, unless ``forget``, that its directory is one.

    :raises PoolNotEmpty: images are in it
    :raises PoolNotFound:
    """
    pools = registry.PoolRegistry()
    entry = pools.entry(name)
    plan = plan_module.Plan()
    shown, has_marker = f'[forget pool {name}]', _has_marker(entry)
    if not forget and entry.ending is not None and not has_marker:
        pools.get(name)  # which says what to do
    if not forget and not os.path.ismount(entry.path) and mount_unit.installed(entry.path):
        raise exception.PoolInvalid(
            path=entry.path,
            reason=(
                'its file system is not mounted, so that nobody can see whether images are in it: '
                f"'systemctl start {mount_unit.unit_name(entry.path)}', or --forget to lose its "
                f"name and settings"
            ),
        )
    if not forget and has_marker:
        _check_empty(name, pools.get(name).entries())
        shown = f'[delete {os.path.join(entry.path, names.MARKER)} and forget pool {name}]'
    plan.add(shown, lambda: pools.remove(name, forget=forget))
    return plan


def _has_marker(entry: pool.PoolEntry) -> bool:
    return os.path.lexists(os.path.join(entry.path, names.MARKER))


def _check_empty(name: str, left: list[str]) -> None:
    if left:
        raise exception.PoolNotEmpty(
            name=name, count=len(left), entries=', '.join(left[:3]) + (', ...' if left[3:] else '')
        )


def plan_destroy(name: str) -> plan_module.Plan:
    """Undo a pool with everything under it: mount, unit, the namespace if it is one, registration.

    :raises PoolNotEmpty: images are in it
    :raises PoolNotFound:
    :raises PoolInvalid: it is not mounted, or in another place as well
    """
    pools = registry.PoolRegistry()
    entry = pools.entry(name)
    plan = plan_module.Plan()
    if entry.ending is None or _has_marker(entry):
        found = pools.get(name)
        mount = filesystem.mount_at(found.path)
        if mount is None:
            raise exception.PoolInvalid(
                path=found.path,
                reason=('it is a directory in a larger file system: remove without --destroy'),
            )
        _check_empty(name, found.entries())
        ending = _ending(mount)
        plan.add(
            f'[delete {os.path.join(found.path, names.MARKER)}: nothing new comes into pool '
            f'{name}]',
            lambda: pools.begin_end(name, ending),
            lambda: _restore(found),
        )
    else:
        ending = registry.Ending(**entry.ending)
        mount = filesystem.mount_at(entry.path)
        if mount:
            _check_the_same(mount, ending, entry.path)
            _check_empty(name, sorted(set(os.listdir(entry.path)) - {'lost+found'}))
    if mount:
        _check_mounted_once(mount)
        _add_unmount(plan, entry.path, mount)
    if ending.filesystem and mount_unit.what(entry.path) == f'UUID={ending.filesystem}':
        boot.add_removal(
            plan,
            entry.path,
            (lambda: filesystems.install_unit(name, mount.source, entry.path, mount.kind))
            if mount
            else None,
        )
    _add_namespace(plan, name, ending, mount.source if mount else None)
    plan.add(f'[forget pool {name}]', lambda: pools.remove(name, forget=True))
    return plan


def _ending(mount: filesystem.Mount) -> registry.Ending:
    """What has to be ended, by names that do not change."""
    of_device = (
        ndctl.of_blockdev(mount.source)
        if mount.source.startswith('/dev/pmem') and shutil.which('ndctl')
        else None
    )
    return registry.Ending(
        source=mount.source,
        filesystem=filesystems.uuid(mount.source) if mount.kind in filesystem.KINDS else None,
        namespace=of_device[1].uuid if of_device else None,
    )


def _check_the_same(mount: filesystem.Mount, ending: registry.Ending, path: str) -> None:
    """:raises PoolInvalid: what is mounted there is not what the pool was on"""
    if ending.filesystem is None:
        same = mount.source == ending.source
    else:
        same = mount.kind in filesystem.KINDS and _is_of(mount.source, ending)
    if not same:
        raise exception.PoolInvalid(
            path=path,
            reason=(
                f'{mount.source} is mounted there, which is not what the pool was on: unmount it'
            ),
        )


def _is_of(device: str, ending: registry.Ending) -> bool:
    try:
        return bool(filesystems.uuid(device) == ending.filesystem)
    except exception.ToolFailed:
        return False  # it carries none


def _check_mounted_once(mount: filesystem.Mount) -> None:
    """In this name space of mounts; in others (containers) it may be as well, which shows when the
    device is not free.

    :raises PoolInvalid: unmounting would not end it
    """
    others = sorted(
        {
            other.at
            for other in filesystem.mounts()
            if other.number == mount.number and other.at != mount.at
        }
    )
    if others:
        raise exception.PoolInvalid(
            path=mount.at,
            reason=(
                f'its file system is mounted at {", ".join(others)} as well: unmount that first'
            ),
        )


def _add_unmount(plan: plan_module.Plan, path: str, mount: filesystem.Mount) -> None:
    # Who uses something there is noticed here, and until the super block is wiped everything can be
    # put back.
    plan.add(
        plan_module.command_line(*filesystem.umount_command(path)),
        lambda: filesystems.unmount(path),
        (lambda: filesystems.mount(mount.kind, mount.source, path))
        if mount.kind in filesystem.KINDS
        else None,
    )


def _add_namespace(
    plan: plan_module.Plan, name: str, ending: registry.Ending, device: str | None
) -> None:
    """:param device: which is still mounted; None: the namespace has to be looked for, and at"""
    found = ndctl.of_uuid(ending.namespace) if ending.namespace else None
    if found is None:
        return
    if device is None:
        if not found.device:
            raise exception.DeviceRefused(
                device=found.dev,
                reason=(
                    f'it is disabled, so that nobody can see whether it is still that of pool '
                    f'{name}: '
                    f"'ndctl enable-namespace {found.dev}'"
                ),
            )
        device = found.device
        if filesystems.signature(device) and not _is_of(device, ending):
            raise exception.DeviceRefused(
                device=device,
                reason=(
                    f"it carries something else than pool {name} by now: 'pcowctl pool remove "
                    f"--forget {name}' leaves it so"
                ),
            )
    # What is made here next must not look as if it carried somebody's data.
    of_pool, namespace, uuid = device, found.dev, ending.filesystem or ''
    plan.add(
        plan_module.command_line(*filesystem.wipe_command(of_pool)),
        lambda: filesystems.wipe(of_pool, uuid),
    )
    plan.add(
        plan_module.command_line(*namespaces.destroy_command(namespace)),
        lambda: namespaces.destroy(namespace),
    )


def _restore(found: pool.Pool) -> None:
    """:raises PoolInvalid: what it was in is gone"""
    if not os.path.ismount(found.path):
        raise exception.PoolInvalid(path=found.path, reason='it is not mounted any more')
    registry.PoolRegistry().restore(found)
