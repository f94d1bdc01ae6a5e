# SPDX-License-Identifier: Apache-2.0
"""The runbooks that want no domain, typed as they stand. That on damaged images has a test of its
own.
"""

from pcow_driver.common import units
from tests.functional import page_case

_MEDIA = {
    r'^ndctl |^cat /sys/block/pmem0/': 'needs NVDIMMs: the badblocks of scenario media-errors@pmem'
}


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
