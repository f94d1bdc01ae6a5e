# SPDX-License-Identifier: Apache-2.0
"""Plans that make a directory known as a pool: one that is none yet, one that is one already, one
that was moved.
"""

from __future__ import annotations

import os

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import marker
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.privileged import filesystems
from pcow_driver.provision import boot
from pcow_driver.provision import plan as plan_module

Owner = tuple[int, int]  # user and group (-1: stays)


def plan_directory(name: str, directory: str, owner: Owner | None = None) -> plan_module.Plan:
    """A pool in an existing file system; the directory is made if it is missing.

    :param owner: of the pool, if root makes it for somebody

    What a killed :func:`~pcow_driver.provision.provision.plan_create` left is finished.

    :raises PoolExists: the name is taken
    :raises PoolInvalid: it is a pool already
    """
    names.check_name('pool', name)
    registry.PoolRegistry().check_unknown(name)
    _check_not_hugetlbfs(directory)
    if owner is not None and not (os.path.ismount(directory) and boot.may_be_mounted(directory)):
        raise exception.UsageInvalid(
            reason=(
                f'--owner is for a file system that is mounted where pools are; {directory} gets '
                f'one afterwards (chown)'
            )
        )
    marker.check_none(directory)
    plan = plan_module.Plan()
    mount = boot.not_mounted_at_boot(directory)
    if mount and boot.may_be_mounted(directory):
        if mount.kind == 'xfs':
            add_extent_hint(plan, directory)
    _add_unit(plan, name, directory)
    add_registration(plan, name, directory)
    add_owner(plan, directory, owner)
    return plan


def add_registration(plan: plan_module.Plan, name: str, directory: str) -> None:
    plan.add(
        f'[write {os.path.join(directory, names.MARKER)} and register pool {name}]',
        lambda: _register(name, directory),
    )


def _register(name: str, directory: str) -> None:
    registry.PoolRegistry().create(name, directory)


def add_extent_hint(plan: plan_module.Plan, directory: str) -> None:
    plan.add(
        plan_module.command_line(*filesystem.extent_hint_command(directory)),
        lambda: filesystems.set_extent_hint(directory),
    )


def add_owner(plan: plan_module.Plan, directory: str, owner: Owner | None) -> None:
    """The last step: before it root works in a directory of its own."""
    if owner is not None:
        user, group = owner
        shown = f'{user}:{group}' if group >= 0 else str(user)
        plan.add(
            plan_module.command_line('chown', shown, directory),
            lambda: filesystems.give(directory, user, group),
        )


def _add_unit(plan: plan_module.Plan, name: str, directory: str) -> bool:
    """Of a file system on persistent memory that nothing mounts at boot; whether there is one."""
    mount = boot.not_mounted_at_boot(directory)
    if mount is None or not boot.may_be_mounted(directory):
        return False
    mount_unit.check_name(directory)
    mount_unit.check_free(directory, f'UUID={filesystems.uuid(mount.source)}')
    boot.add_unit(plan, name, lambda: mount.source, directory, mount.kind)
    return True


def _check_not_hugetlbfs(directory: str) -> None:
    if filesystem.mounted(filesystem.mount_point(directory))[0] == 'hugetlbfs':
        raise exception.UsageInvalid(
            reason=(
                f'{directory} is on hugetlbfs, whose files cannot be written or allocated in '
                f'pieces: take --memory --huge, which makes '
                'a pool of pages of 2 MiB on tmpfs'
            )
        )


def plan_import(directory: str, name: str | None) -> plan_module.Plan:
    """Make a pool known that exists, or that it is mounted in another place now; and have it
    mounted at boot.

    :param name: on this host; None: as it was made, or as it is known
    :raises PoolExists: the name is taken
    :raises PoolInvalid: no pool is there, or it is known and nothing is to be done
    """
    path = os.path.abspath(directory)
    found, pools, plan = pool.open_directory(path), registry.PoolRegistry(), plan_module.Plan()
    entry = pools.known(found, name)
    if entry is None:
        wanted = names.check_name('pool', name or found.name)
        pools.check_unknown(wanted)
        _add_unit(plan, wanted, path)
        plan.add(f'[register {path} as pool {wanted}]', lambda: _import(path, wanted))
    elif os.path.realpath(entry.path) == os.path.realpath(path):
        if not _add_unit(plan, entry.name, path):
            raise exception.PoolInvalid(
                path=path, reason=f'it is known already, as pool {entry.name}'
            )
    else:
        known, old = entry.name, entry.path
        mount = filesystem.mount_at(path)
        if (
            mount
            and mount.kind in filesystem.KINDS
            and mount_unit.what(old) is not None
            and boot.may_be_mounted(old)
            and mount_unit.what(old) == f'UUID={filesystems.uuid(mount.source)}'
        ):
            kind, source = mount.kind, mount.source
            boot.add_removal(plan, old, lambda: filesystems.install_unit(known, source, old, kind))
        _add_unit(plan, known, path)
        plan.add(
            f'[pool {known} is in {path} now, and no longer in {old}]', lambda: _import(path, known)
        )
    return plan


def _import(directory: str, name: str) -> None:
    registry.PoolRegistry().import_(directory, name)
