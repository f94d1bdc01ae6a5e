# SPDX-License-Identifier: Apache-2.0
"""A domain whose RAM is an image: a libvirt and a pcow-img that record; QEMU's answers are given.

Real ones do the same in tests/functional/test_virsh_checkpoints.py.
"""

import dataclasses
import json
from pathlib import Path
import sys
from types import ModuleType
from typing import Any

import fixtures

from pcow_driver.virt import domain
from tests.unit.pcow_driver import base

SECOND = 1795812953
UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
_XML = """<domain type='qemu'>{ram}<devices><memory model='nvdimm' access='shared'>
<source><path>{directory}/vm.pcow</path></source>
<target><size unit='KiB'>67584</size><node>0</node></target><alias name='nvdimm0'/></memory>
{more}</devices></domain>"""
_RAM = "<metadata><ram xmlns='urn:pcow:domain' path='{directory}/vm-ram.pcow'/></metadata>"
_PCOW_IMG = """#!/bin/sh
for path; do :; done
case "$*" in
*-l*) cat "$path" ;;
*) echo "$@" >>{directory}/log; [ ! -e {directory}/fails ] || {{ echo refused >&2; exit 1; }}
   echo '{{"freed": 4096}}' ;;
esac
"""


def snapshot(number: int, name: str, **fields: Any) -> dict[str, Any]:
    """As pcow-img prints it."""
    return {
        'id': str(number),
        'name': name,
        'parent-id': None,
        'vm-state-size': 0,
        'date-sec': SECOND + number,
        'date-nsec': 1000,
        'virtual-size': 2 << 20,
        'data-size': 4096,
        'shared-size': 8192,
        'delete-frees': 100,
        'current': False,
        'pinned': False,
        **fields,
    }


@dataclasses.dataclass(frozen=True)
class _Named:
    text: str

    def name(self) -> str:
        return self.text


class Recorded:
    """A connection and its only domain. ``calls`` is what was done; ``replies`` what QEMU says to a
    command: a value, or an error's words.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.active, self.has_ram, self.generation_id = True, True, False
        self.domains = list[str]()
        self.uuid = UUID
        self.more = ''  # of its devices
        self.calls = list[Any]()
        self.replies = dict[str, Any]()

    def lookupByName(self, _name: str) -> 'Recorded':  # noqa: N802
        return self

    def isActive(self) -> int:  # noqa: N802
        return int(self.active)

    def hasManagedSaveImage(self, _flags: int) -> int:  # noqa: N802
        return 0

    def UUIDString(self) -> str:  # noqa: N802
        return self.uuid

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        ram = _RAM.format(directory=self.directory) if self.has_ram else ''
        genid = '<genid/>' if self.generation_id else ''
        return _XML.format(directory=self.directory, ram=f'{ram}{genid}', more=self.more)

    def listAllDomains(self) -> list['_Named']:  # noqa: N802
        return [_Named(name) for name in self.domains]

    def listAllSnapshots(self) -> list[object]:  # noqa: N802
        return []

    def createWithFlags(self, flags: int) -> None:  # noqa: N802
        self.calls.append(('create', flags))

    def resume(self) -> None:
        self.calls.append('resume')

    def destroy(self) -> None:
        self.calls.append('destroy')


def _monitor(recorded: Recorded, request: str, flags: int) -> str:
    assert flags == 0
    command = json.loads(request)
    if command['execute'] != 'query-status':  # whether it answers
        recorded.calls.append((command['execute'], command.get('arguments', {})))
    reply = recorded.replies.get(command['execute'], {})
    if isinstance(reply, str):
        return json.dumps({'error': {'class': 'GenericError', 'desc': reply}})
    return json.dumps({'return': reply})


class TestCase(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        for name in ('libvirt', 'libvirt_qemu'):
            module = ModuleType(name)
            self.useFixture(fixtures.MonkeyPatch('sys.modules', sys.modules | {name: module}))
            setattr(module, 'VIR_DOMAIN_START_PAUSED', 1)  # noqa: B010
            setattr(module, 'VIR_DOMAIN_XML_INACTIVE', 2)  # noqa: B010
            setattr(module, 'VIR_DOMAIN_XML_SECURE', 1)  # noqa: B010
            setattr(module, 'qemuMonitorCommand', _monitor)  # noqa: B010
        self.ram, self.nvdimm = self.directory / 'vm-ram.pcow', self.directory / 'vm.pcow'
        self.log = self.directory / 'log'
        self.configure(pcow_img=self.script('pcow-img', _PCOW_IMG.format(directory=self.directory)))
        self.recorded = Recorded(self.directory)
        self.found = domain.Domain(self.recorded, 'web1')
        self.write([], [])

    def write(self, ram: list[dict[str, Any]], nvdimm: list[dict[str, Any]]) -> None:
        """The snapshots of the two images."""
        self.ram.write_text(json.dumps(ram))
        self.nvdimm.write_text(json.dumps(nvdimm))

    def logged(self) -> list[str]:
        """What pcow-img was told, but for what only reads."""
        return self.log.read_text().splitlines() if self.log.exists() else []
