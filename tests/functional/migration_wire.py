# SPDX-License-Identifier: Apache-2.0
"""What carries a migration, and lets go or cuts off its very end."""

from __future__ import annotations

import contextlib
import enum
import os
from pathlib import Path
import signal
import socket
import subprocess
import threading
from typing import Self


class End(enum.Enum):
    """What becomes of the last of the stream."""

    PASSED = enum.auto()
    CUT = enum.auto()
    # it comes, but the source has failed by then: it lost the way back
    GIVEN_UP = enum.auto()


class Wire:
    """Between the two QEMUs: keeps back what comes after the VM, a description of it, until it is
    told what becomes of that.
    """

    _BEGIN = b'{"configuration"'
    _PREFIX = 5  # the kind of section, and its length

    def __init__(self, source: Path, destination: Path) -> None:
        self._destination = destination
        self._path = source
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(source))
        self._listener.listen(1)
        self._told = threading.Event()
        self._end = End.CUT
        self._destination_process: subprocess.Popen[str] | None = None
        self.at_the_end = threading.Event()
        self._thread = threading.Thread(target=self._connect)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._told.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._path.unlink()

    def go_on(self, end: End, destination: subprocess.Popen[str]) -> None:
        """With GIVEN_UP, the destination is stopped (SIGSTOP) before it can read the last byte."""
        self._end = end
        self._destination_process = destination
        self._told.set()

    def wait(self) -> None:
        """Until it is over."""
        self._thread.join()

    def _connect(self) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            source = stack.enter_context(self._listener.accept()[0])
            destination = stack.enter_context(socket.socket(socket.AF_UNIX))
            destination.connect(str(self._destination))
            back = threading.Thread(target=self._copy_back, args=(destination, source))
            back.start()
            stack.callback(back.join)
            try:
                self._copy(source, destination)
            finally:
                for end in (source, destination):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def _copy_back(self, destination: socket.socket, source: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := destination.recv(1 << 16):
                source.sendall(data)
            source.shutdown(socket.SHUT_WR)

    def _copy(self, source: socket.socket, destination: socket.socket) -> None:
        keep, rest = self._PREFIX + len(self._BEGIN), b''
        while (begin := rest.find(self._BEGIN)) < 0:
            destination.sendall(rest[:-keep])
            rest = rest[-keep:]
            if not (data := source.recv(1 << 16)):
                return
            rest += data
        destination.sendall(rest[: begin - self._PREFIX])
        self.at_the_end.set()
        self._told.wait()
        if self._end is End.PASSED:
            destination.sendall(rest[begin - self._PREFIX :])
            while data := source.recv(1 << 16):
                destination.sendall(data)
        elif self._end is End.GIVEN_UP:
            end = begin + int.from_bytes(rest[begin - 4 : begin], 'big')
            while len(rest) < end and (data := source.recv(1 << 16)):
                rest += data
            destination.sendall(rest[begin - self._PREFIX : -1])
            source.shutdown(socket.SHUT_WR)
            while source.recv(1 << 16):
                pass
            assert self._destination_process is not None
            self._destination_process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self._destination_process.pid, os.WSTOPPED | os.WNOWAIT)
            destination.sendall(rest[-1:])
