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

    def run() -> None:
        while True:
            try:
                name = left.popleft()
            except IndexError:
                return
            try:
                results.put((name, work(name)))
            except Exception as e:  # of whatever kind: who waits learns of each
                results.put((name, e))

    for _number in range(min(len(names), max(_THREADS, os.cpu_count() or 1))):
        threading.Thread(target=run, daemon=True).start()
    waited_for = set(names)
    while waited_for:
        try:
            name, done = results.get(
                timeout=None if end is None else max(0, end - time.monotonic())
            )
        except queue.Empty:
            left.clear()
            for name in sorted(waited_for):
                yield name, None
            return
        waited_for.remove(name)
        yield name, done
