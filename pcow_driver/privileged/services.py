# SPDX-License-Identifier: Apache-2.0
"""What a service that is not root may have done: the immutable flag of templates of its own, and
nothing else.

The daemon (:mod:`~pcow_driver.privileged.helper`) runs as the user of the service, with
CAP_LINUX_IMMUTABLE: it reaches what the service reaches, and the kernel lets it set the flag of
nothing that belongs to somebody else.
"""

from __future__ import annotations

import os
import stat
import warnings

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import names

with warnings.catch_warnings():
    # oslo.privsep imports eventlet where that is installed, which says on every start of a program
    # that nobody should use it.
    warnings.simplefilter('ignore')
    from oslo_privsep import capabilities
    from oslo_privsep import priv_context

CONTEXT = f'{__name__}.context'
CAPABILITIES = (capabilities.CAP_LINUX_IMMUTABLE,)

context = priv_context.PrivContext(
    __name__, cfg_section='pcow_privileged', pypath=CONTEXT, capabilities=CAPABILITIES
)


@context.entrypoint
def set_immutable(path: str, wanted: bool) -> None:
    """:param path: absolute, without links
    :raises PoolInvalid: it is no template of this user in a pool of this user or one of its groups
    :raises OSError: the file system has no such flag, for instance
    """
    if os.geteuid() == 0:
        raise exception.PoolInvalid(
            path=path, reason='this daemon is root; pcow-privsep-helper starts one that is not'
        )
    try:
        with descriptors.parent(path) as (directory, name):
            _check_pool(directory, path)
            with immutable.opened(name, directory=directory) as fd:
                if os.fstat(fd).st_uid != os.geteuid() or not immutable.is_sealed(fd):
                    raise exception.PoolInvalid(path=path, reason='it is no template of this user')
                immutable.set_flag_of(fd, bool(wanted))
    except exception.PathRefused as e:
        raise exception.PoolInvalid(path=path, reason=str(e)) from None


def _check_pool(directory: int, path: str) -> None:
    """:raises PoolInvalid:"""
    status = os.fstat(directory)
    own = status.st_uid == os.geteuid() or (
        status.st_gid in {os.getegid(), *os.getgroups()} and status.st_mode & stat.S_IWGRP
    )
    try:
        marker = os.stat(names.MARKER, dir_fd=directory, follow_symlinks=False).st_mode
    except OSError:
        marker = 0
    if (
        not own
        or status.st_mode & stat.S_IWOTH
        or not stat.S_ISREG(marker)
        or not path.endswith(names.IMAGE_SUFFIX)
    ):
        raise exception.PoolInvalid(path=path, reason='it is no image in a pool of this user')
