# SPDX-License-Identifier: Apache-2.0
"""pcowctl as its entry point is called, in a process of its own each time, and what it prints.

A new interpreter that imports everything takes seconds in an emulator: the processes are forks of
one that has imported it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import traceback

from pcow_driver.cli import app
from pcow_driver.cli import capacity
from pcow_driver.cli import doctor
from pcow_driver.cli import domain_xml
from pcow_driver.cli import garbage
from pcow_driver.cli import image
from pcow_driver.cli import pool
from pcow_driver.cli import snapshot
from pcow_driver.cli import template
from tests.vm import machine

IMPORTED = (app, capacity, doctor, domain_xml, garbage, image, pool, snapshot, template)
_SECONDS = 300.0


@dataclasses.dataclass(frozen=True)
class Result:
    command: str
    exit_code: int
    output: str  # of stdout and stderr as they came

    def dump(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def _wait(pid: int, words: tuple[str, ...]) -> int:
    limit = time.monotonic() + _SECONDS
    while time.monotonic() < limit:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise machine.Failure(f'pcowctl {shlex.join(words)}: no end within {_SECONDS:.0f} s')


def run(
    *words: str, stdout_only: bool = False, prepare: Callable[[], None] | None = None
) -> Result:
    """Run it, in a process in which ``prepare`` was called before.

    :raises Failure: it did not end in time
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        pid = os.fork()
        if pid == 0:
            code = 255
            try:
                os.dup2(file.fileno(), 1)
                os.dup2(os.open(os.devnull, os.O_WRONLY) if stdout_only else file.fileno(), 2)
                if prepare is not None:
                    prepare()
                code = app.main(list(words))
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
            except BaseException:  # as the interpreter would say it
                traceback.print_exc()
                code = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code & 255)
        code = _wait(pid, words)
        file.seek(0)
        return Result(shlex.join(('pcowctl', *words)), code, file.read().decode(errors='replace'))


def must(*words: str, stdout_only: bool = False) -> Result:
    """:raises Failure: it fails"""
    done = run(*words, stdout_only=stdout_only)
    if done.exit_code:
        raise machine.Failure(f'{done.command}: exit code {done.exit_code}: {done.output[-3000:]}')
    return done


def must_fail(said: str, *words: str) -> Result:
    """It must fail with one line that a regular expression matches.

    :raises Failure: it does not
    """
    done = run(*words)
    if done.exit_code == 0 or not re.search(said, done.output) or 'Traceback' in done.output:
        raise machine.Failure(
            f'{done.command}: exit code {done.exit_code}, and not {said!r}: {done.output[-3000:]}'
        )
    return done


def shell(*words: object) -> Result:
    """Another program that belongs to a session.

    :raises Failure: it fails
    """
    line = [str(word) for word in words]
    done = subprocess.run(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise machine.Failure(
            f'{shlex.join(line)}: exit code {done.returncode}: {done.stdout[-3000:]}'
        )
    return Result(shlex.join((os.path.basename(line[0]), *line[1:])), 0, done.stdout)
