# SPDX-License-Identifier: Apache-2.0
"""The examples of the manual pages of pcow-img and pcow-io, typed as they stand, one after the
other.
"""

import os
from pathlib import Path
import re
import shutil
import subprocess

from tests.functional import format1
from tests.functional import images
from tests.functional.images import MIB

_PAGES = images.TOP / 'doc/source/man'
_BLOCK = re.compile(r'::\n\n((?: {3}.+\n|\n)+)')


def examples(page: str) -> list[str]:
    _before, _title, text = (_PAGES / page).read_text().partition('\nExamples\n')
    return [
        line.strip().removeprefix('$ ')
        for block in _BLOCK.findall(text)
        for line in block.splitlines()
        if re.match(r' +(\$ )?pcow-', line)
    ]


class ManExamplesTest(images.ImageTestCase):
    def type_in(self, line: str) -> subprocess.CompletedProcess[str]:
        programs = Path(images.program('pcow-img')).parent
        return subprocess.run(
            ['bash', '-o', 'pipefail', '-c', line.replace('/pool/', f'{self.directory}/pool/')],
            cwd=self.directory,
            env=os.environ | {'PATH': f'{programs}:{os.environ["PATH"]}'},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=images.TIMEOUT,
            check=False,
        )

    def test_pcow_img(self) -> None:
        self.path('pool').mkdir()
        self.path('disk.raw').write_bytes(b'x' * MIB)
        self.run_program('qemu-img', 'convert', '-O', 'qcow2', 'disk.raw', 'debian.qcow2')
        format1.write(self.path('old.img'), 32, {0: b'o' * 65536})
        lines = examples('pcow-img.rst')
        self.assertGreater(len(lines), 8)
        for line in lines:
            if 'yesterday' in line:
                self.img('snapshot', '-c', 'yesterday', self.path('pool/vm1.pcow'))
            if '| jq' in line and not shutil.which('jq'):
                line = line.partition('|')[0]
            done = self.type_in(line)
            self.assertEqual(0, done.returncode, f'{line}: {done.stderr}')
        made = sorted(path.name for path in self.path('pool').iterdir())
        self.assertEqual(['debian.pcow', 'new.pcow', 'vm1.pcow', 'vm2.pcow'], made)
        self.assertEqual(
            'qcow2', self.img_format('backup.qcow2'), 'what was asked for, and what its name says'
        )

    def img_format(self, name: str) -> str:
        said = self.run_program('qemu-img', 'info', name).stdout
        return re.search(r'(?m)^file format: (\w+)$', said)[1]

    def test_pcow_io(self) -> None:
        self.create('vm1.pcow')
        lines = examples('pcow-io.rst')
        self.assertGreater(len(lines), 3)
        for line in lines:
            done = self.type_in(line)
            # the one that shows what is said of other bytes
            expected = int('-P 1 ' in line)
            self.assertEqual(expected, done.returncode, f'{line}: {done.stderr}')
