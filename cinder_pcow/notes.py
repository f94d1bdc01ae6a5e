# SPDX-License-Identifier: Apache-2.0
"""Where volumes were last about to go, out of their backend section: a file for each in ``migrations`` under ``[pcow] state_path``.

All sections and services of a host that have that in common see the same notes.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from cinder_pcow import local
from cinder_pcow import remote
from pcow_driver import exception
from pcow_driver import locks

Target = local.LocalPool | remote.RemotePool


def path(name: str) -> Path:
    return Path(locks.state_path(), 'migrations', name)


def read(name: str) -> Target | None:
    """:raises StateInvalid:"""
    try:
        value = json.loads(path(name).read_text())
        return remote.RemotePool(**value) if 'address' in value else local.LocalPool(**value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as e:
        raise exception.StateInvalid(path=str(path(name)), reason=str(e)) from None


def write(name: str, target: Target) -> None:
    """Durable on return."""
    final = path(name)
    final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = final.with_name(f'.{name}.part')
    with open(part, 'w', encoding='utf-8') as file:
        json.dump(dataclasses.asdict(target), file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(final)
    directory = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def drop(name: str) -> None:
    path(name).unlink(missing_ok=True)
