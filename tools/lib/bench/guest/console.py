# SPDX-License-Identifier: Apache-2.0
"""A guest under QEMU (TCG), driven through its serial console."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
import re
import signal
import socket
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self

from pcow_driver.common import exception

_READY = re.compile(rb'pcow-guest: ready')
_FAILED = re.compile(rb'pcow-guest: error: ([^\r\n]*)|(Kernel panic[^\r\n]*)')
_START_SECONDS = 30.0
_QMP_SECONDS = 120.0
_TAIL = 2000  # bytes of the console that an error shows
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Guest:
    """Context manager; the guest ends with it, as if the plug was pulled."""

    def __init__(self, command: list[str], directory: Path) -> None:
        self._sockets = {name: directory / f'{name}.sock' for name in ('console', 'qmp')}
        self._command = [
            *command,
            '-chardev',
            f'socket,id=console,path={self._sockets["console"]},server=on,wait=off',
            '-serial',
            'chardev:console',
            '-qmp',
            f'unix:{self._sockets["qmp"]},server=on,wait=off',
        ]
        self._errors = directory / 'qemu.log'
        self._text = b''  # what the console said and no command has taken yet
        self._commands = 0

    def __enter__(self) -> Self:
        with open(self._errors, 'wb') as errors:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                preexec_fn=_end_with_parent,
            )
        try:
            self._console = self._connect('console')
            self._monitor = self._connect('qmp')
            self._answers = self._monitor.makefile('rb')
            self._answers.readline()  # the greeting
            self.qmp('qmp_capabilities', {})
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._answers.close()
        self._monitor.close()
        self._console.close()
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _connect(self, name: str) -> socket.socket:
        limit = time.monotonic() + _START_SECONDS
        while time.monotonic() < limit and self._process.poll() is None:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._sockets[name]))
                connection.settimeout(1 if name == 'console' else _QMP_SECONDS)
                return connection
            except OSError:
                connection.close()
                time.sleep(0.002)
        raise exception.PcowError(
            reason=f'QEMU did not start: '
            f'{self._errors.read_text(errors="replace").strip()[-_TAIL:]}'
        )

    def wait_ready(self, timeout: float) -> None:
        """:raises PcowError: no shell in ``timeout`` seconds"""
        self._expect(_READY, timeout)

    def qmp(self, command: str, arguments: dict[str, Any]) -> Any:
        """What it returns.

        :raises PcowError: QEMU refuses it
        """
        self._monitor.sendall(
            json.dumps({'execute': command, 'arguments': arguments}).encode() + b'\n'
        )
        answer: dict[str, Any] = {'event': None}
        while 'event' in answer:
            answer = json.loads(self._answers.readline())
        if 'error' in answer:
            raise exception.PcowError(reason=f'{command}: {answer["error"]["desc"]}')
        return answer['return']

    def run(self, command: str, timeout: float) -> str:
        """Run a shell command in the guest and return what it prints.

        :raises PcowError: it fails or does not end
        """
        self._commands += 1
        begin, end = f'begin-{self._commands}', f'end-{self._commands}'
        # the quotes keep the echo of this line from looking like its output
        for byte in f'echo "pcow-""{begin}"; {command}; echo "pcow-""{end}-$?"\n'.encode():
            self._console.sendall(bytes([byte]))  # a UART has no flow control
        match = self._expect(
            re.compile(rf'pcow-{begin}\r?\n(.*?)pcow-{end}-(\d+)\r?\n'.encode(), re.DOTALL), timeout
        )
        output = match[1].decode(errors='replace').replace('\r', '').strip()
        if match[2] != b'0':
            raise exception.PcowError(reason=f'in the guest, {command!r} failed: {output[-_TAIL:]}')
        return output

    def ask(self, line: str, answer: re.Pattern[bytes], timeout: float) -> re.Match[bytes]:
        """What a program that has the console says to this line; short ones, as a UART has no flow
        control.

        :raises PcowError: it does not say that
        """
        self._console.sendall(line.encode() + b'\n')
        return self._expect(answer, timeout)

    def _expect(self, pattern: re.Pattern[bytes], timeout: float) -> re.Match[bytes]:
        limit = time.monotonic() + timeout
        while time.monotonic() < limit:
            match = pattern.search(self._text)
            if match:
                self._text = self._text[match.end() :]
                return match
            failed = _FAILED.search(self._text)
            if failed:
                raise exception.PcowError(
                    reason=f'the guest gave up: {(failed[1] or failed[2]).decode(errors="replace")}'
                )
            try:
                data = self._console.recv(65536)
            except TimeoutError:
                continue
            if not data:
                break
            self._text += data
        said = self._errors.read_text(errors='replace') + self._text.decode(errors='replace')
        raise exception.PcowError(
            reason=f'the guest did not answer in {timeout:.0f} s: {" ".join(said[-_TAIL:].split())}'
        )
