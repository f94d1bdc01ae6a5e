# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of an all-in-one, finds them again and ends them.

They are known by their TMPDIR, which names the all-in-one: whatever they start inherits it, virtual
machines included.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import threading
import time

from pcow_driver.common import exception
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

START_SECONDS = 120.0
_PATIENCE = 8.0  # seconds from SIGTERM to SIGKILL
_LAST = ('mariadb', 'rabbitmq', 'epmd')  # what the others need to end in an orderly way
# seconds before each look at processes that show no environment
_LOOKS = (0.0, *(0.003,) * 40)
_TAIL = 4  # lines of a log in a message


def log_tail(path: Path, lines: int = _TAIL) -> str:
    """The last lines of a log, in one."""
    try:
        with open(path, 'rb') as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 16384))
            text = log.read().decode(errors='replace')
    except FileNotFoundError:
        return 'it has no log'
    found = [line.strip() for line in text.splitlines() if line.strip()]
    return ' | '.join(found[-lines:]) or 'its log is empty'


def port_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((settings_module.LOOPBACK, port)) == 0


class Processes:
    """Those of one all-in-one; the methods may be called from several threads."""

    def __init__(self, settings: settings_module.Settings) -> None:
        self.settings = settings
        self._directory = settings.state / 'processes'
        self._lock = threading.Lock()
        self._ending = False

    def environment(self, **more: str) -> dict[str, str]:
        """Variables that every process gets; nothing of the user's own OpenStack."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(('OS_', 'PYTHON', 'RABBITMQ_'))
        }
        # without SPT_NOENV, a service that gives itself a title (neutron) overwrites the memory of
        # its environment with that
        return {
            **kept,
            'LC_ALL': 'C.UTF-8',
            'TMPDIR': str(self.settings.temporary),
            'SPT_NOENV': '1',
            **more,
        }

    def log(self, name: str) -> Path:
        return self.settings.logs / f'{name}.log'

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a service in the background.  Its output goes to its log.

        :raises PcowError: it cannot be started, or everything is being ended
        """
        with self._lock:
            process = self._spawn(name, command, environment)
            self.note(name, process.pid)
        return process

    def note(self, name: str, pid: int) -> None:
        """From now on ``name`` is this process."""
        self._directory.mkdir(exist_ok=True)
        (self._directory / name).write_text(f'{pid} {state.start_time(pid)}\n')

    def forget(self, name: str) -> None:
        """``name`` is no process any more."""
        (self._directory / name).unlink(missing_ok=True)

    def run(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Run a program to its end.

        :raises PcowError: it fails; the message has the end of its log
        """
        with self._lock:
            process = self._spawn(name, command, environment)
        if process.wait():
            raise exception.PcowError(
                reason=f'{name} failed: {log_tail(self.log(name))} (all of it is in '
                f'{self.log(name)})'
            )

    def _spawn(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None
    ) -> subprocess.Popen[bytes]:
        if self._ending:
            raise exception.PcowError(reason=f'{name} is not started any more')
        with open(self.log(name), 'ab') as log:
            try:
                # A session of its own: it outlives this process, and Ctrl-C does not reach it.
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd='/',
                    env=self.environment(**(environment or {})),
                )
            except FileNotFoundError as e:
                raise exception.PcowError(
                    reason=f'{name} cannot be started: there is no {e.filename}'
                ) from None

    def pid(self, name: str) -> int | None:
        """Of a service that runs."""
        try:
            pid, begun = map(int, (self._directory / name).read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        return pid if state.start_time(pid) == begun else None

    def names(self) -> list[str]:
        """Services that were started since the last end, also those that ended by themselves."""
        return (
            sorted(path.name for path in self._directory.iterdir())
            if self._directory.is_dir()
            else []
        )

    def wait_port(self, name: str, port: int) -> None:
        """Wait until a service answers.

        :raises PcowError: it ended or does not answer in time; the message has the end of its log
        """
        limit = time.monotonic() + START_SECONDS
        while time.monotonic() < limit:
            if port_open(port):
                return
            self.check(name)
            time.sleep(0.1)
        raise exception.PcowError(
            reason=f'{name} does not answer on port {port} within {START_SECONDS:.0f} s: '
            f'{log_tail(self.log(name))} (all of it is in {self.log(name)})'
        )

    def check(self, name: str) -> None:
        """:raises PcowError: the service ended; the message has the end of its log"""
        if self.pid(name) is None:
            raise exception.PcowError(
                reason=f'{name} ended: {log_tail(self.log(name))} (all of it is in '
                f'{self.log(name)})'
            )

    def all(self) -> list[int]:
        """Pids of all processes of the all-in-one."""
        mark = f'TMPDIR={self.settings.temporary}'.encode()
        found = {pid for name in self.names() if (pid := self.pid(name))}
        unknown = [
            int(entry.name)
            for entry in Path('/proc').iterdir()
            if entry.name.isdigit() and int(entry.name) != os.getpid()
        ]
        for pause in _LOOKS:
            time.sleep(pause)
            environments = {pid: _environment(pid) for pid in unknown}
            found.update(
                pid for pid, environment in environments.items() if mark in environment.split(b'\0')
            )
            unknown = [
                pid
                for pid, environment in environments.items()
                if not environment and _has_program(pid)
            ]
            if not unknown:
                break
        return list(found)

    def end(self) -> None:
        """End all of them. Nothing can be started afterwards. May be called again after an
        interruption.
        """
        with self._lock:
            self._ending = True
        last = {pid for name in _LAST if (pid := self.pid(name)) is not None}
        sessions = {os.getsid(pid) for pid in last if state.start_time(pid) is not None}
        teardown.end([pid for pid in self.all() if _session(pid) not in sessions], _PATIENCE)
        teardown.end(list(last), _PATIENCE)
        teardown.end(self.all(), _PATIENCE)  # also what began meanwhile
        for name in self.names():
            self.forget(name)

    def kill(self, name: str, program: str) -> None:
        """SIGKILL for a service and those of its processes that run ``program``; what else they
        started goes on.

        :raises PcowError: it does not run
        """
        self.check(name)
        session = _session(self.pid(name) or 0)
        mine = [
            pid
            for pid in self.all()
            if _session(pid) == session and f'/{program}'.encode() in _command(pid)
        ]
        # a parent before its children, which it would start again
        for pid in sorted(mine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        teardown.end(mine)  # waits for them
        self.forget(name)

    def end_node(self, *names: str) -> None:
        """End all that shares the mounts of these services."""
        namespaces = {
            namespace
            for name in names
            if (pid := self.pid(name)) and (namespace := _namespace(pid))
        }
        namespaces.discard(_namespace(os.getpid()))
        teardown.end([pid for pid in self.all() if _namespace(pid) in namespaces], _PATIENCE)
        for name in names:
            self.forget(name)


def _read(pid: int, name: str) -> bytes:
    """What /proc has of a process; nothing of one that has ended."""
    try:
        return Path(f'/proc/{pid}/{name}').read_bytes()
    except OSError:
        return b''


def _environment(pid: int) -> bytes:
    """Empty while its program is being loaded, too."""
    return _read(pid, 'environ')


def _has_program(pid: int) -> bool:
    """Not so a thread of the kernel, nor one that has ended."""
    try:
        return bool(os.readlink(f'/proc/{pid}/exe'))
    except OSError:
        return False


def _namespace(pid: int) -> str:
    """Of the mounts that a process sees."""
    try:
        return os.readlink(f'/proc/{pid}/ns/mnt')
    except OSError:
        return ''


def _command(pid: int) -> bytes:
    return _read(pid, 'cmdline')


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0
