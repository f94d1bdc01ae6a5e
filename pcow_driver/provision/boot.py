# SPDX-License-Identifier: Apache-2.0
"""Whether a pool is there again after a boot, and the steps that see to it."""

from __future__ import annotations

from collections.abc import Callable
import os

from pcow_driver.common import exception
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.privileged import checks
from pcow_driver.privileged import filesystems
from pcow_driver.provision import plan as plan_module

_DAX = {'dax', 'dax=always'}


def not_mounted_at_boot(directory: str) -> filesystem.Mount | None:
    """The file system on persistent memory that is mounted there with DAX, if nothing mounts it at
    boot.
    """
    mount = filesystem.mount_at(directory)
    if (
        mount is None
        or mount.kind not in filesystem.KINDS
        or not mount.source.startswith('/dev/pmem')
    ):
        return None
    return (
        None
        if not _DAX & set(mount.options.split(',')) or mount_unit.mounted_at_boot(directory)
        else mount
    )


def may_be_mounted(directory: str) -> bool:
    """It is one of the places where pcowctl mounts pools."""
    try:
        checks.mount_point(directory)
    except (exception.UsageInvalid, exception.PathRefused):
        return False
    return True


def add_unit(
    plan: plan_module.Plan, name: str, device: Callable[[], str], directory: str, kind: str
) -> None:
    path, _link = mount_unit.paths(directory)
    plan.add(
        f'[write and enable {path}, which mounts it at boot]',
        lambda: filesystems.install_unit(name, device(), directory, kind),
        lambda: _uninstall(directory),
    )
    _add_reload(plan)


def add_removal(
    plan: plan_module.Plan, directory: str, undo: Callable[[], None] | None = None
) -> None:
    """Of a unit that is there."""
    plan.add(
        f'rm {" ".join(mount_unit.paths(directory))}',
        lambda: filesystems.uninstall_unit(directory),
        undo,
    )
    _add_reload(plan)


def _add_reload(plan: plan_module.Plan) -> None:
    if _systemd_runs():
        plan.add(plan_module.command_line(*filesystem.RELOAD_COMMAND), filesystems.reload_units)


def _uninstall(directory: str) -> None:
    filesystems.uninstall_unit(directory)
    if _systemd_runs():
        filesystems.reload_units()


def _systemd_runs() -> bool:
    return os.path.isdir('/run/systemd/system')
