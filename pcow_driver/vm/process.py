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
import fcntl
import os
import socket
import stat
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self
import uuid as uuidlib

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import names
from pcow_driver.common import text
from pcow_driver.common import tool
from pcow_driver.common import units
from pcow_driver.copies import fork as image_fork
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.virt import qmp as control

LOG = logging.getLogger(__name__)

_LOCK = 'lock'
# Options of QEMU with something of the host that belongs to one machine
_NOT_SHARED = {'-chardev', '-drive', '-blockdev', '-hda', '-cdrom', '-netdev', '-nic', '-net'}
_START_SECONDS = 30.0
_ANSWER_SECONDS = 120.0
_PERIOD = 0.001  # seconds between two looks for QEMU's socket
_END_SECONDS = 30.0  # after which a QEMU that was killed is left to the kernel
_SAID = 2000  # characters of what a QEMU that did not start has said


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a VM is."""

    name: str
    ram: str  # path of the image that is its RAM, whose size it has
    nvdimms: tuple[str, ...] = ()  # paths of images, all of them in pools
    arguments: tuple[str, ...] = ()  # further ones of QEMU: -kernel, -initrd, -append, devices
    accelerator: str = 'kvm:tcg'  # the first of these that is there
    cpu: str = 'max'


class Process:
    """Context manager: its QEMU ends with it, as if the plug was pulled; its images stay."""

    def __init__(self, spec: Spec, directory: str) -> None:
        """
        :param directory: for its sockets and its log; its own, of at most 90 bytes, made if it is
            not there. What is at ``console`` in it is the guest's first serial port.
        :raises ImageNotFound: that of its RAM
        """
        self.spec, self.directory, self.name = spec, directory, spec.name
        self._uuid = image.info(spec.ram, force_share=True).uuid or str(uuidlib.uuid4())
        self._process: subprocess.Popen[bytes] | None = None
        self._qmp: control.Qmp | None = None

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
        """That of its RAM: who else works on its checkpoints has the same lock."""
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
        if not self.active():
            raise exception.DomainInvalid(domain=self.name, reason='it is off')
        try:
            if self._qmp is None:  # the last answer did not come in time
                self._qmp = self._connect()
            return self._qmp.run(command, **arguments)
        except OSError as e:
            raise exception.QmpFailed(
                command=command, error_class='', description=f'QEMU cannot be reached: {e.strerror}'
            ) from None
        except BaseException as e:
            # what comes now would be taken for the answer to the next command
            if not (isinstance(e, exception.QmpFailed) and e.details.get('error_class')):
                self._close()
            raise

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
        with interrupt.clearing_up():
            if self._process is not None:
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_SECONDS)
                self._process = None
            self._close()

    def _close(self) -> None:
        if self._qmp is not None:
            self._qmp.close()
            self._qmp = None

    def _begin(self) -> None:
        lock, log = _own(self.directory, self.name), os.path.join(self.directory, 'log')
        try:
            for path in (self._control, self.console):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(log, flags, 0o600), 'wb') as output:
                self._process = subprocess.Popen(
                    [
                        *(tool.find('emulator', build_first=True), *_arguments(self.spec)),
                        *('-uuid', self.uuid, '-S'),
                        *('-qmp', f'unix:{_escaped(self._control)},server=on,wait=off'),
                        '-chardev',
                        f'socket,id=console,path={_escaped(self.console)},server=on,wait=off',
                        *('-serial', 'chardev:console', *self.spec.arguments),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(lock,),  # it has the directory as long as it is there
                    start_new_session=True,  # a Ctrl-C is for who has started it
                )
            os.truncate(lock, 0)
            os.pwrite(lock, f'{self._process.pid}\n'.encode(), 0)
            self._qmp = self._connect()
        except (exception.QmpFailed, OSError) as e:
            begun = self._process is not None
            self.end()
            raise exception.DomainInvalid(
                domain=self.name, reason=f'QEMU did not start: {_said(log) if begun else e}'
            ) from None
        except BaseException:
            self.end()
            raise
        finally:
            os.close(lock)

    @property
    def _control(self) -> str:
        return os.path.join(self.directory, 'qmp')

    def _connect(self) -> control.Qmp:
        """:raises QmpFailed: nobody answers, in words of QEMU's or the kernel's
        :raises OSError: the same
        """
        end = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._control)
            except OSError:
                connection.close()
                if not self.active() or time.monotonic() > end:
                    raise
                time.sleep(_PERIOD)
            else:
                connection.settimeout(_ANSWER_SECONDS)
                return control.Qmp(connection)


def _said(log: str) -> str:
    with open(log, encoding='utf-8', errors='replace') as said:
        return text.one_line(said.read(_SAID)) or 'it does not answer'


def _own(directory: str, name: str) -> int:
    """The lock of a directory that is this user's alone, and no QEMU's: a descriptor.

    :raises DomainInvalid: it is somebody else's
    """
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise exception.DomainInvalid(
                domain=name, reason=f'{directory} is no directory that only this user can write to'
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = os.open(os.path.join(directory, _LOCK), flags, 0o600)
    except OSError as e:
        raise exception.DomainInvalid(domain=name, reason=f'{directory}: {e.strerror}') from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.pread(lock, 20, 0).decode(errors='replace').strip()
        os.close(lock)
        raise exception.DomainInvalid(
            domain=name, reason=f'a QEMU has {directory}: end it (process {pid or "unknown"}) first'
        ) from None
    return lock


def _escaped(value: str) -> str:
    """For an option of QEMU, in which a comma ends a value."""
    return value.replace(',', ',,')


def _arguments(spec: Spec) -> list[str]:
    memory = image.info(spec.ram, force_share=True).virtual_size
    sizes = [image.info(path, force_share=True).virtual_size for path in spec.nvdimms]
    # each begins at a GiB
    most = memory + sum(units.round_up(size, units.GIB) + units.GIB for size in sizes)
    found = [
        *('-name', f'guest={_escaped(spec.name)}'),
        *('-nodefaults', '-no-user-config', '-display', 'none'),
        *('-machine', f'q35,nvdimm=on,hpet=off,memory-backend=ram,accel={spec.accelerator}'),
        *('-cpu', spec.cpu),
        *('-m', f'{memory // units.MIB}M,slots={len(sizes)},maxmem={most // units.MIB}M'),
        '-object',
        f'memory-backend-file,id=ram,mem-path={_escaped(spec.ram)},share=on,size={memory}',
        *('-device', 'vmgenid,guid=auto'),
    ]
    for number, (path, size) in enumerate(zip(spec.nvdimms, sizes, strict=True)):
        found += [
            '-object',
            f'memory-backend-file,id=mem{number},mem-path={_escaped(path)},share=on,size={size}',
            '-device',
            f'nvdimm,memdev=mem{number},id=nvdimm{number},uuid={uuidlib.uuid4()}',
        ]
    return found


def fork(
    parent: Process,
    checkpoint: str,
    name: str,
    directory: str,
    arguments: tuple[str, ...] | None = None,
) -> Process:
    """A VM that goes on from a checkpoint of the parent, beside it, and runs.

    Its images are new ones in the same pools, and hold what it stores. It belongs to the caller,
    with :func:`delete_images` for these when it has ended.

    :param name: of the child, and the begin of the names of its images
    :param directory: as of :class:`Process`
    :param arguments: as in :class:`Spec`, of the same devices; None: the parent's, which name no
        socket, file or interface that two QEMUs cannot share
    :raises InvalidName:
    :raises ImageExists:
    :raises NoRoom: the operator's limits have no room for it
    :raises DomainInvalid: QEMU does not start; or it needs arguments of its own
    :raises QmpFailed: QEMU cannot, and says why
    """
    shared = _NOT_SHARED & set(parent.spec.arguments)
    if arguments is None and shared:
        raise exception.DomainInvalid(
            domain=name,
            reason=f'{", ".join(sorted(shared))} of its parent are not for two: give it arguments',
        )
    with contextlib.ExitStack() as stack:
        made: list[str] = []
        stack.callback(_clear_up, made)
        parts = [(path, f'{name}-{number}') for number, path in enumerate(parent.spec.nvdimms)]
        for path, new_name in (*parts, (parent.spec.ram, f'{name}{names.RAM_SUFFIX}')):
            made.append(
                image_fork.fork(path, checkpoint, new_name, cluster_size=image_fork.VM_CLUSTER_SIZE)
            )
        child = Process(
            dataclasses.replace(
                parent.spec,
                name=name,
                ram=made[-1],
                nvdimms=tuple(made[:-1]),
                arguments=parent.spec.arguments if arguments is None else arguments,
            ),
            directory,
        )
        stack.callback(child.end)
        with child.started():
            child.qmp('pcow-checkpoint-revert')
        stack.pop_all()
    return child


def delete_images(child: Process) -> None:
    """Of one that :func:`fork` made and that has ended.

    :raises DomainInvalid: it runs
    :raises ImageInUse: somebody has one open
    :raises ImageHasChildren: a fork of it stands on one
    """
    if child.active():
        raise exception.DomainInvalid(domain=child.name, reason='it runs')
    for path in reversed(child.writable()):
        with contextlib.suppress(exception.ImageNotFound):
            _delete(path)


def _delete(path: str) -> None:
    """:raises PoolInvalid: it is in none"""
    directory, file = os.path.split(os.path.abspath(path))
    pool_module.open_directory(directory).delete_image(file.removesuffix(names.IMAGE_SUFFIX))


def _clear_up(paths: list[str]) -> None:
    """Of a child that did not start; why is told, and this besides."""
    with interrupt.clearing_up():
        for path in paths:
            try:
                _delete(path)
            except exception.PcowError as e:
                LOG.warning('The image of a child that did not start stays: %s', e)
