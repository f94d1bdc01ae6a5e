# SPDX-License-Identifier: Apache-2.0
"""Protected VMs go on: after a fixation from that, after a kill, a crash or a power cut from the
last checkpoint that is durable.

The layer that a killed QEMU stored to is not gone on with, as the registers that belong to it are
lost. What the guest had stored there is kept as a snapshot of each of its NVDIMMs.
"""

from __future__ import annotations

import dataclasses
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import records
from pcow_driver.images import image
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

UNSAVED = 'pcow-unsaved-'
_TRIES = 3  # from one checkpoint


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
    its owner. The caller is alone with it (:func:`pcow_driver.fixation.records.alone`).

    :raises StateInvalid: what became of it cannot be kept
    """
    begun = time.monotonic_ns()
    try:
        last = automatic.newest(tree.checkpoints(found))
        if last is None:
            raise exception.DomainInvalid(
                domain=found.name,
                reason=f'it has no checkpoint to go on from: virsh start {found.name} boots it',
            )
        tries = record.tries + 1 if record.checkpoint == last.name else 1
        if record.state is records.State.RUNS and tries > _TRIES:
            raise exception.DomainInvalid(
                domain=found.name,
                reason=(
                    f'it has gone on from {last.name} {_TRIES} times, and ended each time: '
                    f"'pcowctl host recover' tries it again, 'pcowctl vm revert {found.name} NAME' "
                    f'an older one'
                ),
            )
        if record.checkpoint != last.name or record.state is not records.State.FIXATED:
            _keep_unsaved(found)
        checkpoint.revert(found, last.name, run=not record.paused)
    except exception.PcowError as e:
        if found.active():  # somebody was quicker
            records.write(found.uuid, records.Record(records.State.RUNS, durable=record.durable))
            return Result(name=found.name, checkpoint='', age=0, time=0, problem=str(e))
        LOG.error('%s does not go on: %s', found.name, e)
        records.write(
            found.uuid, dataclasses.replace(record, state=records.State.FAILED, reason=str(e))
        )
        return Result(name=found.name, checkpoint='', age=0, time=0, problem=str(e))
    taken = time.monotonic_ns() - begun
    age = max(0.0, time.time() - last.date.timestamp())
    LOG.warning('%s goes on from %s, of %.0f s ago', found.name, last.name, age)
    records.write(
        found.uuid,
        records.Record(
            records.State.RUNS, checkpoint=last.name, durable=record.durable, tries=tries
        ),
    )
    if not record.paused:
        found.arrive()
    return Result(name=found.name, checkpoint=last.name, age=age, time=taken)


def recover_all() -> list[Result]:
    """All that have to run, and do not: also those that could not go on before. One after the
    other, as each is as fast as the memory.

    :raises LibvirtFailed:
    """
    done = []
    with domain.connect() as connection:
        by_uuid = {
            one.uuid: one
            for one in (domain.Domain(connection, name) for name in domain.names_of_all(connection))
        }
        for uuid in records.all_uuids():
            with records.alone(uuid):
                record, found = records.read(uuid), by_uuid.get(uuid)
                if found is None:
                    records.forget(uuid)
                elif record is not None and not found.active():
                    done.append(recover(found, record))
    return done


def _keep_unsaved(found: domain.Domain) -> None:
    """What the NVDIMMs hold now, and no checkpoint does; it takes the place of that of before.

    Without room for it the VM goes on all the same.
    """
    name = automatic.new_name(UNSAVED)
    ram = found.ram()
    for path in found.writable():
        if path == ram:
            continue
        try:
            old = [one.name for one in image.snapshot_list(path) if one.name.startswith(UNSAVED)]
            with room.for_snapshot(path):
                image.snapshot_create(path, name)
            for one in old:
                image.snapshot_delete(path, one)
        except exception.PcowError as e:
            LOG.warning('%s: what it held is not kept: %s', path, e)
