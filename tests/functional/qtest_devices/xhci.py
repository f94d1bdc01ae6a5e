# SPDX-License-Identifier: Apache-2.0
"""A driver of an xHCI controller with one USB device, for a QEMU without a guest (xHCI 1.2)."""

from __future__ import annotations

import struct
import time

from tests.functional import qemu
from tests.functional.qtest_devices import pci

SUCCESS, SHORT_PACKET = 1, 13  # completion codes
CONTROL, BULK_OUT, BULK_IN = 4, 2, 6  # types of endpoints
_ENTRIES = 64  # of a ring
_SUPER_SPEED = 4
# Of control and bulk, by speed
_LARGEST_PACKET = {1: (64, 64), 3: (64, 512), _SUPER_SPEED: (512, 1024)}
# Types of entries (TRB)
_NORMAL, _SETUP, _STATUS, _LINK, _ENABLE_SLOT, _ADDRESS, _CONFIGURE = 1, 2, 4, 6, 9, 11, 12
_TRANSFER_EVENT, _COMMAND_EVENT = 32, 33
_CYCLE, _TOGGLE, _CHAIN, _REPORT, _IMMEDIATE, _TO_HOST = 1, 2, 1 << 4, 1 << 5, 1 << 6, 1 << 16
_COMMAND, _STATE, _COMMAND_RING, _CONTEXTS, _CONFIG, _PORTS = 0, 4, 0x18, 0x30, 0x38, 0x400
_RUN, _RESET, _HALTED = 1, 2, 1


class Ring:
    """Entries that the controller takes."""

    def __init__(self, vm: qemu.Qemu, address: int) -> None:
        self._vm, self.address = vm, address
        self._at, self._cycle, self._chain = 0, _CYCLE, 0
        vm.write(address, bytes(16 * _ENTRIES))

    def put(self, parameter: int, status: int, control: int) -> int:
        """:returns: where the entry lies"""
        if self._at == _ENTRIES - 1:
            self._write(self.address, 0, _LINK << 10 | _TOGGLE | self._chain)
            self._at, self._cycle = 0, self._cycle ^ _CYCLE
        place = self._write(parameter, status, control)
        self._at += 1
        self._chain = control & _CHAIN
        return place

    def _write(self, parameter: int, status: int, control: int) -> int:
        place = self.address + 16 * self._at
        self._vm.write(place, struct.pack('<QII', parameter, status, control | self._cycle))
        return place


class Xhci(pci.Device):
    """Its first device, configured; endpoints by their place in the context."""

    def __init__(self, vm: qemu.Qemu, place: int, number: int, endpoints: dict[int, int]) -> None:
        """:param endpoints: 2 * number + 1 if it is to the host, and the type; beside control"""
        super().__init__(vm, place, 0, number)
        self._config(0x14, 0)
        lengths = self._get(0)
        self._operation, self._doorbells = lengths & 0xFF, self._get(0x14)
        self._events = self.area + 0x3000
        self._taken = 0
        self._begin(self._get(0x18) + 0x20)
        port, speed = self._reset_port(self._get(4) >> 24)
        self._slot = self._do(0, _ENABLE_SLOT) >> 24
        self._rings = {
            number: Ring(vm, self.area + 0x8000 + 0x1000 * number) for number in (1, *endpoints)
        }
        self._context = self.area + 0x4000
        vm.write(self.area + 8 * self._slot, struct.pack('<Q', self._context))
        sizes = _LARGEST_PACKET[speed]
        self._input({1: (CONTROL, sizes[0])}, port, speed)
        self._do(self._inputs, _ADDRESS)
        self._set_configuration()
        self._input({number: (kind, sizes[1]) for number, kind in endpoints.items()}, port, speed)
        self._do(self._inputs, _CONFIGURE)

    def _begin(self, interrupter: int) -> None:
        operation = self._operation
        self._set(operation + _COMMAND, 0)
        self._await(operation + _STATE, _HALTED, _HALTED)
        self._set(operation + _COMMAND, _RESET)
        self._await(operation + _COMMAND, _RESET, 0)
        self._vm.write(self.area, bytes(0x6000))
        self._commands = Ring(self._vm, self.area + 0x1000)
        self._inputs, self._interrupter = self.area + 0x5000, interrupter
        segments = self.area + 0x2000
        self._vm.write(segments, struct.pack('<QII', self._events, _ENTRIES, 0))
        self._set(operation + _CONFIG, 1)
        self._set_long(operation + _CONTEXTS, self.area)
        self._set_long(operation + _COMMAND_RING, self._commands.address | _CYCLE)
        self._set(interrupter + 8, 1)
        self._set_long(interrupter + 0x18, self._events)
        self._set_long(interrupter + 0x10, segments)
        self._set(operation + _COMMAND, _RUN)

    def _reset_port(self, ports: int) -> tuple[int, int]:
        """Of the first one that has a device: its number and its speed."""
        for number in range(ports):
            register = self._operation + _PORTS + 0x10 * number
            if self._get(register) & 1:
                self._set(register, 1 << 9 | 1 << 4)
                return number + 1, self._await(register, 2, 2) >> 10 & 0xF
        raise AssertionError('no USB device')

    def _input(self, endpoints: dict[int, tuple[int, int]], port: int, speed: int) -> None:
        """An input context that adds them: types and largest packets."""
        added = 1 | sum(1 << number for number in endpoints)
        contexts = bytearray(struct.pack('<II', 0, added).ljust(32 * 33, b'\0'))
        struct.pack_into('<II', contexts, 32, speed << 20 | max(endpoints) << 27, port << 16)
        for number, (kind, size) in endpoints.items():
            struct.pack_into(
                '<IIQ',
                contexts,
                32 + 32 * number,
                0,
                3 << 1 | kind << 3 | size << 16,
                self._rings[number].address | _CYCLE,
            )
        self._vm.write(self._inputs, bytes(contexts))

    def _ring_doorbell(self, slot: int, endpoint: int) -> None:
        self._set(self._doorbells + 4 * slot, endpoint)

    def _do(self, parameter: int, kind: int) -> int:
        """A command.

        :returns: the last word of its event
        """
        slot = 0 if kind == _ENABLE_SLOT else self._slot
        place = self._commands.put(parameter, 0, kind << 10 | slot << 24)
        self._ring_doorbell(0, 0)
        status, control = self._event(_COMMAND_EVENT, place)
        if status >> 24 != SUCCESS:
            raise AssertionError(f'xHCI command {kind} ended with {status >> 24}')
        return control

    def _event(self, kind: int, place: int) -> tuple[int, int]:
        """Wait for that of one entry; others are taken away."""
        end = time.monotonic() + pci.SECONDS
        while time.monotonic() < end:
            at = self._events + 16 * (self._taken % _ENTRIES)
            parameter, status, control = struct.unpack('<QII', self._vm.read(at, 16))
            if control & _CYCLE == self._taken // _ENTRIES % 2:
                self._vm.pause()
                continue
            self._taken += 1
            following = self._events + 16 * (self._taken % _ENTRIES)
            self._set_long(self._interrupter + 0x18, following | 8)
            if control >> 10 & 0x3F == kind and parameter == place:
                return status, control
        raise AssertionError('the xHCI controller does not answer')

    def _set_configuration(self) -> None:
        request = struct.pack('<BBHHH', 0, 9, 1, 0, 0)
        self._rings[1].put(
            int.from_bytes(request, 'little'), len(request), _SETUP << 10 | _IMMEDIATE
        )
        place = self._rings[1].put(0, 0, _STATUS << 10 | _TO_HOST | _REPORT)
        self._ring_doorbell(self._slot, 1)
        self.finish(place)

    def begin(self, endpoint: int, buffers: pci.Buffers) -> int:
        """A transfer of all buffers as one.

        :returns: for ``finish``
        """
        place = 0
        for number, (address, length) in enumerate(buffers):
            flag = _REPORT if number == len(buffers) - 1 else _CHAIN
            place = self._rings[endpoint].put(address, length, _NORMAL << 10 | flag)
        self._ring_doorbell(self._slot, endpoint)
        return place

    def finish(self, place: int) -> None:
        """Wait for the end of a transfer.

        :raises AssertionError: it failed, or was short
        """
        status, _control = self._event(_TRANSFER_EVENT, place)
        if status >> 24 != SUCCESS:
            raise AssertionError(
                f'a USB transfer ended with {status >> 24}, without {status & 0xFFFFFF} bytes'
            )
