# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of servers, as far as their images have them: QEMU alone makes them, and none runs
here.
"""

import dataclasses
import datetime
from typing import Any

import fixtures

from nova_pcow.common import reserved
from pcow_driver.images import image
from pcow_driver.images import model

WARM = 'warm'
_DATE = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)


class Checkpoints(fixtures.Fixture):
    """Snapshots named :data:`WARM`, and what a suspended server resumes from, are those of
    checkpoints, and others whose names are added to ``names``.
    """

    names: set[str]

    def _setUp(self) -> None:  # noqa: N802 - the name is given by fixtures
        read, self.names = image.snapshot_list, {WARM, reserved.SUSPENDED}

        def listed(path: str, **options: Any) -> list[model.Snapshot]:
            is_ram = path.endswith('-ram.pcow')
            return [
                dataclasses.replace(one, date=_DATE, vm_state_size=500 if is_ram else 0)
                if one.name in self.names
                else one
                for one in read(path, **options)
            ]

        self.useFixture(fixtures.MonkeyPatch('pcow_driver.images.image.snapshot_list', listed))
