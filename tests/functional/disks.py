# SPDX-License-Identifier: Apache-2.0
"""Drivers of AHCI and NVMe disks for a QEMU without a guest, one command at a time."""

from __future__ import annotations

import struct
import time

from tests.functional import qemu
from tests.functional import virtio
from tests.functional.qtest_devices import pci

PAGE = 4096


class Ahci(pci.Device):
    """The disk at the first port (AHCI 1.3.1); buffers begin at even addresses."""

    PORT = 0x100

    def __init__(self, vm: qemu.Qemu, place: int, number: int) -> None:
        super().__init__(vm, place, 5, number)
        self._set(4, 1 << 31)  # AHCI, and no interrupts
        self._set(self.PORT + 0x18, 0)
        self._await(self.PORT + 0x18, 0xC000, 0)
        for register, at in ((0, self.area), (8, self.area + 0x1000)):
            self._set(self.PORT + register, at)
            self._set(self.PORT + register + 4, 0)
        self._set(self.PORT + 0x18, 0x10)  # receive
        self._set(self.PORT + 0x18, 0x11)  # start

    def transfer(self, kind: int, sector: int, buffers: pci.Buffers) -> int:
        """As virtio.Block has it."""
        count = sum(length for _address, length in buffers) // virtio.SECTOR
        write = kind == virtio.BLOCK_OUT
        command = struct.pack(
            '<BBBBBBBBBBBBBBBBI',
            0x27,
            0x80,
            0x35 if write else 0x25,
            0,
            sector & 0xFF,
            sector >> 8 & 0xFF,
            sector >> 16 & 0xFF,
            0x40,
            sector >> 24 & 0xFF,
            0,
            0,
            0,
            count & 0xFF,
            count >> 8,
            0,
            0,
            0,
        )
        table = self.area + 0x2000
        regions = b''.join(
            struct.pack('<QII', address, 0, length - 1) for address, length in buffers
        )
        self._vm.write(table, command.ljust(0x80, b'\0') + regions)
        self._vm.write(
            self.area, struct.pack('<IIQ', 5 | write << 6 | len(buffers) << 16, 0, table)
        )
        self._set(self.PORT + 0x10, 0xFFFF_FFFF)
        self._set(self.PORT + 0x38, 1)
        end = time.monotonic() + pci.SECONDS
        while self._get(self.PORT + 0x38) & 1:
            # An error of this command, not of one before it: the port has to be started anew
            if self._get(self.PORT + 0x10) & 1 << 30:
                self._set(self.PORT + 0x18, 0x10)
                self._await(self.PORT + 0x18, 0x8000, 0)
                self._set(self.PORT + 0x30, 0xFFFF_FFFF)
                self._set(self.PORT + 0x18, 0x11)
                return 1
            if time.monotonic() > end:
                raise AssertionError('the AHCI disk does not answer')
            self._vm.pause()
        return self._get(self.PORT + 0x20) & 1


class Nvme(pci.Device):
    """The first name space (NVMe 1.4); a buffer is one piece."""

    ENTRIES = 16

    def __init__(self, vm: qemu.Qemu, place: int, number: int) -> None:
        super().__init__(vm, place, 0, number)
        self._config(0x14, 0)
        self._set(0x14, 0)
        self._await(0x1C, 1, 0)
        self._vm.write(self.area, bytes(0x6000))
        self._set(0x24, (self.ENTRIES - 1) << 16 | (self.ENTRIES - 1))
        for register, at in ((0x28, self.area), (0x30, self.area + 0x1000)):
            self._set(register, at)
            self._set(register + 4, 0)
        self._set(0x14, 0x0046_0001)
        self._await(0x1C, 1, 1)
        self._at = [0, 0]
        size = (self.ENTRIES - 1) << 16 | 1
        for opcode, at, flags in ((5, self.area + 0x3000, 1), (1, self.area + 0x2000, 1 << 16 | 1)):
            if self._command(
                0, struct.pack('<IIQQQQIIQQ', opcode, 0, 0, 0, at, 0, size, flags, 0, 0)
            ):
                raise AssertionError('the NVMe disk gives no queue')

    def _command(self, queue: int, entry: bytes) -> int:
        number = self._at[queue]
        submission, completion = self.area + 0x2000 * queue, self.area + 0x1000 + 0x2000 * queue
        at = number % self.ENTRIES
        phase = 1 - number // self.ENTRIES % 2
        self._vm.write(submission + 64 * at, entry)
        self._at[queue] += 1
        self._set(0x1000 + 8 * queue, self._at[queue] % self.ENTRIES)
        end = time.monotonic() + pci.SECONDS
        while True:
            status = int.from_bytes(self._vm.read(completion + 16 * at + 14, 2), 'little')
            if status & 1 == phase:
                break
            if time.monotonic() > end:
                raise AssertionError('the NVMe disk does not answer')
            self._vm.pause()
        self._set(0x1004 + 8 * queue, self._at[queue] % self.ENTRIES)
        return status >> 1

    def transfer(self, kind: int, sector: int, buffers: pci.Buffers) -> int:
        """As virtio.Block has it."""
        pages = [
            page
            for address, length in buffers
            for page in (address, *range((address | PAGE - 1) + 1, address + length, PAGE))
        ]
        second = 0
        if len(pages) == 2:
            second = pages[1]
        elif len(pages) > 2:
            second = self.area + 0x8000
            self._vm.write(second, struct.pack(f'<{len(pages) - 1}Q', *pages[1:]))
        count = sum(length for _address, length in buffers) // virtio.SECTOR
        opcode = 1 if kind == virtio.BLOCK_OUT else 2
        return self._command(
            1,
            struct.pack(
                '<IIQQQQQIIII', opcode, 1, 0, 0, pages[0], second, sector, count - 1, 0, 0, 0
            ),
        )
