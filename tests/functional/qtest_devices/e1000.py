# SPDX-License-Identifier: Apache-2.0
"""A driver of the Intel 8254x network card for a QEMU without a guest (Intel's manual 317453)."""

from __future__ import annotations

import struct
import time

from tests.functional import qemu
from tests.functional.qtest_devices import pci

LONGEST = 12000  # frame
BUFFER = 2048  # of one receive descriptor; a frame fills all but the last
_ENTRIES = 16
_RCTL, _TCTL = 0x100, 0x400
_RECEIVE, _TRANSMIT = 0x2800, 0x3800  # registers of the rings: base, length, head, tail
_LENGTH, _HEAD, _TAIL = 8, 0x10, 0x18
_PROMISCUOUS = 0x8018  # unicast, multicast, broadcast
_LONG, _STRIP_CRC, _ENABLE = 1 << 5, 1 << 26, 2
_END, _REPORT = 1, 8  # of a packet; in the status when it is done
_DONE = 1
# In which QEMU's model takes no packets after a change of the receiver's control
_SETTLE_NS = 1_000_000_001


class E1000(pci.Device):
    """It sends and receives one frame at a time."""

    def __init__(self, vm: qemu.Qemu, place: int, number: int) -> None:
        """The VM has no CPU: its time passes as the test wants."""
        super().__init__(vm, place, 0, number)
        self._set(_RCTL, 0)
        self._set(_TCTL, 0)
        self._at = {_RECEIVE: 0, _TRANSMIT: 0}
        self._rings = {_RECEIVE: self.area, _TRANSMIT: self.area + 0x1000}
        vm.write(self.area, bytes(0x2000))
        for registers, ring in self._rings.items():
            self._set_long(registers, ring)
            self._set(registers + _LENGTH, 16 * _ENTRIES)
            self._set(registers + _HEAD, 0)
            self._set(registers + _TAIL, 0)
        self._set(_TCTL, _ENABLE)
        self._set(_RCTL, _PROMISCUOUS | _LONG | _STRIP_CRC | _ENABLE)
        vm.ask(f'clock_step {_SETTLE_NS}')

    def _post(self, registers: int, entries: list[bytes]) -> None:
        for entry in entries:
            self._vm.write(self._rings[registers] + 16 * self._at[registers], entry)
            self._at[registers] = (self._at[registers] + 1) % _ENTRIES
        self._set(registers + _TAIL, self._at[registers])

    def _wait(self, registers: int) -> bytes:
        """Until the last one that was posted is done, which is returned."""
        at = self._rings[registers] + 16 * ((self._at[registers] - 1) % _ENTRIES)
        end = time.monotonic() + pci.SECONDS
        while not (entry := self._vm.read(at, 16))[12] & _DONE:
            if time.monotonic() > end:
                raise AssertionError(f'the network card does not get on: {entry.hex()}')
            self._vm.pause()
        return entry

    def send(self, buffers: pci.Buffers) -> None:
        """A frame, of which a part is in each buffer; it ends when all have been loaded."""
        commands = [0] * (len(buffers) - 1) + [_END | _REPORT]
        self._post(
            _TRANSMIT,
            [
                struct.pack('<QHBBI', address, length, 0, command, 0)
                for (address, length), command in zip(buffers, commands, strict=True)
            ],
        )
        self._wait(_TRANSMIT)

    def post_receive(self, buffers: pci.Buffers) -> None:
        """For one frame: each but the last has BUFFER bytes, as much as the card stores to it."""
        self._post(_RECEIVE, [struct.pack('<QQ', address, 0) for address, _length in buffers])
        self._length = buffers[-1][1]

    def received(self) -> None:
        """It has come, and filled the buffers to what was expected."""
        entry = self._wait(_RECEIVE)
        length, status = struct.unpack_from('<H', entry, 8)[0], entry[12]
        if length != self._length or not status & 2:
            raise AssertionError(
                f'a frame ends with {length} bytes, not {self._length}, and {entry.hex()}'
            )
