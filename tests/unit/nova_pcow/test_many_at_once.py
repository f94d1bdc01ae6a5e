# SPDX-License-Identifier: Apache-2.0
"""nova-compute does many operations at once, as green threads or as threads of the system, and its
accounts are true afterwards.

``PCOW_RANDOM_SECONDS`` is how long it works in each of the two modes, ``PCOW_TEST_SEED`` repeats
what was chosen.
"""

import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

from tests.unit.pcow_driver import base

SECONDS = float(os.environ.get('PCOW_RANDOM_SECONDS', '9'))
SEED = int(os.environ.get('PCOW_TEST_SEED') or random.randrange(1 << 32))
PROGRAM = Path(__file__).with_name('at_once.py')
SIZES = {'one': '16g', 'two': '3g'}
# what it takes beside its work, on a machine that is busy
BESIDE = 900


class RandomWorkAtOnceTest(unittest.TestCase):
    def run_program(self, mode: str) -> None:
        directory = tempfile.mkdtemp(prefix='pcow-test-at-once-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, directory)
        os.mkdir(os.path.join(directory, 'tmp'))  # the alarm leaves there what it will
        for name, size in SIZES.items():
            # of its own: what others hold would be in the accounts
            path = os.path.join(directory, name)
            os.mkdir(path)
            subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'none', path], check=True)
            self.addCleanup(subprocess.run, ['umount', '-l', path], check=True)
        with subprocess.Popen(
            [sys.executable, PROGRAM, directory, mode, str(SEED), str(SECONDS)],
            cwd=base.TOP,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=dict(
                os.environ,
                PYTHONPATH=str(base.TOP),
                PYTHONWARNINGS='ignore',
                TMPDIR=os.path.join(directory, 'tmp'),
            ),
            start_new_session=True,
        ) as program:
            try:
                said = program.communicate(timeout=SECONDS + BESIDE)[0]
            finally:
                if program.poll() is None:
                    os.killpg(program.pid, signal.SIGKILL)
        self.assertEqual(0, program.returncode, said)
        print(*(line for line in said.splitlines() if line.startswith(mode)), sep='\n')

    def test_green_threads(self) -> None:
        self.run_program('green')

    def test_threads_of_the_system(self) -> None:
        self.run_program('native')
