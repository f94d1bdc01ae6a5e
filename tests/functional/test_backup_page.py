# SPDX-License-Identifier: Apache-2.0
"""The page on backup and restore, typed as it stands."""

from pathlib import Path

from tests.functional import page_case

_NOT_TYPED = {
    '--domain ': 'wants a virtual machine: test_virsh_forks',
    '^pcowctl image (un)?serve ': 'test_served types these',
}
_POOL = '/var/lib/pcow/pools/fast'


class BackupPageTest(page_case.PageTestCase):
    def view(self, path: str) -> bytes:
        """What a guest sees."""
        self.do(f'pcow-img convert -f pcow -O raw {path} view.raw')
        raw: Path = self.host.home / 'view.raw'
        content = raw.read_bytes()
        raw.unlink()
        return content

    def test_backup_and_restore(self) -> None:
        self.do(f'pcowctl pool create fast {_POOL}; mkdir /mnt/copy')
        self.make_template('fast', 'debian12')
        self.do('pcowctl image create fast/web1 --template debian12')
        image = f'{_POOL}/web1.pcow'
        self.do(f'pcow-io -c "write -P 0xaa {page_case.OFFSET} 64k" {image}')
        before = self.view(image)
        self.assertEqual(b'\xaa' * 65536, before[page_case.OFFSET :][:65536])
        self.do('pcowctl snapshot create fast/web1 before-upgrade')
        self.do(f'pcow-io -c "write -P 0xbb {page_case.OFFSET} 64k" {image}')
        with page_case.typed('howto/backup', _NOT_TYPED) as page:
            for line in page.commands():
                page.took(line)
                self.do(line)
        for name in ('web1-restored', 'web1-thin'):
            self.assertEqual(before, self.view(f'{_POOL}/{name}.pcow'), name)
        self.assertEqual('debian12.pcow', self.ctl('image show fast/web1-thin')['base'])
        self.assertTrue(self.ctl('image show /mnt/copy/web1-base.pcow')['template'])
        self.assertEqual('web1-golden.pcow', self.ctl('image show fast/web2')['base'])
        data = self.view(f'{_POOL}/web2.pcow')
        # behind an info block of its own
        self.assertEqual(before[page_case.OFFSET :], data[page_case.OFFSET : len(before)])
