# SPDX-License-Identifier: Apache-2.0
"""A libvirt whose only domain runs in a QEMU that answers nothing, as one that was stopped.

As libvirt does, it gives the first who asks a job that lasts until QEMU answers, and tells others
after a while that somebody has it. It waits as C does: green threads do not see it.
"""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

from pcow_driver.virt import libvirt_host

NAME = 'stands'
JOB_SECONDS = 0.5  # 30 of libvirt itself
_XML = "<domain type='qemu'><name>{0}</name><uuid>{1}</uuid><devices>{2}</devices></domain>"
_NVDIMM = (
    "<memory model='nvdimm' access='shared'><source><path>{0}</path></source>"
    "<target><size unit='KiB'>67584</size><node>0</node></target><alias name='nvdimm{1}'/></memory>"
)


def native(name: str) -> Any:
    """A module of Python as it was before eventlet came, whether it has or not."""
    patcher: Any = sys.modules.get('eventlet.patcher')
    return patcher.original(name) if patcher is not None else __import__(name)


class LibvirtError(Exception):
    """libvirt.libvirtError"""

    def get_error_code(self) -> int:
        return 68  # VIR_ERR_OPERATION_TIMEOUT


class StandingQemu:
    """virDomain, and the connection."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths
        self.done: list[str] = []  # after it went on
        threading = native('threading')
        self._goes_on, self._job = threading.Event(), threading.Lock()

    def go_on(self) -> None:
        self._goes_on.set()

    def ask(self, command: str) -> str:
        """:raises LibvirtError: somebody else has the job"""
        if not self._job.acquire(timeout=JOB_SECONDS):
            raise LibvirtError('cannot acquire state change lock')
        try:
            self._goes_on.wait()
            self.done.append(command)
        finally:
            self._job.release()
        return json.dumps({'return': {}})

    def suspend(self) -> None:
        self.ask('suspend')

    def resume(self) -> None:
        self.ask('resume')

    def name(self) -> str:
        return NAME

    def UUIDString(self) -> str:  # noqa: N802
        return '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'

    def isActive(self) -> int:  # noqa: N802
        return 1

    def state(self) -> tuple[int, int]:
        return 1, 0  # running

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        devices = ''.join(_NVDIMM.format(path, i) for i, path in enumerate(self.paths))
        return _XML.format(NAME, self.UUIDString(), devices)

    def listAllSnapshots(self) -> list[object]:  # noqa: N802
        return []

    def listAllDomains(self) -> list[StandingQemu]:  # noqa: N802
        return [self]

    def lookupByName(self, _name: str) -> StandingQemu:  # noqa: N802
        return self

    def close(self) -> None:
        pass


def install(qemu: StandingQemu) -> None:
    """Have :mod:`pcow_driver.virt.domain` find it, in this process."""
    module = ModuleType('libvirt')
    module.__dict__.update(
        libvirtError=LibvirtError,
        registerErrorHandler=lambda *_words: None,
        open=lambda _uri: qemu,
        qemuMonitorCommand=lambda _domain, command, _flags: qemu.ask(
            json.loads(command)['execute']
        ),
        VIR_DOMAIN_RUNNING=1,
        VIR_DOMAIN_XML_INACTIVE=2,
    )
    libvirt_host.binding = lambda _name: module  # type: ignore[assignment]
