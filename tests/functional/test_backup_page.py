# SPDX-License-Identifier: Apache-2.0
"""The commands of the page on backup and restore, typed as they stand there.

Not those for a domain, which needs a virtual machine, nor image serve: test_served has that.
"""

import re
import subprocess

from tests.functional import test_pcowctl
from tests.functional.test_pcowctl import MIB
from tests.functional.test_pcowctl import OFFSET

PAGE = test_pcowctl.TOP / 'doc/source/howto/backup.rst'
_COMMAND = re.compile(r'^ {4}(pcow(?:-img convert|ctl image (?:export|list)) .*)$', re.MULTILINE)


class BackupPageTest(test_pcowctl.TestCase):
    def type_in(self, line: str) -> None:
        line = line.replace('/var/lib/pcow/pools/fast', str(self.pool))
        line = line.replace('/mnt/copy', str(self.directory))
        words = line.split()
        command = (
            self.command(*words[1:])
            if words[0] == 'pcowctl'
            else [str(test_pcowctl.BIN / words[0]), *words[1:]]
        )
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment | {'PYTHONPATH': str(test_pcowctl.TOP)},
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(0, done.returncode, f'{line}: {done.stderr}')

    def test_backup_and_restore(self) -> None:
        self.ctl('pool', 'create', 'fast', self.pool)
        source = self.make_qcow2('debian12.qcow2', 8 * MIB, at_0=0x11, at_1048576=0x22)
        self.ctl('template', 'build', source, 'fast/debian12', '--source-format', 'qcow2')
        self.ctl('image', 'create', 'fast/web1', '--template', 'debian12')
        image = self.pool / 'web1.pcow'
        self.io(image, f'write -P 0xaa {OFFSET} 64k')
        before = self.guest_view(image)
        self.ctl('snapshot', 'create', 'fast/web1', 'before-upgrade')
        self.io(image, f'write -P 0xbb {OFFSET} 64k')
        lines = [line for line in _COMMAND.findall(PAGE.read_text()) if '--domain' not in line]
        self.assertGreater(len(lines), 4)
        for line in lines:
            self.type_in(line)
        for name in ('web1-restored', 'web1-thin'):
            self.assertEqual(before, self.guest_view(self.pool / f'{name}.pcow'), name)
        shown = self.show('image', 'show', 'fast/web1-thin')
        self.assertEqual('debian12.pcow', shown['base'])
        self.assertTrue(self.show('image', 'show', self.directory / 'web1-base.pcow')['template'])
