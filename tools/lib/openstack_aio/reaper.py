# SPDX-License-Identifier: Apache-2.0
"""Runs a program and waits for all that it leaves behind, as init does: usage: reaper.py PROGRAM
[ARGUMENT...].

A virtual machine that ended counts as running for libvirt until somebody has waited for it, and in
a container nobody may.
"""

import contextlib
import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # A signal that comes before the handlers are there waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - the program is the argument

    def forward(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    code = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == '__main__':
    sys.exit(main())
