# SPDX-License-Identifier: Apache-2.0
"""Runs the job in a child process and clears up when that ends, in whichever way it ends.

The parent does nothing that could be interrupted in the middle: signals only make it end the child.
"""

from collections.abc import Callable
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback

from pcow_driver.common import exception
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 5.0  # seconds for the child to end by itself


def _child(run: state.Run, job: Callable[[state.Run], None], program: str) -> int:
    """The job, in a session of its own: what it starts can be ended as one group, and Ctrl-C
    reaches the parent only.
    """
    try:
        job(run)
        return 0
    except exception.PcowError as e:
        sys.stdout.flush()
        print(f'{program}: {e}', file=sys.stderr)
    except OSError as e:
        sys.stdout.flush()
        print(f'{program}: {e.filename or "the system"}: {e.strerror}', file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 1


def _ended(pid: int, patience: float) -> bool:
    """Whether a child ended, waiting for it a while. It stays a zombie, so that its number names
    nothing else.

    Daemons that came to this process are waited for on the way: libvirtd counts on QEMU's zombies
    going away.
    """
    limit = time.monotonic() + patience
    while time.monotonic() < limit:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        if ended is None:
            time.sleep(0.01)
        else:
            os.waitpid(ended.si_pid, os.WNOHANG)
    return False


def supervise(job: Callable[[state.Run], None], program: str = 'quickstart') -> int:
    """Run ``job`` and return the exit code; afterwards nothing of it is left, unless it set
    ``run.kept``.

    :param program: whose name stands in front of messages
    """
    received: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _frame: received.append(number))
    # Daemons of the child (libvirtd, QEMU) become children of this process, which can then wait for
    # their end.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    run = state.Run.create()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        code = _child(run, job, program)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    code = _watch(pid, received)
    with contextlib.suppress(ValueError):
        run.reload()
    if code or not run.kept:
        teardown.tear_down(run)
    _reap_orphans()
    if received:
        print(
            f'{program}: interrupted ({signal.Signals(received[0]).name}); nothing is left',
            file=sys.stderr,
        )
        return 128 + received[0]
    return code


def _watch(pid: int, received: list[int]) -> int:
    """Wait for the child; end it with all that it started when a signal has come. Return its exit
    code as a shell would.
    """
    while not _ended(pid, 0.2):
        if received:
            _kill_group(pid, signal.SIGTERM)
            _ended(pid, _PATIENCE)
            break
    _kill_group(pid, signal.SIGKILL)  # also what a failed step left running
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _reap_orphans() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
