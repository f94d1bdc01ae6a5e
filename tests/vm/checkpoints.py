# SPDX-License-Identifier: Apache-2.0
"""VMs whose RAM and NVDIMM are images, and checkpoints of the whole of them: what power cuts must
leave of these. One has its state on a qcow2 disk (snapshot-save), one has no disk
(pcow-checkpoint-create).

A VM has no guest: who is the guest stores by the qtest protocol, and flushes nothing, as nobody
flushes RAM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self

from tests.functional import qmp
from tests.vm import machine

_PAGE = 4096
_PIECE = 128 << 10
# What a checkpoint's guest fills before it: from here on, with the byte of its number. More than a
# flush does line by line, so that it commits, and whole slabs, so that nothing is left to commit in
# the background.
_RAM_SIZE, _RAM_FILLED = 32 << 20, (8 << 20, 10 << 20)
_NVDIMM_SIZE, _NVDIMM_FILLED = 16 << 20, (2 << 20, 10 << 20)


@dataclasses.dataclass(frozen=True)
class Files:
    """What a VM consists of."""

    name: str
    ram: Path
    nvdimm: Path
    disk: Path | None

    @property
    def filled(self) -> dict[Path, tuple[int, int]]:
        return {self.ram: _RAM_FILLED, self.nvdimm: _NVDIMM_FILLED}


WITH_DISK = Files(
    name='disk',
    ram=Path('/fs/ext4/ram.pcow'),
    nvdimm=Path('/fs/xfs/nvdimm.pcow'),
    disk=Path('/fs/ext4/states.qcow2'),
)
DISKLESS = Files(
    name='diskless', ram=Path('/fs/xfs/ram.pcow'), nvdimm=Path('/fs/ext4/nvdimm.pcow'), disk=None
)
ALL = (WITH_DISK, DISKLESS)
_SECONDS = 300.0
_BACKENDS = ('ram0', 'mem0')
_BY_TURNS = 24
# until the library has prepared the space that comes next
_SETTLE_SECONDS = 1.0
_OTHER = 255  # a byte that is of no checkpoint


def name_of(number: int) -> str:
    return f'checkpoint-{number}'


def _alone(number: int) -> str:
    return f'alone-{number}'


def _byte(number: int) -> int:
    return number % 251 + 1


def make(place: machine.Place) -> None:
    """At the first boot."""
    for files in ALL:
        for path, size in ((files.ram, _RAM_SIZE), (files.nvdimm, _NVDIMM_SIZE)):
            machine.run(place.binaries / 'pcow-img', 'create', '-q', path, size)
        if files.disk is not None:
            machine.run('qemu-img', 'create', '-q', '-f', 'qcow2', files.disk, '1M')


class Vm:
    """Context manager."""

    def __init__(self, place: machine.Place, files: Files) -> None:
        self._files = files
        self._sockets = {
            kind: place.logs / f'checkpoints-{files.name}.{kind}' for kind in ('qmp', 'qtest')
        }
        self._errors = place.logs / f'checkpoints-{files.name}.errors'
        self._command = [
            str(place.binaries / 'qemu-system-x86_64'),
            '-machine',
            'q35,nvdimm=on,memory-backend=ram0',
            '-accel',
            'qtest',
            '-m',
            f'{_RAM_SIZE >> 20}M,slots=2,maxmem=1G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            '-object',
            f'memory-backend-file,id=ram0,mem-path={files.ram},size={_RAM_SIZE},share=on',
            '-object',
            f'memory-backend-file,id=mem0,mem-path={files.nvdimm},share=on',
            '-device',
            'nvdimm,memdev=mem0,id=nv0',
            '-qmp',
            f'unix:{self._sockets["qmp"]},server=on,wait=off',
            '-qtest',
            f'unix:{self._sockets["qtest"]},server=on,wait=off',
            '-qtest-log',
            'none',
        ]
        if files.disk is not None:
            self._command += [
                '-blockdev',
                f'driver=qcow2,node-name=disk0,file.driver=file,file.filename={files.disk}',
                '-device',
                'virtio-blk-pci,drive=disk0',
            ]
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with open(self._errors, 'wb') as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
            )
        self._open.callback(self._end)
        try:
            self._qmp = qmp.Qmp(qmp.connect(self._sockets['qmp'], self._process, _SECONDS))
            self._open.callback(self._qmp.close)
            self._qtest = qmp.connect(self._sockets['qtest'], self._process, _SECONDS)
            self._open.callback(self._qtest.close)
        except OSError:
            self._open.close()
            raise machine.Failure(f'QEMU does not start: {self._errors.read_text()}') from None
        (device,) = self._qmp.run('query-memory-devices')
        self._start = {self._files.ram: 0, self._files.nvdimm: int(device['data']['addr'])}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.close()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _fill(self, path: Path, byte: int) -> None:
        """In pieces: much at a time is stored past the caches."""
        offset, length = self._files.filled[path]
        for at in range(offset, offset + length, _PIECE):
            self._qtest.sendall(
                f'memset {self._start[path] + at:#x} {_PIECE:#x} {byte:#x}\n'.encode()
            )
            reply = self._qtest.recv(100)
            if reply != b'OK\n':
                raise machine.Failure(f'qtest: {reply!r}')

    def _store(self, number: int) -> None:
        """What counts is stored where there is space already: to get some commits all of
        the file.
        """
        for path in self._files.filled:
            self._fill(path, _OTHER)
        time.sleep(_SETTLE_SECONDS)
        for name in _BACKENDS:
            self._qmp.run('pcow-flush', id=name)
        for path in self._files.filled:
            self._fill(path, _byte(number))

    def checkpoint(self, number: int) -> None:
        """Of the whole VM; with a disk by turns as libvirt takes them and by ``savevm``, and then
        of each image alone, which commits least.

        All are to be durable on return.
        """
        self._store(number)
        if self._files.disk is None:
            self._qmp.run('pcow-checkpoint-create', name=name_of(number))
            return
        if number % _BY_TURNS:
            said = self._qmp.run('human-monitor-command', command_line=f'savevm {name_of(number)}')
            if said:
                raise machine.Failure(f'savevm: {said}')
        else:
            self._save(number)
        self._store(number)
        for name in _BACKENDS:
            self._qmp.run('pcow-snapshot-create', id=name, name=_alone(number))

    def _save(self, number: int) -> None:
        self._qmp.run(
            'snapshot-save', job_id='job', tag=name_of(number), vmstate='disk0', devices=['disk0']
        )
        end = time.monotonic() + _SECONDS
        while time.monotonic() < end:
            (job,) = [item for item in self._qmp.run('query-jobs') if item['id'] == 'job']
            if job['status'] == 'concluded':
                self._qmp.run('job-dismiss', id='job')
                if 'error' in job:
                    raise machine.Failure(f'snapshot-save: {job["error"]}')
                return
            time.sleep(0.01)
        raise machine.Failure('snapshot-save does not end')


def _states(place: machine.Place, path: Path) -> dict[str, int]:
    """Bytes of VM state of each snapshot, by name."""
    listed = json.loads(
        machine.run(place.binaries / 'pcow-img', 'snapshot', '-l', '--output=json', path)
    )
    return {str(item['name']): int(item['vm-state-size']) for item in listed}


def _compare(
    place: machine.Place, path: Path, filled: tuple[int, int], name: str, number: int
) -> int:
    """Pages that were compared."""
    target = Path('/tmp/checkpoint.raw')
    target.unlink(missing_ok=True)
    machine.run(
        place.binaries / 'pcow-img', 'convert', '-f', 'pcow', '-O', 'raw', '-l', name, path, target
    )
    offset, length = filled
    with target.open('rb') as file:
        file.seek(offset)
        data = file.read(length)
    target.unlink()
    expected = bytes([_byte(number)]) * _PAGE
    wrong = [at for at in range(0, length, _PAGE) if data[at : at + _PAGE] != expected]
    if wrong:
        raise machine.Failure(
            f'{path}, {name}: {len(wrong)} of {length // _PAGE} pages are not as they were, '
            f'the first at {offset + wrong[0]:#x}'
        )
    return length // _PAGE


def verify(place: machine.Place, sure: list[int], unsure: list[int]) -> dict[str, Any]:
    """All that were told of are there, on both images; and what is there is whole, told of or not.

    A name in one image and a mark in the other is for the next QEMU to finish; then it is whole,
    too.
    """
    figures = {'checkpoints': 0, 'checkpoint-pages': 0}
    for files in ALL:
        kinds = (name_of, _alone) if files.disk is not None else (name_of,)
        for path, filled in files.filled.items():
            machine.run(place.binaries / 'pcow-img', 'check', path, accept=(0, 3))
            states = _states(place, path)
            for number in (*sure, *unsure):
                for name in (kind(number) for kind in kinds):
                    if name in states:
                        figures['checkpoint-pages'] += _compare(place, path, filled, name, number)
                        figures['checkpoints'] += 1
                    elif number in sure:
                        raise machine.Failure(f'{path}: {name} is gone; there are {sorted(states)}')
                    # the state is what commits it: a name without one was given too early
                    if files.disk is None and path == files.ram and states.get(name) == 0:
                        raise machine.Failure(f'{path}: {name} has no state')
    return figures
