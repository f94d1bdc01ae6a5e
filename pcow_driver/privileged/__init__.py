# SPDX-License-Identifier: Apache-2.0
"""What pcow does as root, and nothing else (oslo.privsep).

Each entry point does one thing to one thing: it takes names, sizes and choices, never a command or an option, checks them
itself, and builds the command.  Who is not root gets a daemon with the few capabilities below, started as
``[pcow_privileged] helper_command`` says (default: sudo).  Who is root calls the same entry points without a daemon.
"""

import os
import warnings

with warnings.catch_warnings():
    # oslo.privsep imports eventlet where that is installed, which says on every start of a program that nobody should use it.
    warnings.simplefilter('ignore')
    from oslo_privsep import capabilities
    from oslo_privsep import priv_context

context = priv_context.PrivContext(
    __name__, cfg_section='pcow_privileged', pypath=f'{__name__}.context',
    capabilities=[
        capabilities.CAP_SYS_ADMIN,            # mount; label areas
        capabilities.CAP_DAC_OVERRIDE,         # devices and mount points that belong to others
        capabilities.CAP_CHOWN,                # a new pool belongs to who asked for it
        capabilities.CAP_FOWNER,
        capabilities.CAP_SYS_PTRACE,           # who has a character device open or mapped
        capabilities.CAP_LINUX_IMMUTABLE])


def settle() -> None:
    """Call once at the start of a program: root needs no daemon."""
    if os.geteuid() == 0:
        context.set_client_mode(False)
