# SPDX-License-Identifier: Apache-2.0
"""QEMU's control channel, with nothing but the standard library: tests/vm uses this inside a
virtual machine as well.
"""

import json
from pathlib import Path
import socket
import subprocess
import time
from typing import Any

START_SECONDS = 60
EVENT_SECONDS = 30


def connect(
    path: Path, process: subprocess.Popen[Any], timeout: float = START_SECONDS
) -> socket.socket:
    """Connect to a socket that a QEMU is about to make.

    :raises OSError: it ended, or the socket did not come in time
    """
    end = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except OSError:
            connection.close()
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            connection.settimeout(timeout)
            return connection


class Qmp:
    """Commands and events over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        # For reading alone: one that is written to as well drops what it has read ahead, an event
        # behind a reply for instance.
        self._file = connection.makefile('rb')
        self.events: list[dict[str, Any]] = []
        # A client that connects while the machine starts may see an event first.
        while 'QMP' not in (line := self._read('the greeting')):
            self.events.append(line)
        self.run('qmp_capabilities')

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def _send(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self.begin(name, **arguments)
        return self.end(name)

    def begin(self, name: str, /, **arguments: Any) -> None:
        """A command whose end somebody waits for later, with ``end``."""
        self._socket.sendall(json.dumps({'execute': name, 'arguments': arguments}).encode() + b'\n')

    def end(self, name: str) -> dict[str, Any]:
        """The reply to the command that was begun."""
        while True:
            reply = self._read(name)
            if 'event' not in reply:
                return reply
            self.events.append(reply)

    def _read(self, wanted: str) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise AssertionError(f'{wanted}: QEMU closed the connection')
        return dict(json.loads(line))

    def run(self, command: str, /, **arguments: Any) -> Any:
        """Result of a command that succeeds; '_' in names of arguments stands for '-'."""
        reply = self._send(
            command, {key.replace('_', '-'): value for key, value in arguments.items()}
        )
        if 'error' in reply:
            raise AssertionError(f'{command}: {reply["error"]["desc"]}')
        return reply['return']

    def run_error(self, command: str, /, **arguments: Any) -> str:
        """Message of a command that fails."""
        reply = self._send(command, arguments)
        if 'error' not in reply:
            raise AssertionError(f'{command} succeeded: {reply["return"]}')
        return str(reply['error']['desc'])

    def take_event(self, name: str) -> dict[str, Any] | None:
        """Data of an event that has come; it is taken away."""
        for event in self.events:
            if event['event'] == name:
                self.events.remove(event)
                return dict(event.get('data', {}))
        return None

    def wait_time(self, name: str) -> float:
        """When an event was sent, in seconds since 1970; it is taken away."""
        end = time.monotonic() + EVENT_SECONDS
        while time.monotonic() < end:
            for event in self.events:
                if event['event'] == name:
                    self.events.remove(event)
                    stamp = event['timestamp']
                    return float(stamp['seconds'] + stamp['microseconds'] / 1e6)
            self.run('query-status')
            time.sleep(0.02)
        raise AssertionError(f'no event {name} in {EVENT_SECONDS} s')

    def wait_event(self, name: str, timeout: float = EVENT_SECONDS) -> dict[str, Any]:
        """An event, also one that came before."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            data = self.take_event(name)
            if data is not None:
                return data
            self.run('query-status')
            time.sleep(0.02)
        raise AssertionError(f'no event {name} in {timeout} s')
