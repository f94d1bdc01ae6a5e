# SPDX-License-Identifier: Apache-2.0
import signal
import subprocess
import sys

from tests.unit.pcow_driver import base


class InterruptTest(base.TestCase):
    def _run(self, code: str) -> int:
        return subprocess.run(
            [sys.executable, '-c', code], cwd=base.TOP, capture_output=True, check=False, timeout=60
        ).returncode

    def test_an_exception_that_python_drops_is_not_lost(self) -> None:
        """Raised in a destructor, where Python prints and ignores it."""
        for number, exit_code in (
            (signal.SIGINT, -signal.SIGINT),
            (signal.SIGTERM, 128 + signal.SIGTERM),
            (signal.SIGHUP, 128 + signal.SIGHUP),
        ):
            marker = self.directory / 'finished'
            code = (
                'import signal\n'
                'from pcow_driver.common import interrupt, tool\n'
                'interrupt.install()\n'
                'class Raises:\n'
                '    def __del__(self):\n'
                f'        signal.raise_signal({int(number)})\n'
                'Raises()\n'
                f'tool.run("/bin/sh", "-c", "sleep 0.5; touch {marker}")\n'
            )
            self.assertEqual(exit_code, self._run(code))
            self.assertFalse(marker.exists())

    def test_nothing_new_begins(self) -> None:
        marker = self.directory / 'started'
        code = (
            'import signal\n'
            'from pcow_driver.common import interrupt, tool\n'
            'interrupt.install()\n'
            'try:\n'
            '    signal.raise_signal(signal.SIGTERM)\n'
            'except SystemExit:\n'
            '    pass\n'
            f'tool.run("/usr/bin/touch", "{marker}")\n'
        )
        self.assertEqual(128 + signal.SIGTERM, self._run(code))
        self.assertFalse(marker.exists())

    def test_what_is_ignored_stays_ignored(self) -> None:
        """As under nohup."""
        code = (
            'import signal\n'
            'from pcow_driver.common import interrupt, tool\n'
            'signal.signal(signal.SIGHUP, signal.SIG_IGN)\n'
            'interrupt.install()\n'
            'signal.raise_signal(signal.SIGHUP)\n'
            'tool.run("/bin/true")\n'
        )
        self.assertEqual(0, self._run(code))

    def test_what_is_undone_is_undone_in_full(self) -> None:
        """Whatever comes when the terminal goes: the shell ends its jobs by SIGHUP, and perhaps
        more than once.
        """
        marker = self.directory / 'undone'
        code = (
            'import signal\n'
            'from pcow_driver.common import interrupt, tool\n'
            'interrupt.install()\n'
            'try:\n'
            '    signal.raise_signal(signal.SIGHUP)\n'
            'finally:\n'
            '    with interrupt.clearing_up():\n'
            '        signal.raise_signal(signal.SIGHUP)\n'
            '        signal.raise_signal(signal.SIGTERM)\n'
            f'        tool.run("/usr/bin/touch", "{marker}")\n'
        )
        self.assertEqual(128 + signal.SIGHUP, self._run(code))
        self.assertTrue(marker.exists())
