# SPDX-License-Identifier: Apache-2.0
"""The boot of this host: what was true in another one may be so no longer."""

_ID = '/proc/sys/kernel/random/boot_id'


def current() -> str:
    """Its UUID, as the kernel made it (proc_sys_kernel(5))."""
    with open(_ID, encoding='ascii') as f:
        return f.read().strip()
