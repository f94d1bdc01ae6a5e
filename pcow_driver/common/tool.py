# SPDX-License-Identifier: Apache-2.0
"""Finding and running the programs that do the work: pcow-img, qemu-img, QEMU."""

import dataclasses
import glob
import json
import os
from pathlib import Path
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import units

LOG = logging.getLogger(__name__)

_MAX_MESSAGE = 2000
_LOOK = 0.5  # seconds in which a thread sees that a signal has come
_GRACE = 5  # seconds of CPU in which a program ends that was told to
# How glib and the library of C end a program that gets no memory. An assertion ends it so as well,
# and says that.
_WITHOUT_MEMORY = (signal.SIGABRT, signal.SIGTRAP)
_ASSERTION = 'ssertion'
# How one ends that takes a NULL for memory, and one that has a fault.
_CRASHED = (signal.SIGSEGV, signal.SIGBUS)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a program may take that reads what a tenant has made. A sound image needs a part of it;
    one that was made for that takes all of a host.
    """

    cpu: int  # seconds
    memory: int = units.GIB  # bytes of address space, as Nova and Cinder have it

    def command(self) -> tuple[str, ...]:
        """What the program is started by."""
        return (
            find_system('prlimit', 'util-linux'),
            f'--cpu={self.cpu}:{self.cpu + _GRACE}',
            f'--as={self.memory}',
            '--core=0',
            '--',
        )

    def environment(self) -> dict[str, str]:
        """Each thread would have an arena of its own, of 64 MiB that nobody uses."""
        return {'MALLOC_ARENA_MAX': '1'}

    def check(self, name: str, exit_code: int, message: str) -> None:
        """
        :raises ToolLimited: a program has ended so as it meets one of them
        :raises ToolCrashed: one of them may have ended it so
        """
        memory = f'{units.format_size(self.memory)} of memory'
        if exit_code == -signal.SIGXCPU:
            raise exception.ToolLimited(tool=name, limit=f'{self.cpu} s of CPU')
        if 'Cannot allocate memory' in message or (
            -exit_code in _WITHOUT_MEMORY and _ASSERTION not in message
        ):
            raise exception.ToolLimited(tool=name, limit=memory)
        if -exit_code in _CRASHED:
            raise exception.ToolCrashed(
                tool=name, signal=signal.Signals(-exit_code).name, limit=memory
            )


def build_dirs() -> list[Path]:
    """build/bin of the checkout, seen from an editable install and from build/venv; none of what
    was installed elsewhere.
    """
    found = []
    checkout, environment = Path(__file__).resolve().parents[2], Path(sys.prefix).resolve()
    if (checkout / 'qemu-backend').is_dir():  # not site-packages
        found.append(checkout / 'build' / 'bin')
    if (environment.parent / 'meson' / 'build.ninja').is_file():  # not any environment
        found.append(environment.parent / 'bin')
    return found


def find(option: str, *, build_first: bool = False) -> str:
    """Path of the program that ``[pcow] option`` names: as given, then in PATH, then in the
    checkout's build/bin.

    :param build_first: look in build/bin before PATH
    :raises ToolNotFound:
    """
    name = str(conf.CONF.pcow[option])
    if '/' in name:
        places = [shutil.which(name)]
    else:
        built = [shutil.which(str(directory / name)) for directory in build_dirs()]
        places = [*built, shutil.which(name)] if build_first else [shutil.which(name), *built]
    for place in places:
        if place:
            return os.path.abspath(place)
    raise exception.ToolNotFound(tool=name, option=option)


def find_module(option: str, directories: str) -> str:
    """Path of the loadable module that ``[pcow] option`` names: as given, then in the checkout's
    build/bin, then in directories.

    :param directories: a glob pattern
    :raises ToolNotFound:
    """
    name = str(conf.CONF.pcow[option])
    places = (
        [name]
        if '/' in name
        else [
            str(place / name)
            for place in (*build_dirs(), *map(Path, sorted(glob.glob(directories))))
        ]
    )
    for place in places:
        if os.path.isfile(place):
            return os.path.abspath(place)
    raise exception.ToolNotFound(tool=name, option=option)


def find_system(name: str, package: str) -> str:
    """Path of a program of the distribution, also if PATH lacks the directories for root.

    :raises PackageMissing:
    """
    path = shutil.which(
        name, path=os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/sbin', '/sbin'))
    )
    if path is None:
        raise exception.PackageMissing(tool=name, package=package)
    return path


def _message(name: str, stdout: str, stderr: str, exit_code: object) -> str:
    """What a failed program said, in one line and without its own name in front."""
    lines = [
        line.strip().removeprefix(f'{name}: ')
        for line in (stderr.strip() or stdout.strip()).splitlines()
    ]
    text = '; '.join(line for line in lines if line)
    return text[:_MAX_MESSAGE] or f'{name} ended with exit code {exit_code} and no message'


def _communicate(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """A signal ends the wait of the main thread; another one has to look."""
    if threading.current_thread() is threading.main_thread() or not interrupt.is_installed():
        return process.communicate()
    while True:
        try:
            return process.communicate(timeout=_LOOK)
        except subprocess.TimeoutExpired:
            interrupt.check()


def run(
    path: str,
    *args: str,
    ok_exit_codes: tuple[int, ...] = (0,),
    cwd: str | None = None,
    limits: Limits | None = None,
    stdin: str = os.devnull,
) -> str:
    """Run a program to its end and return what it printed on stdout.

    The program does not outlive this call, also when the call is left by an exception such as
    KeyboardInterrupt.

    :param limits: of one that reads what a tenant has made
    :param stdin: path of what it reads there
    :raises ToolFailed: another exit code than ``ok_exit_codes``
    :raises ToolLimited: it has met one of its limits
    :raises ToolCrashed: it has crashed, for which one of them may be the reason
    :raises ToolNotFound: the program went away
    """
    name = os.path.basename(path)
    interrupt.check()
    begun = time.monotonic()
    with open(stdin, 'rb') as given:
        try:
            # Not by oslo_concurrency.processutils: for its preexec_fn, Python copies the page
            # tables of the whole service (fork). That takes 50 ms of one with 300 MB, where vfork
            # takes 2.
            process = subprocess.Popen(
                (*(limits.command() if limits else ()), path, *args),
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=cwd,
                env={**os.environ, 'LC_ALL': 'C', **(limits.environment() if limits else {})},
            )
        except FileNotFoundError:
            raise exception.ToolNotFound(tool=path, option=name.replace('-', '_')) from None
    try:
        interrupt.check()
        stdout, stderr = map(os.fsdecode, _communicate(process))
    except BaseException:
        if process.poll() is None:
            process.kill()
            process.wait()
        raise
    LOG.debug(
        '%s ended with exit code %d after %.3f s',
        shlex.join((path, *args)),
        process.returncode,
        time.monotonic() - begun,
    )
    if process.returncode not in ok_exit_codes:
        if limits is not None:
            limits.check(name, process.returncode, stderr)
        raise exception.ToolFailed(
            tool=name,
            exit_code=process.returncode,
            message=_message(name, stdout, stderr, process.returncode),
        )
    interrupt.check()
    return stdout


def run_json(
    path: str, *args: str, ok_exit_codes: tuple[int, ...] = (0,), limits: Limits | None = None
) -> Any:
    """As :func:`run`, but parse the output as JSON.

    :raises ToolOutputInvalid: it is not JSON
    """
    output = run(path, *args, ok_exit_codes=ok_exit_codes, limits=limits)
    try:
        return json.loads(output)
    except ValueError as e:
        raise exception.ToolOutputInvalid(
            tool=os.path.basename(path), reason=f'not JSON: {e}'
        ) from None
