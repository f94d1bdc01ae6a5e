# SPDX-License-Identifier: Apache-2.0
"""What the QEMU of a protected VM does by itself when it is told to end: nobody may be there to ask
for a fixation then.
"""

from __future__ import annotations

from pcow_driver.fixation import automatic
from pcow_driver.fixation import policy
from pcow_driver.virt import domain


def tell(found: domain.Domain, on_shutdown: str) -> None:
    """Have its QEMU keep the last moment at a signal, or not, as the policy says.

    :param on_shutdown: of :class:`pcow_driver.fixation.policy.Policy`; '': it is not protected
    :raises QmpFailed: it is one that cannot
    :raises LibvirtFailed:
    """
    with domain.errors():
        if on_shutdown == policy.FIXATE:
            found.qmp('pcow-checkpoint-at-signal', prefix=automatic.FIXATION)
        else:
            found.qmp('pcow-checkpoint-at-signal')
