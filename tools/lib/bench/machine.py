# SPDX-License-Identifier: Apache-2.0
"""The machine that figures come from, as ``pcow-bench`` describes it in its JSON."""

import os
from pathlib import Path
import platform
import re
from typing import Any

from pcow_driver.common import units


def describe() -> dict[str, Any]:
    """cpu, cores, memory (bytes), kernel."""
    model = re.search(
        r'^model name\s*: (.*)$', Path('/proc/cpuinfo').read_text(errors='replace'), re.MULTILINE
    )
    system = platform.uname()
    return {
        'cpu': model[1] if model else system.machine,
        'cores': len(os.sched_getaffinity(0)),
        'memory': os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'),
        'kernel': f'{system.system} {system.release} {system.machine}',
    }


def sentence(machine: dict[str, Any]) -> str:
    """The machine in one line for people."""
    parts = [
        machine['cpu'],
        f'{machine["cores"]} cores',
        f'{units.format_size(machine["memory"])} of memory',
        machine['kernel'],
    ]
    if 'pool' in machine:
        parts.append(
            f'pool {machine["pool"]} ({machine["pool_file_system"]}, {machine["persistence"]})'
        )
    return ', '.join(parts)
