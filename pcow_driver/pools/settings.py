# SPDX-License-Identifier: Apache-2.0
"""What the operator decided for a pool."""

from __future__ import annotations

import dataclasses

from pcow_driver.common import exception

DEFAULT_OVERCOMMIT = 20.0  # as Cinder's max_over_subscription_ratio


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the operator decided for a pool on this host; percentages are of its file system."""

    # what images may come to hold, as a multiple of the space; 0: no limit
    overcommit: float = DEFAULT_OVERCOMMIT
    reserve: int = 0  # percent that are never provisioned
    low: int = 20  # percent free below which somebody should act
    critical: int = 5  # percent free below which guests will soon wait
    draining: bool = False  # takes no new images

    def check(self) -> Settings:
        """:raises UsageInvalid:"""
        if not 0 <= self.overcommit <= 10000:
            raise exception.UsageInvalid(reason='the over-commit limit is 0 (none) to 10000')
        if not 0 <= self.reserve < 100 or not 0 <= self.critical <= self.low <= 100:
            raise exception.UsageInvalid(
                reason='percentages are 0 to 100, and critical is not above low'
            )
        return self

    def reserved(self, total: int) -> int:
        """Bytes of a file system of ``total`` bytes that are never provisioned."""
        return total * self.reserve // 100
