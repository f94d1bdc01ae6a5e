# SPDX-License-Identifier: Apache-2.0
"""A QEMU without a guest: the test itself stores to guest memory (qtest protocol) and talks QMP,
over sockets in a directory.
"""

import functools
from pathlib import Path
import re
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self

from tests.functional import images
from tests.functional import qmp

START_SECONDS = qmp.START_SECONDS


def preload(directory: Path, *sources: str) -> dict[str, str]:
    """Environment for a QEMU that finds some calls elsewhere than in the C library.

    :param sources: files beside this one, which are compiled into the directory
    """
    libraries = []
    for source in sources:
        library = directory / f'{Path(source).stem}.so'
        subprocess.run(
            ['cc', '-shared', '-fPIC', '-pthread', '-o', library, Path(__file__).parent / source],
            check=True,
        )
        libraries.append(str(library))
    return {'LD_PRELOAD': ' '.join(libraries)}


class Qemu:
    """Context manager; arguments come after what every test needs: a machine with two NVDIMM slots.

    :param accel: without one, no CPU runs
    """

    def __init__(self, directory: Path, *arguments: str, accel: str = 'qtest') -> None:
        self._sockets = {name: directory / f'{name}.sock' for name in ('qmp', 'qtest')}
        self._command = [
            images.program('qemu-system-x86_64'),
            '-machine',
            'q35,nvdimm=on',
            '-accel',
            accel,
            '-m',
            '128M,slots=2,maxmem=8G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            '-qmp',
            f'unix:{self._sockets["qmp"]},server=on,wait=off',
            '-qtest',
            f'unix:{self._sockets["qtest"]},server=on,wait=off',
            '-qtest-log',
            'none',
            *arguments,
        ]
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._qmp = qmp.Qmp(qmp.connect(self._sockets['qmp'], self.process))
            self._open.append(self._qmp)
            self._qtest = qmp.connect(self._sockets['qtest'], self.process)
            self._answers = self._qtest.makefile('rb')
            self._open += [self._answers, self._qtest]
        except BaseException as error:
            self.process.kill()
            error.add_note(f'QEMU: {self.process.stderr.read() if self.process.stderr else ""}')
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for resource in self._open:
            resource.close()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def qmp(self, command: str, /, **arguments: Any) -> Any:
        """Result of a command that succeeds; '_' in names of arguments stands for '-'."""
        return self._qmp.run(command, **arguments)

    def qmp_error(self, command: str, /, **arguments: Any) -> str:
        """Message of a command that fails."""
        return self._qmp.run_error(command, **arguments)

    def begin_qmp(self, command: str, /, **arguments: Any) -> None:
        """Begin a command; ``end_qmp`` has its reply."""
        self._qmp.begin(command, **arguments)

    def end_qmp(self, command: str) -> dict[str, Any]:
        """The whole reply."""
        return self._qmp.end(command)

    def take_event(self, name: str) -> dict[str, Any] | None:
        """Data of an event that has come, as far as it has been read."""
        return self._qmp.take_event(name)

    def take_events(self) -> list[dict[str, Any]]:
        """All that have come, in their order."""
        self.qmp('query-status')
        events, self._qmp.events = self._qmp.events, []
        return events

    def wait_event(self, name: str) -> dict[str, Any]:
        """An event, also one that came before."""
        return self._qmp.wait_event(name)

    def wait_time(self, name: str) -> float:
        """When an event was sent, also one that came before, in seconds since 1970."""
        return self._qmp.wait_time(name)

    def wait_status(self, expected: str) -> str:
        """The run state, when it has become what is expected, or after some time."""
        end = time.monotonic() + qmp.EVENT_SECONDS
        while (
            found := str(self.qmp('query-status')['status'])
        ) != expected and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def quit(self) -> None:
        """End in an orderly way."""
        self.qmp('quit')
        self.process.wait(START_SECONDS)

    def address(self, device: str) -> int:
        """Where an NVDIMM or a virtio-pmem device lies in guest memory."""
        listed = {entry['data']['id']: entry['data'] for entry in self.qmp('query-memory-devices')}
        if device in listed:
            return int(listed[device]['addr'])
        path = f'/machine/peripheral/{device}'
        return int(self.qmp('qom-get', path=path, property='memaddr'))

    def ask(self, line: str) -> str:
        """Answer to a command of the qtest protocol, without its OK."""
        return self.ask_together(line)[0]

    def ask_together(self, *lines: str) -> list[str]:
        """The same for commands that come in one piece, so that QEMU does nothing else
        in between.
        """
        self._qtest.sendall(''.join(f'{line}\n' for line in lines).encode())
        replies = [self._answers.readline().decode().split(maxsplit=1) for _ in lines]
        for reply in replies:
            if not reply or reply[0] != 'OK':
                raise AssertionError(f'qtest: {reply}')
        return [reply[1].strip() if len(reply) > 1 else '' for reply in replies]

    def pause(self) -> None:
        """Between two looks at whether a device has done something."""
        time.sleep(0.0005)

    def write(self, address: int, data: bytes) -> None:
        self.ask(f'write {address:#x} {len(data):#x} 0x{data.hex()}')

    def read(self, address: int, length: int) -> bytes:
        return bytes.fromhex(self.ask(f'read {address:#x} {length:#x}')[2:])


@functools.cache
def devices() -> frozenset[str]:
    """The names that -device knows in this build."""
    command = [images.program('qemu-system-x86_64'), '-device', 'help']
    said = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=True,
    ).stdout
    return frozenset(re.findall(r'^name "([^"]+)"', said, re.MULTILINE))


def refused(*arguments: str, fds: tuple[int, ...] = ()) -> str:
    """What QEMU says when it does not start.

    :param fds: file descriptors that it inherits
    """
    result = subprocess.run(
        [
            images.program('qemu-system-x86_64'),
            '-machine',
            'q35,nvdimm=on',
            '-accel',
            'qtest',
            '-m',
            '128M,slots=2,maxmem=8G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            *arguments,
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
        pass_fds=fds,
    )
    if result.returncode == 0:
        raise AssertionError('QEMU accepted it')
    return result.stderr
