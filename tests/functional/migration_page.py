# SPDX-License-Identifier: Apache-2.0
"""The page on migration, typed as it stands, on two hosts with a libvirtd each: files, pools and
libvirt of their own, on one machine, so ``ssh`` is what runs a command on the other one.
"""

import shlex
import uuid

from pcow_driver.common import units
from tests.functional import long
from tests.functional import own_host
from tests.functional import page_case
from tests.functional import page_libvirt
from tests.functional import pages
from tools.lib.quickstart import libvirtd
from tools.lib.quickstart import state
from tools.lib.quickstart import teardown

# Two libvirtds of one machine would be one host, and would take the same ports.
_SETTINGS = f'host_uuid = "{uuid.uuid4()}"\n'
_QEMU_SETTINGS = """\
migration_host = "there.example"
migration_port_min = 49452
migration_port_max = 49515
"""
_LONG = {
    '/mnt/old/fast|^pcow-img check .* /var/lib/|^pcowctl image (create|delete)|^virsh migrate': (
        'only with --long'
    )
}
_SSH = """\
#!/bin/sh
while [ "$1" != HOST ]; do shift; done
shift
exec {command} "$*"
"""


class MigrationPage(page_libvirt.LibvirtPageTestCase):
    """Of :mod:`tests.functional.test_domain_pages`."""

    def _begin_there(self) -> None:
        self.there = own_host.OwnHost()
        self.addCleanup(self.there.close)
        run = state.Run.create()
        self.addCleanup(teardown.tear_down, run)
        daemon = libvirtd.Libvirtd(run.directory, _QEMU_SETTINGS, _SETTINGS)
        daemon.install_hook()
        daemon.start(launcher=self.there.launcher)
        # where those look for it that come from elsewhere
        (run.directory / 'run/libvirt-sock').symlink_to(daemon.socket)
        self.there.write_settings(f'libvirt_uri = {daemon.uri}\n')
        self.shell_there = self.there.shell(environment={'LIBVIRT_DEFAULT_URI': daemon.uri})
        self.shell_there.type(f'pcowctl pool create fast {page_libvirt.POOL}')
        self._make_ssh()
        self._mount()
        self.addCleanup(self._clear_there)
        with self.own.own('/etc/hosts').open('a') as hosts:
            hosts.write('127.0.0.1 there.example\n')

    def _make_ssh(self) -> None:
        environment = [
            f'{name}={self.shell_there.environment[name]}' for name in ('PATH', 'PYTHONPATH')
        ]
        words = (*self.there.launcher, 'env', *environment, 'sh', '-c')
        program = self.own.directory / 'bin/ssh'
        program.parent.mkdir()
        program.write_text(_SSH.format(command=shlex.join(words)))
        program.chmod(0o755)

    def _mount(self) -> None:
        """The pool of each where the other has it."""
        for shell, place, host in (
            (self.shell, '/mnt/new/fast', self.there),
            (self.shell_there, '/mnt/old/fast', self.own),
        ):
            pool = host.behind(page_libvirt.POOL)
            shell.type(f'mkdir -p {place}; mountpoint -q {place} || mount --bind {pool} {place}')

    def _clear_there(self) -> None:
        for name in self.shell_there.type('virsh list --all --name').split():
            self.shell_there.type(f'virsh destroy {name}', None)
            self.shell_there.type(f'virsh undefine {name}', None)
        self.shell_there.type(f'rm -f {page_libvirt.POOL}/*.pcow')

    def test_migration(self) -> None:
        self._begin_there()
        with page_case.typed('howto/migration', {} if long.LONG else _LONG) as self.page:
            self._send()
            self._copy()
            if long.LONG:
                self._live()

    def _view(self, shell: pages.Shell) -> str:
        """Digest of what a guest of web1 would see."""
        image = f'{page_libvirt.POOL}/web1.pcow'
        shell.type(f'pcow-img convert -f pcow -O raw {image} view.raw')
        return shell.type('sha256sum <view.raw; rm view.raw')

    def _send(self) -> None:
        self.define()
        self.do(f'pcow-io -c "write -P 0x77 {20 * units.MIB} 1M" {page_libvirt.POOL}/web1.pcow')
        self.page.type(self.shell, '^pcowctl image send')
        self.assertEqual(self._view(self.shell), self._view(self.shell_there))
        self._clear_there()

    def _copy(self) -> None:
        self.do('pcowctl snapshot create fast/web1 before')
        pool = self.host.shell(directory=self.pool)
        self.assertIn('debian12.pcow', self.page.type(pool, '^pcow-img info'))
        self.page.type(pool, '^cp .* /mnt/new/fast/$')
        self.page.type(self.shell, 'check --data /mnt/new/fast/debian12')
        self.assertIn('verified', self.page.type(self.shell, 'check --data /mnt/new/fast/web1'))
        self.assertEqual(self._view(self.shell), self._view(self.shell_there))
        self.assertIn('before', self.shell_there.type('pcowctl snapshot list fast/web1'))
        self._clear_there()
        self.do('pcowctl snapshot delete fast/web1 before')

    def _live(self) -> None:
        self.do('virsh start web1')
        before = self.wait_boot()
        there = self.shell_there
        self.page.type(there, '^cp .*/mnt/old/fast')
        self.page.type(there, f'check --data {page_libvirt.POOL}')
        self.page.type(there, '^pcowctl image create')
        self.page.type(self.shell, '^virsh migrate')
        self.assertEqual('shut off', self.state())
        self.assertEqual('running', there.type('virsh domstate web1').strip())
        with self.console_there() as console:
            found = console.expect(rb'check: (?:gen=(\d+) mark=\S+ ok|booted|BROKEN)', 60)
        self.assertIsNotNone(found[1], found[0])
        self.assertGreaterEqual(int(found[1]), before)
        self.page.type(self.shell, '^pcowctl image delete')
        self.assertFalse((self.pool / 'web1.pcow').exists())
        self.assertEqual('running', there.type('virsh domstate web1').strip())

    def console_there(self) -> page_libvirt.domain_case.Console:
        return page_libvirt.domain_case.Console(self.shell_there.type('virsh dumpxml web1'))
