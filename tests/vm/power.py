# SPDX-License-Identifier: Apache-2.0
"""Power cuts, seen from inside: what a machine that is killed at any moment had flushed is there
when it starts again.

Step N of the load is known from N alone: a write and a flush, a snapshot now and then, by turns on
each file system, and a write that nothing flushes; and now and then a checkpoint of a VM whose RAM
is an image (:mod:`tests.vm.checkpoints`). The machine tells every step that is done; whoever kills
it knows from that what must be found.
"""

from __future__ import annotations

from collections.abc import Iterable
import contextlib
import json
import mmap
import os
from pathlib import Path
from typing import Any

from tests.vm import checkpoints
from tests.vm import fsdax
from tests.vm import machine

# steps at most that may be done and not told of when the machine is killed
UNTOLD = 40
_STEPS = 400  # of one boot, at most
_KINDS = tuple(fsdax.REGIONS)
_RESULTS = Path('/dev/ttyS1')
_SLOT = 64 << 10
_PAGE = 4096
_SLOTS = 48  # few, so that most writes copy what a snapshot holds
_SNAPSHOT_EVERY = 10  # steps of one file system
_CHECKPOINT_EVERY = 12  # steps
_SIZE = '16M'
# its first bytes are the number of a step, stored and never flushed
_UNFLUSHED = Path('/fs/ext4/unflushed')
_NUMBER_BYTES = 8


def _step(number: int) -> tuple[str, int, int]:
    """File system, slot and byte of a step; from 1 on."""
    return _KINDS[number % len(_KINDS)], number * 29 // len(_KINDS) % _SLOTS, number % 251 + 1


def _snapshot_of(number: int) -> str | None:
    """The snapshot that is made after the write of a step."""
    return f's{number}' if number // len(_KINDS) % _SNAPSHOT_EVERY == 0 else None


def _checkpoints(numbers: Iterable[int]) -> list[int]:
    """The steps after which there is a checkpoint."""
    return [number for number in numbers if number % _CHECKPOINT_EVERY == 0]


def _image(kind: str) -> Path:
    return Path('/fs') / kind / 'power.pcow'


def _places(place: machine.Place) -> dict[str, machine.Place]:
    return {kind: machine.Place.load(place.dump() | {'pool': f'/fs/{kind}'}) for kind in _KINDS}


def begin(place: machine.Place) -> dict[str, Any]:
    """The file systems and images, at the first boot."""
    made = {}
    for kind, own in _places(place).items():
        made[kind] = fsdax.namespace(own, kind)['mount']
        machine.run(place.binaries / 'pcow-img', 'create', '-q', _image(kind), _SIZE)
    checkpoints.make(place)
    _UNFLUSHED.write_bytes(bytes(_PAGE))
    os.sync()
    return made


def _write(number: int) -> str:
    _kind, slot, value = _step(number)
    return f'write -q -P {value} {slot * _SLOT} {_SLOT}'


def load(place: machine.Place, first: int) -> dict[str, Any]:
    """Steps from ``first`` on, until the machine is killed."""
    # nothing is flushed but by the steps
    Path('/proc/sys/vm/dirty_writeback_centisecs').write_text('0\n')
    with contextlib.ExitStack() as stack:
        results = stack.enter_context(open(_RESULTS, 'w', buffering=1))
        unflushed = stack.enter_context(
            mmap.mmap(stack.enter_context(open(_UNFLUSHED, 'r+b')).fileno(), _PAGE)
        )
        vms = [stack.enter_context(checkpoints.Vm(place, files)) for files in checkpoints.ALL]
        for number in range(first, first + _STEPS):
            kind = _step(number)[0]
            commands = [_write(number), 'flush']
            if name := _snapshot_of(number):
                commands.append(f'snapshot create {name}')
            # what the next step here writes is begun, and in caches
            commands.append(_write(number + len(_KINDS)))
            machine.run(
                place.binaries / 'pcow-io',
                *(word for item in commands for word in ('-c', item)),
                _image(kind),
            )
            if _checkpoints([number]):
                for vm in vms:
                    vm.checkpoint(number)
            unflushed[:_NUMBER_BYTES] = number.to_bytes(_NUMBER_BYTES, 'little')
            results.write(json.dumps({'done': number}) + '\n')
    raise machine.Failure('nobody killed the machine')


def _allowed(kind: str, slot: int, sure: list[int], unsure: list[int]) -> set[int]:
    """Bytes that a slot may hold: that of the last step that was told of, or of one after it that
    may have been done.
    """
    last = max((number for number in sure if _step(number)[:2] == (kind, slot)), default=0)
    later = {
        _step(number)[2] for number in unsure if number > last and _step(number)[:2] == (kind, slot)
    }
    return {_step(last)[2] if last else 0} | later


def _content(place: machine.Place, kind: str, snapshot: str | None) -> bytes:
    target = Path('/tmp') / f'{kind}.raw'
    target.unlink(missing_ok=True)
    select = ('-l', snapshot) if snapshot else ()
    machine.run(
        place.binaries / 'pcow-img',
        'convert',
        '-f',
        'pcow',
        '-O',
        'raw',
        *select,
        _image(kind),
        target,
    )
    data = target.read_bytes()
    target.unlink()
    return data


def _compare(kind: str, data: bytes, sure: list[int], unsure: list[int], what: str) -> int:
    """Pages compared; each of them holds what one step wrote."""
    pages = 0
    for slot in range(_SLOTS):
        allowed = _allowed(kind, slot, sure, unsure)
        for offset in range(slot * _SLOT, (slot + 1) * _SLOT, _PAGE):
            page = data[offset : offset + _PAGE]
            # a write that was cut off may have changed a part of the page
            if not set(page) <= allowed:
                held = sorted(set(page))[:4]
                raise machine.Failure(
                    f'{kind}, {what}: the page at {offset:#x} holds {held} and not {allowed}'
                )
            pages += 1
    return pages


def verify(place: machine.Place, runs: list[tuple[int, int]]) -> dict[str, Any]:
    """Look at everything that must be there.

    :param runs: of each boot so far, the first step and the last that was told
    """
    steps = [number for first, last in runs for number in range(first, last + 1)]
    unsure = [number for _first, last in runs for number in range(last + 1, last + 1 + UNTOLD)]
    figures: dict[str, Any] = {'steps': len(steps), 'pages': 0, 'snapshots': 0}
    for kind, own in _places(place).items():
        device = f'/dev/pmem{fsdax.REGIONS[kind].removeprefix("region")}'
        machine.run('mount', '-t', kind, '-o', 'dax=always,noatime', device, own.pool)
        # 3: leaks, and nothing else
        machine.run(place.binaries / 'pcow-img', 'check', _image(kind), accept=(0, 3))
        figures['pages'] += _compare(kind, _content(place, kind, None), steps, unsure, 'active')
        named = {
            item['name']
            for item in json.loads(
                machine.run(
                    place.binaries / 'pcow-img', 'snapshot', '-l', '--output=json', _image(kind)
                )
            )
        }
        for number in steps:
            name = _snapshot_of(number)
            if name and _step(number)[0] == kind:
                if name not in named:
                    raise machine.Failure(
                        f'{kind}: the snapshot {name} is gone; there are {sorted(named)}'
                    )
                before = [item for item in steps if item <= number]
                untold = [item for item in unsure if item < number]
                figures['pages'] += _compare(
                    kind, _content(place, kind, name), before, untold, name
                )
                figures['snapshots'] += 1
    if runs:
        first, last = runs[-1]
        figures |= checkpoints.verify(
            place,
            _checkpoints(range(first, last + 1)),
            _checkpoints(range(last + 1, last + 1 + UNTOLD)),
        )
    return figures | {
        'unflushed': int.from_bytes(_UNFLUSHED.read_bytes()[:_NUMBER_BYTES], 'little')
    }


def run(place: machine.Place, name: str) -> dict[str, Any]:
    """``begin``, ``load-FIRST``, or ``verify-FIRST-LAST-FIRST-LAST...``."""
    what, *numbers = name.split('-')
    values = [int(number) for number in numbers]
    if what == 'begin':
        return begin(place)
    if what == 'load':
        return load(place, values[0])
    return verify(place, list(zip(values[::2], values[1::2], strict=True)))
