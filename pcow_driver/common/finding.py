# SPDX-License-Identifier: Apache-2.0
"""What a look at the host gives: found, judged, and what to do about it."""

import dataclasses

OK, ADVICE, MISSING = 'ok', 'advice', 'missing'
NOTHING_TO_DO = 'nothing to do'


@dataclasses.dataclass(frozen=True)
class Finding:
    check: str
    status: str  # OK, ADVICE: works with limits, MISSING: does not work without
    found: str
    advice: str = NOTHING_TO_DO
