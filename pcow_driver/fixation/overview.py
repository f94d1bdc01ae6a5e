# SPDX-License-Identifier: Apache-2.0
"""What is known of the protected domains, for people."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.fixation import records
from pcow_driver.fixation import recover
from pcow_driver.pools import registry
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import tree

LOG = logging.getLogger(__name__)

POWER_FAILURE = 'power failure'
END_OF_QEMU = 'end of QEMU'
_DURABLE = 'pmem'  # class of a pool whose images are there after a power failure


@dataclasses.dataclass(frozen=True)
class Row:
    """Of one domain."""

    name: str
    state: str
    policy: policy.Policy
    outlives: str
    checkpoint: str  # the last one, whoever took it
    age: float | None  # seconds
    durable: int  # ns that one took, until it was durable: as long as a fixation will take


def rows(connection: Any, name: str | None = None) -> list[Row]:
    """Of the protected domains, or of this one if it is, the highest priority first.

    :raises LibvirtFailed:
    """
    found = []
    for one in [name] if name is not None else libvirt_host.names_of_all(connection):
        try:
            with libvirt_host.errors():
                item = domain.Domain(connection, one)
                has = policy.get(item)
                if has is not None:
                    found.append(_row(item, has))
        except exception.PcowError as e:
            if name is not None:
                raise
            LOG.warning('%s: %s', one, e)  # it has gone, for instance
    return sorted(found, key=lambda row: (-row.policy.priority, row.name))


def _row(found: domain.Domain, has: policy.Policy) -> Row:
    record = records.read(found.uuid)
    problem = ''
    try:
        last = automatic.newest(tree.checkpoints(found))
    except exception.PcowError as e:
        last, problem = None, str(e)
    return Row(
        name=found.name,
        state=_state(found, record, has) + (f'; {problem}' if problem else ''),
        policy=has,
        outlives=_outlives(found),
        checkpoint='' if last is None else last.name,
        age=None if last is None else max(0.0, time.time() - last.date.timestamp()),
        durable=0 if record is None else record.durable,
    )


def _state(found: domain.Domain, record: records.Record | None, has: policy.Policy) -> str:
    if found.active():
        return 'runs'
    if record is None:
        return 'off'
    if record.state is records.State.FAILED:
        return f'failed: {record.reason}'
    if recover.is_left_to_owner(found, record, has):
        return 'off' if record.run == has.over else f'ended, {has.owner} has it go on'
    return 'fixated' if record.state is records.State.FIXATED else 'ended, goes on'


def _outlives(found: domain.Domain) -> str:
    """By the worst of the pools of its images."""
    pools = registry.PoolRegistry()
    for path in found.writable():
        pool = pools.find(os.path.dirname(path))
        if pool is None or pool.persistence() != _DURABLE:
            return END_OF_QEMU
    return POWER_FAILURE
