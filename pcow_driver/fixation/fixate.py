# SPDX-License-Identifier: Apache-2.0
"""Fixation: the last moment of a protected VM is a durable checkpoint, and its QEMU ends.

For a host that goes down. As no guest runs on behind its checkpoint, nothing is lost; the term is
that of "Temporality: A NVRAM-based Virtualization Platform" (SRDS 2015).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import automatic
from pcow_driver.fixation import guests
from pcow_driver.fixation import parallel
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.virt import domain
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

_GUESTS = 0.1  # of a deadline, for what guests do themselves
_LATE = 'it was not done in time; pcow-protect.service has it run on, or: virsh resume'


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one domain."""

    name: str
    checkpoint: str  # '': it was not fixated
    time: int  # ns from the command until its QEMU has ended
    durable: int = 0  # the same until its last moment was kept, and was known to be
    problem: str = ''  # why it was not; it goes on from its last checkpoint then


def fixate(found: domain.Domain) -> Result:
    """Of one that runs, or is paused. If it fails, the guest runs on; if this process is killed,
    :class:`~pcow_driver.fixation.watch.Watch` has it run on.

    :raises DomainInvalid: it is off, has crashed, is about to go on, or its RAM is no image
    :raises QmpFailed: QEMU cannot, and says why
    :raises LibvirtFailed: its QEMU does not end: the guest stays stopped, and goes on from its last
        moment; Watch tries again to end it
    :raises StateInvalid: nobody would know that it has to go on; its QEMU has not ended
    """
    begun = time.monotonic_ns()
    with libvirt_host.errors(), records.alone(found.uuid):
        record = _begin(found)
        try:
            found.suspend()  # what is stored behind the checkpoint would be lost
            _check_whole(found)
            name, taken = automatic.take(found, automatic.FIXATION, last=True)
            record = dataclasses.replace(
                record, state=records.State.FIXATED, checkpoint=name, durable=taken.durable
            )
            records.write(found.uuid, record)
        except BaseException:
            with interrupt.clearing_up():
                go_on(found, record)
            raise
        durable = time.monotonic_ns() - begun
        finish(found)
    return Result(
        name=found.name, checkpoint=name, time=time.monotonic_ns() - begun, durable=durable
    )


def finish(found: domain.Domain) -> None:
    """Its last moment is kept, and its QEMU ends.

    :raises LibvirtFailed: it does not; the next call may have more luck
    """
    with libvirt_host.errors():
        _disarm(found)
        found.destroy()


def go_on(found: domain.Domain, record: records.Record) -> None:
    """It was stopped for its last checkpoint, and runs on, unless something else has stopped it."""
    if not record.paused and not found.running() and found.is_whole():
        found.resume()
    records.write(found.uuid, dataclasses.replace(record, state=records.State.RUNS))


def _begin(found: domain.Domain) -> records.Record:
    record = records.read(found.uuid)
    if record is not None and record.state is records.State.RECOVERING and not found.running():
        raise exception.DomainInvalid(
            domain=found.name, reason='it is about to go on from a checkpoint, and does so later'
        )
    # Of a guest that runs QEMU is asked when it has stopped: until then it answers later.
    if not found.running():
        _check_whole(found)
    if record is None or record.run != runs.current(found):
        record = runs.begun(found)
    # One that was cut off has stopped the guest itself, and knows whether somebody had before.
    cut_off = record.state in (records.State.FIXATING, records.State.FIXATED)
    paused = record.paused if cut_off else found.paused_on_purpose()
    record = dataclasses.replace(record, state=records.State.RUNS, paused=paused)
    records.write(found.uuid, record)
    record = dataclasses.replace(record, state=records.State.FIXATING)
    records.write(found.uuid, record)
    return record


def _check_whole(found: domain.Domain) -> None:
    if not found.is_whole():
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                'it has crashed, lost a store of a device, or does not run yet: this is no moment '
                'to go on from'
            ),
        )


def _disarm(found: domain.Domain) -> None:
    """QEMU ends by a signal, and would take one more. That would be no harm."""
    try:
        at_signal.tell(found, '')
    except exception.PcowError as e:  # it is an older one, or hangs
        LOG.debug('%s: %s', found.name, e)


def wanted() -> list[str]:
    """Names of the protected domains that run and are to be fixated, in the order in which that is
    done.

    :raises LibvirtFailed:
    """
    with libvirt_host.connect() as connection:
        names = libvirt_host.names_of_all(connection)
    found = []
    for name in names:
        try:
            with libvirt_host.connect() as connection:
                one = domain.Domain(connection, name)
                has = policy.get(one)
                if has is not None and has.on_shutdown == policy.FIXATE and one.active():
                    found.append((-has.priority, name))
        except exception.PcowError as e:  # it is gone, or nobody can read what is wanted
            LOG.error('%s: %s', name, e)
    return [name for _priority, name in sorted(found)]


def fixate_all(names: Sequence[str], deadline: float | None = None) -> Iterator[Result]:
    """Fixate these domains, several at once, in this order.

    :param deadline: seconds from now, after which it ends; a domain whose last checkpoint took
        longer to be durable than there is time is left to that
    :return: of each domain, as it comes to its end
    """
    end = None if deadline is None else time.monotonic() + deadline
    if names:
        _note()
    share = guests.SECONDS if deadline is None else min(guests.SECONDS, deadline * _GUESTS)
    told, back = guests.tell(names, guest_hook.Event.FIXATE, share), []
    for name, done in parallel.each(names, lambda name: _fixate(name, end), end):
        if isinstance(done, Result):
            result = done
        else:
            if done is not None:
                known = isinstance(done, exception.PcowError)
                LOG.error('%s is not fixated: %s', name, done, exc_info=None if known else done)
            problem = _LATE if done is None else str(done)
            result = Result(name=name, checkpoint='', time=0, problem=problem)
        if result.problem and name in told:
            back.append(name)
        yield result
    guests.tell(back, guest_hook.Event.RECOVERED)


def _note() -> None:
    try:
        records.note_fixation()
    except exception.PcowError as e:  # it is only for those that are not done
        LOG.error('%s', e)


def _fixate(name: str, end: float | None) -> Result:
    with libvirt_host.connect() as connection:
        found = domain.Domain(connection, name)
        known = records.read(found.uuid)
        needed = known.durable / 1e9 if known is not None else 0.0
        if end is not None and time.monotonic() + needed > end:
            return Result(name=name, checkpoint='', time=0, problem='there is no time for it')
        return fixate(found)
