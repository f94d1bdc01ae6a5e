# SPDX-License-Identifier: Apache-2.0
"""The same work for several domains, of which one that hangs keeps no other one waiting."""

from __future__ import annotations

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import os
import queue
import threading
import time
from typing import TypeVar

_Result = TypeVar('_Result')

_THREADS = 4  # at least
_STALLS = 10.0  # seconds without an end, after which one more begins


def each(
    names: Sequence[str], work: Callable[[str], _Result], end: float | None
) -> Iterator[tuple[str, _Result | Exception | None]]:
    """Several at once, in this order.

    :param end: value of :func:`time.monotonic` until which they are waited for; None: without end
    :return: of each, as it comes to its end, what the work gives, or raises; None: it has not come
        to its end, and goes on as long as the process does
    """
    left = collections.deque(names)
    results = queue.SimpleQueue[tuple[str, _Result | Exception]]()

    def begin() -> None:
        threading.Thread(target=_do, args=(left, work, results), daemon=True).start()

    for _number in range(min(len(names), max(_THREADS, os.cpu_count() or 1))):
        begin()
    waited_for = set(names)
    while waited_for:
        seconds = _STALLS if end is None else min(_STALLS, max(0, end - time.monotonic()))
        try:
            name, done = results.get(timeout=seconds)
        except queue.Empty:
            if end is not None and time.monotonic() >= end:
                break
            if left:  # those that are at work may all hang
                begin()
            continue
        waited_for.remove(name)
        yield name, done
    left.clear()
    for name in sorted(waited_for):
        yield name, None


def _do(
    left: collections.deque[str],
    work: Callable[[str], _Result],
    results: queue.SimpleQueue[tuple[str, _Result | Exception]],
) -> None:
    while True:
        try:
            name = left.popleft()
        except IndexError:
            return
        try:
            results.put((name, work(name)))
        except Exception as e:  # of whatever kind: who waits learns of each
            results.put((name, e))
