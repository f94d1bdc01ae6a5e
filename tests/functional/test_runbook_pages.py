# SPDX-License-Identifier: Apache-2.0
"""The runbooks, typed as they stand, in the state that they are for: a pool that is full while its
guest stores, a QEMU that was killed, a host that was started again. That on damaged images has a
test of its own.
"""

import json
import os
import signal
import time

from pcow_driver.common import units
from pcow_driver.images import image
from tests.functional import page_case
from tests.functional import page_libvirt
from tests.functional import pages

_POOL = page_libvirt.POOL
_LEFT = '512K'  # for a snapshot, and not for what its guest stores then
_MEDIA = {
    r'^ndctl |^cat /sys/block/pmem0/': 'needs NVDIMMs: the badblocks of scenario media-errors@pmem'
}
_KILLED = {r'^systemctl ': 'test_openstack starts services again that were killed'}


class HostPageTest(page_case.PageTestCase):
    def test_host_lost(self) -> None:
        self.do('pcowctl pool create quick --memory --size 64M')
        self.do('umount /var/lib/pcow/pools/quick')  # as after a boot
        self.do('pcowctl pool create pmem /mnt/there')
        self.make_image('/mnt/there/web1.pcow')
        with page_case.typed('howto/runbook-host-lost') as page:
            self.assertRegex(page.type(self.shell, '^pcowctl doctor', None), 'pool quick')
            self.assertIn('quick', page.type(self.shell, '^pcowctl pool check', 3))
            page.type(self.shell, '--forget quick')
            page.type(self.shell, 'create quick')
            self.assertEqual(8 * units.GIB, self.size('quick'))
            self.do('pcowctl pool remove --forget pmem; mv /mnt/there /mnt/pmem0')
            page.type(self.shell, 'import /mnt/pmem0')
            self.assertEqual({'web1'}, self.names('pmem'))
            self.assertIn('pmem', self.do('pcowctl pool check'))

    def test_media_error(self) -> None:
        self.make_image('web1.pcow')
        with page_case.typed('howto/runbook-media-error', _MEDIA) as page:
            said = page.type(self.shell, '^pcow-img check')
            self.assertIn('No errors were found', said)


class KilledPageTest(page_libvirt.LibvirtPageTestCase):
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
        while not self._snapshots():  # once more if it was too fast
            export = self.begin('pcowctl image export --domain web1 --format raw out.raw')
            while export.poll() is None and not self._snapshots():
                pass
            os.killpg(export.pid, signal.SIGKILL)
            self.end(export)

    def _snapshots(self) -> list[object]:
        return [*image.info(str(self.pool / 'web1.pcow'), force_share=True).snapshots]


class FullPoolPageTest(page_libvirt.LibvirtPageTestCase):
    pool_size = '96M'

    def test_full_pool(self) -> None:
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
