# SPDX-License-Identifier: Apache-2.0
"""The exit codes that the manual pages promise: each row of their tables is provoked."""

import contextlib
import os
from pathlib import Path
import re
import signal
import subprocess
import time

from tests.functional import images
from tests.functional import test_pcowctl

PAGES = test_pcowctl.TOP / 'doc/source/man'
_ROW = re.compile(r'^(?P<command>[a-z]+(?: [a-z]+)?) +(?P<code>\d+) +\S', re.MULTILINE)
# Nothing makes a file unreadable after it was opened, as a device does: looked up in the code.
_OF_THE_CODE = {
    ('pcow-img', 'compare', 3): 'CANNOT_GET_STATUS = 3',
    ('pcow-img', 'compare', 4): 'CANNOT_READ = 4',
}


def documented() -> set[tuple[str, str, int]]:
    rows = set()
    for page in ('pcowctl', 'pcow-img', 'pcow-io'):
        text = (PAGES / f'{page}.rst').read_text()
        table = text.partition('.. exit codes begin\n')[2].partition('.. exit codes end\n')[0]
        rows |= {(page, row['command'], int(row['code'])) for row in _ROW.finditer(table)}
    return rows


class ExitCodesTest(test_pcowctl.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.seen: set[tuple[str, str, int]] = set()
        self.pool.mkdir()
        self.ctl('pool', 'create', 'p', self.pool)
        self.ctl('image', 'create', '--size', '8M', 'p/vm')
        # A mirror would mend what is done to its metadata.
        (self.pool / 'vm.pcow').unlink()
        self.run_program(
            test_pcowctl.BIN / 'pcow-img',
            *('create', '-q', '-o', 'mirror=off', self.pool / 'vm.pcow', '8M'),
        )
        self.image = self.pool / 'vm.pcow'
        self.healthy = self.image.read_bytes()

    def ends(self, program: str, row: str, code: int, *args: object) -> None:
        command = (
            self.command(*args) if program == 'pcowctl' else [test_pcowctl.BIN / program, *args]
        )
        self.run_program(*command, exit_code=code)
        self.seen.add((program, row, code))

    def damage(self) -> None:
        """A second name for the record of the active layer."""
        images.patch(self.image, 4096, b'\xff' * 64)

    def lose(self) -> None:
        """The owner word of a slab that holds data."""
        self.heal()
        self.run_program(test_pcowctl.BIN / 'pcow-io', '-c', 'write 0 64k', self.image)
        images.patch(self.image, (64 << 10) + 8, b'\xff' * 16)  # whichever of the first two

    def forget_data(self) -> None:
        """A slab table of zeros owns nothing: what was data looks like space that nothing uses."""
        self.run_program(test_pcowctl.BIN / 'pcow-io', '-c', 'write 0 64k', self.image)
        images.patch(self.image, 64 << 10, bytes(4096))

    def leak(self) -> None:
        """As a crash leaves it: a slab that nothing refers to, beside one that is in use."""
        self.run_program(test_pcowctl.BIN / 'pcow-io', '-c', 'write 0 64k', self.image)
        with self.image.open('r+b') as f:
            end = f.seek(0, os.SEEK_END)
            f.truncate(end + (2 << 20))
            f.seek(end)
            f.write(b'x' * 4096)

    def heal(self) -> None:
        self.image.write_bytes(self.healthy)

    def check_all(self) -> None:
        for program, row, words in (
            ('pcowctl', 'image check', ('image', 'check', 'p/vm')),
            ('pcow-img', 'check', ('check', self.image)),
        ):
            self.ends(program, row, 0, *words)
            self.damage()
            self.ends(program, row, 2, *words)
            self.heal()
            self.forget_data()
            self.ends(program, row, 2, *words)
            self.heal()
            self.leak()
            self.ends(program, row, 3, *words)
            self.heal()

    def pools(self) -> None:
        self.ends('pcowctl', 'pool check', 0, 'pool', 'check')
        self.ctl('pool', 'set', '--low', '100', '--critical', '0', 'p')
        self.ends('pcowctl', 'pool check', 1, 'pool', 'check', 'p')
        self.ctl('pool', 'set', '--low', '100', '--critical', '100', 'p')
        self.ends('pcowctl', 'pool check', 2, 'pool', 'check', 'p')
        self.ends('pcowctl', 'pool check', 3, 'pool', 'check', '--prometheus', '/nowhere/f', 'p')
        self.ends('pcowctl', 'pool scrub', 0, 'pool', 'scrub', 'p')
        unreadable = self.pool / 'unreadable.pcow'
        unreadable.write_bytes(bytes(8192))
        self.ends('pcowctl', 'pool scrub', 3, 'pool', 'scrub', 'p')
        self.ctl('image', 'create', '--size', '8M', 'p/template')
        path = self.pool / 'template.pcow'
        self.run_program(test_pcowctl.BIN / 'pcow-io', '-c', 'write -P 1 0 4k', path, exit_code=0)
        self.run_program(test_pcowctl.BIN / 'pcow-img', 'seal', '--checksums', path, exit_code=0)
        images.patch(path, 6 << 20, b'x')
        self.ends('pcowctl', 'pool scrub', 2, 'pool', 'scrub', 'p')
        self.ends('pcow-img', 'all', 0, 'unseal', path)
        self.ends('pcow-img', 'seal', 2, 'seal', '--checksums', path)
        self.ends('pcow-img', 'seal', 0, 'seal', '--checksums', '--accept-damage', path)
        self.ends('pcow-img', 'all', 0, 'unseal', path)
        self.checksums('p/template', path)
        path.unlink()
        unreadable.unlink()

    def checksums(self, name: str, path: Path) -> None:
        """Of a snapshot, damaged between."""
        made = ('snapshot', 'checksum', name, 's')
        self.ends('pcow-img', 'all', 0, 'snapshot', '-c', 's', path)
        self.ends('pcowctl', 'snapshot checksum', 0, *made)
        images.patch(path, 6 << 20, b'y')
        self.ends('pcowctl', 'snapshot checksum', 2, *made)
        self.ends('pcow-img', 'checksum', 2, 'checksum', path)
        self.ends('pcowctl', 'snapshot checksum', 0, *made, '--accept-damage')
        self.ends('pcow-img', 'checksum', 0, 'checksum', path)

    def tools(self) -> None:
        other = self.directory / 'other.pcow'
        self.ends('pcow-img', 'all', 0, 'create', other, '8M')
        self.ends('pcow-img', 'all', 1, 'info', self.directory / 'none.pcow')
        self.ends('pcow-img', 'all', 1, 'info', '--no-such-option')
        self.ends('pcow-img', 'check', 1, 'check', self.directory / 'none.pcow')
        self.ends('pcow-img', 'check', 63, 'check', '-f', 'raw', other)
        self.lose()
        self.ends('pcow-img', 'check', 2, 'check', '-r', 'all', self.image)
        self.ends('pcowctl', 'image check', 2, 'image', 'check', '--repair', 'p/vm')
        self.ends('pcow-img', 'check', 0, 'check', '-r', 'all', '--accept-loss', self.image)
        self.ends('pcow-img', 'all', 0, 'rescue', f'{self.image}.rescue')
        os.unlink(f'{self.image}.rescue')
        self.lose()
        self.ends(
            'pcowctl', 'image check', 0, 'image', 'check', '--repair', '--accept-loss', 'p/vm'
        )
        self.ends('pcow-img', 'all', 1, 'rescue', self.image)
        self.heal()
        self.ends('pcow-img', 'compare', 0, 'compare', self.image, other)
        self.ends('pcow-io', 'all', 0, '-c', 'write -P 1 0 4k', other)
        self.ends('pcow-img', 'compare', 1, 'compare', self.image, other)
        self.ends('pcow-img', 'compare', 2, 'compare', other, self.directory / 'none.pcow')
        self.ends('pcow-io', 'all', 1, '-c', 'read -P 2 0 4k', other)

    def interrupted(self, number: int, code: int) -> None:
        """In the midst of a transfer: it waits for what is to come."""
        read, write = os.pipe()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, write)
            process = stack.enter_context(
                subprocess.Popen(
                    self.command('image', 'receive', 'p/arriving'),
                    stdin=read,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self.environment,
                    cwd=test_pcowctl.TOP,
                )
            )
            os.close(read)
            status = Path(f'/proc/{process.pid}/status')
            deadline = time.monotonic() + 60
            caught = re.compile(r'^SigCgt:\s*([0-9a-f]+)$', re.MULTILINE)
            # its handlers are there
            while time.monotonic() < deadline:
                found = caught.search(status.read_text())
                if found and int(found[1], 16) >> (signal.SIGTERM - 1) & 1:
                    break
                time.sleep(0.02)
            process.send_signal(number)
            self.assertEqual(code, process.wait(timeout=60))
        self.seen.add(('pcowctl', 'all', code))

    def test_each_row(self) -> None:
        self.ends('pcowctl', 'all', 0, 'pool', 'list')
        self.ends('pcowctl', 'all', 1, 'image', 'show', 'p/none')
        self.ends('pcowctl', 'all', 2, 'image', 'show', '--no-such-option')
        self.ends('pcowctl', 'all', 2, 'frobnicate')
        self.check_all()
        self.pools()
        self.tools()
        self.interrupted(signal.SIGINT, 130)
        self.interrupted(signal.SIGTERM, 143)
        self.config.write_text(self.config.read_text() + 'emulator = /nowhere/qemu\n')
        self.ends('pcowctl', 'doctor', 1, 'doctor')
        code = (test_pcowctl.TOP / 'qemu-backend/tools/img/compare.c').read_text()
        for row, text in _OF_THE_CODE.items():
            self.assertIn(text, code)
            self.seen.add(row)
        self.assertEqual(documented(), self.seen)
