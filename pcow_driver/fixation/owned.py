# SPDX-License-Identifier: Apache-2.0
"""Protected VMs that another program starts, their owner: Nova's.

It makes the network and the volumes of a domain, which are not there after a boot of the host, and
defines it anew whenever it starts it. So there is one who has a VM go on at a time:

* after a boot of the host the owner (:func:`pending`, :func:`start`, :func:`run`), which may keep
  no record, as those are root's: that a moment is used up stands in the policy, and the loop
  (:mod:`pcow_driver.fixation.watch`) begins a new record when it sees the VM run;
* until the host is started again the loop, if the QEMU was killed, or who has the host recover from
  a fixation. An owner waits for that (:func:`is_held`).
"""

from __future__ import annotations

import dataclasses
import time

from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.fixation import runs
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import tree


def record_of(found: domain.Domain) -> records.Record | None:
    """Of its last run, as far as it was seen, which nobody has ended or has had go on.

    :raises StateInvalid: nobody knows
    :raises UsageInvalid: the same
    """
    wanted, record = policy.get(found), records.read(found.uuid)
    if wanted is None or record is None or record.run == wanted.over:
        return None
    return record


def pending(found: domain.Domain) -> records.Record | None:
    """Of a domain that is off, or was left paused by who had it go on: what its owner has it go on
    with; None: nothing.

    :raises StateInvalid: nobody knows
    :raises UsageInvalid: the same
    """
    record = record_of(found)
    if record is None or runs.is_of_this_boot(record) or record.state is records.State.FAILED:
        return None
    return None if found.saved() or (found.active() and not is_left(found)) else record


def is_left(found: domain.Domain) -> bool:
    """Of an active domain: whether its owner has started it, and was killed before that ran.

    :raises StateInvalid: nobody knows
    """
    if not found.paused_on_purpose() or found.has_run():
        return False
    record = record_of(found)
    return record is None or not runs.is_of_this_boot(record)  # else the loop is at it


def start(found: domain.Domain, record: records.Record) -> str:
    """Have it where it was, paused. What its NVDIMMs hold beyond that is kept before.

    :param record: of :func:`pending`
    :return: the checkpoint
    :raises PcowError: it cannot be, and is off as before
    """
    with libvirt_host.errors():
        if found.active():  # a start that was cut off, which has kept that
            name = checkpoint.current_name(found)
            checkpoint.revert(found, name)
            return name
        last = recover.last_moment(found, record)
        recover.keep_unsaved(found, last, first=not _has_kept(found, record))
        return checkpoint.start_at(found, last or None, run=False)


def run(found: domain.Domain, record: records.Record) -> None:
    """Behind :func:`start`: it is not gone back to once more, whenever this process ends.

    :raises LibvirtFailed:
    """
    with libvirt_host.errors():
        note_over(found)
        if not record.paused:
            found.resume()


def note_over(found: domain.Domain) -> None:
    """Before a domain is started that is not defined anew for that, or whose guest shuts down to
    start again: nothing of its last run is gone on from.

    :raises LibvirtFailed:
    :raises StateInvalid: nobody knows which one that was
    """
    with libvirt_host.errors():
        wanted, record = policy.get(found), records.read(found.uuid)
        if wanted is not None and record is not None:
            policy.write(found, dataclasses.replace(wanted, over=record.run))


def is_of_earlier_boot(record: records.Record) -> bool:
    """Whether the host was started since."""
    return not runs.is_of_this_boot(record)


def age(found: domain.Domain, name: str) -> float:
    """Seconds since a checkpoint of an active domain was taken.

    :raises PcowError: QEMU does not tell
    """
    with libvirt_host.errors():
        dates = (one.date for one in tree.checkpoints(found) if one.name == name)
        date = next(dates, None)
    return 0.0 if date is None else max(0.0, time.time() - date.timestamp())


def is_held(found: domain.Domain) -> bool:
    """Of a domain that does not run, on a host that was not started since: whether it is about to
    go on without its owner, or the host is about to go down.

    :raises StateInvalid: nobody knows
    """
    record = record_of(found)
    if record is None or record.paused or not runs.is_of_this_boot(record):
        return False
    if found.active():
        return record.state in (records.State.FIXATING, records.State.FIXATED)
    if record.state in (records.State.FIXATED, records.State.RECOVERING):
        return True
    return record.state is not records.State.FAILED and found.was_killed()


def _has_kept(found: domain.Domain, record: records.Record) -> bool:
    """Whether somebody has tried it before, and kept what no checkpoint of this run holds."""
    ram = found.ram()
    return any(
        one.name.startswith(recover.UNSAVED) and one.date.timestamp() > record.since
        for path in found.writable()
        if path != ram
        for one in image.snapshot_list(path)
    )
