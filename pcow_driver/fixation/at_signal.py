# SPDX-License-Identifier: Apache-2.0
"""What the QEMU of a protected VM does by itself when it is told to end: nobody may be there to ask
for a fixation then.
"""

from __future__ import annotations

import functools
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import machine
from pcow_driver.vm import state_room

LOG = logging.getLogger(__name__)

_COMMAND = 'pcow-checkpoint-at-signal'
_SECONDS, _LOOK = 5.0, 0.02  # in which QEMU takes what it keeps; a pool may lack it


def tell(found: domain.Domain, on_shutdown: str) -> None:
    """Have its QEMU keep the last moment at a signal, or not, as the policy says.

    :param on_shutdown: of :class:`pcow_driver.fixation.policy.Policy`; '': it is not protected
    :raises QmpFailed: it is one that cannot
    :raises LibvirtFailed:
    """
    with libvirt_host.errors():
        if on_shutdown == policy.FIXATE:
            keep(found, automatic.FIXATION)
        else:
            found.qmp(_COMMAND)


def keep(found: machine.Machine, prefix: str) -> None:
    """As :func:`tell`: the name of what is kept begins so. Where a pool has a limit, nobody else
    gets what QEMU takes for it, until it has that.

    There was room when the VM was protected (:func:`pcow_driver.fixation.policy.put`). If there is
    none any more, QEMU is told all the same, and takes what the file system has: a last moment that
    is lost is worse than a limit that is passed by some MiB.
    """
    spare = functools.partial(state_room.of_spare, found)
    try:
        with room.for_more(*found.writable(), beside=spare) as is_limited:
            found.qmp(_COMMAND, prefix=prefix)
            end = time.monotonic() + _SECONDS
            while is_limited and _lacks(found) and time.monotonic() < end:
                time.sleep(_LOOK)
    except exception.NoRoom as e:
        LOG.warning('%s: what its QEMU keeps for its last moment: %s', found.name, e)
        found.qmp(_COMMAND, prefix=prefix)


def _lacks(found: machine.Machine) -> bool:
    """Whether it has not all of it yet."""
    return any(int(one.get('spare', 0)) < int(one.get('spare-wanted', 0)) for one in found.query())
