# SPDX-License-Identifier: Apache-2.0
"""The immutable flag of templates, for services that are not root."""

from pcow_driver import immutable
from pcow_driver.privileged import context


@context.entrypoint
def set_immutable(path: str, wanted: bool) -> None:
    """:raises PoolInvalid: it is no sealed image of a pool
    :raises OSError: the file system has no such flag
    """
    immutable.set_flag(immutable.checked(path), wanted)
