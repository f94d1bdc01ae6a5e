# SPDX-License-Identifier: Apache-2.0
"""Live migration of a guest whose CPUs store all the time, to another QEMU with a chain
of its own.
"""

from __future__ import annotations

from pathlib import Path
import time
from typing import TYPE_CHECKING
from typing import Any

from tests.vm import chain
from tests.vm import machine

if TYPE_CHECKING:
    from tests.vm import scenarios

_GRANULE = 8192
_IMAGE = 'live.pcow'


def _chain(context: scenarios.Context, name: str) -> Path:
    """An empty image on the chain that the guest knows; its copies are the very files, with their
    UUIDs.
    """
    directory = context.directory / name
    directory.mkdir()
    context.tool('pcow-img', 'create', '-q', '-b', context.image(directory), directory / _IMAGE)
    return directory / _IMAGE


def _wait(vm: machine.Machine) -> dict[str, Any]:
    limit = time.monotonic() + machine.COMMAND_SECONDS
    while time.monotonic() < limit:
        found = dict(vm.run_qmp('query-migrate'))
        if found['status'] == 'completed':
            return found
        if found['status'] in ('failed', 'cancelled'):
            raise vm.failure(f'the migration {found["status"]}: {found.get("error-desc")}')
        time.sleep(0.05)
    raise vm.failure('the migration did not end')


def live_migration(context: scenarios.Context) -> dict[str, Any]:
    """All CPUs write while it goes on; then every byte is as each of them left it."""
    here, there = _chain(context, 'here'), _chain(context, 'there')
    address = f'unix:{context.directory}/migration'
    with context.test_guest(*context.backend(here)) as source:
        source.wait_ready()
        source.command(f'stores 1 2000 {_GRANULE}')
        source.command('load-start')
        with context.test_guest(
            *context.backend(there), '-incoming', address, name=f'{context.name}-there'
        ) as vm:
            source.run_qmp(
                'migrate-set-capabilities',
                capabilities=[{'capability': 'return-path', 'state': True}],
            )
            source.run_qmp('migrate-set-parameters', max_bandwidth=64 * chain.MIB)
            source.run_qmp('migrate', uri=address)
            found, left = _wait(source), source.pcow()
            time.sleep(0.3)
            writes = [int(word) for word in vm.command('load-stop').split()]
            vm.command('load-adopt')
            vm.command('read')
            vm.command(f'stores 2 2000 {_GRANULE}')
            vm.command('read')
            info = vm.power_off()
    context.tool('pcow-img', 'check', there)
    if not left['stats']['write-traps']:
        raise machine.Failure(f'no store was trapped, so nothing was shown: {left}')
    return {
        'engine': left['engine'],
        'persistence': left['persistence'],
        'stats': left['stats'],
        'times': info['times'],
        'writes': sum(writes),
        'downtime_ms': found['downtime'],
        'total_ms': found['total-time'],
        'transferred': found['ram']['transferred'],
    }
