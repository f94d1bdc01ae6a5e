# SPDX-License-Identifier: Apache-2.0
"""A driver of a USB disk for a QEMU without a guest (USB mass storage, bulk only 1.0)."""

from __future__ import annotations

import struct

from tests.functional import qemu
from tests.functional import virtio
from tests.functional.qtest_devices import pci
from tests.functional.qtest_devices import xhci

_IN, _OUT = 3, 4  # endpoints 1 to the host and 2 to the device
_COMMAND, _STATUS = b'USBC', b'USBS'


class UsbStorage:
    """The only device of an xHCI controller."""

    def __init__(self, vm: qemu.Qemu, place: int, number: int) -> None:
        self._vm = vm
        self._host = xhci.Xhci(vm, place, number, {_IN: xhci.BULK_IN, _OUT: xhci.BULK_OUT})
        self._scratch = self._host.area + 0x10000
        self._tag = 0
        for _ in range(2):  # the first one hears that the device was reset
            self._begin(virtio.BLOCK_OUT, bytes(6), [])
            status = self.end()
        if status:
            raise AssertionError('the USB disk is not ready')

    def _begin(self, kind: int, command: bytes, buffers: pci.Buffers) -> None:
        self._tag += 1
        total = sum(length for _address, length in buffers)
        flags, endpoint = (0x80, _IN) if kind == virtio.BLOCK_IN else (0, _OUT)
        wrapper = struct.pack(
            '<4sIIBBB16s', _COMMAND, self._tag, total, flags, 0, len(command), command
        )
        self._vm.write(self._scratch, wrapper)
        self._host.finish(self._host.begin(_OUT, [(self._scratch, len(wrapper))]))
        self._data = self._host.begin(endpoint, buffers) if buffers else None

    def begin(self, kind: int, sector: int, buffers: pci.Buffers) -> None:
        """A transfer that may be under way for a while."""
        blocks = sum(length for _address, length in buffers) // virtio.SECTOR
        operation = 0x28 if kind == virtio.BLOCK_IN else 0x2A
        self._begin(kind, struct.pack('>BBIBHB', operation, 0, sector, 0, blocks, 0), buffers)

    def end(self) -> int:
        """:returns: 0 if it went well"""
        if self._data is not None:
            self._host.finish(self._data)
        self._host.finish(self._host.begin(_IN, [(self._scratch, 13)]))
        signature, tag, residue, status = struct.unpack('<4sIIB', self._vm.read(self._scratch, 13))
        if (signature, tag) != (_STATUS, self._tag):
            raise AssertionError(f'the USB disk answers {signature!r} {tag} {residue} {status}')
        return int(status or residue)

    def transfer(self, kind: int, sector: int, buffers: pci.Buffers) -> int:
        """As virtio.Block has it."""
        self.begin(kind, sector, buffers)
        return self.end()
