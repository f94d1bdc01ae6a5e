# SPDX-License-Identifier: Apache-2.0
"""Which QEMU of a domain it is: a checkpoint of an earlier one is no moment of this one."""

from __future__ import annotations

import time

from pcow_driver.fixation import automatic
from pcow_driver.fixation import records
from pcow_driver.virt import domain
from pcow_driver.vm import tree

_BOOT_ID = '/proc/sys/kernel/random/boot_id'


def current(found: domain.Domain) -> str:
    """Of a domain that is active; another one of each QEMU and each boot of the host.

    :raises DomainInvalid: its QEMU has ended
    """
    with open(_BOOT_ID, encoding='ascii') as f:
        return f'{f.read().strip()}/{found.process()}'


def begun(found: domain.Domain) -> records.Record:
    """Record of a domain whose QEMU is seen for the first time: what checkpoint it stands on is one
    of before.

    :raises PcowError: QEMU does not tell
    """
    last = automatic.current(tree.checkpoints(found))
    return records.Record(
        records.State.RUNS,
        run=current(found),
        since=time.time(),
        before='' if last is None else last.name,
    )


def at(found: domain.Domain, checkpoint: str) -> records.Record:
    """Record of a domain that goes on from this checkpoint in a QEMU of now.

    :raises DomainInvalid: its QEMU has ended
    """
    return records.Record(
        records.State.RUNS, run=current(found), since=time.time(), checkpoint=checkpoint
    )


def note_revert(found: domain.Domain, checkpoint: str) -> None:
    """Somebody has had the domain go back to this checkpoint: it is one of this run now. The caller
    is alone with it since before (:func:`pcow_driver.fixation.records.alone`).

    :raises StateInvalid:
    """
    if records.read(found.uuid) is not None and found.active():
        records.write(found.uuid, at(found, checkpoint))
