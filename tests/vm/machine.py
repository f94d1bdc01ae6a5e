# SPDX-License-Identifier: Apache-2.0
"""A QEMU with a guest: its console, QMP, and the port over which a test guest takes commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
import re
import select
import socket
import subprocess
import time
from types import TracebackType
from typing import Any
from typing import Self

from tests.functional import qmp
from tests.vm import silence

START_SECONDS = 60.0
# A machine inside a machine, on a host that does other things as well: a hang is told late, but an
# answer is never too late.
BOOT_SECONDS = 300.0
COMMAND_SECONDS = 300.0
END_SECONDS = 60.0
_PANIC = re.compile(rb'Kernel panic[^\r\n]*|pcow-guest: error: [^\r\n]*')
_TAIL = 4000  # bytes of a console that an error shows


class Failure(Exception):
    """What a scenario found wrong."""


class Silence(Failure):
    """The guest did not go on: it may be the outer machine's emulation that lost an interrupt."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where things are, in the outer machine or on this one."""

    accel: str  # of the QEMUs under test
    binaries: Path  # pcow-img, pcow-io, qemu-system-x86_64
    kernel: Path
    initrd: Path  # of the test guest
    guest: Path  # the test guest's program
    info_block: Path  # bytes for offset 4096 of a test image
    debian_initrd: Path
    template: Path  # a sealed image with a Debian guest
    chain: Path  # directory with what chain.make() made
    pool: Path  # directory for images
    logs: Path
    cpus: int

    def dump(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            key: str(value) if isinstance(value, Path) else value
            for key, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def load(cls, fields: dict[str, Any]) -> Place:
        """What dump() returned."""
        values: dict[str, Any] = {
            key: value if key in ('accel', 'cpus') else Path(value) for key, value in fields.items()
        }
        return cls(**values)


def run(
    *command: object,
    timeout: float = COMMAND_SECONDS,
    stdin: bytes = b'',
    accept: tuple[int, ...] = (0,),
) -> str:
    """Run a program and return what it prints.

    :raises Failure: it failed or did not end in time
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise Failure(f'{" ".join(words)}: no end within {timeout:.0f} s') from None
    if done.returncode not in accept:
        message = (done.stderr or done.stdout).decode(errors='replace').strip()
        raise Failure(f'{" ".join(words)}: exit code {done.returncode}: {message[-2000:]}')
    return done.stdout.decode(errors='replace')


class Machine:
    """Context manager. ``arguments`` come after what all need; ``command_port``: it is a test
    guest.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        *arguments: str,
        command_port: bool = True,
        memory: str = '384M',
    ) -> None:
        self.name = name
        self.kvm = place.accel == 'kvm'
        self._log = place.logs / f'{name}.log'
        self._errors = place.logs / f'{name}.errors'
        self._sockets = {kind: place.logs / f'{name}.{kind}' for kind in ('qmp', 'port', 'console')}
        port = (
            (
                '-device',
                'virtio-serial-pci',
                '-chardev',
                f'socket,id=port,path={self._sockets["port"]},server=on,wait=off',
                '-device',
                'virtserialport,chardev=port',
            )
            if command_port
            else ()
        )
        self._command = [
            str(place.binaries / 'qemu-system-x86_64'),
            '-name',
            f'guest={name},process={name}',
            '-machine',
            'q35,nvdimm=on',
            '-accel',
            'kvm' if place.accel == 'kvm' else 'tcg,thread=multi',
            '-cpu',
            'host,svm=off' if place.accel == 'kvm' else 'max',
            '-smp',
            str(place.cpus),
            '-m',
            f'{memory},slots=2,maxmem=16G',
            '-nodefaults',
            '-no-user-config',
            '-display',
            'none',
            '-chardev',
            f'socket,id=console,path={self._sockets["console"]},server=on,wait=off,logfile={self._log}',
            '-serial',
            'chardev:console',
            '-qmp',
            f'unix:{self._sockets["qmp"]},server=on,wait=off',
            '-kernel',
            str(place.kernel),
            *port,
            *arguments,
        ]
        self._command_port = command_port
        self._console: socket.socket | None = None
        # bytes of the console's log that a pattern was found in
        self._console_seen = 0
        self._shell_commands = 0
        self._pending = b''
        self._sent = 0.0
        self.times: dict[str, float] = {}  # seconds that boots and commands of the guest took
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.kvm:
            silence.record()
        with open(self._errors, 'wb') as errors:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, text=True
            )
        try:
            self.qmp = qmp.Qmp(self._connect('qmp'))
            self._open.callback(self.qmp.close)
            if self._command_port:
                self._port = self._connect('port')
                self._open.callback(self._port.close)
        except BaseException:
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
        self._open.close()
        for path in self._sockets.values():
            path.unlink(missing_ok=True)

    def _connect(self, kind: str) -> socket.socket:
        try:
            return qmp.connect(self._sockets[kind], self.process, START_SECONDS)
        except OSError:
            raise self.failure('QEMU did not start') from None

    def failure(self, what: str, state: str = '', kind: type[Failure] = Failure) -> Failure:
        """An exception with what QEMU and the guest's console said last, and the ``state`` in which
        they were found.
        """
        said = (
            self._errors.read_bytes()[-_TAIL:].decode(errors='replace').strip()
            if self._errors.exists()
            else ''
        )
        console = (
            self._log.read_bytes()[-_TAIL:].decode(errors='replace').strip()
            if self._log.exists()
            else ''
        )
        code = self.process.poll()
        ended = f' (QEMU ended with {code})' if code is not None else ''
        return kind(
            f'{self.name}: {what}{ended}'
            + (f'\n--- QEMU:\n{said}' if said else '')
            + (f'\n--- console:\n{console}' if console else '')
            + (f'\n--- state:\n{state}' if state else '')
        )

    def said(self) -> str:
        """What QEMU has printed."""
        return self._errors.read_text(errors='replace') if self._errors.exists() else ''

    def _silence(self, what: str) -> Failure:
        """Of a guest that is late, with the state it is in."""
        return self.failure(what, silence.describe(self.process.pid, self.qmp, self.kvm), Silence)

    def _recorded(self) -> str:
        """Why the machine may have ended: events of QEMU and of KVM."""
        with contextlib.suppress(AssertionError, OSError, ValueError):
            self.qmp.run('query-status')
        return '\n'.join(
            (
                *(json.dumps(event) for event in self.qmp.events),
                silence.recorded() if self.kvm else '',
            )
        )

    def _check_alive(self) -> None:
        if self.process.poll() is not None:
            raise self.failure('QEMU ended', self._recorded())
        panic = _PANIC.search(self._log.read_bytes()) if self._log.exists() else None
        if panic:
            raise self.failure(panic[0].decode(errors='replace'))

    def read_line(self, timeout: float) -> str:
        """Next line of the test guest.

        :raises Failure: none came in time, or the guest or QEMU ended
        """
        limit = time.monotonic() + timeout
        while b'\n' not in self._pending:
            if time.monotonic() > limit:
                raise self._silence(f'the guest said nothing for {timeout:.0f} s')
            if select.select([self._port], [], [], 0.5)[0]:
                data = self._port.recv(4096)
                if not data:
                    raise self.failure('the guest hung up', self._recorded())
                self._pending += data
            else:
                self._check_alive()
        line, _newline, self._pending = self._pending.partition(b'\n')
        return line.decode(errors='replace')

    def wait_ready(self, timeout: float = BOOT_SECONDS) -> None:
        """Until the test guest takes commands."""
        begun = time.monotonic()
        line = self.read_line(timeout)
        if not line.startswith('ready '):
            raise self.failure(line)
        self._took('boot', begun)

    def _took(self, what: str, begun: float) -> None:
        self.times[what] = round(self.times.get(what, 0) + time.monotonic() - begun, 2)

    def send(self, command: str) -> None:
        """Give the guest a command and do not wait."""
        self._sent = time.monotonic()
        self._port.sendall(command.encode() + b'\n')

    def result(self, command: str, timeout: float = COMMAND_SECONDS) -> str:
        """Answer to a command that was sent.

        :raises Failure: the guest found something wrong
        """
        line = self.read_line(timeout)
        state, _space, text = line.partition(' ')
        if state == 'ready':
            raise self.failure(f'{command}: the guest started anew', self._recorded())
        if state != 'ok':
            raise self.failure(f'{command}: {text or line}')
        self._took(command.partition(' ')[0], self._sent)
        return text

    def command(self, command: str, timeout: float = COMMAND_SECONDS) -> str:
        """Have the guest do something and return what it says."""
        self.send(command)
        return self.result(command, timeout)

    def busy(self) -> bool:
        """Whether no answer of the guest waits to be read."""
        return b'\n' not in self._pending and not select.select([self._port], [], [], 0)[0]

    def run_qmp(self, command: str, /, **arguments: Any) -> Any:
        """:raises Failure: it fails"""
        try:
            return self.qmp.run(command, **arguments)
        except (AssertionError, OSError) as e:
            raise self.failure(f'{e}') from None

    def wait_event(self, name: str, timeout: float) -> dict[str, Any]:
        """:raises Failure: it did not come"""
        try:
            return self.qmp.wait_event(name, timeout)
        except (AssertionError, OSError) as e:
            others = ', '.join(event['event'] for event in self.qmp.events)
            raise self._silence(
                f'{e}; others that came: {others or "none"}; {self.pcow().get("stats")}'
            ) from None

    def wait_console(self, pattern: re.Pattern[bytes], timeout: float) -> re.Match[bytes]:
        """Until the console shows something, from where the last call found its own.

        :raises Failure: it did not in time, or the guest or QEMU ended
        """
        limit = time.monotonic() + timeout
        while time.monotonic() < limit:
            self._drain()
            match = (
                pattern.search(self._log.read_bytes(), self._console_seen)
                if self._log.exists()
                else None
            )
            if match:
                self._console_seen = match.end()
                return match
            self._check_alive()
            time.sleep(0.05)
        raise self._silence(f'the console did not show {pattern.pattern!r} within {timeout:.0f} s')

    def _drain(self) -> None:
        """Read the console's socket empty (the log has it all): a full one would stop the guest."""
        with contextlib.suppress(BlockingIOError):
            while self._console is not None and self._console.recv(65536):
                pass

    def send_shell(self, command: str) -> tuple[str, str]:
        """Begin a command in the shell on the console; returns what stands around its
        output there.
        """
        if self._console is None:
            self._console = self._connect('console')
            self._console.setblocking(False)
            self._open.callback(self._console.close)
        self._shell_commands += 1
        begin, end = f'begin-{self._shell_commands}', f'end-{self._shell_commands}'
        # the quotes keep the echo of this line from looking like its output
        for byte in f'echo "vm-""{begin}"; {command}; echo "vm-""{end}-$?"\n'.encode():
            # a UART has no flow control: one byte after the other
            self._console.send(bytes([byte]))
            self._drain()
            time.sleep(0.0005)
        return begin, end

    def shell(self, command: str, timeout: float = COMMAND_SECONDS) -> str:
        """Run a command in the shell on the console and return what it prints.

        :raises Failure: it fails, or does not end in time
        """
        begin, end = self.send_shell(command)
        match = self.wait_console(
            re.compile(rf'vm-{begin}\r?\n(.*?)vm-{end}-(\d+)\r?\n'.encode(), re.DOTALL), timeout
        )
        output = match[1].decode(errors='replace').replace('\r', '').strip()
        if match[2] != b'0':
            raise self.failure(f'{command!r} failed: {output}')
        return output

    def wait_end(self, timeout: float = END_SECONDS) -> None:
        """Until QEMU ended by itself.

        :raises Failure: it did not, or not well
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise self.failure(f'QEMU did not end within {timeout:.0f} s') from None
        if code:
            raise self.failure('QEMU ended badly')

    def power_off(self) -> dict[str, Any]:
        """Have the test guest power off; return what query-pcow said before."""
        info = self.pcow()
        self.send('power-off')
        self.wait_end()
        self._took('power-off', self._sent)
        return info

    def pcow(self) -> dict[str, Any]:
        """What query-pcow shows of the one backend, if there is one, and "times"."""
        found = self.run_qmp('query-pcow')
        return (dict(found[0]) if found else {}) | {'times': self.times}
