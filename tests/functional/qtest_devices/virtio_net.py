# SPDX-License-Identifier: Apache-2.0
"""A driver of virtio-net for a QEMU without a guest (virtio 1.2, 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
import struct

from tests.functional import qemu
from tests.functional import virtio
from tests.functional.qtest_devices import pci

HEADER = 12  # bytes before a frame
_TRANSMIT_AREA = 0x4000  # behind the queue that receives


def header(buffers: int) -> bytes:
    """What the device puts before a frame that took so many buffers."""
    return bytes(HEADER - 2) + struct.pack('<H', buffers)


class Net(virtio.Device):
    """It receives with mergeable buffers: a frame takes as many as it needs."""

    features = 1 << 15

    def queues(self) -> tuple[virtio.Queue, ...]:
        return (self, self._transmit)

    def __init__(self, vm: qemu.Qemu, slot: int) -> None:
        area = virtio.QUEUE_AREA + slot * virtio.QUEUE_BYTES
        self._transmit = virtio.Queue(vm, 1, area + _TRANSMIT_AREA)
        super().__init__(vm, slot)

    def send(self, buffers: pci.Buffers) -> None:
        """A frame, of which a part is in each buffer; it ends when all have been loaded."""
        self._vm.write(self.scratch, bytes(HEADER))
        self._transmit.request([(self.scratch, HEADER), *buffers], [])

    def post_receive(self, groups: Sequence[pci.Buffers]) -> None:
        """For one frame and the header before it.

        :param groups: the buffers of one descriptor chain each, with as many bytes as the frame
        """
        first = 0
        self._lengths = [sum(length for _address, length in group) for group in groups]
        for group in groups:
            self.post([], group, first)
            first += len(group)
        self.notify()

    def received(self) -> None:
        """It has come, and filled the buffers to what was expected."""
        self.wait()
        for number, length in enumerate(self._lengths):
            at = (self._sent - len(self._lengths) + number) % virtio.QUEUE_SIZE
            found = struct.unpack('<II', self._vm.read(self._device + 4 + 8 * at, 8))[1]
            if found != length:
                raise AssertionError(f'virtio-net put {found} bytes into buffers of {length}')
