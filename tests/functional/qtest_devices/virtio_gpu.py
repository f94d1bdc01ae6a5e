# SPDX-License-Identifier: Apache-2.0
"""A driver of virtio-gpu for a QEMU without a guest: flat pictures (virtio 1.2, 5.7)."""

from __future__ import annotations

import struct

from tests.functional import virtio
from tests.functional.qtest_devices import pci

# A format, and where in its four bytes red, green and blue are: all with one byte that nobody sees
FORMATS = {2: (2, 1, 0), 4: (1, 2, 3), 68: (3, 2, 1), 134: (0, 1, 2)}
DISPLAY_INFO_BYTES = 24 + 16 * 24  # of the answer
Rectangle = tuple[int, int, int, int]  # x, y, width, height

_DISPLAY_INFO, _CREATE, _UNREF, _SCANOUT, _FLUSH, _TRANSFER, _ATTACH = range(0x100, 0x107)
_OK, _OK_DISPLAY_INFO = 0x1100, 0x1101
_FENCE = 1
_HEADER = 24


class Gpu(virtio.Device):
    """A resource is a picture of the device's own, whose backing are buffers in guest memory."""

    def _command(self, kind: int, body: bytes) -> None:
        self._vm.write(self.scratch, struct.pack('<IIQQ', kind, 0, 0, 0) + body)
        length, answer = _HEADER + len(body), self.scratch + 0x4000
        self.request([(self.scratch, length)], [(answer, _HEADER)])
        (found,) = struct.unpack('<I', self._vm.read(answer, 4))
        if found != _OK:
            raise AssertionError(f'virtio-gpu answers {kind:#x} with {found:#x}')

    def display_info(self, fence: int, buffers: pci.Buffers) -> bytes:
        """Ask for the displays; the answer goes to the buffers.

        :returns: how it begins
        """
        self._vm.write(self.scratch, struct.pack('<IIQQ', _DISPLAY_INFO, _FENCE, fence, 0))
        self.request([(self.scratch, _HEADER)], buffers)
        return struct.pack('<IIQQ', _OK_DISPLAY_INFO, _FENCE, fence, 0)

    def create(self, resource: int, kind: int, width: int, height: int) -> None:
        self._command(_CREATE, struct.pack('<IIII', resource, kind, width, height))

    def destroy(self, resource: int) -> None:
        self._command(_UNREF, struct.pack('<II', resource, 0))

    def attach(self, resource: int, backing: pci.Buffers) -> None:
        """The device keeps these mapped until the resource goes away."""
        entries = b''.join(struct.pack('<QII', address, length, 0) for address, length in backing)
        self._command(_ATTACH, struct.pack('<II', resource, len(backing)) + entries)

    def transfer(self, resource: int, rectangle: Rectangle, offset: int) -> None:
        """Load a rectangle of the resource from its backing.

        :param offset: of its first byte there
        """
        self._command(_TRANSFER, struct.pack('<IIIIQII', *rectangle, offset, resource, 0))

    def show(self, resource: int, width: int, height: int) -> None:
        """On the first display."""
        self._command(_SCANOUT, struct.pack('<IIIIII', 0, 0, width, height, 0, resource))

    def flush(self, resource: int, rectangle: Rectangle) -> None:
        """The display shows what the rectangle has become."""
        self._command(_FLUSH, struct.pack('<IIIIII', *rectangle, resource, 0))
