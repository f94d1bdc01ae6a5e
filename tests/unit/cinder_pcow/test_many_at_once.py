# SPDX-License-Identifier: Apache-2.0
"""cinder-volume does many operations at once, as green threads or as threads of the system, beside
other services of the host.

``PCOW_RANDOM_SECONDS`` is for how many seconds.
"""

import os
from pathlib import Path
import shutil
import subprocess
import sys
import tempfile
import unittest

from pcow_driver.common import conf
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base

SECONDS = float(os.environ.get('PCOW_RANDOM_SECONDS', '3'))
PROGRAM = Path(__file__).with_name('at_once.py')


# One changes a template as :func:`pcow_driver.images.image.create_overlay` does, while a program
# runs; the other comes meanwhile.
ONE_AFTER_THE_OTHER = """
import eventlet
eventlet.monkey_patch()
import faulthandler, sys
from oslo_concurrency import processutils
from pcow_driver.images import protection
faulthandler.dump_traceback_later(20, exit=True)
def first():
    with protection.lifted(sys.argv[1]):
        processutils.execute('sleep', '0.2')
threads = [eventlet.spawn(first), eventlet.spawn(protection.unlink, sys.argv[1])]
for thread in threads:
    thread.wait()
"""


class ManyAtOnceTest(unittest.TestCase):
    def run_programs(self, *modes: str) -> None:
        """Each in a process of its own, on one pool."""
        directory = tempfile.mkdtemp(prefix='pcow-test-at-once-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, directory)
        os.mkdir(os.path.join(directory, 'state'))
        conf.CONF.set_override('state_path', os.path.join(directory, 'state'), 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'state_path', 'pcow')
        # of its own: what others hold would be in the accounts
        path = os.path.join(directory, 'one')
        os.mkdir(path)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=8g', 'none', path], check=True)
        self.addCleanup(subprocess.run, ['umount', '-l', path], check=True)
        pool = registry.PoolRegistry().create('one', path)
        quiet_points = str(3 if len(modes) == 1 else 0)
        programs = [
            subprocess.Popen(
                [sys.executable, PROGRAM, directory, mode, str(number), str(SECONDS), quiet_points],
                cwd=base.TOP,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=dict(os.environ, PYTHONPATH=str(base.TOP), PYTHONWARNINGS='ignore'),
            )
            for number, mode in enumerate(modes)
        ]
        said = [program.communicate(timeout=SECONDS + 300)[0] for program in programs]
        self.assertEqual(
            [0] * len(modes), [program.returncode for program in programs], '\n'.join(said)
        )
        print(*said, sep='')
        self.assertEqual([], pool.entries())
        self.assertEqual([], os.listdir(os.path.join(directory, 'state', 'locks')))

    def test_flag_of_a_template(self) -> None:
        """Who waits for the lock of the directory does not keep the one who has it from
        going on.
        """
        with tempfile.NamedTemporaryFile(suffix='.pcow', delete=False) as file:
            done = subprocess.run(
                [sys.executable, '-c', ONE_AFTER_THE_OTHER, file.name],
                cwd=base.TOP,
                capture_output=True,
                text=True,
                check=False,
                env=dict(os.environ, PYTHONWARNINGS='ignore'),
            )
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertFalse(os.path.exists(file.name))

    def test_green_threads(self) -> None:
        self.run_programs('green')

    def test_threads_of_the_system(self) -> None:
        self.run_programs('native')

    def test_both_beside_each_other(self) -> None:
        """As nova-compute and cinder-volume are, and each service while they are changed over."""
        self.run_programs('green', 'native')
