# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from unittest import mock

from pcow_driver.fixation import parallel
from tests.unit.pcow_driver import base


class ParallelTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.hanging = threading.Event()
        self.addCleanup(self.hanging.set)

    def work(self, name: str) -> str:
        if name.startswith('hangs'):
            self.hanging.wait()
        if name.startswith('fails'):
            raise ValueError(name)
        return name.upper()

    def test_each_has_its_end(self) -> None:
        done = dict(parallel.each(['a', 'fails', 'b'], self.work, None))
        self.assertEqual(('A', 'B'), (done['a'], done['b']))
        self.assertIsInstance(done['fails'], ValueError)
        self.assertEqual([], [*parallel.each([], self.work, None)])

    def test_many_that_hang(self) -> None:
        """More than there are threads: those behind them are done all the same."""
        hang = [f'hangs-{number}' for number in range(2 * (os.cpu_count() or 1) + 8)]
        with mock.patch.multiple(parallel, _STALLS=0.01, _TURN=0.01):
            done = dict(parallel.each([*hang, 'a', 'b'], self.work, time.monotonic() + 5))
        self.assertEqual(('A', 'B'), (done['a'], done['b']))
        self.assertEqual({None}, {done[name] for name in hang})

    def run_program(self, names: list[str], *code: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own, with its handlers of signals: ``work`` of the code, several at
        once.
        """
        head = (
            'import os, signal, threading, time',
            'from pcow_driver.common import interrupt, tool',
            'from pcow_driver.fixation import parallel',
            'interrupt.install()',
        )
        lines = (*head, *code, f'[*parallel.each({names}, work, None)]')
        return subprocess.run(
            [sys.executable, '-c', '\n'.join(lines)],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    def test_a_signal(self) -> None:
        """Whoever meets it: a thread, or the one that waits for the threads. A program ends with
        it; who cannot be told is named.
        """
        for waits, named in (
            ('tool.run("/bin/sleep", "60")', []),
            ('time.sleep(60)', ['first', 'last']),
        ):
            done = self.run_program(
                ['first', 'last'],
                'parallel._CLEARS_UP = 1',
                'def work(name):',
                '    if name == "last":',
                '        with interrupt.clearing_up():',
                '            os.kill(os.getpid(), signal.SIGTERM)',
                '            time.sleep(0.2)',
                f'    {waits}',
            )
            found = [line.partition(':')[0] for line in done.stderr.splitlines()]
            self.assertEqual((128 + signal.SIGTERM, named), (done.returncode, found), waits)

    def test_two_signals(self) -> None:
        """The second one does not cut off what the first one has begun to undo."""
        done = self.run_program(
            ['a', 'b'],
            'def work(name):',
            '    try:',
            '        tool.run("/bin/sleep", "60")',
            '    except BaseException:',
            '        with interrupt.clearing_up():',
            '            time.sleep(1)',
            '            print(name, flush=True)',
            '        raise',
            'def kill():',
            '    for _ in range(2):',
            '        time.sleep(0.7)',
            '        os.kill(os.getpid(), signal.SIGTERM)',
            'threading.Thread(target=kill, daemon=True).start()',
        )
        self.assertEqual(
            (128 + signal.SIGTERM, ['a', 'b']), (done.returncode, sorted(done.stdout.split()))
        )

    def test_an_end_of_the_process_in_a_thread(self) -> None:
        def work(_name: str) -> str:
            raise SystemExit(3)

        with self.assertRaises(SystemExit):
            [*parallel.each(['a', 'b'], work, None)]

    def test_nothing_begins_behind_the_end(self) -> None:
        hang = [f'hangs-{number}' for number in range(2 * (os.cpu_count() or 1) + 8)]
        begun = list[str]()

        def work(name: str) -> str:
            begun.append(name)
            return self.work(name)

        done = dict(parallel.each([*hang, 'a'], work, time.monotonic() + 0.1))
        self.assertEqual({None}, {*done.values()})
        self.hanging.set()
        for thread in threading.enumerate():
            if thread.daemon:
                thread.join()
        self.assertNotIn('a', begun)
