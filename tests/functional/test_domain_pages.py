# SPDX-License-Identifier: Apache-2.0
"""The pages on booting, power and monitoring, typed as they stand by the administrator of a host
with a libvirtd. What tells systemd is not: the scenarios of the VM lab have one.
"""

import json
import re
import shlex

from pcow_driver.common import units
from pcow_driver.images import info_block
from pcow_driver.images import protection
from tests.functional import page_case
from tests.functional import page_libvirt
from tests.functional import pages

_BOOT = {
    r'^openstack ': 'test_openstack types these',
    r'^pcow boot: |^uname -r;|^6\.1\.0-|^/dev/pmem0p1 ': 'in a guest of Debian: test_boot_matrix',
}
_POWER = {r'^systemctl ': 'scenario persist'}
_MONITORING = {r'^systemctl ': 'needs systemd'}
_HEADS = 6 * units.MIB  # where data begins, behind the metadata and its mirror


class BootPageTest(page_libvirt.LibvirtPageTestCase):
    def test_boot(self) -> None:
        with page_case.typed('howto/boot', _BOOT) as self.page:
            self._boot()
            self._seed()

    def type_in(self, pattern: str) -> str:
        return str(self.page.type(self.shell, pattern))

    def _boot(self) -> None:
        name = page_libvirt.TEMPLATE
        self.do(f'pcowctl template delete fast/{name}')
        self.home('debian-12-genericcloud-amd64.qcow2').symlink_to(self.home(f'{name}.qcow2'))
        self.type_in('^pcowctl template build')
        self.type_in('^pcowctl image create')
        self.type_in(r'domain-xml fast/web1 \| virsh')
        self.start_console(self.page.take('--console'))
        self.assertIn('nvdimm', self.do('virsh dumpxml web1'))
        self.type_in('--cmdline')
        self.assertIn('systemd.unit=rescue.target', self.home('web1.xml').read_text())
        self.do('virsh destroy web1; virsh undefine web1')

    def _seed(self) -> None:
        self.do('mkdir -p /var/lib/libvirt/images')
        for name, first in (('user-data', '#cloud-config'), ('meta-data', 'instance-id: web1')):
            (block,) = (block for block in self.page.blocks if block[0] == first)
            self.home(name).write_text(''.join(f'{line}\n' for line in block))
            for line in self.page.lines:
                if line in (word.strip() for word in block):
                    self.page.took(line)
        self.type_in('^genisoimage ')
        seed = '/var/lib/libvirt/images/web1.iso'
        self.assertIn('cidata', self.do(f'isoinfo -d -i {seed}'))
        for name in ('user-data', 'meta-data'):
            self.do(f'isoinfo -J -x /{name} -i {seed} | cmp - {name}')
        self.type_in('--seed')
        self.start_console(self.page.find('--console'))
        self.assertIn(seed, self.do('virsh domblklist web1'))


class PowerPageTest(page_libvirt.LibvirtPageTestCase):
    def test_power(self) -> None:
        with page_case.typed('howto/power', _POWER) as self.page:
            self._install()
            self.define('--ram', 'fast')
            self.do('virsh start web1')
            self.generation = self.wait_boot()
            self._protect()
            self._fixate()
            self._unsaved()

    def type_in(self, pattern: str) -> str:
        return str(self.page.type(self.shell, pattern))

    def test_services(self) -> None:
        """The VM lab starts what the page starts."""
        (line,) = (one for one in pages.Page('howto/power').lines if ' enable --now ' in one)
        words = ', '.join(repr(word) for word in shlex.split(line))
        self.assertIn(f'({words})', (pages.TOP / 'tests/vm/persist.py').read_text())

    def _install(self) -> None:
        lines = [self.page.take(pattern) for pattern in ('^cd etc/', '^install ')]
        self.do('mkdir -p /etc/systemd/system')
        self.host.shell(directory=pages.TOP).type('\n'.join(lines))
        for name in ('pcow-fixate.service', 'pcow-protect.service'):
            self.do(f'cmp {pages.TOP}/etc/systemd/system/{name} /etc/systemd/system/{name}')

    def row(self) -> dict[str, object]:
        (found,) = self.ctl('vm protect --list')
        return dict(found)

    def _protect(self) -> None:
        self.type_in('^pcowctl vm protect web1$')
        self.assertEqual('auto', self.row()['interval'])
        self.type_in('--interval 30s --priority 5')
        row = self.row()
        self.assertEqual(('runs', '30', 5), (row['state'], row['interval'], row['priority']))
        self.assertRegex(self.type_in('vm protect --list'), r'web1 .* runs ')
        self.loop = self.begin('pcowctl host watch')
        # some seconds after its start
        self.wait(lambda: max(map(int, re.findall(r'\d+', self.type_in('query-pcow')))) > 0)

    def _fixate(self) -> None:
        self.type_in('^pcowctl host fixate')
        self.assertEqual('shut off', self.state())
        row = self.row()
        self.assertEqual('fixated', row['state'])
        self.assertIn('pcow-fixation-', str(row['last checkpoint']))
        self.type_in('^pcowctl host recover')
        after = self.wait_report()
        self.assertGreaterEqual(after, self.generation)

    def _unsaved(self) -> None:
        self.mark('early')
        self.do('pcowctl vm checkpoint web1 mine')
        self.mark('late')
        self.do(f'kill -9 {self.pid()}')
        self.wait(lambda: self.state() == 'running' and 'runs' == self.row()['state'])
        with self.console() as console:
            console.expect(b'mark=early ok', page_libvirt.SECONDS)
        (name,) = set(re.findall(r'pcow-unsaved-\w+', self.type_in('^pcowctl snapshot list')))
        self.do('virsh destroy web1')
        self.type_in('--remove')
        self.assertEqual([], self.ctl('vm protect --list'))
        self.assertFalse(self.holds('late'))
        (there,) = re.findall(r'pcow-unsaved-\w+', self.page.find('^pcowctl snapshot revert'))
        self.shell.places[there] = name
        self.type_in('^pcowctl snapshot revert')
        self.assertTrue(self.holds('late'))
        self.type_in('^virsh start web1')
        self.wait_boot()


class MonitoringPageTest(page_libvirt.LibvirtPageTestCase):
    def test_monitoring(self) -> None:
        self.do('mkdir -p /var/lib/node_exporter')
        with page_case.typed('howto/monitoring', _MONITORING) as page:
            page.type(self.shell, 'pool set')
            settings = json.loads((self.pool / '.pcow-pool').read_text())
            self.assertIn('20', str(settings))
            self.assertIn('fast', page.type(self.shell, '^pcowctl pool check$'))
            page.type(self.shell, '--prometheus')
            figures = self.do('cat /var/lib/node_exporter/pcow.prom')
            self.assertIn('pcow_pool_state{pool="fast"} 0', figures)
            page.type(self.shell, '^pcowctl doctor', None)
            self.define()
            self.do('virsh start web1')
            self.wait_boot()
            with self.listening(page, '^virsh event ') as said:
                self._damage()
            self.assertIn('urn:pcow:damage', said[0])
            self.assertIn(page_libvirt.TEMPLATE, self.do('virsh metadata web1 urn:pcow:damage'))
            with self.listening(page, 'PCOW_ERROR') as said:
                self._cut_short()
            self.assertIn('PCOW_ERROR', said[0])

    def _damage(self) -> None:
        """A bit of the data of the template."""
        template = self.pool / f'{page_libvirt.TEMPLATE}.pcow'
        with protection.lifted(str(template)), template.open('r+b') as file:
            file.seek(_HEADS)
            data = file.read(units.MIB)
            at = next(n for n, byte in enumerate(data) if byte)
            file.seek(_HEADS + at)
            file.write(bytes([data[at] ^ 1]))
        self.do('pcowctl pool scrub fast', 2)

    def _cut_short(self) -> None:
        """The template; then QEMU loads what its guest has from there, the info block."""
        template = self.pool / f'{page_libvirt.TEMPLATE}.pcow'
        with protection.lifted(str(template)), template.open('r+b') as file:
            file.truncate(_HEADS)
        said = self.do('virsh qemu-monitor-command web1 --hmp info memory-devices')
        (address,) = re.findall(r'addr: 0x(\w+)', said)
        load = f'xp /1xb {int(address, 16) + info_block.BLOCK_OFFSET:#x}'
        self.do(f'virsh qemu-monitor-command web1 --hmp "{load}"', None)
