# SPDX-License-Identifier: Apache-2.0

import subprocess
import sys
import unittest

from tests.unit.pcow_driver import base

PROGRAM = """
{first}
import threading, time
from tests.unit import watchdog
dog = watchdog.Watchdog({stands_still}, {none_ends})
def waits_for_ever():
    threading.Event().wait()
with dog.watching():
    {work}
print('at the end')
"""


class WatchdogTest(unittest.TestCase):
    def ends(
        self, work: str, stands_still: float = 60, none_ends: float = 60, first: str = ''
    ) -> tuple[int, str]:
        program = PROGRAM.format(
            stands_still=stands_still, none_ends=none_ends, work=work, first=first
        )
        done = subprocess.run(
            [sys.executable, '-c', program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=base.TOP,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout

    def test_no_operation_ends(self) -> None:
        code, said = self.ends('waits_for_ever()', none_ends=0.3)
        self.assertEqual(1, code)
        self.assertIn('no operation has ended for 0.3 seconds', said)
        self.assertIn('in waits_for_ever', said)

    def test_green_threads(self) -> None:
        code, said = self.ends(
            'eventlet.spawn(waits_for_ever).wait()',
            none_ends=0.3,
            first='import eventlet\neventlet.monkey_patch()',
        )
        self.assertEqual(1, code)
        self.assertIn('in waits_for_ever', said)

    def test_no_other_thread_runs(self) -> None:
        # a power does not let go of the interpreter
        code, said = self.ends('7 ** 10**8', stands_still=0.3)
        self.assertEqual(1, code)
        self.assertIn('Timeout', said)

    def test_operations_end(self) -> None:
        work = 'all(dog.alive() or time.sleep(0.1) is None for _ in range(10))'
        self.assertEqual((0, 'at the end\n'), self.ends(work, none_ends=0.5))
