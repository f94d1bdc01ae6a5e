# SPDX-License-Identifier: Apache-2.0
"""Where volumes were last about to go, out of their backend section: a file for each in
``migrations`` under ``[pcow] state_path``.

All sections and services of a host that have that in common see the same notes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from cinder_pcow import local
from cinder_pcow import remote
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks

Target = local.LocalPool | remote.RemotePool


def path(name: str) -> Path:
    return Path(locks.state_path(), 'migrations', name)


def read(name: str) -> Target | None:
    """:raises StateInvalid:"""
    try:
        value = json.loads(durable.read(str(path(name))))
        return remote.RemotePool(**value) if 'address' in value else local.LocalPool(**value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as e:
        raise exception.StateInvalid(path=str(path(name)), reason=str(e)) from None


def write(name: str, target: Target) -> None:
    """Durable on return."""
    final = path(name)
    final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    durable.replace(str(final), json.dumps(dataclasses.asdict(target)))


def drop(name: str) -> None:
    path(name).unlink(missing_ok=True)
