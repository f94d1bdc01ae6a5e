# SPDX-License-Identifier: Apache-2.0
"""What a memory or a disk should hold, where some of it may be the one or the other."""

from __future__ import annotations

GRANULE = 4096  # that is compared at once


class Content:
    def __init__(self, data: bytes | bytearray) -> None:
        self.data = bytearray(data)
        self._doubts: list[tuple[int, bytes]] = []

    def copy(self) -> Content:
        other = Content(self.data)
        other._doubts = list(self._doubts)
        return other

    def store(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data
        end = offset + len(data)
        self._doubts = [
            (at, other) for at, other in self._doubts if at < offset or at + len(other) > end
        ]

    def doubt(self, offset: int, data: bytes) -> None:
        """Each byte is this, or what it was."""
        self._doubts.append((offset, bytes(data)))

    def adopt(self, offset: int, found: bytes) -> str:
        """Take what is there, if it can be.

        :returns: '' or what is wrong
        """
        expected = bytes(self.data[offset : offset + len(found)])
        for at in range(0, len(found), GRANULE):
            if expected[at : at + GRANULE] != found[at : at + GRANULE]:
                wrong = self._wrong(
                    offset + at, expected[at : at + GRANULE], found[at : at + GRANULE]
                )
                if wrong:
                    return wrong
        self.store(offset, found)
        return ''

    def _wrong(self, offset: int, expected: bytes, found: bytes) -> str:
        right = [a == b for a, b in zip(expected, found, strict=True)]
        for at, other in self._doubts:
            for index in range(max(at, offset), min(at + len(other), offset + len(found))):
                right[index - offset] |= other[index - at] == found[index - offset]
        if all(right):
            return ''
        first = right.index(False)
        return (
            f'{right.count(False)} bytes of {GRANULE} from {offset + first:#x} are wrong: '
            f'{found[first : first + 16].hex()}, not {expected[first : first + 16].hex()}'
        )
