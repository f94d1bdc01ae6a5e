# SPDX-License-Identifier: Apache-2.0
"""Ends a program that does many operations at once when it stands still, and tells where."""

from collections.abc import Iterator
import contextlib
import faulthandler
import gc
import os
import sys
import threading
import time
import traceback


class Watchdog:
    """Who watches says :meth:`alive` when an operation ends; after ``none_ends`` seconds without
    one the program ends, with exit code 1 and the stacks of all threads. Seconds in which this
    machine stood count as one. It ends as well after ``stands_still`` seconds in which its own
    thread does not run: the hub of green threads does not come round.
    """

    def __init__(self, stands_still: float, none_ends: float) -> None:
        self._stands_still, self._none_ends = stands_still, none_ends
        self._over = False
        self.alive()

    def alive(self) -> None:
        self._waited = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._over = True
            watcher.join()

    def _watch(self) -> None:
        while not self._over and self._waited < self._none_ends:
            faulthandler.dump_traceback_later(self._stands_still, exit=True)
            before = time.monotonic()
            time.sleep(0.05)
            self._waited += min(time.monotonic() - before, 1)
        faulthandler.cancel_dump_traceback_later()
        if not self._over:
            print(f'no operation has ended for {self._none_ends:g} seconds', *_stacks(), sep='\n')
            sys.stdout.flush()
            os._exit(1)


def _stacks() -> Iterator[str]:
    """faulthandler reads those of threads that run, and may crash then; this thread has the
    interpreter for itself.
    """
    for identity, frame in sys._current_frames().items():
        yield from (f'thread {identity:#x}', *traceback.format_stack(frame))
    if 'greenlet' in sys.modules:
        for one in gc.get_objects():
            if isinstance(one, sys.modules['greenlet'].greenlet) and one.gr_frame is not None:
                yield from (f'green thread {id(one):#x}', *traceback.format_stack(one.gr_frame))
