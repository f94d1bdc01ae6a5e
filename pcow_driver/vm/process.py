# SPDX-License-Identifier: Apache-2.0
"""A VM without libvirt: its QEMU is a child of this process, as a service for sandboxes has
thousands of them. :mod:`pcow_driver.vm.checkpoint` and :mod:`pcow_driver.vm.tree` work on it as on
a domain.

One object is one thread's at a time; different ones may be different threads'.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import os
import socket
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self
import uuid as uuidlib

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import fork as image_fork
from pcow_driver.images import image
from pcow_driver.virt import qmp

_START_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
_PERIOD = 0.001  # seconds between two looks for QEMU's socket
_SAID = 2000  # characters of what a QEMU that did not start has said


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a VM is."""

    name: str
    ram: str  # path of the image that is its RAM, whose size it has
    nvdimms: tuple[str, ...] = ()  # paths of images
    arguments: tuple[str, ...] = ()  # further ones of QEMU: -kernel, -initrd, -append, devices
    accelerator: str = 'kvm:tcg'  # the first of these that is there
    cpu: str = 'max'


class Process:
    """Context manager: its QEMU ends with it, as if the plug was pulled; its images stay."""

    def __init__(self, spec: Spec, directory: str) -> None:
        """
        :param directory: for its sockets and its log; its own, of at most 90 bytes, made if it is
            not there. What is at ``console`` in it is the guest's first serial port.
        """
        self.spec, self.directory, self.name = spec, directory, spec.name
        self._uuid = str(uuidlib.uuid4())
        self._process: subprocess.Popen[bytes] | None = None
        self._qmp: qmp.Qmp | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    @property
    def uuid(self) -> str:
        return self._uuid

    @property
    def console(self) -> str:
        """Path of a UNIX stream socket, the guest's first serial port."""
        return os.path.join(self.directory, 'console')

    def active(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def ram(self) -> str | None:
        return self.spec.ram

    def writable(self) -> list[str]:
        return [*self.spec.nvdimms, self.spec.ram]

    def qmp(self, command: str, **arguments: str | int) -> Any:
        """Run a QMP command and return what it returns.

        :raises DomainInvalid: it is off
        :raises QmpFailed: QEMU refused it, or has ended
        """
        if self._qmp is None:
            raise exception.DomainInvalid(domain=self.name, reason='it is off')
        return self._qmp.run(command, **arguments)

    def query(self, command: str = 'query-pcow') -> list[dict[str, Any]]:
        """As :meth:`pcow_driver.virt.domain.Domain.query`."""
        answer = self.qmp(command)
        if not isinstance(answer, list) or not all(isinstance(item, dict) for item in answer):
            raise exception.ToolOutputInvalid(tool='QEMU', reason=f'{command}: not a list')
        return answer

    def start(self) -> None:
        """Boot the guest.

        :raises DomainInvalid: it runs, or QEMU does not start, and says why
        """
        with self.started():
            pass

    @contextlib.contextmanager
    def started(self, *, run: bool = True) -> Iterator[None]:
        """A QEMU exists for it afterwards, in which the guest has not run meanwhile, and does now.
        If what is done meanwhile fails, it is off again.

        :param run: False: it is paused afterwards
        :raises DomainInvalid: it runs, or QEMU does not start, and says why
        """
        if self.active():
            raise exception.DomainInvalid(domain=self.name, reason='it runs already')
        self.end()
        self._begin()
        try:
            yield
            if run:
                self.qmp('cont')
        except BaseException:
            with interrupt.clearing_up():
                self.end()
            raise

    def end(self) -> None:
        """Its QEMU, if it has one. The images are what they are then: go on from a checkpoint."""
        if self._qmp is not None:
            self._qmp.close()
            self._qmp = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _begin(self) -> None:
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        control, log = os.path.join(self.directory, 'qmp'), os.path.join(self.directory, 'log')
        for path in (control, self.console):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        with open(log, 'wb') as output:
            self._process = subprocess.Popen(
                [
                    *(tool.find('emulator', build_first=True), *_arguments(self.spec)),
                    *('-uuid', self.uuid, '-S'),
                    *('-qmp', f'unix:{control},server=on,wait=off'),
                    *('-chardev', f'socket,id=console,path={self.console},server=on,wait=off'),
                    *('-serial', 'chardev:console', *self.spec.arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is for who has started it
            )
        try:
            self._qmp = qmp.Qmp(self._connect(control))
        except (exception.QmpFailed, OSError) as e:
            self.end()
            with open(log, encoding='utf-8', errors='replace') as said:
                words = ' '.join(said.read(_SAID).split())
            raise exception.DomainInvalid(
                domain=self.name, reason=f'QEMU did not start: {words or e}'
            ) from None
        except BaseException:
            with interrupt.clearing_up():
                self.end()
            raise

    def _connect(self, path: str) -> socket.socket:
        end = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(path)
            except OSError:
                connection.close()
                if not self.active() or time.monotonic() > end:
                    raise
                time.sleep(_PERIOD)
            else:
                connection.settimeout(_ANSWER_SECONDS)
                return connection


def _arguments(spec: Spec) -> list[str]:
    memory = image.info(spec.ram, force_share=True).virtual_size
    sizes = [image.info(path, force_share=True).virtual_size for path in spec.nvdimms]
    # each begins at a GiB
    most = memory + sum(units.round_up(size, units.GIB) + units.GIB for size in sizes)
    found = [
        *('-name', f'guest={spec.name}', '-nodefaults', '-no-user-config', '-display', 'none'),
        *('-machine', f'q35,nvdimm=on,memory-backend=ram,accel={spec.accelerator}'),
        *('-cpu', spec.cpu),
        *('-m', f'{memory // units.MIB}M,slots={len(sizes)},maxmem={most // units.MIB}M'),
        '-object',
        f'memory-backend-file,id=ram,mem-path={spec.ram},share=on,size={memory}',
        *('-device', 'vmgenid,guid=auto'),
    ]
    for number, (path, size) in enumerate(zip(spec.nvdimms, sizes, strict=True)):
        found += [
            '-object',
            f'memory-backend-file,id=mem{number},mem-path={path},share=on,size={size}',
            '-device',
            f'nvdimm,memdev=mem{number},id=nvdimm{number},uuid={uuidlib.uuid4()}',
        ]
    return found


def fork(parent: Process, checkpoint: str, name: str, directory: str) -> Process:
    """A VM that goes on from a checkpoint of the parent, beside it, and runs.

    Its images are new ones in the same pools, and hold what it stores. It belongs to the caller,
    with :func:`delete_images` for these when it has ended.

    :param name: of the child, and the begin of the names of its images
    :param directory: as of :class:`Process`
    :raises InvalidName:
    :raises ImageExists:
    :raises NoRoom: the operator's limits have no room for it
    :raises DomainInvalid: QEMU does not start
    :raises QmpFailed: QEMU cannot, and says why
    """
    with contextlib.ExitStack() as stack:
        made: list[str] = []
        stack.callback(_unlink, made)
        for number, path in enumerate(parent.spec.nvdimms):
            made.append(image_fork.fork(path, checkpoint, f'{name}-{number}'))
        made.append(image_fork.fork(parent.spec.ram, checkpoint, f'{name}{names.RAM_SUFFIX}'))
        spec = dataclasses.replace(parent.spec, name=name, ram=made[-1], nvdimms=tuple(made[:-1]))
        child = Process(spec, directory)
        with child.started():
            child.qmp('pcow-checkpoint-revert')
        stack.pop_all()
    return child


def delete_images(child: Process) -> None:
    """Of one that :func:`fork` made and that has ended.

    :raises DomainInvalid: it runs
    """
    if child.active():
        raise exception.DomainInvalid(domain=child.name, reason='it runs')
    _unlink(child.writable())


def _unlink(paths: list[str]) -> None:
    with interrupt.clearing_up():
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
