# SPDX-License-Identifier: Apache-2.0
"""Which QEMU of a domain it is: a checkpoint of an earlier one is no moment of this one."""

from __future__ import annotations

import time

from pcow_driver.fixation import records
from pcow_driver.virt import domain

_BOOT_ID = '/proc/sys/kernel/random/boot_id'


def current(found: domain.Domain) -> str:
    """Of a domain that is active; another one of each QEMU and each boot of the host."""
    with open(_BOOT_ID, encoding='ascii') as f:
        return f'{f.read().strip()}/{found.run_id()}'


def begun(found: domain.Domain, checkpoint: str = '', **more: int) -> records.Record:
    """Record of a domain whose QEMU is seen for the first time.

    :param checkpoint: that it has gone on from
    """
    return records.Record(
        records.State.RUNS,
        run=current(found),
        since=time.time(),
        checkpoint=checkpoint,
        durable=more.get('durable', 0),
        tries=more.get('tries', 0),
    )


def note_revert(found: domain.Domain, checkpoint: str) -> None:
    """Somebody has had the domain go back to this checkpoint: it is one of this run now.

    :raises StateInvalid:
    """
    with records.alone(found.uuid):
        if records.read(found.uuid) is not None:
            records.write(found.uuid, begun(found, checkpoint))
