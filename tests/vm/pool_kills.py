# SPDX-License-Identifier: Apache-2.0
"""Pools whose making or end was killed, that are mounted twice, or that were moved: inside the
machine, on persistent memory.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import ctypes
import json
import os
from pathlib import Path
import signal
import time
from typing import Any

from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.provision import plan
from tests.vm import command
from tests.vm import machine

POOLS = Path('/var/lib/pcow/pools')
NAME = 'killed'
_CLONE_NEWNS = 0x00020000  # Linux, include/uapi/linux/sched.h


def _expect(condition: object, what: object) -> None:
    if not condition:
        raise machine.Failure(str(what))


def _killed(after: int, *words: str) -> None:
    """pcowctl ends without another instruction when it has done so many steps."""

    def prepare() -> None:
        def run(self: plan.Plan, _report: object = None) -> None:
            for step in self.steps[:after]:
                step.do()
            os.kill(os.getpid(), signal.SIGKILL)

        plan.Plan.run = run  # type: ignore[method-assign,assignment]

    done = command.run(*words, prepare=prepare)
    _expect(
        done.exit_code == -signal.SIGKILL,
        f'{done.command} was not killed: {done.exit_code} {done.output}',
    )


def _steps(*words: str) -> list[str]:
    return command.must(*words, '--dry-run').output.splitlines()


def _create(region: str) -> tuple[str, ...]:
    return 'pool', 'create', NAME, '--region', region, '--size', '640M', '--fs', 'xfs'


def _is_gone() -> None:
    directory = POOLS / NAME
    _expect(not os.path.ismount(directory), f'{directory} is still mounted')
    _expect(mount_unit.what(str(directory)) is None, f'{directory} still has a unit')
    _expect(f'pcow-{NAME}' not in machine.run('ndctl', 'list', '-Ni'), 'there is still a namespace')
    command.must_fail('no pool', 'pool', 'show', NAME)


def made(region: str) -> None:
    """Killed between mount and unit, the pool is finished by the command that the refusal names."""
    create, directory = _create(region), str(POOLS / NAME)
    mounted = (
        next(number for number, line in enumerate(_steps(*create)) if line.startswith('mount ')) + 1
    )
    _killed(mounted, *create)
    command.must_fail(f"'pcowctl pool create NAME {directory}' finishes", *create)
    done = command.must('pool', 'create', NAME, directory)
    for wanted in ('xfs_io', 'mounts it at boot', 'pmem'):
        _expect(wanted in done.output, done.output)
    uuid = machine.run('blkid', '-o', 'value', '-s', 'UUID', _device(directory)).strip()
    _expect(
        mount_unit.what(directory) == f'UUID={uuid}' and mount_unit.mounted_at_boot(directory),
        'no unit mounts it',
    )


def _device(directory: str) -> str:
    mount = filesystem.mount_at(directory)
    if mount is None:
        raise machine.Failure(f'nothing is mounted at {directory}')
    return mount.source


def ended(region: str) -> int:
    """Killed after the unmount, and between the wiping and the end of the namespace: the end goes
    on.

    (After each step: tests/unit/pcow_driver/provision/test_plans.py, in DRAM.)
    """
    destroy = ('pool', 'remove', '--destroy', NAME)
    number = len(_steps(*destroy))
    for after in (2, number - 2):
        _killed(after, *destroy)
        command.must_fail(f'--destroy {NAME}', 'pool', 'show', NAME)
        command.must_fail(f'--destroy {NAME}', 'pool', 'remove', NAME)
        command.must(*destroy)
        _is_gone()
        command.must(*_create(region))
    return number


@contextlib.contextmanager
def _other_name_space() -> Iterator[None]:
    """A process that keeps all mounts of now to itself, as a container does."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = ctypes.CDLL(None).unshare(_CLONE_NEWNS)
        os.write(tell, b'0' if code == 0 else b'1')
        while True:
            time.sleep(60)
    try:
        _expect(os.read(ready, 1) == b'0', 'no name space of mounts could be made')
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(tell)


def mounted_twice() -> None:
    """What is not free is there afterwards as it was."""
    directory, elsewhere = str(POOLS / NAME), Path('/tmp/elsewhere')
    command.must('pool', 'set', NAME, '--overcommit', '3')
    before = command.must('pool', 'show', NAME, '-f', 'json', stdout_only=True).output
    elsewhere.mkdir()
    machine.run('mount', '--bind', directory, elsewhere)
    command.must_fail('as well', 'pool', 'remove', NAME, '--destroy')
    machine.run('umount', elsewhere)
    with _other_name_space():
        command.must_fail('in use', 'pool', 'remove', NAME, '--destroy')
    after = command.must('pool', 'show', NAME, '-f', 'json', stdout_only=True).output
    _expect(json.loads(after) == json.loads(before), f'{after}, not {before}')
    _expect(mount_unit.mounted_at_boot(directory), 'nothing mounts it at boot any more')
    command.must_fail('over-commit', 'image', 'create', f'{NAME}/huge', '--size', '8G')


def moved() -> None:
    """Mounted in another place it keeps name, settings and unit; and comes back."""
    old, new = str(POOLS / NAME), str(POOLS / 'elsewhere')
    Path(new).mkdir()
    for there, here in ((old, new), (new, old)):
        device = _device(there)
        machine.run('umount', there)
        machine.run('mount', '-t', 'xfs', '-o', 'dax=always', device, here)
        command.must_fail('pool import DIRECTORY', 'pool', 'show', NAME)
        command.must('pool', 'import', here)
        _expect(
            mount_unit.what(there) is None and mount_unit.mounted_at_boot(here),
            f'the unit is not that of {here}',
        )
        command.must_fail('over-commit', 'image', 'create', f'{NAME}/huge', '--size', '8G')


def scenario(region: str) -> dict[str, Any]:
    """Leaves the pool for the next boot, where it must be again."""
    made(region)
    steps = ended(region)
    mounted_twice()
    moved()
    return {'steps of an end': steps}
