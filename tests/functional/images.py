# SPDX-License-Identifier: Apache-2.0
"""Running pcow-img, pcow-io and QEMU's tools on images in a directory that goes away
with the test.
"""

import hashlib
import json
import os
from pathlib import Path
import shutil
import signal
import struct
import subprocess
import tempfile
from typing import Any

import testtools

KIB = 1 << 10
MIB = 1 << 20
SLAB = 2 * MIB
TIMEOUT = 120
HEADER_SIZE = 4096
TOP = Path(__file__).resolve().parents[2]


def program(name: str) -> str:
    """Path of a program of this project: from PCOW_BIN_DIR, or build/bin of the checkout."""
    directory = Path(os.environ.get('PCOW_BIN_DIR') or TOP / 'build' / 'bin')
    path = directory / name
    if not os.access(path, os.X_OK):
        raise RuntimeError(f'{path} is not there; run tools/build, or set PCOW_BIN_DIR')
    return str(path)


def digest(path: Path) -> str:
    """Of a file's content, to see whether it changed without having it printed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open('r+b') as file:
        file.seek(offset)
        file.write(data)


def patch_record(path: Path, start: int, size: int, offset: int, data: bytes) -> None:
    """Change bytes of a part of the header that ends with a CRC-32C, which is made right again:
    forged, not damaged.
    """
    content = bytearray(path.read_bytes()[start : start + size])
    content[offset : offset + len(data)] = data
    content[-4:] = struct.pack('<I', crc32c(bytes(content[:-4])))
    patch(path, start, bytes(content))


def patch_header(path: Path, offset: int, data: bytes) -> None:
    patch_record(path, 0, 512, offset, data)


def patch_base(path: Path, offset: int, data: bytes) -> None:
    """Change base record 1, the one that create uses."""
    patch_record(path, 1024, 512, offset, data)


class ImageTestCase(testtools.TestCase):
    """A test with a directory of its own, on memory where there is any (PCOW_TEST_DIR:
    elsewhere).
    """

    def setUp(self) -> None:
        super().setUp()
        parent = os.environ.get('PCOW_TEST_DIR') or (
            '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
        )
        self.directory = Path(tempfile.mkdtemp(prefix='pcow-test-', dir=parent))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def path(self, name: str) -> Path:
        return self.directory / name

    def run_program(
        self, name: str, *args: Any, code: int = 0, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the test's directory and insist on its exit code.

        stdin is closed unless given. Whatever a sanitizer says is a failure, also where an error
        was expected.
        """
        command = [program(name) if name.startswith('pcow-') else name, *map(str, args)]
        source = {'stdin': subprocess.DEVNULL} if stdin is None else {'input': stdin}
        result = subprocess.run(
            command,
            cwd=self.directory,
            capture_output=True,
            text=True,
            errors='replace',
            timeout=TIMEOUT,
            **source,
        )
        self.assertNotRegex(result.stderr, 'Sanitizer|runtime error', f'{command}')
        self.assertEqual(code, result.returncode, f'{command}: {result.stdout}{result.stderr}')
        return result

    def img(self, *args: Any, code: int = 0) -> str:
        """stdout of pcow-img."""
        return self.run_program('pcow-img', *args, code=code).stdout

    def img_json(self, command: str, *args: Any, code: int = 0) -> Any:
        return json.loads(self.img(command, '--output=json', *args, code=code))

    def img_fails(self, *args: Any, message: str, code: int = 1) -> None:
        """pcow-img says one line on stderr that matches message, and nothing on stdout."""
        self.one_line(self.run_program('pcow-img', *args, code=code), 'pcow-img', message)

    def one_line(self, result: subprocess.CompletedProcess[str], name: str, message: str) -> None:
        self.assertRegex(result.stderr, message)
        self.assertEqual(1, len(result.stderr.splitlines()), result.stderr)
        self.assertTrue(result.stderr.startswith(f'{name}: '), result.stderr)

    def io(self, path: Any, *commands: str, code: int = 0, options: tuple[str, ...] = ()) -> str:
        """stdout of pcow-io."""
        args = [argument for command in commands for argument in ('-c', command)]
        return self.run_program('pcow-io', *options, *args, path, code=code).stdout

    def qemu_io(self, path: Any, *commands: str, image_format: str = 'raw') -> str:
        args = [argument for command in commands for argument in ('-c', command)]
        return self.run_program('qemu-io', '-f', image_format, *args, path).stdout

    def start(self, name: str, *args: Any) -> 'subprocess.Popen[str]':
        """Start a program with pipes; it does not outlive the test."""
        process = subprocess.Popen(
            [program(name), *map(str, args)],
            cwd=self.directory,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.addCleanup(self._end, process)
        return process

    @staticmethod
    def _end(process: 'subprocess.Popen[str]') -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.communicate()

    def create(self, name: str, size: Any = '16M', *args: Any) -> Path:
        path = self.path(name)
        self.img('create', '-q', *args, path, *([] if size is None else [size]))
        return path

    def create_plain(self, name: str, size: Any = '16M', *args: Any) -> Path:
        """Without a mirror, which would mend what a test does to its metadata."""
        return self.create(name, size, '-o', 'mirror=off', *args)

    def assert_clean(self, *paths: Path) -> None:
        for path in paths:
            result = self.img_json('check', path)
            self.assertEqual((0, 0), (result['corruptions'], result['leaks']), result)

    def assert_same(self, first: Path, first_format: str, second: Path, second_format: str) -> None:
        """The guest reads the same from both, by our own comparison and by QEMU's."""
        self.assertIn(
            'Images are identical.',
            self.img('compare', '-f', first_format, '-F', second_format, first, second),
        )
        raw = []
        for number, (path, image_format) in enumerate(
            ((first, first_format), (second, second_format))
        ):
            if image_format in ('raw', 'qcow2'):
                raw.append((path, image_format))
            else:
                copy = self.path(f'same-{number}.raw')
                self.img('convert', '-f', image_format, '-O', 'raw', path, copy)
                raw.append((copy, 'raw'))
        self.run_program(
            'qemu-img', 'compare', '-f', raw[0][1], '-F', raw[1][1], raw[0][0], raw[1][0]
        )
        for number in range(2):
            self.path(f'same-{number}.raw').unlink(missing_ok=True)

    def allocated(self, path: Path) -> int:
        """Bytes that the file system holds for a file."""
        return path.stat().st_blocks * 512

    def mount_pool(self, size: str) -> Path:
        """A small tmpfs; needs root."""
        pool = self.path('pool')
        pool.mkdir()
        self.run_program('mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', pool)
        self.addCleanup(subprocess.run, ['umount', '-l', str(pool)], check=False)
        return pool
