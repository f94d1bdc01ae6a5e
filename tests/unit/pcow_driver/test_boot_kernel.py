# SPDX-License-Identifier: Apache-2.0
"""tools.lib.boot_kernel: the kernel proper in a file that unpacks itself."""

from __future__ import annotations

from collections.abc import Callable
import lzma
import shutil
import struct
import subprocess
import zlib

from tests.unit.pcow_driver import base
from tools.lib import boot_kernel


def _note(name: bytes, number: int, data: bytes) -> bytes:
    text = struct.pack('<III', len(name), len(data), number)
    return text + name + bytes(-len(name) % 4) + data + bytes(-len(data) % 4)


def _elf(*notes: bytes) -> bytes:
    data = b''.join(notes)
    header = b'\x7fELF\x02\x01\x01'.ljust(16, b'\0')
    header += struct.pack('<HHIQQQIHHHHHH', 2, 62, 1, 0x1000000, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    program = struct.pack('<IIQQQQQQ', 4, 4, 120, 0, 0, len(data), len(data), 4)
    return header + program + data


def _vmlinuz(packed: bytes) -> bytes:
    setup = bytearray(1024)
    setup[0x1F1] = 1
    setup[0x202:0x206] = b'HdrS'
    struct.pack_into('<H', setup, 0x206, 0x20F)
    struct.pack_into('<II', setup, 0x248, 16, len(packed))
    return bytes(setup) + bytes(16) + packed + b'what follows'


_KERNEL = _elf(_note(b'Linux\0', 18, b'1'), _note(b'Xen\0', 18, b'\0\0\0\1'))


class UnpackTest(base.TestCase):
    def _check(self, packed: bytes) -> None:
        self.assertEqual(_KERNEL, boot_kernel.unpack(_vmlinuz(packed)))

    def _with_length(self, pack: Callable[[bytes], bytes]) -> bytes:
        return pack(_KERNEL) + struct.pack('<I', len(_KERNEL))

    def test_what_python_unpacks(self) -> None:
        self._check(self._with_length(lzma.compress))
        packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
        self._check(packer.compress(_KERNEL) + packer.flush())

    def test_what_programs_unpack(self) -> None:
        for command in (['lz4', '-l', '-c'], ['zstd', '-c']):
            if shutil.which(command[0]) is None:
                continue  # tools/build installs them

            def pack(data: bytes, command: list[str] = command) -> bytes:
                return subprocess.run(command, input=data, capture_output=True, check=True).stdout

            self._check(self._with_length(pack))

    def test_without_the_entry_it_unpacks_itself(self) -> None:
        other = _elf(_note(b'Xen\0', 6, b'linux\0'), _note(b'GNU\0', 18, b''))
        file = _vmlinuz(lzma.compress(other) + struct.pack('<I', len(other)))
        self.assertEqual(file, boot_kernel.unpack(file))

    def test_other_files_stay_what_they_are(self) -> None:
        for file in (b'', b'no kernel', _KERNEL, bytes(4096), _vmlinuz(b'\x00unknown')):
            self.assertEqual(file, boot_kernel.unpack(file))

    def test_half_of_one_is_refused(self) -> None:
        packed = lzma.compress(_KERNEL) + struct.pack('<I', len(_KERNEL) + 1)
        error = self.assertRaises(SystemExit, boot_kernel.unpack, _vmlinuz(packed))
        self.assertIn('bytes were unpacked', str(error))
