# SPDX-License-Identifier: Apache-2.0
"""A driver of virtio PCI devices for a QEMU without a guest: the test is the guest's kernel, and
buffers lie wherever it wants.
"""

from __future__ import annotations

from collections.abc import Sequence
import struct
import time

from tests.functional import qemu

BAR_AREA = 0xE000_0000  # PCI hole of q35 without firmware
QUEUE_AREA = 16 << 20  # in RAM
QUEUE_BYTES = 1 << 16
QUEUE_SIZE = 16
REQUEST_SECONDS = 60

_CAPABILITY_VENDOR = 9
_COMMON, _NOTIFY, _DEVICE = 1, 2, 4  # virtio 1.2, 4.1.4
_ACKNOWLEDGE_DRIVER, _FEATURES_OK, _DRIVER_OK = 3, 8, 4
_VERSION_1 = 1  # bit 32
_NEXT, _WRITE, _INDIRECT = 1, 2, 4

BLOCK_IN, BLOCK_OUT = 0, 1
SECTOR = 512


class Queue:
    """A queue of a device, in guest memory (virtio 1.2, 2.7)."""

    def __init__(self, vm: qemu.Qemu, number: int, area: int) -> None:
        self._vm, self.number, self._area = vm, number, area
        self._descriptors, self._device, self._driver = area, area + 0x1000, area + 0x2000
        self._notify = 0
        self._sent = 0

    def enabled(self, notify: int) -> None:
        """The device knows it.

        :param notify: the register that tells the device to look at it
        """
        self._notify = notify

    @property
    def places(self) -> tuple[int, int, int]:
        """Of descriptors, of what the driver writes, and of what the device writes."""
        return self._descriptors, self._driver, self._device

    def request(
        self, readable: Sequence[tuple[int, int]], writable: Sequence[tuple[int, int]]
    ) -> None:
        """One request of buffers (address, length), first those that the device reads; returns when
        it has been served.
        """
        self.post(readable, writable)
        self.notify()
        self.wait()

    def post(
        self,
        readable: Sequence[tuple[int, int]],
        writable: Sequence[tuple[int, int]],
        first: int = 0,
    ) -> None:
        """Put a request into the queue, and tell nobody.

        :param first: its first descriptor, for one that comes while another is being served
        """
        chain = [(*buffer, 0) for buffer in readable] + [(*buffer, _WRITE) for buffer in writable]
        table = b''.join(
            struct.pack(
                '<QIHH',
                address,
                length,
                flags | (_NEXT if i + 1 < len(chain) else 0),
                first + i + 1,
            )
            for i, (address, length, flags) in enumerate(chain)
        )
        self._vm.write(self._descriptors + 16 * first, table)
        self.post_head(first)

    def post_head(self, first: int) -> None:
        """The same of descriptors that are there."""
        self._vm.write(self._driver + 4 + self._sent % QUEUE_SIZE * 2, struct.pack('<H', first))
        self._sent += 1
        self._vm.write(self._driver + 2, struct.pack('<H', self._sent % 65536))

    def wait(self) -> None:
        """Until all that was posted has been served."""
        end = time.monotonic() + REQUEST_SECONDS
        while not self.served():
            if time.monotonic() > end:
                raise AssertionError(f'the device of the queue at {self._area:#x} does not answer')
            self._vm.pause()

    def served(self) -> bool:
        """Has all that was posted been served?"""
        return int.from_bytes(self._vm.read(self._device + 2, 2), 'little') == self._sent % 65536

    @property
    def sent(self) -> int:
        """Requests so far."""
        return self._sent

    def loaded(self, vm: qemu.Qemu, sent: int) -> None:
        """The guest was reverted to when it had sent that many, maybe in another QEMU."""
        self._vm, self._sent = vm, sent

    def notify(self) -> None:
        """Tell the device to look at its queue."""
        self._vm.ask(self.notification)

    @property
    def notification(self) -> str:
        """That in the protocol of qtest."""
        return f'writew {self._notify:#x} {self.number}'

    @property
    def scratch(self) -> int:
        """RAM for headers and answers."""
        return self._area + 0x8000


class Device(Queue):
    """One device and its first queue, by its slot on bus 0 (``-device ...,addr=SLOT``)."""

    queue = 0  # its number
    features = 0  # beside that of virtio 1; of the first 32

    def __init__(
        self, vm: qemu.Qemu, slot: int, area: int | None = None, writable: bool = True
    ) -> None:
        """:param area: where the queue lies in guest memory; not cleared if it is not writable"""
        super().__init__(vm, self.queue, QUEUE_AREA + slot * QUEUE_BYTES if area is None else area)
        self._slot, self._writable = slot, writable
        self._bar_address: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._notify_multiplier = 0
        self._find_places()
        self._set_up()

    def queues(self) -> tuple[Queue, ...]:
        """All that are used."""
        return (self,)

    def _config(self, offset: int, width: str, value: int | None = None) -> int:
        self._vm.ask(f'outl 0xcf8 {0x8000_0000 | self._slot << 11 | offset & ~3:#x}')
        port = 0xCFC + offset % 4
        if value is not None:
            self._vm.ask(f'out{width} {port:#x} {value:#x}')
            return value
        return int(self._vm.ask(f'in{width} {port:#x}'), 0)

    def _find_places(self) -> None:
        if self._config(0, 'w') == 0xFFFF:
            raise AssertionError(f'no device in slot {self._slot}')
        at = self._config(0x34, 'b')
        while at:
            if self._config(at, 'b') == _CAPABILITY_VENDOR:
                kind, bar = self._config(at + 3, 'b'), self._config(at + 4, 'b')
                if kind in (_COMMON, _NOTIFY, _DEVICE) and kind not in self._places:
                    self._places[kind] = self._bar(bar) + self._config(at + 8, 'l')
                    if kind == _NOTIFY:
                        self._notify_multiplier = self._config(at + 16, 'l')
            at = self._config(at + 1, 'b')
        self._config(4, 'w', 6)  # memory space, bus master

    def _bar(self, number: int) -> int:
        if number not in self._bar_address:
            address = BAR_AREA + self._slot * (1 << 20) + number * (1 << 16)
            self._config(0x10 + 4 * number, 'l', address)
            self._config(0x14 + 4 * number, 'l', 0)
            self._bar_address[number] = address
        return self._bar_address[number]

    def _common(self, offset: int, width: str, value: int) -> None:
        self._vm.ask(f'write{width} {self._places[_COMMON] + offset:#x} {value:#x}')

    def _set_up(self) -> None:
        self._common(20, 'b', 0)
        self._common(20, 'b', _ACKNOWLEDGE_DRIVER)
        for half, features in enumerate((self.features, _VERSION_1)):
            self._common(8, 'l', half)
            self._common(12, 'l', features)
        self._common(20, 'b', _ACKNOWLEDGE_DRIVER | _FEATURES_OK)
        if self._writable:
            self._vm.write(self._area, bytes(QUEUE_BYTES))
        for queue in self.queues():
            self._enable(queue)
        self._common(20, 'b', _ACKNOWLEDGE_DRIVER | _FEATURES_OK | _DRIVER_OK)

    def _enable(self, queue: Queue) -> None:
        self._common(22, 'w', queue.number)
        self._common(24, 'w', QUEUE_SIZE)
        for register, place in zip((32, 40, 48), queue.places, strict=True):
            self._common(register, 'q', place)
        queue.enabled(
            self._places[_NOTIFY]
            + self._notify_multiplier
            * int(self._vm.ask(f'readw {self._places[_COMMON] + 30:#x}'), 0)
        )
        self._common(28, 'w', 1)

    def reset(self) -> None:
        """As a guest does that starts anew; the queue is gone."""
        self._common(20, 'b', 0)

    def reset_queue(self) -> None:
        """Also of a device that was reset (virtio 1.2, 4.1.4.3: queue_reset)."""
        self._common(22, 'w', self.queue)
        self._common(58, 'w', 1)

    @property
    def registers(self) -> int:
        """Memory that is not RAM."""
        return self._places[_COMMON]


class Block(Device):
    """virtio-blk; ``buffers`` are (address, length) in guest memory, in whole sectors in all."""

    def transfer(self, kind: int, sector: int, buffers: Sequence[tuple[int, int]]) -> int:
        """:returns: status, 0 if it went well"""
        header, status = self._prepare(kind, sector)
        if kind == BLOCK_OUT:
            self.request([header, *buffers], [status])
        else:
            self.request([header], [*buffers, status])
        return self._vm.read(*status)[0]

    def post_output(self, sector: int, buffers: Sequence[tuple[int, int]]) -> None:
        """A write, of which nobody is told yet."""
        header, status = self._prepare(BLOCK_OUT, sector)
        self.post([header, *buffers], [status])

    def post_input(self, sector: int, buffers: Sequence[tuple[int, int]]) -> None:
        """The same of a read."""
        header, status = self._prepare(BLOCK_IN, sector)
        self.post([header], [*buffers, status])

    def post_kind(self, kind: int, buffers: Sequence[tuple[int, int]]) -> None:
        """The same of another request that the device answers with data."""
        header, status = self._prepare(kind, 0)
        self.post([header], [*buffers, status])

    def status(self) -> int:
        """Of the last one, when it has been served."""
        return self._vm.read(self.scratch + 16, 1)[0]

    def _prepare(self, kind: int, sector: int) -> tuple[tuple[int, int], tuple[int, int]]:
        self._vm.write(self.scratch, struct.pack('<IIQ', kind, 0, sector) + b'\xff')
        return (self.scratch, 16), (self.scratch + 16, 1)


class Scsi(Device):
    """virtio-scsi with one disk, target 0."""

    queue = 2

    def transfer(self, kind: int, sector: int, buffers: Sequence[tuple[int, int]]) -> int:
        """As Block has it.

        :returns: 0 if it went well, else the status of the command or of the device
        """
        self.post_transfer(kind, sector, buffers)
        self.notify()
        self.wait()
        return self.status()

    def post_transfer(self, kind: int, sector: int, buffers: Sequence[tuple[int, int]]) -> None:
        """A command of which nobody is told yet."""
        blocks = sum(length for _address, length in buffers) // SECTOR
        command = struct.pack(
            '>BBIBHB', 0x28 if kind == BLOCK_IN else 0x2A, 0, sector, 0, blocks, 0
        )
        lun = b'\x01\x00\x40' + bytes(5)
        self._vm.write(self.scratch, lun + bytes(11) + command.ljust(32, b'\0') + b'\xff' * 108)
        header, answer = (self.scratch, 51), (self.scratch + 51, 108)
        if kind == BLOCK_IN:
            self.post([header], [answer, *buffers])
        else:
            self.post([header, *buffers], [answer])

    def status(self) -> int:
        """Of the last one, when it has been served."""
        _length, _rest, _qualifier, status, response = struct.unpack(
            '<IIHBB', self._vm.read(self.scratch + 51, 12)
        )
        return int(status or response)


class Random(Device):
    """virtio-rng, whose requests may have any number of buffers (virtio 1.2, 2.7.5.3: indirect
    descriptors).
    """

    features = 1 << 28

    def fill(self, buffers: Sequence[tuple[int, int]]) -> None:
        self.post_fill(buffers)
        self.notify()
        self.wait()

    def post_fill(self, buffers: Sequence[tuple[int, int]]) -> None:
        """A request, of which nobody is told yet."""
        table = b''.join(
            struct.pack(
                '<QIHH', address, length, _WRITE | (_NEXT if i + 1 < len(buffers) else 0), i + 1
            )
            for i, (address, length) in enumerate(buffers)
        )
        self._vm.write(self.scratch, table)
        self._vm.write(
            self._descriptors, struct.pack('<QIHH', self.scratch, len(table), _INDIRECT, 0)
        )
        self.post_head(0)


class Pmem(Device):
    """virtio-pmem."""

    def place(self) -> tuple[int, int]:
        """Address and size of its memory."""
        return struct.unpack('<QQ', self._vm.read(self._places[_DEVICE], 16))

    def flush(self) -> int:
        """:returns: 0 if it went well"""
        self.post_flush()
        self.notify()
        self.wait()
        return self.answer()

    def post_flush(self, number: int = 0) -> None:
        """A request, of which nobody is told yet; ``number`` tells those apart that are under way
        together.
        """
        place = self.scratch + 8 * number
        self._vm.write(place, struct.pack('<II', 0, 0xFFFF_FFFF))
        self.post([(place, 4)], [(place + 4, 4)], 2 * number)

    def answer(self, number: int = 0) -> int:
        """:returns: 0 if it went well"""
        return int.from_bytes(self._vm.read(self.scratch + 8 * number + 4, 4), 'little')


class Balloon(Device):
    """The queue of virtio-balloon over which the guest tells of memory that is free (virtio 1.2,
    5.5.6.7).
    """

    queue = 3
    features = 1 << 3

    def command(self) -> int:
        """By which the host asks for hints; below 2 it does not."""
        return int(self._vm.ask(f'readl {self._places[_DEVICE] + 8:#x}'), 0)

    def begin(self) -> None:
        """Tell that hints follow."""
        self._vm.write(self.scratch, struct.pack('<I', self.command()))
        self.request([(self.scratch, 4)], [])

    def hint(self, address: int, length: int) -> None:
        """This memory is free."""
        self.request([], [(address, length)])


class FreePages(Device):
    """The queue over which the guest reports memory that it does not use, of a virtio-balloon that
    asks for hints as well.
    """

    queue = 4
    features = 1 << 3 | 1 << 5

    def report(self, address: int, length: int) -> None:
        self.request([], [(address, length)])
