# SPDX-License-Identifier: Apache-2.0
"""A guest whose RAM is an image, too."""

from __future__ import annotations

from pathlib import Path
import time
from typing import TYPE_CHECKING
from typing import Any

from tests.vm import chain
from tests.vm import machine
from tests.vm import space

if TYPE_CHECKING:
    from tests.vm import scenarios

_MEMORY = '384M'
# so that no page becomes writable together with its neighbours
_CLUSTER = '4k'
GRANULE = 8192
_STOPPED_SECONDS = 10.0
_STOPPED_TCG_SECONDS = 2.0  # no clock that goes on by itself
_CLOCK = 'kvm-clock'
_POOL_SIZE = 1024 * chain.MIB
# after which what was prepared for stores, and not wanted, is given back
_PREPARED_SECONDS = 12.0
# after which QEMU tries again what could not be prepared
_RETRY_SECONDS = 15.0
_PUT_OFF = 'memory that KVM stores to (clock, stolen time) cannot be made writable'


def _clock(vm: machine.Machine) -> float:
    """Seconds since the guest was booted, by its clock."""
    milliseconds, source = vm.command('clock').split()
    if vm.kvm and source != _CLOCK:
        raise vm.failure(f'the guest has the clock {source}, so nothing is shown')
    return int(milliseconds) / 1000


def counters(vm: machine.Machine) -> dict[str, int]:
    """What was done for the stores to RAM; *watches* had to find an address that nothing
    else told.
    """
    stats = next(info['stats'] for info in vm.run_qmp('query-pcow') if info['id'] == 'ram0')
    return {name: int(stats[name]) for name in ('write-traps', 'pages-copied', 'watches')}


def prepare(
    context: scenarios.Context, directory: Path, more: str = ''
) -> tuple[Path, tuple[str, ...]]:
    """An image for RAM, and arguments for QEMU.

    :param more: properties of the backend, with a comma in front
    """
    path = directory / 'ram.pcow'
    context.tool('pcow-img', 'create', '-q', '-o', f'cluster_size={_CLUSTER}', path, _MEMORY)
    return path, (
        '-machine',
        'memory-backend=ram0',
        '-object',
        f'memory-backend-file,id=ram0,mem-path={path},size={_MEMORY},share=on{more}',
    )


def _stop_for_a_while(vm: machine.Machine, snapshot: str = '') -> float:
    """The seconds that passed for the guest beyond those for which it ran.

    :param snapshot: of RAM and image while the VM is stopped
    """
    pause = _STOPPED_SECONDS if vm.kvm else _STOPPED_TCG_SECONDS
    # in this order: the answer may take its time
    begun, before = time.monotonic(), _clock(vm)
    vm.run_qmp('stop')
    if snapshot:
        vm.run_qmp('pcow-snapshot-create', id='ram0', name=snapshot)
        vm.run_qmp('pcow-snapshot-create', id='mem0', name=f'{snapshot}-too')
    time.sleep(pause)
    vm.run_qmp('cont')
    passed = _clock(vm) - before
    # At most; and that may be long, as the guest has to copy all that it uses.
    ran = time.monotonic() - begun - pause
    if passed > ran + pause / 2:
        raise vm.failure(
            f'the clock of the guest went {passed:.1f} s forward, although the VM ran for '
            f'{ran:.1f} s only'
        )
    return round(passed - ran, 3)


def guest_ram(context: scenarios.Context) -> dict[str, Any]:
    """What KVM itself stores to RAM goes on after a snapshot.

    The guest's clock is a page that only KVM stores to: it does so when the VM goes on, to leave
    out the time for which it was stopped.

    What the processor stores to there by itself goes on as well. QEMU finds page tables and the
    frames of interrupts without a watch, but not those of debug exceptions, which have a stack of
    their own.
    """
    image, (ram, memory) = context.image(context.directory), prepare(context, context.directory)
    ahead = []
    with context.test_guest(
        *context.backend(image),
        *memory,
        '-append',
        f'console=ttyS0 quiet panic=-1 mitigations=off clocksource={_CLOCK}',
    ) as vm:
        vm.wait_ready()
        vm.command('load-start')
        for name in ('first', 'second'):
            ahead.append(_stop_for_a_while(vm, name))
            vm.run_qmp('pcow-snapshot-create', id='ram0', name=f'{name}-live')
        vm.command('load-stop')
        vm.command('load-adopt')
        vm.command(f'stores 1 2000 {GRANULE}')
        vm.command('read')
        vm.run_qmp('pcow-snapshot-create', id='ram0', name='before-trap')
        before = counters(vm)
        vm.command('trap')
        for_traps = counters(vm)['watches'] - before['watches']
        # the firmware has the vCPU enter system management, for which KVM stores its registers
        vm.run_qmp('pcow-snapshot-create', id='ram0', name='before-reset')
        vm.run_qmp('system_reset')
        vm.wait_ready()
        _clock(vm)
        figures = counters(vm)
        figures |= {'watches': figures['watches'] - for_traps, 'watches-for-traps': for_traps}
        info = vm.power_off()
    for path in (image, ram):
        context.check_image(path)
    return {
        'engine': info['engine'],
        'persistence': info['persistence'],
        'stats': info['stats'],
        'times': info['times'],
        'clock_ahead_seconds': ahead,
        'ram': figures,
    }


def _check_stopped(vm: machine.Machine) -> None:
    """A store of the guest itself has failed, which it is not told, as it takes no
    machine checks.
    """
    vm.wait_event('STOP', machine.COMMAND_SECONDS)
    status = vm.run_qmp('query-status')['status']
    if status != 'io-error':
        raise vm.failure(f'the VM is {status}')


def ram_full(context: scenarios.Context) -> dict[str, Any]:
    """RAM on a pool that is full for a while after a snapshot, and makes stores fail: what KVM
    itself stores there goes on later.

    What it stores to cannot be prepared when the vCPUs run again, which is tried once more later;
    until then the clock, a page that nobody else stores to, stays as it was.
    """
    if context.place.accel != 'kvm':
        raise machine.Failure('nobody but KVM stores to RAM by himself')
    pool = context.directory / 'full'
    pool.mkdir()
    space.mount(pool, f'size={_POOL_SIZE}')
    try:
        image, (ram, memory) = context.image(context.directory), prepare(context, pool, space.FAIL)
        with context.test_guest(
            *context.backend(image),
            *memory,
            '-append',
            f'console=ttyS0 quiet panic=-1 mitigations=off clocksource={_CLOCK}',
        ) as vm:
            vm.wait_ready()
            _clock(vm)
            vm.run_qmp('stop')
            vm.wait_event('STOP', machine.COMMAND_SECONDS)  # the next one is of QEMU's doing
            vm.run_qmp('pcow-snapshot-create', id='ram0', name='frozen')
            time.sleep(_PREPARED_SECONDS)  # what was prepared for stores is given back
            taken = space.take(pool)
            vm.run_qmp('cont')
            _check_stopped(vm)
            if _PUT_OFF not in vm.said():
                raise vm.failure('QEMU does not say that it could not make memory writable for KVM')
            taken.unlink()
            vm.run_qmp('cont')
            begun = time.monotonic()
            vm.command('read')
            time.sleep(max(0.0, begun + _RETRY_SECONDS - time.monotonic()))
            vm.command('read')  # so that all CPUs have run since
            # not with a snapshot, for which all would be prepared anew
            ahead = _stop_for_a_while(vm)
            vm.command(f'stores 1 2000 {GRANULE}')
            vm.command('read')
            info = vm.power_off()
        for path in (image, ram):
            context.check_image(path)
        return {
            'engine': info['engine'],
            'persistence': info['persistence'],
            'stats': info['stats'],
            'times': info['times'],
            'clock_ahead_seconds': ahead,
        }
    finally:
        space.unmount(pool)
