# SPDX-License-Identifier: Apache-2.0
"""A guest whose RAM is an image, too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from typing import Any

from tests.vm import machine

if TYPE_CHECKING:
    from tests.vm import scenarios

_MEMORY = '384M'
_CLUSTER = '4k'                                # so that no page becomes writable together with its neighbours
_GRANULE = 8192
_STOPPED_SECONDS = 10.0
_CLOCK = 'kvm-clock'


def _clock(vm: machine.Machine) -> float:
    """Seconds since the guest was booted, by its clock."""
    milliseconds, source = vm.command('clock').split()
    if vm.kvm and source != _CLOCK:
        raise vm.failure(f'the guest has the clock {source}, so nothing is shown')
    return int(milliseconds) / 1000


def _stop_for_snapshots(vm: machine.Machine, name: str) -> float:
    """Snapshots while the VM is stopped; the seconds that passed for the guest beyond those for which it ran."""
    begun, before = time.monotonic(), _clock(vm)         # in this order: the answer may take its time
    vm.run_qmp('stop')
    vm.run_qmp('pcow-snapshot-create', id='ram0', name=name)
    vm.run_qmp('pcow-snapshot-create', id='mem0', name=f'{name}-too')
    time.sleep(_STOPPED_SECONDS)
    vm.run_qmp('cont')
    passed = _clock(vm) - before
    # At most; and that may be long, as the guest has to copy all that it uses.
    ran = time.monotonic() - begun - _STOPPED_SECONDS
    if passed > ran + _STOPPED_SECONDS / 2:
        raise vm.failure(f'the clock of the guest went {passed:.1f} s forward, although the VM ran for {ran:.1f} s only')
    return round(passed - ran, 3)


def guest_ram(context: scenarios.Context) -> dict[str, Any]:
    """What KVM itself stores to RAM goes on after a snapshot.

    The guest's clock is a page that only KVM stores to: it does so when the VM goes on, to leave out the time for which
    it was stopped.
    """
    image, ram = context.image(context.directory), context.directory / 'ram.pcow'
    context.tool('pcow-img', 'create', '-q', '-o', f'cluster_size={_CLUSTER}', ram, _MEMORY)
    ahead = []
    with context.test_guest(*context.backend(image), '-machine', 'memory-backend=ram0',
                            '-object', f'memory-backend-file,id=ram0,mem-path={ram},size={_MEMORY},share=on',
                            '-append', f'console=ttyS0 quiet panic=-1 mitigations=off clocksource={_CLOCK}') as vm:
        vm.wait_ready()
        vm.command('load-start')
        for name in ('first', 'second'):
            ahead.append(_stop_for_snapshots(vm, name))
            vm.run_qmp('pcow-snapshot-create', id='ram0', name=f'{name}-live')
        vm.command('load-stop')
        vm.command('load-adopt')
        vm.command(f'stores 1 2000 {_GRANULE}')
        vm.command('read')
        # the firmware has the vCPU enter system management, for which KVM stores its registers
        vm.run_qmp('pcow-snapshot-create', id='ram0', name='before-reset')
        vm.run_qmp('system_reset')
        vm.wait_ready()
        _clock(vm)
        info = vm.power_off()
    for path in (image, ram):
        context.check_image(path)
    return {'engine': info['engine'], 'persistence': info['persistence'], 'stats': info['stats'], 'times': info['times'],
            'clock_ahead_seconds': ahead}
