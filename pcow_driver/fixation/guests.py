# SPDX-License-Identifier: Apache-2.0
"""Guests that want to know of a fixation (:mod:`pcow_driver.virt.guest_hook`): all at once, and
nobody waits longer than he would for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
import threading
import time

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.fixation import policy
from pcow_driver.virt import domain
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

SECONDS = 2.0  # for the guest's own work: a battery may be what there is


def tell(names: Sequence[str], event: guest_hook.Event, seconds: float = SECONDS) -> list[str]:
    """Those of these domains that run and want it. One that does not answer in that time goes on
    with it, as long as this process is there.

    :return: their names
    """
    told = [name for name in names if _wants(name)]
    threads = [
        threading.Thread(target=_tell, args=(name, event, seconds), daemon=True) for name in told
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return told


def _wants(name: str) -> bool:
    try:
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, name)
            wanted = policy.get(found)
            return wanted is not None and wanted.guest_hook and found.running()
    except exception.PcowError as e:  # whoever fixates it says so
        LOG.debug('%s: %s', name, e)
        return False


def _tell(name: str, event: guest_hook.Event, seconds: float) -> None:
    try:
        with libvirt_host.connect() as connection:
            domain.Domain(connection, name).run_guest_hook(event, seconds=seconds)
    except exception.PcowError as e:
        LOG.warning('%s', e)
