# SPDX-License-Identifier: Apache-2.0
"""A QEMU without a guest: the test itself stores to guest memory (qtest protocol) and talks QMP, over sockets in a directory."""

import json
from pathlib import Path
import socket
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self

from tests.functional import images

START_SECONDS = 60
EVENT_SECONDS = 30


class Qemu:
    """Context manager; arguments come after what every test needs (a machine with two NVDIMM slots and no CPU that runs)."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._sockets = {name: directory / f'{name}.sock' for name in ('qmp', 'qtest')}
        self._command = [
            images.program('qemu-system-x86_64'), '-machine', 'q35,nvdimm=on', '-accel', 'qtest', '-m', '128M,slots=2,maxmem=8G',
            '-nodefaults', '-no-user-config', '-display', 'none',
            '-qmp', f'unix:{self._sockets["qmp"]},server=on,wait=off',
            '-qtest', f'unix:{self._sockets["qtest"]},server=on,wait=off', '-qtest-log', 'none',
            *arguments]
        self.events: list[dict[str, Any]] = []
        self._open: list[Any] = []

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True)
        try:
            qmp = self._connect('qmp')
            self._qmp = qmp.makefile('rw')
            qtest = self._connect('qtest')
            self._qtest = qtest.makefile('rw')
            self._open += [self._qmp, self._qtest, qmp, qtest]
            self._qmp.readline()
            self.qmp('qmp_capabilities')
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for resource in self._open:
            resource.close()
        if self.process.stderr is not None:
            self.process.stderr.close()

    def _connect(self, name: str) -> socket.socket:
        end = time.monotonic() + START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._sockets[name]))
            except OSError:
                connection.close()
                if self.process.poll() is not None or time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                connection.settimeout(START_SECONDS)
                return connection

    def _send(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._qmp.write(json.dumps({'execute': name, 'arguments': arguments}) + '\n')
        self._qmp.flush()
        while True:
            reply = json.loads(self._qmp.readline())
            if 'event' not in reply:
                return dict(reply)
            self.events.append(reply)

    def qmp(self, command: str, /, **arguments: Any) -> Any:
        """Result of a command that succeeds; '_' in names of arguments stands for '-'."""
        reply = self._send(command, {key.replace('_', '-'): value for key, value in arguments.items()})
        if 'error' in reply:
            raise AssertionError(f'{command}: {reply["error"]["desc"]}')
        return reply['return']

    def qmp_error(self, command: str, /, **arguments: Any) -> str:
        """Message of a command that fails."""
        reply = self._send(command, arguments)
        if 'error' not in reply:
            raise AssertionError(f'{command} succeeded: {reply["return"]}')
        return str(reply['error']['desc'])

    def wait_event(self, name: str) -> dict[str, Any]:
        """An event, also one that came before."""
        end = time.monotonic() + EVENT_SECONDS
        while time.monotonic() < end:
            for event in self.events:
                if event['event'] == name:
                    self.events.remove(event)
                    return dict(event['data'])
            self.qmp('query-status')
            time.sleep(0.02)
        raise AssertionError(f'no event {name} in {EVENT_SECONDS} s')

    def quit(self) -> None:
        """End in an orderly way."""
        self.qmp('quit')
        self.process.wait(START_SECONDS)

    def address(self, device: str) -> int:
        """Where an NVDIMM lies in guest memory."""
        return next(int(entry['data']['addr']) for entry in self.qmp('query-memory-devices') if entry['data']['id'] == device)

    def _command_qtest(self, line: str) -> str:
        self._qtest.write(line + '\n')
        self._qtest.flush()
        reply = self._qtest.readline().split(maxsplit=1)
        if not reply or reply[0] != 'OK':
            raise AssertionError(f'qtest: {reply}')
        return reply[1].strip() if len(reply) > 1 else ''

    def write(self, address: int, data: bytes) -> None:
        self._command_qtest(f'write {address:#x} {len(data):#x} 0x{data.hex()}')

    def read(self, address: int, length: int) -> bytes:
        return bytes.fromhex(self._command_qtest(f'read {address:#x} {length:#x}')[2:])


def refused(*arguments: str) -> str:
    """What QEMU says when it does not start."""
    result = subprocess.run(
        [images.program('qemu-system-x86_64'), '-machine', 'q35,nvdimm=on', '-accel', 'qtest', '-m', '128M,slots=2,maxmem=8G',
         '-nodefaults', '-no-user-config', '-display', 'none', *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_SECONDS, check=False)
    if result.returncode == 0:
        raise AssertionError('QEMU accepted it')
    return result.stderr
