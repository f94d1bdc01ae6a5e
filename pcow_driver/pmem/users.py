# SPDX-License-Identifier: Apache-2.0
"""Who uses a namespace in mode devdax: a character device has no mark in itself, and the kernel
takes it away from them.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import re
import stat

from pcow_driver.common import exception

_BUS = Path('/sys/bus/nd/devices')
_PROC = Path('/proc')
_NAME = re.compile(r'dax\d+\.\d+')


def _character_devices(namespace: str) -> Iterator[tuple[str, Path, int]]:
    """Name, place in sysfs and number of each; a namespace in mode devdax may be divided into
    several.
    """
    for parent in _BUS.glob('dax*'):
        try:
            if (parent / 'namespace').read_text(encoding='ascii').strip() != namespace:
                continue
        except OSError:
            continue
        for directory, names, _files in os.walk(parent.resolve()):
            for name in filter(_NAME.fullmatch, names):
                with contextlib.suppress(OSError, ValueError):
                    major, minor = (
                        (Path(directory) / name / 'dev').read_text(encoding='ascii').split(':')
                    )
                    yield name, Path(directory) / name, os.makedev(int(major), int(minor))


def check_unused(namespace: str) -> None:
    """:raises DeviceRefused: a process has a character device of the namespace open or mapped, or
    the kernel uses it as memory
    """
    found = list(_character_devices(namespace))
    for name, place, _number in found:
        if os.path.basename(os.path.realpath(place / 'driver')) == 'kmem':
            raise exception.DeviceRefused(
                device=namespace,
                reason=(
                    f"{name} is part of this host's memory: 'daxctl reconfigure-device "
                    f"--mode=devdax {name}' first"
                ),
            )
    numbers = {number: name for name, _place, number in found}
    for process in _processes() if numbers else ():
        used = _used(process, numbers)
        if used:
            raise exception.DeviceRefused(
                device=namespace,
                reason=(
                    f'/dev/{used} is in use by process {process.name} ({_command(process)}): end '
                    f'it first'
                ),
            )


def _processes() -> Iterator[Path]:
    return (path for path in _PROC.iterdir() if path.name.isdigit())


def _used(process: Path, numbers: dict[int, str]) -> str | None:
    """What of the devices the process has.

    :raises DeviceRefused: that cannot be seen
    """
    for place in ('fd', 'map_files'):  # a file may be closed and stay mapped
        try:
            entries = list((process / place).iterdir())
        except PermissionError as e:
            raise exception.DeviceRefused(
                device=', '.join(numbers.values()),
                reason=(
                    f'who uses it cannot be seen ({e.filename}: {e.strerror}): do this as root'
                ),
            ) from None
        except OSError:
            return None  # it has ended
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat()
                if stat.S_ISCHR(status.st_mode) and status.st_rdev in numbers:
                    return numbers[status.st_rdev]
    return None


def _command(process: Path) -> str:
    try:
        return (process / 'comm').read_text(encoding='utf-8', errors='replace').strip()
    except OSError:
        return 'which has ended meanwhile'
