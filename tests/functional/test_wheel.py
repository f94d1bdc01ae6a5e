# SPDX-License-Identifier: Apache-2.0
"""The wheel: what an operator runs is in it, and nothing else."""

import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

TOP = Path(__file__).resolve().parents[2]
PACKAGES = {
    'cinder_pcow',
    'nova_pcow',
    *(
        f'nova_pcow/{name}'
        for name in (
            'common',
            'libvirt_driver',
            'migration',
            'placement',
            'records',
            'servers',
            'snapshots',
            'warm_images',
        )
    ),
    'pcow_driver',
    *(
        f'pcow_driver/{name}'
        for name in (
            'cli',
            'common',
            'copies',
            'export',
            'fixation',
            'health',
            'images',
            'pmem',
            'pools',
            'privileged',
            'provision',
            'snapshots',
            'templates',
            'virt',
            'vm',
        )
    ),
}
# Beside Python modules: it makes the compute driver importable as one of Nova's.
FILES = {'nova_pcow.pth'}


class WheelTest(unittest.TestCase):
    def wheel(self) -> Path:
        """Made of what git tracks: a build leaves files in its source."""
        work = Path(tempfile.mkdtemp(prefix='pcow-wheel-'))
        self.addCleanup(shutil.rmtree, work)
        tracked = subprocess.run(
            ('git', 'ls-files', '-z'), cwd=TOP, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, tracked.split('\0')):
            if (TOP / name).is_file():
                (work / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(TOP / name, work / 'source' / name)
        done = subprocess.run(
            (
                sys.executable,
                '-m',
                'pip',
                'wheel',
                '--disable-pip-version-check',
                '--no-deps',
                '--wheel-dir',
                work,
                work / 'source',
            ),
            env=os.environ | {'PBR_VERSION': '0.1.0'},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return next(work.glob('*.whl'))

    def test_holds_what_an_operator_runs(self) -> None:
        with zipfile.ZipFile(self.wheel()) as archive:
            names = [name for name in archive.namelist() if '.dist-info/' not in name]
        packages = {os.path.dirname(name) for name in names if name.endswith('.py')}
        self.assertEqual(PACKAGES, packages)
        data = {name for name in names if '.data/data/' in name}
        self.assertEqual(FILES, {name for name in names if not name.endswith('.py')} - data)
        wanted = {
            line.split('=')[1].strip()
            for line in (TOP / 'setup.cfg').read_text().splitlines()
            if line.startswith('    ') and '= etc/' in line
        }
        self.assertEqual(
            {os.path.basename(name) for name in wanted}, {os.path.basename(name) for name in data}
        )
