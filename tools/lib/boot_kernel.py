# SPDX-License-Identifier: Apache-2.0
"""The kernel proper in a file vmlinuz, which QEMU can enter at once (PVH): a kernel that unpacks
itself takes much of an emulated processor's time.
"""

from __future__ import annotations

from collections.abc import Callable
import lzma
import struct
import subprocess
import zlib

# Offsets in the setup header (Documentation/arch/x86/boot.rst)
_AT_SECTORS = 0x1F1
_AT_MAGIC = 0x202
_AT_VERSION = 0x206
_AT_PAYLOAD = 0x248
_PAYLOAD_SINCE = 0x208
_SECTOR = 512
_MAX = 256 << 20
# The note that names a 32-bit entry: of Xen, number 18
_PHYS32_ENTRY = 18
_PT_NOTE = 4
_X86_64 = 62


def _program(*command: str) -> Callable[[bytes], bytes]:
    def unpack(data: bytes) -> bytes:
        return subprocess.run(command, input=data, capture_output=True, check=True).stdout

    return unpack


# By the first bytes of what is packed. All but gzip have the length behind them once more.
_UNPACKERS: dict[bytes, Callable[[bytes], bytes]] = {
    b'\x02\x21\x4c\x18': _program('lz4', '-d', '-c'),
    b'\x28\xb5\x2f\xfd': _program('zstd', '-d', '-c'),
    b'\xfd7zXZ': lzma.decompress,
    b'\x1f\x8b': lambda data: zlib.decompress(data, 16 + zlib.MAX_WBITS),
}


def _payload(vmlinuz: bytes) -> bytes:
    if vmlinuz[_AT_MAGIC : _AT_MAGIC + 4] != b'HdrS':
        return b''
    (version,) = struct.unpack_from('<H', vmlinuz, _AT_VERSION)
    if version < _PAYLOAD_SINCE:
        return b''
    offset, length = struct.unpack_from('<II', vmlinuz, _AT_PAYLOAD)
    begin = ((vmlinuz[_AT_SECTORS] or 4) + 1) * _SECTOR + offset
    return vmlinuz[begin : begin + length]


def _has_entry(kernel: bytes) -> bool:
    """Whether it is an ELF file for x86-64 with a note that names the entry."""
    if kernel[:5] != b'\x7fELF\x02' or struct.unpack_from('<H', kernel, 18)[0] != _X86_64:
        return False
    (headers,) = struct.unpack_from('<Q', kernel, 32)
    size, count = struct.unpack_from('<HH', kernel, 54)
    for number in range(count):
        kind, _flags, at, _virtual, _physical, length = struct.unpack_from(
            '<IIQQQQ', kernel, headers + number * size
        )
        end = at + length
        while kind == _PT_NOTE and at + 12 <= end:
            name_size, data_size, note = struct.unpack_from('<III', kernel, at)
            name = kernel[at + 12 : at + 12 + name_size]
            if (name, note) == (b'Xen\0', _PHYS32_ENTRY):
                return True
            at += 12 + (name_size + 3) // 4 * 4 + (data_size + 3) // 4 * 4
    return False


def unpack(vmlinuz: bytes) -> bytes:
    """The kernel proper, or the same file if there is none that QEMU can enter."""
    packed = _payload(vmlinuz)
    for magic, unpacker in _UNPACKERS.items():
        if not packed.startswith(magic):
            continue
        length = struct.unpack_from('<I', packed, len(packed) - 4)[0]
        kernel = unpacker(packed if magic == b'\x1f\x8b' else packed[:-4])
        if len(kernel) != length or length > _MAX:
            raise SystemExit(f'boot_kernel: {len(kernel)} bytes were unpacked, not {length}')
        return kernel if _has_entry(kernel) else vmlinuz
    return vmlinuz
