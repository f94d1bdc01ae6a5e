# SPDX-License-Identifier: Apache-2.0
"""A program of the guest's own that is told what becomes of it, as QEMU's agent has one for the
moment in which file systems are frozen (``/etc/qemu/fsfreeze-hook``).

The agent starts it (``guest-exec``), with one of :class:`Event` as its first word. What the guest
says is not trusted with more than whether it has done it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import json
import math
import time
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import text
from pcow_driver.images import model
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)

PATH = '/etc/qemu/pcow-hook'
_AGENT = 'the guest agent'
_NO_AGENT = (
    'it has no channel to an agent: give it one, org.qemu.guest_agent.0, and install '
    'qemu-guest-agent in the guest'
)
_PERIOD, _LONGEST = 0.02, 0.2  # seconds between two questions: the first, and the last ones
_SAID = 200  # characters of what a hook that has failed says


class Event(enum.Enum):
    """What the hook is told."""

    FIXATE = 'fixate'  # before its last moment is kept
    RECOVERED = 'recovered'  # it has gone on, after a gap
    FORKED = 'forked'  # it is another machine now: its name and UUID follow


@dataclasses.dataclass(frozen=True)
class Bindings:
    """Modules of libvirt-python."""

    libvirt: Any
    libvirt_qemu: Any


def run(
    name: str, domain: Any, bindings: Bindings, event: Event, *words: str, seconds: float
) -> None:
    """Have it run, and wait for its end; the guest's clock is put right before, unless it is told
    of a fixation.

    :param domain: virDomain of a guest that runs
    :param words: further arguments
    :param seconds: for all of it; libvirt may wait some more for an agent that has stopped
    :raises GuestHookFailed: it was not run, or has not ended well by then
    """
    if not libvirt_xml.has_agent_channel(domain.XMLDesc(0)):
        raise exception.GuestHookFailed(domain=name, reason=_NO_AGENT)
    asked = _Agent(name, domain, bindings, time.monotonic() + seconds)
    asked.ask('guest-ping', {}, again=True)
    if event is not Event.FIXATE:
        asked.set_clock()
    begun = asked.ask(
        'guest-exec', {'path': PATH, 'arg': [event.value, *words], 'capture-output': True}
    )
    number, pause = begun.integer('pid'), _PERIOD
    while True:
        status = asked.ask('guest-exec-status', {'pid': number})
        if status.boolean('exited'):
            break
        time.sleep(pause)
        pause = min(_LONGEST, pause * 2)
    if status.optional_integer('exitcode') != 0:
        raise exception.GuestHookFailed(
            domain=name, reason=f'{PATH} {event.value} has failed: {_said(status)}'
        )


def _said(status: model.Reader) -> str:
    try:
        data = base64.b64decode(status.fields.get('err-data') or '', validate=True)
    except (binascii.Error, TypeError, ValueError):
        data = b''
    words = ' '.join(text.printable(data[:_SAID].decode(errors='replace')).split())
    code = status.fields.get('exitcode')
    return words or (f'exit code {code}' if isinstance(code, int) else 'by a signal')


class _Agent:
    def __init__(self, name: str, domain: Any, bindings: Bindings, end: float) -> None:
        self._name, self._domain, self._end = name, domain, end
        self._libvirt, self._qemu = bindings.libvirt, bindings.libvirt_qemu

    def set_clock(self) -> None:
        """It may not be allowed to, or have no program for the other clock."""
        try:
            self.ask('guest-set-time', {'time': time.time_ns()})
        except exception.GuestHookFailed as e:
            LOG.warning('Its clock may be wrong: %s', e)

    def ask(self, command: str, arguments: dict[str, Any], *, again: bool = False) -> model.Reader:
        """:param again: while it is not there: that of a guest which has just gone on comes a
        moment later, and may have done before what it is asked for a second time
        """
        request = json.dumps({'execute': command, 'arguments': arguments})
        why = 'it does not end'
        while (left := self._end - time.monotonic()) > 0:
            try:
                said = libvirt_call.call(
                    self._name,
                    command,
                    self._qemu.qemuAgentCommand,
                    libvirt_call.bare(self._domain),
                    request,
                    math.ceil(left),
                    0,
                    seconds=left + libvirt_call.limit(),
                )
                return model.Reader(json.loads(said), command, _AGENT).object('return')
            except (ValueError, RecursionError) as e:
                raise exception.ToolOutputInvalid(tool=_AGENT, reason=f'{command}: {e}') from None
            except exception.NoAnswer as e:
                raise self._failed(str(e)) from None
            except self._libvirt.libvirtError as e:
                why = str(e)
                if not again or e.get_error_code() != self._libvirt.VIR_ERR_AGENT_UNRESPONSIVE:
                    raise self._failed(why) from None
            time.sleep(_PERIOD)
        raise self._failed(f'it was not done in time ({why})')

    def _failed(self, why: str) -> exception.GuestHookFailed:
        return exception.GuestHookFailed(
            domain=self._name, reason=f'{PATH} of its guest was not run, or has not ended: {why}'
        )
