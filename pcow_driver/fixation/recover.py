# SPDX-License-Identifier: Apache-2.0
"""Protected VMs go on: after a fixation from that, after a kill, a crash or a power cut from the
last checkpoint of the same run that is durable.

The layer that a killed QEMU stored to is not gone on with, as the registers that belong to it are
lost. What the guest had stored there is kept as a snapshot of each of its NVDIMMs; without room for
that the VM is left as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.images import image
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

UNSAVED = 'pcow-unsaved-'
_TRIES = 3  # until it has run for long


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one domain."""

    name: str
    checkpoint: str  # from which it goes on; '': it does not
    age: float  # seconds between that and now
    time: int  # ns from the command until it runs
    problem: str = ''


def recover(found: domain.Domain, record: records.Record) -> Result:
    """Start a domain that is off and has to run. One that cannot go on stays off, and is left to
    its owner; what libvirt refuses may go well the next time. The caller is alone with it
    (:func:`pcow_driver.fixation.records.alone`).

    :raises StateInvalid: what became of it cannot be kept
    """
    begun = time.monotonic_ns()
    try:
        with domain.errors():
            recovering = _start(found, record)
    except exception.LibvirtFailed as e:
        return _not_yet(found, e)
    except exception.PcowError as e:
        LOG.error('%s does not go on: %s', found.name, e)
        _give_up(found, records.read(found.uuid) or record, str(e))
        return Result(name=found.name, checkpoint='', age=0, time=0, problem=str(e))
    try:
        with domain.errors():
            age = _note_runs(found, recovering)
    except exception.StateInvalid:
        raise
    except exception.PcowError as e:  # its QEMU has ended again: as if it had not begun
        return _not_yet(found, e)
    taken = time.monotonic_ns() - begun
    LOG.warning('%s goes on from %s, of %.0f s ago', found.name, recovering.checkpoint, age)
    if not record.paused:
        _arrive(found)
    return Result(name=found.name, checkpoint=recovering.checkpoint, age=age, time=taken)


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


def finish(found: domain.Domain, record: records.Record) -> bool:
    """Of a recovery that was cut off when there was a QEMU: take it to its end. It has not run, and
    what was unsaved is kept; any other one was started by somebody, and goes on as it is.

    :return: whether it goes on from its checkpoint
    :raises PcowError: QEMU cannot; after some tries the domain is off, and left to its owner
    """
    if found.is_starting():
        return False
    if not record.kept or not found.paused_on_purpose() or found.has_run():
        records.write(found.uuid, runs.begun(found))
        return False
    record = dataclasses.replace(record, tries=record.tries + 1)
    records.write(found.uuid, record)
    try:
        with domain.errors():
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
    with domain.errors():
        _note_runs(found, dataclasses.replace(record, checkpoint=name))
    return True


def recover_all(*, failed: bool = False) -> list[Result]:
    """All that have to run, and do not; one that fails keeps no other one.

    :param failed: also those that could not go on before
    :raises LibvirtFailed: it does not answer
    """
    with domain.connect() as connection:
        names = domain.names_by_uuid(connection)
    done = []
    for uuid in records.all_uuids():
        name = names.get(uuid)
        try:
            result = _unknown(uuid) if name is None else _recover_if_off(uuid, name, failed=failed)
        except exception.PcowError as e:
            result = Result(name=name or uuid, checkpoint='', age=0, time=0, problem=str(e))
        if result is not None:
            done.append(result)
    return done


def _unknown(uuid: str) -> Result:
    return Result(
        name=uuid,
        checkpoint='',
        age=0,
        time=0,
        problem=f'libvirt has no such domain; if it is gone, delete {records.path_of(uuid)}',
    )


def _recover_if_off(uuid: str, name: str, *, failed: bool) -> Result | None:
    with domain.connect() as connection, records.alone(uuid):
        found, record = domain.Domain(connection, name), records.read(uuid)
        if record is None or found.active():
            return None
        if policy.get(found) is None or is_to_stay_off(found, record):
            records.forget(uuid)
            return None
        if record.state is records.State.FAILED and not failed:
            return None
        return recover(found, record)


def is_to_stay_off(found: domain.Domain, record: records.Record) -> bool:
    """Whether somebody has ended it, or has libvirt start it again where it was saved. A fixation
    and a recovery end it themselves, and know that before.
    """
    return found.saved() or (
        record.state in (records.State.RUNS, records.State.FIXATING) and found.stopped_on_purpose()
    )


def _start(found: domain.Domain, record: records.Record) -> records.Record:
    """:return: with the checkpoint that it is at"""
    before, last = record.state, _last_moment(found, record)
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
    _keep_unsaved(found, last, first=tries <= 1 and not record.kept)
    record = dataclasses.replace(record, kept=True)
    records.write(found.uuid, record)
    name = checkpoint.start_at(found, last or None, run=not record.paused)
    return dataclasses.replace(record, checkpoint=name)


def _note_runs(found: domain.Domain, record: records.Record) -> float:
    """:return: seconds between its checkpoint and now"""
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


def _arrive(found: domain.Domain) -> None:
    """It runs, whatever comes of this."""
    try:
        with domain.errors():
            found.arrive()
    except exception.PcowError as e:
        LOG.warning('%s: neither its network nor its clock was told: %s', found.name, e)


def _last_moment(found: domain.Domain, record: records.Record) -> str:
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


def _keep_unsaved(found: domain.Domain, last: str, *, first: bool) -> None:
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
