# SPDX-License-Identifier: Apache-2.0
"""The mirror follows a VM that runs: what it stored a minute ago is judged after it was killed."""

import struct
import subprocess
import time

from tests.functional import images
from tests.functional import long
from tests.functional import qemu
from tests.functional import test_qemu_backend as backend

BITMAPS = images.MIB  # where they begin in the file, doc/source/reference/format.rst
FOLLOWED_SECONDS = 75  # a minute, and what a busy machine takes
DAMAGE = 2


class MirrorTest(backend.QemuTestCase):
    def lose_pages(self) -> None:
        """Half of a slab is not there any more, says its bitmap."""
        with self.image.open('r+b') as file:
            file.seek(BITMAPS)
            bitmaps = file.read(images.MIB)
            at = next(
                at for at in range(0, len(bitmaps), 8) if struct.unpack_from('<Q', bitmaps, at)[0]
            )
            file.seek(BITMAPS + at)
            file.write(bytes(8))

    def check(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [images.program('pcow-img'), 'check', *options, self.image],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=images.TIMEOUT,
            check=False,
        )

    @long.only_long
    def test_killed(self) -> None:
        backend.tool('pcow-img', 'create', '-q', self.image, backend.SIZE)
        with qemu.Qemu(self.directory, *backend.backend(self.image)) as vm:
            address = vm.address('nv0')
            for offset in range(0, backend.SIZE, images.SLAB):
                vm.write(address + offset, b'stored a minute ago')
            time.sleep(FOLLOWED_SECONDS)
            vm.process.kill()
            vm.process.wait()
        self.assertEqual(0, self.check().returncode)
        self.lose_pages()
        found = self.check()
        self.assertEqual(DAMAGE, found.returncode, found.stdout)
        self.assertIn('bitmaps', found.stdout)
        self.assertEqual(0, self.check('-r', 'all').returncode)
        for offset in range(0, backend.SIZE, images.SLAB):
            self.assertIn(
                'stored a minute',
                backend.tool('pcow-io', '-r', '-c', f'read -v {offset} 32', self.image),
            )
