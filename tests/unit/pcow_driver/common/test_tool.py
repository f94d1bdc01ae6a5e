# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import fixtures

from pcow_driver.common import exception
from pcow_driver.common import tool
from tests.unit.pcow_driver import base


class FindTest(base.TestCase):
    def test_by_path_and_in_path(self) -> None:
        program = self.script('pcow-img', '#!/bin/sh\n')
        self.configure(pcow_img=program)
        self.assertEqual(program, tool.find('pcow_img'))
        self.configure(pcow_img='pcow-img')
        self.useFixture(fixtures.EnvironmentVariable('PATH', str(self.directory)))
        self.assertEqual(program, tool.find('pcow_img'))

    def test_not_found(self) -> None:
        for name in ('no-such-program-here', str(self.directory / 'pcow-img'), str(self.directory)):
            self.configure(pcow_img=name)
            error = self.assertRaises(exception.ToolNotFound, tool.find, 'pcow_img')
            self.assertIn('[pcow] pcow_img', str(error))

    def test_build_dir_is_that_of_the_checkout(self) -> None:
        self.assertEqual(base.TOP / 'build' / 'bin', tool.build_dirs()[0])


class RunTest(base.TestCase):
    def test_output(self) -> None:
        program = self.script('good', '#!/bin/sh\nprintf "%s|" "$@"\n')
        self.assertEqual('a b|-x||', tool.run(program, 'a b', '-x', ''))

    def test_failure_is_one_line_without_the_programs_name(self) -> None:
        program = self.script(
            'pcow-img',
            '#!/bin/sh\necho "pcow-img: x.pcow: bad" >&2; echo "try again" >&2; exit 3\n',
        )
        error = self.assertRaises(exception.ToolFailed, tool.run, program)
        self.assertEqual('x.pcow: bad; try again', str(error))
        self.assertEqual(3, error.details['exit_code'])
        self.assertEqual('', tool.run(program, ok_exit_codes=(0, 3)))

    def test_silent_failure(self) -> None:
        self.assertIn(
            'exit code 7',
            str(
                self.assertRaises(
                    exception.ToolFailed, tool.run, self.script('silent', '#!/bin/sh\nexit 7\n')
                )
            ),
        )

    def test_json(self) -> None:
        self.assertEqual(
            {'a': 1}, tool.run_json(self.script('json', '#!/bin/sh\necho \'{"a": 1}\'\n'))
        )
        self.assertRaises(
            exception.ToolOutputInvalid,
            tool.run_json,
            self.script('text', '#!/bin/sh\necho hello\n'),
        )

    def test_gone(self) -> None:
        self.assertRaises(exception.ToolNotFound, tool.run, str(self.directory / 'gone'))

    def test_child_ends_with_an_interrupted_caller(self) -> None:
        pid_file = self.directory / 'pid'
        program = self.script(
            'long',
            f'#!/bin/sh\necho $$ > {pid_file}.new; mv {pid_file}.new {pid_file}; exec sleep 100\n',
        )
        code = (
            'import signal, sys\n'
            'signal.signal(signal.SIGTERM, lambda *args: sys.exit(5))\n'
            'from pcow_driver.common import tool\n'
            f'tool.run({program!r})\n'
        )
        caller = subprocess.Popen([sys.executable, '-c', code], cwd=base.TOP)
        self.addCleanup(caller.kill)
        child = int(self._wait_for(pid_file))
        caller.send_signal(signal.SIGTERM)
        self.assertEqual(5, caller.wait(30))
        self.assertFalse(os.path.exists(f'/proc/{child}'))

    def test_limits(self) -> None:
        program = self.script(
            'shown', '#!/bin/sh\nulimit -v; ulimit -St; ulimit -c; echo $MALLOC_ARENA_MAX "$@"\n'
        )
        found = tool.run(program, '-x', 'a b', limits=tool.Limits(cpu=7))
        self.assertEqual(['1048576', '7', '0', '1 -x a b'], found.splitlines())
        self.assertEqual('unlimited', tool.run(program).splitlines()[0])

    def limited(self, program: str, limits: tool.Limits) -> str:
        return str(self.assertRaises(exception.ToolLimited, tool.run, program, limits=limits))

    def test_program_that_takes_all_of_the_cpu(self) -> None:
        program = self.script('busy', '#!/bin/sh\nwhile :; do :; done\n')
        self.assertIn('busy has met its limit of 1 s of CPU', self.limited(program, tool.Limits(1)))

    def test_program_that_takes_all_of_the_memory(self) -> None:
        """It tells so, or ends as the library of C has it end."""
        for end in ('os.abort()', 'sys.exit(os.strerror(errno.ENOMEM))'):
            program = self.script(
                'greedy',
                f'#!{sys.executable}\nimport errno, os, sys\n'
                f'try:\n    bytearray(200 << 20)\nexcept MemoryError:\n    {end}\n',
            )
            self.assertIn(
                'greedy has met its limit of 150 MiB of memory',
                self.limited(program, tool.Limits(cpu=30, memory=150 << 20)),
            )
            self.assertEqual('', tool.run(program))

    def test_program_that_has_a_fault(self) -> None:
        """The limit is told where it was met, and not of every end by a signal."""
        limits = tool.Limits(cpu=30)
        for name in ('SEGV', 'BUS'):
            program = self.script('faulty', f'#!/bin/sh\nkill -{name} $$\n')
            crashed = self.assertRaises(exception.ToolCrashed, tool.run, program, limits=limits)
            self.assertIn(f'faulty has crashed (SIG{name})', str(crashed))
            self.assertIn('or its limit of 1 GiB of memory is the reason', str(crashed))
        said = "x.c:7: f: Assertion \\`a' failed."
        program = self.script('wrong', f'#!/bin/sh\necho "{said}" >&2; kill -ABRT $$\n')
        error = self.assertRaises(exception.ToolFailed, tool.run, program, limits=limits)
        self.assertIn("Assertion `a' failed", str(error))

    def _wait_for(self, path: Path) -> str:
        deadline = time.monotonic() + 30
        while not path.exists():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        return path.read_text(encoding='ascii')
