# SPDX-License-Identifier: Apache-2.0
"""tcp_client.py HOST PORT: one connection to a server that echoes. Sends numbered lines until
SIGTERM, and compares what comes back. Says several times a second, as JSON, how many lines came
back, the longest time, in seconds, without any, and the time (time.monotonic()).
"""

import contextlib
import json
import select
import signal
import socket
import sys
import time
from types import FrameType

_PERIOD, _TELLS = 0.01, 0.2
_CONNECT_SECONDS = 30.0


class Client:
    def __init__(self, host: str, port: str) -> None:
        self._connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setblocking(False)
        self._sent, self._left = 0, b''
        self._last = time.monotonic()
        self.lines, self.longest, self.problem = 0, 0.0, ''
        self.ended = False

    def end(self, _number: int, _frame: FrameType | None) -> None:
        self.ended = True

    def turn(self) -> None:
        try:
            with contextlib.suppress(BlockingIOError):
                # so short that it goes as a whole
                self._connection.send(f'line {self._sent}\n'.encode())
                self._sent += 1
            if select.select([self._connection], [], [], _PERIOD)[0]:
                self._take(self._connection.recv(65536))
                time.sleep(_PERIOD)
        except OSError as e:
            self.problem = str(e)

    def _take(self, data: bytes) -> None:
        if not data:
            self.problem = 'it was closed'
        *whole, self._left = (self._left + data).split(b'\n')
        for line in whole:
            if line != f'line {self.lines}'.encode():
                self.problem = f'{line!r} in place of line {self.lines}'
            self.lines += 1
        if whole:
            self.longest = max(self.longest, time.monotonic() - self._last)
            self._last = time.monotonic()


def main(host: str, port: str) -> int:
    client, told = Client(host, port), 0.0
    signal.signal(signal.SIGTERM, client.end)
    while not client.ended and not client.problem:
        client.turn()
        if client.problem or time.monotonic() > told + _TELLS:
            told = time.monotonic()
            said = {name: getattr(client, name) for name in ('lines', 'longest', 'problem')}
            print(json.dumps(said | {'time': told}), flush=True)
    return 1 if client.problem else 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
