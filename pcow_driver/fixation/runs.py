# SPDX-License-Identifier: Apache-2.0
"""Which QEMU of a domain it is: a checkpoint of an earlier one is no moment of this one."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import time

from pcow_driver.common import boot_id
from pcow_driver.fixation import records
from pcow_driver.virt import domain
from pcow_driver.vm import model
from pcow_driver.vm import tree


def current(found: domain.Domain) -> str:
    """Of a domain that is active; another one of each QEMU and each boot of the host.

    :raises DomainInvalid: its QEMU has ended
    """
    return f'{boot_id.current()}/{found.process()}'


def is_of_this_boot(record: records.Record) -> bool:
    """Whether the host was not started again since."""
    return record.run.startswith(f'{boot_id.current()}/')


def begun(found: domain.Domain) -> records.Record:
    """Record of a domain whose QEMU is seen for the first time: each checkpoint that is there
    is one of before.

    :raises PcowError: QEMU does not tell
    """
    return records.Record(
        records.State.RUNS,
        run=current(found),
        since=time.time(),
        before=dates(tree.checkpoints(found)),
    )


def at(found: domain.Domain, checkpoint: str) -> records.Record:
    """The same of one that goes on from this checkpoint, which is one of this run now.

    :raises PcowError: its QEMU has ended, or does not tell
    """
    record = begun(found)
    before = {name: date for name, date in record.before.items() if name != checkpoint}
    return dataclasses.replace(record, before=before, checkpoint=checkpoint)


def dates(found: Sequence[model.Checkpoint]) -> dict[str, str]:
    """By name: as of a checkpoint whose name was given again, the two tell which one it is."""
    return {one.name: one.date.isoformat() for one in found}


def is_of_before(record: records.Record, one: model.Checkpoint) -> bool:
    """Whether the checkpoint is older than the run."""
    return record.before.get(one.name) in ('', one.date.isoformat())


def note_revert(found: domain.Domain, checkpoint: str) -> None:
    """Somebody has had the domain go back to this checkpoint: it is one of this run now. The caller
    is alone with it since before (:func:`pcow_driver.fixation.records.alone`).

    :raises PcowError: that cannot be kept, or QEMU does not tell
    """
    if records.read(found.uuid) is not None and found.active():
        records.write(found.uuid, at(found, checkpoint))
