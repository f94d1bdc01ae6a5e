# SPDX-License-Identifier: Apache-2.0
"""What is asked of a VM whose checkpoints are worked on, whoever has started its QEMU: libvirt
(:class:`pcow_driver.virt.domain.Domain`) or a program of its own
(:class:`pcow_driver.vm.process.Process`).
"""

from __future__ import annotations

import contextlib
from typing import Any
from typing import Protocol


class Machine(Protocol):
    """What methods raise is told there."""

    name: str

    @property
    def uuid(self) -> str: ...

    def active(self) -> bool:
        """Whether it has a QEMU."""
        ...

    def ram(self) -> str | None:
        """Path of the image that is its RAM; None: its RAM is none."""
        ...

    def writable(self) -> list[str]:
        """Paths of all its images that its guest can store to, with that of the RAM."""
        ...

    def qmp(self, command: str, **arguments: str | int) -> Any: ...

    def query(self, command: str = ...) -> list[dict[str, Any]]: ...

    def started(self, *, run: bool = ...) -> contextlib.AbstractContextManager[None]:
        """One that is off has a QEMU afterwards, and the guest has not run meanwhile."""
        ...
