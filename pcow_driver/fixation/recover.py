# SPDX-License-Identifier: Apache-2.0
"""Protected VMs go on: after a fixation from that, after a kill, a crash or a power cut from the
last checkpoint of the same run that is durable.

The layer that a killed QEMU stored to is not gone on with, as the registers that belong to it are
lost. What the guest had stored there is kept as a snapshot of each of its NVDIMMs; without room for
that the VM is left as it is.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import threading
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import at_signal
from pcow_driver.fixation import automatic
from pcow_driver.fixation import parallel
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.images import image
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

UNSAVED = 'pcow-unsaved-'
_TRIES = 3  # until it has run for long
_DEADLINE = 300.0  # seconds
_ARRIVAL = 15.0  # seconds in which a guest that answers has done so
_GUEST_SECONDS = 10.0  # for what it does itself then
_LATE = 'it was not done in time; pcow-protect.service goes on with it'


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one domain."""

    name: str
    checkpoint: str  # from which it goes on; '': it does not
    age: float  # seconds between that and now
    time: int  # ns from the command until it runs
    problem: str = ''
    # that tells its network and its clock
    arrival: threading.Thread | None = dataclasses.field(default=None, compare=False)


def recover(found: domain.Domain, record: records.Record, wanted: policy.Policy) -> Result:
    """Start a domain that is off and has to run. One that cannot go on stays off, and is left to
    its owner; what libvirt refuses may go well the next time. The caller is alone with it
    (:func:`pcow_driver.fixation.records.alone`).

    :raises StateInvalid: what became of it cannot be kept
    """
    begun = time.monotonic_ns()
    try:
        with libvirt_host.errors():
            recovering = _start(found, record)
    except exception.LibvirtFailed as e:
        return _not_yet(found, e)
    except exception.PcowError as e:
        LOG.error('%s does not go on: %s', found.name, e)
        _give_up(found, records.read(found.uuid) or record, str(e))
        return Result(name=found.name, checkpoint='', age=0, time=0, problem=str(e))
    try:
        with libvirt_host.errors():
            age = _note_runs(found, recovering, wanted)
    except exception.StateInvalid:
        raise
    except exception.PcowError as e:  # its QEMU has ended again: as if it had not begun
        return _not_yet(found, e)
    taken = time.monotonic_ns() - begun
    LOG.warning('%s goes on from %s, of %.0f s ago', found.name, recovering.checkpoint, age)
    return Result(
        name=found.name,
        checkpoint=recovering.checkpoint,
        age=age,
        time=taken,
        arrival=None if record.paused else _arrive(found.name, wanted),
    )


def _not_yet(found: domain.Domain, error: exception.PcowError) -> Result:
    LOG.error('%s does not go on yet: %s', found.name, error)
    return Result(name=found.name, checkpoint='', age=0, time=0, problem=str(error))


def _give_up(found: domain.Domain, record: records.Record, reason: str) -> None:
    decided = record.state not in (records.State.RUNS, records.State.FIXATING)
    records.write(
        found.uuid,
        dataclasses.replace(
            record,
            state=records.State.FAILED,
            checkpoint=record.checkpoint if decided else '',
            reason=reason,
        ),
    )


def is_cut_off(found: domain.Domain, record: records.Record) -> bool:
    """Of an active domain: whether its QEMU is one that a recovery has started, and left. It has
    not run, and what was unsaved is kept; any other one was started by somebody.

    :raises PcowError: QEMU does not tell
    """
    return record.kept and found.paused_on_purpose() and not found.has_run()


def finish(found: domain.Domain, record: records.Record, wanted: policy.Policy) -> None:
    """Take a recovery that was cut off (:func:`is_cut_off`) to its end.

    :raises PcowError: QEMU cannot; after some tries the domain is off, and left to its owner
    """
    record = dataclasses.replace(record, tries=record.tries + 1)
    records.write(found.uuid, record)
    try:
        with libvirt_host.errors():
            name = record.checkpoint or checkpoint.current_name(found)
            checkpoint.revert(found, name)
            if not record.paused:
                found.resume()
    except exception.PcowError as e:
        if record.tries >= _TRIES:
            LOG.error('%s does not go on: %s', found.name, e)
            found.destroy()
            _give_up(found, record, str(e))
        raise
    with libvirt_host.errors():
        _note_runs(found, dataclasses.replace(record, checkpoint=name), wanted)
    if not record.paused:
        _arrive(found.name, wanted)


def recover_all(*, failed: bool = False, deadline: float = _DEADLINE) -> list[Result]:
    """All that have to run, and do not, several at once; one that fails, or hangs, keeps no other
    one.

    :param failed: also those that could not go on before
    :param deadline: seconds from now, after which nobody waits for those that are left
    :raises LibvirtFailed: it does not answer
    """
    end = time.monotonic() + deadline
    with libvirt_host.connect() as connection:
        names = libvirt_host.names_by_uuid(connection)

    def work(uuid: str) -> _Done:
        name = names.get(uuid)
        return _Done(_unknown(uuid) if name is None else _recover_if_off(uuid, name, failed=failed))

    found = []
    for uuid, done in parallel.each(records.all_uuids(), work, end):
        if isinstance(done, _Done):
            result = done.result
        else:
            known = done is None or isinstance(done, exception.PcowError)
            problem = _LATE if done is None else str(done)
            LOG.error('%s: %s', names.get(uuid, uuid), problem, exc_info=None if known else done)
            result = Result(names.get(uuid, uuid), checkpoint='', age=0, time=0, problem=problem)
        if result is not None:
            found.append(result)
    _wait_for_arrivals(found)
    return found


@dataclasses.dataclass(frozen=True)
class _Done:
    result: Result | None  # None: it had not to go on


def _wait_for_arrivals(found: list[Result]) -> None:
    """The caller may end then, and they with it."""
    end = time.monotonic() + _ARRIVAL
    for one in found:
        if one.arrival is not None:
            one.arrival.join(max(0.0, end - time.monotonic()))


def _unknown(uuid: str) -> Result | None:
    record = records.read(uuid)
    if record is not None and record.owner:  # which may just be defining it anew
        return None
    return Result(
        name=uuid,
        checkpoint='',
        age=0,
        time=0,
        problem=f'libvirt has no such domain; if it is gone, delete {records.path_of(uuid)}',
    )


def _recover_if_off(uuid: str, name: str, *, failed: bool) -> Result | None:
    with libvirt_host.connect() as connection, records.alone(uuid):
        found, record = domain.Domain(connection, name), records.read(uuid)
        if record is None or found.active():
            return None
        wanted = policy.get(found)
        if wanted is None:
            records.forget(uuid)
            return None
        if is_left_to_owner(found, record, wanted):
            return None
        if is_to_stay_off(found, record):
            leave_off(found, wanted, record)
            return None
        if record.state is records.State.FAILED and not failed:
            return None
        return recover(found, record, wanted)


def is_left_to_owner(found: domain.Domain, record: records.Record, wanted: policy.Policy) -> bool:
    """Of a domain that is off, and that another program starts: whether it is that one's to have
    it go on. After a boot of the host that alone knows how; before, only what was killed is surely
    not just being started anew, or was fixated.
    """
    if not wanted.owner:
        return False
    if record.run == wanted.over or not runs.is_of_this_boot(record):
        return True
    if record.state in (records.State.RUNS, records.State.FIXATING):
        return not (found.was_killed() or is_to_stay_off(found, record))
    return False


def is_to_stay_off(found: domain.Domain, record: records.Record) -> bool:
    """Whether somebody has ended it, or has libvirt start it again where it was saved. A fixation
    and a recovery end it themselves, and know that before.
    """
    return found.saved() or (
        record.state in (records.State.RUNS, records.State.FIXATING) and found.stopped_on_purpose()
    )


def leave_off(found: domain.Domain, wanted: policy.Policy, record: records.Record) -> None:
    """Of one that was ended, or is started by libvirt again: it has not to run.

    One that a fixation should have kept, and did not, was perhaps shut down with the host: that is
    what its owner is told.

    :raises PcowError: that cannot be kept, or its images cannot be read
    """
    begun = records.last_fixation()
    over = begun <= max(record.since, record.outlived)
    if found.saved() or wanted.on_shutdown != policy.FIXATE or over:
        records.forget(found.uuid)
        return
    date = datetime.datetime.fromtimestamp(begun, datetime.UTC)
    reason = (
        f'it was not fixated at {date.isoformat(timespec="seconds")}, and was ended later, maybe '
        f"with the host: 'virsh start {found.name}' boots it, unless it is to stay off"
    )
    LOG.error('%s: %s', found.name, reason)
    # Nothing that is there is gone on from: it has come to its end since.
    before = runs.dates(tree.checkpoints(found))
    _give_up(found, dataclasses.replace(record, before=before), reason)


def _start(found: domain.Domain, record: records.Record) -> records.Record:
    """:return: with the checkpoint that it is at"""
    before, last = record.state, last_moment(found, record)
    tries = 0 if before is records.State.FIXATED else record.tries + 1
    # Who is cut off from here on, or gives up, is followed by one who knows where it goes on.
    record = dataclasses.replace(
        record, state=records.State.RECOVERING, checkpoint=last, tries=tries
    )
    records.write(found.uuid, record)
    if tries > _TRIES and before is not records.State.FAILED:
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                f'it has gone on, or tried to, {_TRIES} times, and ended soon each time: '
                f"'pcowctl host recover --failed' tries it again, 'pcowctl vm revert {found.name} "
                f"NAME' an older checkpoint"
            ),
        )
    # Also after one that was cut off: somebody may have booted it since.
    keep_unsaved(found, last, first=tries <= 1 and not record.kept)
    record = dataclasses.replace(record, kept=True)
    records.write(found.uuid, record)
    name = checkpoint.start_at(found, last or None, run=not record.paused)
    return dataclasses.replace(record, checkpoint=name)


def _note_runs(found: domain.Domain, record: records.Record, wanted: policy.Policy) -> float:
    """:return: seconds between its checkpoint and now"""
    try:
        # at once: the loop comes by within a second, or is not there
        at_signal.tell(found, wanted.on_shutdown)
    except exception.PcowError as e:
        LOG.warning('%s: its QEMU keeps no last moment by itself: %s', found.name, e)
    records.write(
        found.uuid,
        dataclasses.replace(
            runs.at(found, record.checkpoint),
            durable=record.durable,
            paused=record.paused,
            tries=record.tries,
        ),
    )
    dates = (one.date for one in tree.checkpoints(found) if one.name == record.checkpoint)
    date = next(dates, None)
    return 0.0 if date is None else max(0.0, time.time() - date.timestamp())


def _arrive(name: str, wanted: policy.Policy) -> threading.Thread:
    """It runs, whatever comes of this. Its guest may never answer: nobody waits for the thread who
    has something else to do, or holds a lock.
    """

    def work() -> None:
        try:
            with libvirt_host.connect() as connection:
                found = domain.Domain(connection, name)
                found.arrive()
                if wanted.guest_hook:
                    found.run_guest_hook(guest_hook.Event.RECOVERED, seconds=_GUEST_SECONDS)
        except exception.PcowError as e:
            LOG.warning('%s: it goes on, and was not told of all: %s', name, e)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def last_moment(found: domain.Domain, record: records.Record) -> str:
    """The checkpoint that it goes on from: no older one than of its last run, and no other branch.

    :return: its name; '': the one that it stands on when a QEMU has finished what the last one left
    :raises DomainInvalid: there is none
    """
    there = tree.checkpoints(found)
    if record.state in (records.State.RUNS, records.State.FIXATING) or (
        record.state is records.State.FAILED and not record.checkpoint
    ):
        if tree.stands_on_unfinished(found):
            return ''
        last = tree.current(there)
        wanted = None if last is None or runs.is_of_before(record, last) else last.name
    elif any(one.name == record.checkpoint for one in there) or tree.has_unfinished(found):
        wanted = record.checkpoint  # QEMU judges of one that is unfinished
    else:
        wanted = None if record.checkpoint else ''
    if wanted is None:
        raise exception.DomainInvalid(
            domain=found.name,
            reason=(
                f'it has no checkpoint of its last run to go on from: virsh start {found.name} '
                f'boots it, with what its memory holds'
            ),
        )
    return wanted


def keep_unsaved(found: domain.Domain, last: str, *, first: bool) -> None:
    """What the NVDIMMs hold now, and no checkpoint does.

    :param first: it takes the place of that of before; those of one that ends again and again stay
        together, as what it held before it began is among them
    :raises PcowError: there is no room for it, and none can be made
    """
    name, ram = automatic.new_name(UNSAVED), found.ram()
    for path in found.writable():
        if path != ram:
            automatic.make_room(
                found, last, functools.partial(_keep_unsaved_of, path, name, first=first)
            )


def _keep_unsaved_of(path: str, name: str, *, first: bool) -> None:
    old = [one.name for one in image.snapshot_list(path) if one.name.startswith(UNSAVED)]
    with room.for_snapshot(path):
        image.snapshot_create(path, name)
    (made,) = (one for one in image.snapshot_list(path) if one.name == name)
    if made.data_size == 0:
        image.snapshot_delete(path, name)
    elif first:
        for one in old:
            image.snapshot_delete(path, one)
