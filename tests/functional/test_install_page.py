# SPDX-License-Identifier: Apache-2.0
"""The pages on installing and upgrading a host, typed as they stand, on a host of its own: what
they copy is where they say, with its modes, and the programs that were copied work.

What tells systemd, udev, the kernel or AppArmor is not: that would be the machine's.
"""

from pathlib import Path
import shlex

from pcow_driver.common import names
from pcow_driver.common import units
from tests.functional import format1
from tests.functional import page_case
from tests.functional import pages

_HOST = 'tells a part of the host that is the machine\'s: scenarios confinement and persist'
_INSTALL = {
    r'^tools/build$': 'tools/run-tests builds',
    r'^python3 -m venv|^/opt/pcow/bin/pip': 'test_wheel installs what is built',
    r'^udevadm |^sysctl --system|^systemctl ': _HOST,
    r'^directory +group +mode$': 'what is compared',
    r'^/var/lib/pcow': 'what is compared',
}
_UPGRADE = {r'^systemctl |^apparmor_parser ': _HOST}
_APPARMOR = 'etc/apparmor.d/local'
_QEMU_IMG = '/usr/local/lib/pcow/libvirt/qemu-img'
_UNIT = 'libvirtd.service.d/pcow.conf'
_IN_UNITS = '/etc/systemd/system/'


class InstallPageTest(page_case.PageTestCase):
    def setUp(self) -> None:
        plugins = self.plugins = self._plugins()
        self.copies = (plugins,)
        super().setUp()
        self.top = self.host.shell(directory=pages.TOP)

    @staticmethod
    def _plugins() -> str:
        shell = pages.Shell(pages.TOP)
        return shell.type("nbdkit --dump-config | sed -n 's/^plugindir=//p'").strip()

    def test_install(self) -> None:
        with page_case.typed('howto/install', _INSTALL) as self.page:
            self._programs()
            self._system()
            self._group()
            self._settings()
            said = self.page.type(self.top, '^pcowctl doctor', None)
            self.assertRegex(said, r'/usr/local/bin/qemu- +\| ok ')

    def _programs(self) -> None:
        self.page.type(self.top, '^install build/bin/pcow-img ')
        for name in ('pcow-img', 'pcow-io', 'qemu-system-x86_64'):
            said = self.do(f'/usr/local/bin/{name} --version')
            self.assertRegex(said, 'version')
        self.page.type(self.top, 'pcow-boot-shim')
        self.do('test -s /usr/local/share/pcow-boot-shim/kernel')
        self.do('test -s /usr/local/share/pcow-boot-shim/initrd')
        self.do(f'rm -f {self.plugins}/nbdkit-pcow-plugin.so')
        self.page.type(self.top, 'nbdkit-pcow-plugin')
        self.assertIn('pcow', self.do('nbdkit pcow --dump-plugin'))
        # as if pip had put its scripts there
        self.do('mkdir -p /opt/pcow; ln -s "$(dirname "$(which pcowctl)")" /opt/pcow/bin')
        self.page.type(self.top, '^ln -s ')
        self.assertIn('pool', self.do('/usr/local/bin/pcowctl --help'))
        for name in ('pcow-privsep-helper', 'pcow-nbd-unit'):
            self.do(f'test -x /usr/local/bin/{name}')

    def _system(self) -> None:
        self.do(f'mkdir -p /etc/udev/rules.d /etc/sysctl.d {_IN_UNITS}')  # as on any host
        for pattern, at, files in (
            ('60-pcow.rules', '/etc/udev/rules.d/', ['60-pcow.rules']),
            ('^install.* etc/sysctl.d', '/etc/sysctl.d/', ['pcow.conf']),
            ('^install.*pcow-scrub', _IN_UNITS, ['pcow-scrub@.service', 'pcow-scrub@.timer']),
        ):
            self.page.type(self.top, pattern)
            for name in files:
                self.do(f'cmp {pages.TOP}{at}{name} {at}{name}')
                self.assertEqual('root 644\n', self.do(f'stat -c "%U %a" {at}{name}'))
        self.do(f'systemd-analyze verify --man=no {_IN_UNITS}pcow-scrub@fast.timer')

    def _settings(self) -> None:
        lines = [self.page.take(pattern) for pattern in (r'^\[pcow\]$', '^emulator = ')]
        self.host.own('/etc/pcow/pcow.conf').write_text('\n'.join(lines))

    def _group(self) -> None:
        self.do('groupdel pcow', None)  # of the machine
        self.page.type(self.top, '^groupadd ')
        self.page.type(self.top, 'host setup')
        table = [line.split() for line in self.page.lines if line.startswith('/var/lib/pcow')]
        self.assertGreater(len(table), 10)
        made = {path: self._is(path) for path, _group, _mode in table}
        self.assertEqual({path: (group, mode) for path, group, mode in table}, made)
        there = self.do('find /var/lib/pcow -type d').split()
        self.assertEqual({*made}, {*there})

    def _is(self, path: str) -> tuple[str, str]:
        group, mode = self.do(f'stat -c "%G %a" {path}').split()
        return group, mode.rjust(4, '0')

    def test_files_of_libvirt(self) -> None:
        """What other pages have an administrator copy."""
        libvirt, snapshots = (pages.Page(f'howto/{name}') for name in ('libvirt', 'snapshots'))
        self.do('mkdir -p /etc/apparmor.d/local/abstractions')
        for page, pattern, source, target in (
            (libvirt, '^install ', 'etc/libvirt/hooks/qemu.d/pcow', ''),
            *(
                (libvirt, rf'^cat {_APPARMOR}/{name}-pcow', f'{_APPARMOR}/{name}-pcow', name)
                for name in ('abstractions/libvirt-qemu', 'usr.sbin.libvirtd')
            ),
            (snapshots, '^install .*qemu-img', 'etc/libvirt/bin/qemu-img', _QEMU_IMG),
            (snapshots, r'^install .*pcow\.conf', f'etc/libvirt/{_UNIT}', f'{_IN_UNITS}{_UNIT}'),
        ):
            if target and not target.startswith('/'):
                target = f'/{_APPARMOR}/{target}'
                self.do(f'rm -f {target}')
            page.type(self.top, pattern)
            self.do(f'cmp {pages.TOP}/{source} {target or "/" + source}')
        for path in ('/etc/libvirt/hooks/qemu.d/pcow', _QEMU_IMG):
            self.do(f'test -x {path}')
        # where the unit has libvirtd look for it
        self.assertIn(str(Path(_QEMU_IMG).parent), (pages.TOP / 'etc/libvirt' / _UNIT).read_text())

    def test_services_of_protection(self) -> None:
        """The VM lab starts what the page on power starts."""
        (line,) = (one for one in pages.Page('howto/power').lines if ' enable --now ' in one)
        words = ', '.join(repr(word) for word in shlex.split(line))
        self.assertIn(f'({words})', (pages.TOP / 'tests/vm/persist.py').read_text())

    def test_upgrade(self) -> None:
        with page_case.typed('howto/upgrade', _UPGRADE) as page:
            self.do('groupadd -f pcow; mkdir -m 2775 /var/lib/pcow/locks')
            page.type(self.shell, 'host setup')
            self.assertEqual(('pcow', '2770'), self._is('/var/lib/pcow/locks'))
            page.type(self.shell, '^pcowctl doctor', None)
            self._modes(page)
            self._format_1(page)

    def _modes(self, page: pages.Page) -> None:
        """Of what others could read."""
        self.do('groupadd -f kvm')
        self.do('umask 0; mkdir -p /mnt/pmem0/pcow')
        self.make_image(f'/mnt/pmem0/pcow/web1{names.IMAGE_SUFFIX}')
        self.do('chmod 644 /mnt/pmem0/pcow/*')
        for pattern in ('^chmod o-rwx', '^chgrp kvm', '^chmod 710'):
            page.type(self.shell, pattern)
        self.assertEqual(('kvm', '0710'), self._is('/mnt/pmem0/pcow'))
        self.assertEqual('0640', self._is('/mnt/pmem0/pcow/web1.pcow')[1])

    def _format_1(self, page: pages.Page) -> None:
        old: Path = self.host.home / 'old.img'
        format1.write(old, 32, {0: b'o' * 65536})
        page.type(self.shell, '^pcow-img convert')
        self.do('pcow-img convert -f pcow -O raw new.pcow new.raw')
        new = (self.host.home / 'new.raw').read_bytes()
        self.assertEqual(b'o' * 65536, new[:65536])
        self.assertGreaterEqual(len(new), units.MIB)
