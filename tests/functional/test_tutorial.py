# SPDX-License-Identifier: Apache-2.0
"""The commands of the tutorial, typed as they stand there.

Not those that start a VM, which need libvirt: test_boot_shim and test_main_job boot.
"""

from pathlib import Path
import re
import subprocess
import sys

from tests.functional import test_pcowctl

PAGE = test_pcowctl.TOP / 'doc/source/tutorial/first-vm.rst'
PLACE = Path('/dev/shm/trial')
_BLOCK = re.compile(r'::\n\n((?: {4}.+\n|\n)+)')
_NOT_HERE = re.compile(r'tools/quickstart|virsh|^PATH=')


def commands() -> list[str]:
    _before, _title, steps = PAGE.read_text().partition('\nStep by step\n')
    return [
        line.strip()
        for block in _BLOCK.findall(steps)
        for line in block.splitlines()
        if line.strip() and not _NOT_HERE.search(line.strip())
    ]


class TutorialTest(test_pcowctl.TestCase):
    def type_in(self, line: str) -> str:
        done = subprocess.run(
            ['bash', '-c', line],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        self.assertEqual(0, done.returncode, f'{line}: {done.stderr}')
        return done.stdout

    def test_step_by_step(self) -> None:
        self.assertFalse(PLACE.exists(), f'{PLACE} is somebody\'s')
        wrapper = self.directory / 'bin/pcowctl'
        wrapper.parent.mkdir()
        wrapper.write_text(
            f'#!/bin/sh\nexec env PYTHONPATH={test_pcowctl.TOP} {sys.executable} '
            f'-m pcow_driver.cli.app --config-file {self.config} "$@"\n'
        )
        wrapper.chmod(0o755)
        self.environment['PATH'] = f'{wrapper.parent}:{self.environment["PATH"]}'
        self.addCleanup(subprocess.run, ['rm', '-rf', str(PLACE)], check=True)
        self.run_program('truncate', '-s', '64M', self.directory / 'disk.raw')
        self.run_program('mkfs.ext4', '-q', self.directory / 'disk.raw')
        self.run_program(
            'qemu-img',
            'convert',
            '-O',
            'qcow2',
            self.directory / 'disk.raw',
            self.directory / 'debian12.qcow2',
        )
        said = {line: self.type_in(line) for line in commands()}
        self.assertGreater(len(said), 12)
        self.assertIn('fresh', said['pcowctl snapshot list trial/web1'])
        self.assertIn('web2', said['pcowctl image list trial'])
        self.assertIn('pcow-boot-shim/kernel', (self.directory / 'web1.xml').read_text())
        self.assertEqual([], list(PLACE.glob('*')))
