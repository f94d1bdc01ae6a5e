# SPDX-License-Identifier: Apache-2.0
"""The page on pools, typed as it stands: on tmpfs, in a directory, and on a file system in a file.
What needs NVDIMMs is typed by the session of the VM lab, which this page shows.
"""

from pcow_driver.common import units
from tests.functional import page_case
from tests.functional import pages

_SESSION = pages.DOCUMENTS / '_static/pool-session.txt'
_NOT_TYPED = {
    r'^region0 |^namespace0\.0 ': 'what doctor says of NVDIMMs: pool-session.txt',
    r'--region region0( --dry-run)?$': 'needs NVDIMMs: pool-session.txt',
}
_DEVICE, _GROWN = 320 * units.MIB, 400 * units.MIB
_LEFT = '.web9.pcow.part'


class PoolsPageTest(page_case.PageTestCase):
    def test_page(self) -> None:
        self.shell.places = {'--region region0 --owner': '--memory --size 64M --owner'}
        with page_case.typed('howto/pools', _NOT_TYPED) as self.page:
            self._owner()
            self._make()
            self._import()
            self._limits()
            self._larger()
            self._drain()
            self._garbage()
            self._gone()

    def type_in(self, pattern: str, exit_code: int = 0) -> str:
        return str(self.page.type(self.shell, pattern, exit_code))

    def test_session(self) -> None:
        """What the page has for NVDIMMs is what the VM lab types."""
        typed = _SESSION.read_text().splitlines()
        page = pages.Page('howto/pools')
        lines = [line for line in page.lines if ' --region ' in line and ' --owner ' not in line]
        self.assertEqual(2, len(lines))
        for line in lines:
            self.assertIn(f'# {line}', typed)

    def _owner(self) -> None:
        for line in ('groupadd pcow', 'useradd -M nova'):
            self.do(line)
        self.type_in('--owner nova:pcow')
        owner = self.do('stat -c "%U %G %a" /var/lib/pcow/pools/fast')
        self.assertEqual('nova pcow 2771\n', owner)
        # it holds nothing
        self.type_in('^pcowctl pool remove fast$')
        self.do('test ! -e /var/lib/pcow/pools/fast/.pcow-pool')
        self.do('umount /var/lib/pcow/pools/fast; rmdir /var/lib/pcow/pools/fast')

    def _make(self) -> None:
        self._mount_fast()
        self.do('pcowctl pool create fast /var/lib/pcow/pools/fast')
        self.assertIn('fast', self.type_in('pool show fast'))
        self.type_in('create quick --memory --size 8G')
        self.type_in('create slow /srv/pcow')
        found = {row['name']: row for row in self.ctl('pool list')}
        self.assertEqual({'fast', 'quick', 'slow'}, set(found))
        self.assertEqual(
            ('volatile', 8 * units.GIB), (found['quick']['persistence'], found['quick']['total'])
        )
        self.assertEqual('/srv/pcow', found['slow']['path'])
        # on a machine without NVDIMMs, and without libvirtd
        self.assertRegex(self.type_in('^pcowctl doctor$', None), 'pool quick +. advice')

    def _mount_fast(self) -> None:
        """On a device that has become larger since."""
        device = self.host.directory / 'device'
        with device.open('wb') as file:
            file.truncate(_DEVICE)
        self.do(f'mkfs.xfs -q {device}')
        with device.open('r+b') as file:
            file.truncate(_GROWN)
        self.do(f'mkdir -p /var/lib/pcow/pools/fast; mount -o loop {device} $_')

    def _import(self) -> None:
        """One that another host has made, on a device that is mounted here now."""
        self.do('pcowctl pool create other /mnt/there')
        self.do('pcowctl pool set --overcommit 3 other')
        self.make_image('/mnt/there/web1.pcow')
        self.do('pcowctl pool remove --forget other; mv /mnt/there /mnt/pmem1')
        self.type_in('pool import /mnt/pmem1')
        self.assertEqual({'web1'}, self.names('other'))
        # with its settings
        self.assertIn('over-commit', self.refused('image create other/web2 --size 1000T'))

    def _limits(self) -> None:
        self.type_in('pool set --overcommit 4 --reserve 10 fast')
        total = self.size('fast')
        said = self.refused(f'image create fast/large --size {4 * total}')
        self.assertIn('over-commit', said)
        self.do(f'pcowctl image create fast/large --size {3 * total // units.MIB}M')
        self.do('rm /var/lib/pcow/pools/fast/large.pcow')

    def _larger(self) -> None:
        before = self.size('fast')
        self.type_in('pool extend fast')
        self.assertGreater(self.size('fast'), before + (_GROWN - _DEVICE) // 2)
        self.type_in('pool extend --size 16G quick')
        self.assertEqual(16 * units.GIB, self.size('quick'))

    def _drain(self) -> None:
        self.make_image('/var/lib/pcow/pools/fast/web1.pcow')
        self.assertIn('web1', self.type_in('pool drain fast'))
        self.assertIn('drain', self.refused('image create fast/web2 --size 16M'))
        self.type_in('pool drain --end fast')
        self.do('pcowctl image create fast/web2 --size 16M')
        self.do('rm /var/lib/pcow/pools/fast/web?.pcow')

    def _garbage(self) -> None:
        # by its shell, as this process does not see what is mounted there
        self.do(f'touch -d "3 hours ago" /var/lib/pcow/pools/fast/{_LEFT}')
        self.assertIn('unfinished', self.type_in('pool garbage fast'))
        said = self.type_in('garbage --delete unfinished --dry-run fast')
        self.assertRegex(said, rf'{_LEFT} .*would be deleted')
        self.do(f'test -e /var/lib/pcow/pools/fast/{_LEFT}')
        self.do('pcowctl pool garbage --delete unfinished fast')
        self.do(f'test ! -e /var/lib/pcow/pools/fast/{_LEFT}')

    def _gone(self) -> None:
        """One with a file system of its own."""
        self.do('pcowctl pool remove --forget fast; umount /var/lib/pcow/pools/fast')
        self.do('pcowctl pool create fast --memory --size 64M')
        self.make_image('/var/lib/pcow/pools/fast/web1.pcow')
        self.assertIn('web1', self.do(self.page.find('remove --destroy fast'), 1))
        self.do('rm /var/lib/pcow/pools/fast/web1.pcow')
        self.type_in('remove --destroy fast')
        self.do('mountpoint -q /var/lib/pcow/pools/fast', 32)
        self.assertIn('fast', self.refused('pool show fast'))
