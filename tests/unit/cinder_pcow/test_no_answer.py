# SPDX-License-Identifier: Apache-2.0
"""A guest's QEMU that does not answer keeps cinder-volume from nothing but its own volumes."""

import json
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

PROGRAM = Path(__file__).with_name('no_answer.py')
LIMIT, WORK = 2, 20  # seconds: of a call of libvirt, and of what is done beside it
STANDS_STILL = 10  # on a machine that is busy; it would be for ever


class NoAnswerTest(unittest.TestCase):
    def check(self, mode: str) -> None:
        directory = tempfile.mkdtemp(prefix='pcow-test-no-answer-', dir='/dev/shm')
        self.addCleanup(shutil.rmtree, directory)
        os.mkdir(os.path.join(directory, 'state'))
        conf.CONF.set_override('state_path', os.path.join(directory, 'state'), 'pcow')
        self.addCleanup(conf.CONF.clear_override, 'state_path', 'pcow')
        registry.PoolRegistry().create('one', os.path.join(directory, 'one'))
        done = subprocess.run(
            [sys.executable, PROGRAM, directory, mode],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
            env=dict(os.environ, PYTHONPATH=str(base.TOP), PYTHONWARNINGS='ignore'),
        )
        self.assertEqual(0, done.returncode, done.stderr)
        told = json.loads(done.stdout.splitlines()[-1])
        for name, kind in (
            ('create', 'VolumeBackendAPIException'),
            ('delete', 'SnapshotIsBusy'),
            ('clone', 'VolumeBackendAPIException'),
            ('group', 'VolumeBackendAPIException'),
        ):
            words, seconds = told[name]
            with self.subTest(name):
                self.assertIn('the domain stands does not answer: ', words)
                self.assertTrue(words.startswith(kind), words)
                self.assertLess(seconds, LIMIT + WORK)
        self.assertEqual(4, len(told['at once']))
        for words, seconds in told['at once']:
            # the first one is told so, and the others that somebody waits for an answer already
            self.assertRegex(words, 'does not answer|state change lock')
            self.assertLess(seconds, 4 * (LIMIT + WORK))
        self.assertLess(told['longest'], STANDS_STILL)
        self.assertEqual(([], []), (told['locks'], told['left']))

    def test_green_threads(self) -> None:
        self.check('green')

    def test_threads_of_the_system(self) -> None:
        self.check('native')
