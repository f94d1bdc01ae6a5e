# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of damage, of exports and of words that are nearly right: the session that
is shown in the documentation is typed as it stands, and says what it says there.

With PCOW_TRANSCRIPT the session is written to that file.
"""

import os
from pathlib import Path
import re
import shlex
import subprocess
from typing import Any

from tests.functional import test_pcowctl

SESSION = test_pcowctl.TOP / 'doc/source/_static/damage-session.txt'
TIMEOUT = 120
_CHANGING = (
    (re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}'), 'UUID'),
    (re.compile(r'\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(\+00:00)?'), 'DATE'),
)


class SessionTest(test_pcowctl.TestCase):
    maxDiff = None

    def setUp(self) -> None:
        super().setUp()
        self.work = self.directory / 'work'
        self.work.mkdir()
        # as a user has them: pcowctl with its configuration
        self.prelude = (
            f'pcowctl() {{ {shlex.join(self.command())} "$@"; }}\n'
            f'cd {shlex.quote(str(self.work))}\n'
        )

    def type(self, command: str) -> str:
        done = subprocess.run(
            ['bash', '-c', self.prelude + command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment | {'LC_ALL': 'C', 'PYTHONPATH': str(test_pcowctl.TOP)},
            timeout=TIMEOUT,
            check=False,
        )
        text = done.stdout.replace(str(self.pool), '/mnt/fast').replace(str(self.work), '.')
        for pattern, name in _CHANGING:
            text = pattern.sub(name, text)
        # an empty line parts the sections of the session
        text = ''.join(line for line in text.splitlines(keepends=True) if line.strip())
        if done.returncode:
            text += f'(exit code {done.returncode})\n'
        return text

    def test_session(self) -> None:
        """A line that begins with ``$`` is typed, one with ``#`` is a comment."""
        expected = SESSION.read_text()
        found = []
        for line in expected.splitlines():
            if line.startswith('#') or not line:
                found.append(f'{line}\n')
            elif line.startswith('$ '):
                found.append(f'{line}\n{self.type(line[2:].replace("/mnt/fast", str(self.pool)))}')
        self.write(''.join(found))
        self.assertEqual(expected, ''.join(found))

    def write(self, text: Any) -> None:
        if 'PCOW_TRANSCRIPT' in os.environ:
            Path(os.environ['PCOW_TRANSCRIPT']).write_text(text)
