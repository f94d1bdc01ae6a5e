# SPDX-License-Identifier: Apache-2.0
"""What has arrived for a server from the host that it left, noted in its directory until its images
are in a pool.

Once the server has left, nothing leads back: Nova advises a hard reboot where it is now, which goes
on with what is noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os

from nova_pcow.migration import cold_migration
from pcow_driver.common import durable

_NAME = 'pcow-arrived.json'


@dataclasses.dataclass(frozen=True)
class Arrival:
    source_host: str  # address
    images: list[cold_migration.Transferred]


def note(directory: str, found: Arrival) -> None:
    """Durable on return."""
    told = {'source_host': found.source_host, 'images': [item.told() for item in found.images]}
    durable.replace(os.path.join(directory, _NAME), json.dumps(told))


def noted(directory: str) -> Arrival | None:
    try:
        with open(os.path.join(directory, _NAME)) as f:
            found = json.load(f)
    except FileNotFoundError:
        return None
    return Arrival(
        found['source_host'], [cold_migration.Transferred.of(item) for item in found['images']]
    )


def forget(directory: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, _NAME))
        durable.sync(directory)
