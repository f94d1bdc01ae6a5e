# SPDX-License-Identifier: Apache-2.0
"""The units of systemd, as systemd reads them."""

import os
from pathlib import Path
import re
import shutil
import subprocess

from tests.unit.pcow_driver import base

_UNITS = base.TOP / 'etc/systemd/system'
_ANALYZE = 'systemd-analyze'
_MORE = '[Unit]\nDescription=x\n{}\n[Service]\nExecStart=/bin/true\n'


class UnitsTest(base.TestCase):
    def verify(self, text: str | None = None) -> str:
        """What systemd has to say of them all; of programs that are not installed it says nothing.

        :param text: of one more
        """
        program = shutil.which(_ANALYZE)
        if program is None:
            self.skipTest(f'{_ANALYZE} is not installed')
        names = []
        for path in sorted(_UNITS.iterdir()):
            if path.suffix not in ('.service', '.socket', '.timer'):
                continue
            name = path.name.replace('@.', '@x.')
            unit = re.sub('=/usr/local/bin/[a-z-]+', '=/bin/true', path.read_text())
            for made in {name, path.name}:  # a template, and a unit that is made of it
                (self.directory / made).write_text(unit)
            names.append(name)
        if text is not None:
            (self.directory / 'more.service').write_text(text)
            names.append('more.service')
        self.assertGreater(len(names), 5)
        done = subprocess.run(
            [program, 'verify', '--man=no', *(str(self.directory / name) for name in names)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | {'SYSTEMD_UNIT_PATH': f'{self.directory}:', 'LC_ALL': 'C'},
            check=False,
        )
        mine = [line for line in done.stderr.splitlines() if self._is_ours(line)]
        return '\n'.join(mine)

    def _is_ours(self, line: str) -> bool:
        """Not of units of the distribution."""
        return any(Path(name).stem in line for name in os.listdir(self.directory))

    def test_they_are_right(self) -> None:
        """Also all of one boot, with that of libvirt that they stand between."""
        together = 'pcow-fixate.service pcow-protect.service libvirt-guests.service'
        self.assertEqual('', self.verify(_MORE.format(f'Wants={together}')))

    def settings(self, name: str) -> list[tuple[str, str]]:
        lines = (_UNITS / name).read_text().splitlines()
        return [
            (key, value)
            for key, equal, value in (line.partition('=') for line in lines)
            if equal and not key.startswith('#')
        ]

    def test_what_is_done_at_a_shutdown(self) -> None:
        """systemd does that only where the start went well."""
        found = self.settings('pcow-fixate.service')
        self.assertIn('ExecStop', dict(found))
        self.assertEqual(
            ['/bin/true'], [value for key, value in found if key.startswith('ExecStart')]
        )

    def test_what_is_restarted_is_so_for_ever(self) -> None:
        count = 0
        for path in _UNITS.glob('*.service'):
            found = dict(self.settings(path.name))
            if found.get('Restart') == 'always':
                count += 1
                self.assertEqual('0', found.get('StartLimitIntervalSec'), path.name)
        self.assertTrue(count)

    def test_a_mistake_is_found(self) -> None:
        circle = 'Wants=pcow-fixate.service\nAfter=pcow-fixate.service\nBefore=pcow-fixate.service'
        said = self.verify(_MORE.format(f'{circle}\nRestrat=always'))
        self.assertIn("'Restrat'", said)
        self.assertIn('ordering cycle', said)
