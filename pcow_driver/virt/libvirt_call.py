# SPDX-License-Identifier: Apache-2.0
"""Calls of libvirt that end, also where a QEMU or libvirt itself does not answer.

A call of libvirt's binding goes to C, and comes back when the answer does: for a QEMU that was
stopped, or stands in the kernel for its storage, that is never. Under eventlet all green threads
would stand meanwhile, and elsewhere a worker, with the locks that it has. So each call has a
native thread of its own, for which the caller waits as its kind of thread does, and so many
seconds.

A call that was given up goes on in its thread. Nobody can take it back: QEMU has the command in its
socket, and obeys it when it goes on. libvirt has a job on the domain till then: who calls next
waits for that for 30 s, is told so by libvirt, and holds up nobody. So one domain that stands costs
one thread here and one of libvirt's workers, until QEMU answers or is ended (virsh destroy needs no
job for that). What was asked for may be done after its caller was told of a failure. Each caller
can live with that: the pool counts what it makes from the image as soon as it is there. What must
not stay so is undone by :func:`afterwards`: a snapshot that nobody knows of, a guest that was
paused or frozen for a moment.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import contextlib
import math
import os
import selectors
import sys
import threading
import time
from types import ModuleType
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import exception

# How many times as long as others those may take that write data of a guest to its storage, or wait
# for the guest itself.
_LONG = 10
_LONG_METHODS = frozenset(
    {'createWithFlags', 'delete', 'destroy', 'fsFreeze', 'fsThaw', 'setTime', 'suspend'}
)
# Those may take as long as they take: all RAM of a guest goes to its storage or comes from there.
# One that was given up would be finished behind the back of its caller, the guest ended with it.
_UNLIMITED_METHODS = frozenset({'revertToSnapshot', 'snapshotCreateXML'})
# libvirt answers these itself, without the QEMU of the domain.
_OF_LIBVIRT = frozenset(
    {'XMLDesc', 'isActive', 'isPersistent', 'listAllSnapshots', 'lookupByName', 'metadata', 'state'}
)
_LOCAL = frozenset({'ID', 'UUIDString', 'getName', 'name'})  # known here already
_PLAIN = (type(None), bool, int, float, str, bytes, dict)
_LOOKS = 0.1  # seconds
_pending: set[_Call] = set()  # with something that is to be done when they have ended


def limit(*, long: bool = False) -> float:
    """Seconds that a call may take."""
    return float(conf.CONF.pcow.libvirt_timeout) * (_LONG if long else 1)


def _limit_of(method: str) -> float:
    return math.inf if method in _UNLIMITED_METHODS else limit(long=method in _LONG_METHODS)


def call(
    domain: str | None, words: str, function: Callable[..., Any], *arguments: Any, seconds: float
) -> Any:
    """What the function returns, which a native thread calls.

    An exception that comes to the waiting thread, as on a signal, is raised when the call has
    ended, as it is where C is called directly: what was begun is not undone while it is under way.
    A second one is raised at once.

    :param domain: name of the one that is asked; None: libvirt
    :param words: what is asked for
    :param function: takes no lock of Python, and logs nothing: to green threads its thread is none
    :param seconds: math.inf: until it ends
    :raises NoAnswer:
    :raises LibvirtFailed: so many calls were given up that there is no room for another one
    """
    try:
        made = _Call(function, arguments)
    except (OSError, RuntimeError) as e:  # calls that were given up have descriptors and threads
        raise exception.LibvirtFailed(
            uri=conf.CONF.pcow.libvirt_uri, reason=f'there is no thread to ask it by: {e}'
        ) from None
    end = time.monotonic() + seconds
    with contextlib.closing(made):
        try:
            has_ended = made.wait(end)
        except BaseException:
            made.wait(end)
            raise
    if has_ended:
        return made.outcome()
    error = exception.NoAnswer(
        domain=domain,
        whom='libvirt' if domain is None else f'the domain {domain}',
        call=words,
        seconds=round(seconds),
        way_out=(
            'see whether libvirtd or virtqemud runs and what it waits for, or start it again'
            if domain is None
            else f"see what its QEMU waits for, its storage first ('virsh domcontrol {domain}'), "
            f"or end it ('virsh destroy {domain}')"
        ),
    )
    error.call = made
    raise error


def unanswered(error: BaseException | None, domain: str) -> exception.NoAnswer | None:
    """What a domain has not answered, if an error is that, or comes from clearing up after it."""
    while error is not None:
        if isinstance(error, exception.NoAnswer) and error.details['domain'] == domain:
            return error
        error = error.__context__
    return None


def afterwards(error: exception.NoAnswer, undo: Callable[[Any], Any]) -> None:
    """Have this called when the call that was given up has ended, with what that has returned, or
    None if it has failed; nobody hears how this ends.

    It is not called if this process ends before; one that does nothing else waits for that, see
    :func:`await_undone`.

    :param undo: as ``function`` of :func:`call`
    """
    error.call.add(undo)


def await_undone(say: Callable[[str], None]) -> None:
    """Wait until all that :func:`afterwards` was told of is done: of a program that would end now.

    :param say: is told once, if there is something to wait for
    """
    said = False
    while any(made.is_pending() for made in list(_pending)):
        if not said:
            said = True
            say(
                'what was given up is undone when QEMU answers, so this waits for it; if it is '
                'interrupted (Ctrl-C), a guest may stay paused or frozen (virsh resume, virsh '
                'domfsthaw), or a snapshot there'
            )
        time.sleep(_LOOKS)


class Proxy:
    """An object of libvirt, or one that is like it: what its methods do is done by :func:`call`,
    and objects that they return are such as well.
    """

    def __init__(self, found: Any, domain: str | None = None) -> None:
        """:param domain: name of the one that it is of"""
        self._bare, self._of = bare(found), domain

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bare, name)
        if not callable(found) or name in _LOCAL:
            return found

        def ask(*arguments: Any) -> Any:
            of = None if name in _OF_LIBVIRT else self._of
            return self._wrapped(
                call(of, name, found, *map(bare, arguments), seconds=_limit_of(name))
            )

        return ask

    def _wrapped(self, found: Any) -> Any:
        if isinstance(found, list | tuple):
            return type(found)(map(self._wrapped, found))
        return found if isinstance(found, _PLAIN) else Proxy(found, self._of)


def bare(found: Any) -> Any:
    """Without what Nova puts around it, or this: a native thread goes to no other one."""
    tpool = sys.modules.get('eventlet.tpool')
    while True:
        if type(found) is Proxy:
            found = found._bare
        elif tpool is not None and type(found) is tpool.Proxy:
            found = found._obj
        else:
            return found


class _Call:
    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function, self._arguments = function, arguments
        self._result: Any = None
        self._error: BaseException | None = None
        self._has_ended = False
        self._undo = collections.deque[Callable[[Any], Any]]()
        # No condition of threading: those of green threads wake no hub of another thread. This one
        # is waited for by select, which is green where threads are.
        self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        tell = os.dup(self._told)  # who has given up closes the other one
        try:
            _native_thread()(target=self._run, args=(tell,), daemon=True).start()
        except BaseException:
            os.close(tell)
            os.close(self._told)
            raise

    def _run(self, tell: int) -> None:
        try:
            self._result = self._function(*self._arguments)
        except BaseException as e:
            self._error = e
        self._has_ended = True
        os.eventfd_write(tell, 1)
        os.close(tell)
        self._undo_all()

    def _undo_all(self) -> None:
        """Each once, whoever comes first: one that was added meanwhile, or who adds it."""
        with contextlib.suppress(IndexError):
            while True:
                undo = self._undo.popleft()
                with contextlib.suppress(Exception):
                    undo(self._result)
        _pending.discard(self)

    def is_pending(self) -> bool:
        return self in _pending

    def add(self, undo: Callable[[Any], Any]) -> None:
        self._undo.append(undo)
        _pending.add(self)
        if self._has_ended:
            _native_thread()(target=self._undo_all, daemon=True).start()

    def wait(self, end: float) -> bool:
        """Whether it has ended by then (time.monotonic())."""
        with selectors.DefaultSelector() as selector:  # under eventlet there is no select.poll
            selector.register(self._told, selectors.EVENT_READ)
            while not self._has_ended and (left := end - time.monotonic()) > 0:
                selector.select(None if left == math.inf else left)
        return self._has_ended

    def close(self) -> None:
        os.close(self._told)

    def outcome(self) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return self._result
        finally:
            self._error = None  # its traceback has this


def _native_thread() -> type[threading.Thread]:
    patcher: Any = sys.modules.get('eventlet.patcher')
    if patcher is None or not patcher.is_monkey_patched('thread'):
        return threading.Thread
    module: ModuleType = patcher.original('threading')
    return vars(module)['Thread']  # type: ignore[no-any-return]
