# SPDX-License-Identifier: Apache-2.0
"""The same work for several domains, of which one that hangs keeps no other one waiting."""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import math
import os
import queue
import threading
import time
from typing import Generic
from typing import TypeVar

from oslo_log import log as logging

from pcow_driver.common import interrupt

LOG = logging.getLogger(__name__)

_Result = TypeVar('_Result')

_THREADS = 4  # at least
_STALLS = 10.0  # seconds without an end, after which one more begins
_TURN = 0.5  # seconds in which a signal is seen that a thread has met
_CLEARS_UP = 10.0  # seconds that threads at work have for that


def each(
    names: Sequence[str], work: Callable[[str], _Result], end: float | None
) -> Iterator[tuple[str, _Result | Exception | None]]:
    """Several at once, in this order.

    :param end: value of :func:`time.monotonic` until which they are waited for; None: without end
    :return: of each, as it comes to its end, what the work gives, or raises; None: it has not come
        to its end, and goes on as long as the process does
    """
    several = _Several(names, work)
    try:
        yield from several.results(math.inf if end is None else end)
    except BaseException:
        with interrupt.clearing_up():  # a second signal does not cut that off
            several.clear_up()
        raise


class _Several(Generic[_Result]):
    """The work, and its threads. :meth:`_do` is theirs, all else is of who waits."""

    def __init__(self, names: Sequence[str], work: Callable[[str], _Result]) -> None:
        self._names, self._work = names, work
        self._left = collections.deque(names)
        self._results = queue.SimpleQueue[tuple[str, _Result | BaseException]]()
        self._threads = list[threading.Thread]()
        self._at_work = set[str]()

    def results(self, end: float) -> Iterator[tuple[str, _Result | Exception | None]]:
        for _number in range(min(len(self._names), max(_THREADS, os.cpu_count() or 1))):
            self._begin()
        waited_for, stalls = set(self._names), time.monotonic() + _STALLS
        while waited_for and (now := time.monotonic()) < end:
            interrupt.check()
            try:
                name, done = self._results.get(timeout=min(_TURN, end - now))
            except queue.Empty:
                if now >= stalls and self._left:  # those that are at work may all hang
                    self._begin()
                    stalls = now + _STALLS
                continue
            if not isinstance(done, Exception) and isinstance(done, BaseException):
                raise done
            stalls = now + _STALLS
            waited_for.remove(name)
            yield name, done
        self._left.clear()
        for name in sorted(waited_for):
            yield name, None

    def clear_up(self) -> None:
        """Nothing more begins; what is at work ends as it can."""
        self._left.clear()
        end = time.monotonic() + _CLEARS_UP
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        for name in sorted(self._at_work.copy()):  # a thread that ends changes it
            LOG.error('%s: the command ends, and this has not', name)

    def _begin(self) -> None:
        thread = threading.Thread(target=self._do, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _do(self) -> None:
        while True:
            try:
                name = self._left.popleft()
            except IndexError:
                return
            self._at_work.add(name)
            try:
                self._results.put((name, self._work(name)))
            except BaseException as e:  # of whatever kind: who waits learns of each
                self._results.put((name, e))
                if not isinstance(e, Exception):
                    return
            finally:
                self._at_work.discard(name)
