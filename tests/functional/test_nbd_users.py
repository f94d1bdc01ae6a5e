# SPDX-License-Identifier: Apache-2.0
"""An export of a service that is not root: whether root can read the file, as os-brick does."""

import os
from pathlib import Path
import shlex
import subprocess
import sys

from pcow_driver.pools import device
from tests.functional import test_device_nbd
from tests.functional.test_pcowctl import BIN

TOP = Path(__file__).resolve().parents[2]
USER = 65534

# In a namespace of its own, a machine as distributions make it: everybody may use FUSE.
_MACHINE = '''
set -e
mount -t tmpfs none {work}
mknod -m 0666 {work}/fuse c 10 229
mount --bind {work}/fuse /dev/fuse
printf '%s' {configuration} > {work}/fuse.conf
mount --bind {work}/fuse.conf /etc/fuse.conf
install -d -o {user} {work}/exports
setpriv --reuid {user} --regid {user} --clear-groups --inh-caps=+dac_read_search \
    --ambient-caps=+dac_read_search {service}
'''
_SERVICE = '''
import sys
from pcow_driver.common import conf
from pcow_driver.export import nbd
directory, path, plugin = sys.argv[1:]
conf.CONF([], default_config_files=[])
conf.CONF.set_override('nbdkit_plugin', plugin, 'pcow')
nbd.start(directory, path)
try:
    print(nbd.mount(directory), flush=True)
    sys.stdin.read()
finally:
    nbd.stop(directory)
'''


class UsersTest(test_device_nbd.TestCase):
    def reads(self, configuration: str) -> bool:
        """Whether root can read the file of another user's export."""
        path = device.create(self.pool, 'volume', 8 << 20)
        os.chown(path, USER, USER)
        self.directory.chmod(0o755)
        work = self.directory / 'work'
        work.mkdir()
        export = str(work / 'exports' / 'one')
        service = shlex.join(
            [sys.executable, '-c', _SERVICE, export, path, str(BIN / 'nbdkit-pcow-plugin.so')]
        )
        script = _MACHINE.format(
            work=work, user=USER, service=service, configuration=shlex.quote(configuration)
        )
        with subprocess.Popen(
            ['unshare', '-m', 'sh', '-c', script],
            cwd=TOP,
            env=os.environ | {'PYTHONPATH': str(TOP)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            shown = process.stdout.readline().strip()
            self.assertTrue(shown, 'the service has not shown a file')
            done = subprocess.run(
                [
                    'nsenter',
                    '-t',
                    str(process.pid),
                    '-m',
                    'dd',
                    f'if={shown}',
                    'of=/dev/null',
                    'count=1',
                ],
                stderr=subprocess.DEVNULL,
                check=False,
            )
            process.stdin.close()
            self.assertEqual(0, process.wait())
        return done.returncode == 0

    def test_where_the_machine_allows_it(self) -> None:
        self.assertTrue(self.reads('#user_allow_other\n user_allow_other # os-brick\n'))

    def test_where_it_does_not(self) -> None:
        self.assertFalse(self.reads('#user_allow_other\n'))
