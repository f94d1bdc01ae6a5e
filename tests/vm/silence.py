# SPDX-License-Identifier: Apache-2.0
"""What a guest that says nothing is doing: looked at twice, so that it can be told whether it runs,
waits or spins.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import time
from typing import Any

from tests.functional import qmp

_APART = 2.0  # seconds between the two looks
_TRACING = Path('/sys/kernel/debug/tracing')
_TRACED = 0.5  # seconds
_TRACE_LINES = 60
_EVENTS = ('kvm_inj_exception', 'kvm_userspace_exit', 'kvm_emulate_insn')
# KVM_EXIT_SHUTDOWN: the processor gives up, and the machine is reset
_SHUTDOWN = 8
_KERNEL_LOG = 6000  # bytes
_STATISTICS = (
    'exits',
    'halt_exits',
    'irq_injections',
    'irq_window_exits',
    'mmio_exits',
    'request_irq_exits',
    'pf_taken',
    'pf_fixed',
)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors='replace').strip()
    return '?'


def _threads(pid: int) -> Iterator[str]:
    """One line for each thread and, where the kernel shows it, where it waits."""
    tasks = Path(f'/proc/{pid}/task')
    for task in sorted(tasks.iterdir() if tasks.is_dir() else (), key=lambda path: int(path.name)):
        fields = _read(task / 'stat').rpartition(')')[2].split()
        spent = f'{fields[0]} user {fields[11]} system {fields[12]}' if len(fields) > 12 else '?'
        stack = ' < '.join(
            line.partition('] ')[2].partition('+')[0]
            for line in _read(task / 'stack').splitlines()[:8]
        )
        where = f'system call {_read(task / "syscall")}; {stack or _read(task / "wchan")}'
        yield f'{task.name} {_read(task / "comm")}: {spent}; {where}'


def _kvm_statistics() -> Iterator[str]:
    """Counters of each vCPU, if debugfs is mounted."""
    for directory in sorted(Path('/sys/kernel/debug/kvm').glob('*-*/vcpu*')):
        yield f'{directory.name}: ' + ', '.join(
            f'{name} {_read(directory / name)}' for name in _STATISTICS
        )
    for directory in sorted(Path('/sys/kernel/debug/kvm').glob('*-*')):
        yield ', '.join(
            f'{path.name} {_read(path)}' for path in sorted(directory.iterdir()) if path.is_file()
        )


def record() -> None:
    """Have the kernel note the few events of KVM that tell why a guest was reset; it costs nothing
    that could be measured.
    """
    with contextlib.suppress(OSError):  # a kernel without tracepoints
        for name in _EVENTS:
            (_TRACING / f'events/kvm/{name}/enable').write_text('1')
        (_TRACING / 'tracing_on').write_text('1')
        # what comes after a reset would push out what was before; the kernel takes it once
        (_TRACING / 'events/kvm/kvm_userspace_exit/trigger').write_text(
            f'traceoff if reason == {_SHUTDOWN}'
        )


def recorded() -> str:
    """The end of what was noted."""
    lines = _read(_TRACING / 'trace').splitlines()
    return '\n'.join((f'--- {len(lines)} lines of trace:', *lines[-_TRACE_LINES:]))


def _trace() -> str:
    """All that KVM does in a moment: the end of it."""
    switch = _TRACING / 'events/kvm/enable'
    with contextlib.suppress(OSError):
        switch.write_text('1')
        time.sleep(_TRACED)
        switch.write_text('0')
    return recorded()


def _kernel_log() -> str:
    text = b''
    with contextlib.suppress(OSError):
        descriptor = os.open('/dev/kmsg', os.O_RDONLY | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                while True:
                    text += os.read(descriptor, 8192)
        finally:
            os.close(descriptor)
    return text[-_KERNEL_LOG:].decode(errors='replace').strip()


def _ask(channel: qmp.Qmp, command: str, **arguments: Any) -> str:
    try:
        answer = channel.run(command, **arguments)
    except (AssertionError, OSError, ValueError) as e:
        return f'{command}: {e or type(e).__name__}'
    return answer if isinstance(answer, str) else json.dumps(answer)


def _look(pid: int, channel: qmp.Qmp) -> Iterator[str]:
    yield from _threads(pid)
    yield from _kvm_statistics()
    yield _ask(channel, 'query-status')
    yield _ask(channel, 'query-pcow')
    yield _ask(channel, 'human-monitor-command', command_line='info registers -a')
    for cpu in range(2):
        yield _ask(channel, 'human-monitor-command', command_line=f'info lapic {cpu}')
    yield Path('/proc/interrupts').read_text()


def describe(pid: int, channel: qmp.Qmp, kvm: bool) -> str:
    """Threads of QEMU, counters of KVM, registers of the guest, all twice; then the log of the
    kernel that it runs on.

    :param pid: of the QEMU
    :param kvm: it runs under KVM, in the outer machine, whose tracepoints are nobody else's
    """
    looks = []
    for pause in (_APART, 0.0):
        looks.append('\n'.join(_look(pid, channel)))
        time.sleep(pause)
    return (
        '\n--- a moment later:\n'.join(looks)
        + (_trace() if kvm else '')
        + f'\n--- kernel log:\n{_kernel_log()}'
    )
