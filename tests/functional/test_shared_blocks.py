# SPDX-License-Identifier: Apache-2.0
"""An image that was copied with shared blocks, on a pool that is full: stores wait or fail, and are
no signal.
"""

import os
from pathlib import Path
import subprocess
import tempfile
import unittest

from tests.functional import images

SIZE = 32 << 20
POOL = 400 << 20


def setUpModule() -> None:
    if os.geteuid():
        raise unittest.SkipTest('needs root to mount a file system')


class SharedBlocksTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(dir='/var/tmp')
        self.addCleanup(directory.cleanup)
        disk, self.pool = Path(directory.name, 'disk'), Path(directory.name, 'pool')
        self.pool.mkdir()
        with open(disk, 'wb') as file:
            file.truncate(POOL)
        for command in (
            ['mkfs.xfs', '-q', '-m', 'reflink=1', str(disk)],
            ['mount', '-o', 'loop', str(disk), str(self.pool)],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                self.skipTest(f'{command[0]}: {done.stderr.strip()}')
        self.addCleanup(subprocess.run, ['umount', str(self.pool)], check=True)
        self.image, self.copy = self.pool / 'image.pcow', self.pool / 'copy.pcow'
        self.tool('pcow-img', 'create', '-q', self.image, str(SIZE))
        self.tool('pcow-io', '-c', f'write -P 7 0 {SIZE}', self.image)
        subprocess.run(['cp', '--reflink=always', self.image, self.copy], check=True)

    def tool(self, name: str, *arguments: object, code: int = 0) -> str:
        done = subprocess.run(
            [images.program(name), *(str(word) for word in arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        self.assertEqual(code, done.returncode, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def fill(self, left: int) -> None:
        """Until so many bytes are left, about."""
        found = os.statvfs(self.pool)
        fd = os.open(self.pool / 'fill', os.O_CREAT | os.O_WRONLY)
        try:
            os.posix_fallocate(fd, 0, found.f_bavail * found.f_frsize - left)
        finally:
            os.close(fd)

    def test_full_pool_is_an_error(self) -> None:
        self.fill(12 << 20)
        said = self.tool('pcow-io', '-c', f'write -P 9 0 {SIZE}', self.copy, code=1)
        self.assertIn('the pool is full; free space', said)
        (self.pool / 'fill').unlink()
        self.tool('pcow-io', '-c', f'write -P 9 0 {SIZE}', '-c', f'read -P 9 0 {SIZE}', self.copy)
        self.tool('pcow-io', '-r', '-c', f'read -P 7 0 {SIZE}', self.image)
        for image in (self.image, self.copy):
            self.tool('pcow-img', 'check', image)

    def test_blocks_become_its_own(self) -> None:
        self.tool('pcow-io', '-c', f'write -P 9 0 {SIZE}', self.copy)
        self.tool('pcow-img', 'snapshot', '-c', 'one', self.copy)
        found = subprocess.run(
            ['filefrag', '-v', str(self.copy)], capture_output=True, text=True, check=False
        )
        if found.returncode == 0:
            self.assertNotIn('shared', found.stdout)
        self.tool('pcow-io', '-r', '-c', f'read -P 7 0 {SIZE}', self.image)
