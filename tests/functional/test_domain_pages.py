# SPDX-License-Identifier: Apache-2.0
"""The pages on booting, power and monitoring, and the runbooks on a full pool and a killed QEMU,
typed as they stand by the administrator of a host with a libvirtd, in the state that they are for.
What tells systemd is not: scenarios of the VM lab have one.
"""

import json
import os
import re
import signal
import time

from pcow_driver.common import units
from pcow_driver.images import image
from pcow_driver.images import info_block
from pcow_driver.images import protection
from pcow_driver.virt import libvirt_xml
from tests.functional import howto_pages
from tests.functional import long
from tests.functional import migration_page
from tests.functional import page_case
from tests.functional import page_libvirt
from tests.functional import pages

_BOOT = {
    r'^openstack ': 'test_openstack types these',
    r'^pcow boot: |^uname -r;|^6\.1\.0-|^/dev/pmem0p1 ': 'in a guest of Debian: test_boot_matrix',
}
_POWER = {r'^systemctl ': 'scenario persist'}
_MONITORING = {r'^systemctl ': 'needs systemd'}
_EVENTS = {'^virsh (qemu-monitor-)?event ': 'only with --long'}
_KILLED = {r'^systemctl ': 'test_openstack starts services again that were killed'}
_POOL = page_libvirt.POOL
_LEFT = '512K'  # for a snapshot, and not for what its guest stores then
_HEADS = 6 * units.MIB  # where data begins, behind the metadata and its mirror


class DomainPagesTest(howto_pages.HowtoPages, migration_page.MigrationPage):
    """All on one host, which takes a while to be there."""

    page: pages.Page

    def type_in(self, pattern: str, exit_code: int | None = 0) -> str:
        return self.page.type(self.shell, pattern, exit_code)

    # ---- boot

    def test_boot(self) -> None:
        with page_case.typed('howto/boot', _BOOT) as self.page:
            self._boot()
            self._seed()

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

    # ---- power

    def test_power(self) -> None:
        with page_case.typed('howto/power', _POWER) as self.page:
            self._install()
            self.define('--ram', 'fast')
            self.do('virsh start web1')
            self.generation = self.wait_boot()
            self._protect()
            self._fixate()
            self._unsaved()

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
        self.assertRegex(
            self.type_in('vm protect --list'), r'\| web1 +\| runs +\| 30 +\| \w+ +\| +5 '
        )
        self.begin('pcowctl host watch')
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
        self.wait(lambda: self.state() == 'running')
        with self.console() as console:
            console.expect(b'mark=early ok', page_libvirt.SECONDS)
        (name,) = set(re.findall(r'pcow-unsaved-\w+', self.type_in('^pcowctl snapshot list')))
        self.do('virsh destroy web1')
        self.type_in('--remove')
        self.assertNotIn(libvirt_xml.PROTECTION_NAMESPACE, self.do('virsh dumpxml web1'))
        self.assertFalse(self.holds('late'))
        (there,) = re.findall(r'pcow-unsaved-\w+', self.page.find('^pcowctl snapshot revert'))
        self.shell.places[there] = name
        self.type_in('^pcowctl snapshot revert')
        self.assertTrue(self.holds('late'))
        self.type_in('^virsh start web1')
        self.wait_boot()

    # ---- monitoring

    def test_monitoring(self) -> None:
        self.do('mkdir -p /var/lib/node_exporter')
        not_typed = _MONITORING if long.LONG else _MONITORING | _EVENTS
        with page_case.typed('howto/monitoring', not_typed) as page:
            page.type(self.shell, 'pool set')
            settings = json.loads((self.pool / '.pcow-pool').read_text())
            self.assertIn('20', str(settings))
            self.assertIn('fast', page.type(self.shell, '^pcowctl pool check$'))
            page.type(self.shell, '--prometheus')
            figures = self.do('cat /var/lib/node_exporter/pcow.prom')
            self.assertIn('pcow_pool_state{pool="fast"} 0', figures)
            page.type(self.shell, '^pcowctl doctor', None)
            if long.LONG:
                self._events(page)

    def _events(self, page: pages.Page) -> None:
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

    # ---- runbooks

    @long.only_long
    def test_killed(self) -> None:
        with page_case.typed('howto/runbook-killed', _KILLED) as page:
            self.define()
            self.do('virsh start web1')
            self.wait_boot()
            self.mark('kept')
            self.kill()
            self.assertTrue(self.holds('kept'))
            page.type(self.shell, '^virsh start web1')
            self.wait_boot()
            self._leave()
            said = page.type(self.shell, 'pool garbage fast')
            self.assertRegex(said, 'unfinished')
            self.assertRegex(said, r'snapshot +\| web1\.pcow')
            page.type(self.shell, '--delete unfinished')
            page.type(self.shell, '--delete snapshot')
            self.assertFalse([*self.pool.glob('.web9*')])
            self.assertEqual([], self.ctl('snapshot list fast/web1'))

    def _leave(self) -> None:
        """What commands leave that are killed."""
        (self.pool / '.web9.pcow.part').touch()
        self.make_old(self.pool / '.web9.pcow.part')
        while not self._left_snapshots():  # once more if it was too fast
            export = self.begin('pcowctl image export --domain web1 --format raw out.raw')
            while export.poll() is None and not self._left_snapshots():
                pass
            os.killpg(export.pid, signal.SIGKILL)
            self.end(export)

    def _left_snapshots(self) -> list[object]:
        return [*image.info(str(self.pool / 'web1.pcow'), force_share=True).snapshots]

    @long.only_long
    def test_full_pool(self) -> None:
        self.make_pool('96M')
        with page_case.typed('howto/runbook-pool-full') as page:
            self.do('pcowctl pool create quick --memory --size 64M')
            self._old()
            carrier = '/var/lib/libvirt/web1-state.qcow2'
            self.do(f'qemu-img create -q -f qcow2 {carrier} 1M')
            self.define('--carrier-disk', carrier)
            self.do('virsh start web1')
            self.wait_boot()
            self.wait(self._is_full)
            self.do(f'truncate -s -{_LEFT} {_POOL}/fill')
            self.do('pcowctl snapshot create --domain web1 old-snapshot')
            self.wait(lambda: self._is_full() and self._waits())
            self.do('pcowctl pool check fast', 2)
            self._mend(page)
            self.wait_report()
            self.do('pcowctl pool check fast')

    def _old(self) -> None:
        """An image that nobody needs, with leaks as a QEMU leaves that is killed."""
        self.do(f'pcowctl image create fast/old --template {page_libvirt.TEMPLATE}')
        self.do('pcowctl domain-xml fast/old --type qemu | virsh define /dev/stdin')
        self.do('virsh start old')
        self.wait_boot('old')
        self.kill('old')
        self.do('virsh undefine old')

    def _is_full(self) -> bool:
        """For good: QEMU gives back what it had prepared when a pool gets full."""
        self.do(f'cat /dev/zero >>{_POOL}/fill', 1)
        time.sleep(0.5)
        return self.do(f'df --output=avail {_POOL} | tail -n 1').strip() == '0'

    def _waits(self) -> bool:
        said = json.loads(self.do('virsh qemu-monitor-command web1 \'{"execute": "query-pcow"}\''))
        return any(one['stats']['pool-full-waits'] for one in said['return'])

    def _mend(self, page: pages.Page) -> None:
        self.assertIn('old', page.type(self.shell, '^pcowctl pool capacity'))
        self.assertRegex(page.type(self.shell, '^pcowctl pool garbage fast'), r'leak +\| old\.pcow')
        page.type(self.shell, '--delete leak')
        self.assertNotIn('leak', self.do('pcowctl pool garbage fast'))
        page.type(self.shell, '^pcowctl snapshot delete')
        self.assertEqual([], self.ctl('snapshot list --domain web1'))
        page.type(self.shell, '^pcowctl image delete')
        self.assertEqual({'web1'}, self.names('fast'))
        page.type(self.shell, '^pcowctl pool extend')
        self.assertEqual(16 * units.GIB, self.size('quick'))
        self.do(f'rm {_POOL}/fill')
