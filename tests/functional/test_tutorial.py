# SPDX-License-Identifier: Apache-2.0
"""The tutorial, typed as it stands, but for what starts a VM: test_boot_shim and test_main_job
boot.
"""

from pathlib import Path

from tests.functional import page_case

PLACE = Path('/dev/shm/trial')
_NOT_TYPED = {
    '^tools/quickstart ': 'test_main_job types this',
    '^PATH=': 'this test has the same programs',
    '^virsh ': 'wants libvirt: howto_pages types these',
}


class TutorialTest(page_case.PageTestCase):
    def test_step_by_step(self) -> None:
        self.assertFalse(PLACE.exists(), f'{PLACE} is somebody\'s')
        self.addCleanup(self.do, f'rm -rf {PLACE}')
        self.make_disk('debian12.qcow2')
        with page_case.typed('tutorial/first-vm', _NOT_TYPED) as page:
            said = {}
            for line in page.commands():
                page.took(line)
                said[line] = self.do(line)
        self.assertGreater(len(said), 12)
        self.assertIn('fresh', said['pcowctl snapshot list trial/web1'])
        self.assertIn('web2', said['pcowctl image list trial'])
        self.assertIn('pcow-boot-shim/kernel', (self.host.home / 'web1.xml').read_text())
        self.assertEqual([], list(PLACE.glob('*')))
