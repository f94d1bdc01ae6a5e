# SPDX-License-Identifier: Apache-2.0
"""A PCI device with registers in memory, for a QEMU without a guest."""

from __future__ import annotations

from collections.abc import Sequence
import time

from tests.functional import qemu

Buffers = Sequence[tuple[int, int]]  # addresses and lengths
AREA = 8 << 20  # of their queues, in RAM
AREA_BYTES = 1 << 20
BAR_AREA = 0xE800_0000
SECONDS = 60


class Device:
    def __init__(self, vm: qemu.Qemu, place: int, bar: int, number: int) -> None:
        """:param place: slot << 3 | function on bus 0
        :param number: another one for each device of a VM
        """
        self._vm, self._place = vm, place
        self._registers = BAR_AREA + number * (1 << 20)
        self.area = AREA + number * AREA_BYTES
        self._config(0x10 + 4 * bar, self._registers)
        self._config(4, 6)  # memory space, bus master

    def _config(self, offset: int, value: int) -> None:
        self._vm.ask_together(
            f'outl 0xcf8 {0x8000_0000 | self._place << 8 | offset:#x}', f'outl 0xcfc {value:#x}'
        )

    def _get(self, offset: int) -> int:
        return int(self._vm.ask(f'readl {self._registers + offset:#x}'), 0)

    def _set(self, offset: int, value: int) -> None:
        self._vm.ask(f'writel {self._registers + offset:#x} {value:#x}')

    def _set_long(self, offset: int, value: int) -> None:
        """A register of 64 bits, the low half first."""
        self._set(offset, value & 0xFFFF_FFFF)
        self._set(offset + 4, value >> 32)

    def _await(self, offset: int, mask: int, value: int) -> int:
        end = time.monotonic() + SECONDS
        while (found := self._get(offset)) & mask != value:
            if time.monotonic() > end:
                raise AssertionError(f'device {self._place:#x}: {offset:#x} stays {found:#x}')
            self._vm.pause()
        return found
