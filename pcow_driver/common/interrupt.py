# SPDX-License-Identifier: Apache-2.0
"""Ending on SIGINT, SIGTERM and SIGHUP, for programs made of this package; libraries and services
never install this.

The handler raises, so that temporary files and child processes go. But Python drops an exception
that strikes in a destructor, or in a hook around fork; so the signal is remembered as well, and
looked at around each program that is run.
"""

from collections.abc import Iterator
import contextlib
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_received: list[int] = []
_thread = threading.local()  # depth of clearing_up() in it


def install() -> None:
    """Let SIGINT raise KeyboardInterrupt, SIGTERM SystemExit(143) and SIGHUP SystemExit(129), and
    remember each.

    SIGHUP comes when the terminal or the SSH session goes; if it is ignored (nohup), it stays so.
    """
    for number in _SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)


def is_installed() -> bool:
    """Whether what :func:`check` looks at may come."""
    return any(signal.getsignal(number) is _handle for number in _SIGNALS)


def check() -> None:
    """Raise again what a signal raised before, in whichever thread; nothing new begins after an
    interrupt.
    """
    if _received and not _depth():
        if _received[0] == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + _received[0])


@contextlib.contextmanager
def clearing_up() -> Iterator[None]:
    """What this thread undoes in here is not interrupted, by no signal that has come or comes;
    afterwards they count again.
    """
    _thread.depth = _depth() + 1
    try:
        yield
    finally:
        _thread.depth -= 1


def _depth() -> int:
    return int(getattr(_thread, 'depth', 0))


def _handle(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    check()
