# SPDX-License-Identifier: Apache-2.0
"""The commands of the how-to pages on templates, domains, snapshots, forks and checkpoints, typed
as they stand there, one page after the other, by an administrator of a host with a libvirtd.

What is not typed is named with its reason in ``_NOT_TYPED``. The other pages have tests of their
own.
"""

from pcow_driver.common import names
from pcow_driver.images import image
from tests.functional import page_libvirt
from tests.functional import pages

_PLACES = {
    # two are as good as sixteen, and this machine may have two processors
    '--count 16': '--count 2',
    # the guest of the tests has all in its initrd
    '--kernel vmlinuz': '--kernel vmlinuz --initrd initrd',
}
_HOST = 'copies files: test_install_page; tells systemd or AppArmor: scenario confinement'
_NOT_TYPED = {
    'templates': {'^pcow-img rebase': 'is for a base that was changed: test_templates_protected'},
    'libvirt': {
        '^install |^systemctl |^cat etc/|^apparmor_parser ': _HOST,
        '--grant|attach-device': 'wants a second image in XML by hand: test_virsh_snapshots',
    },
    'snapshots': {
        '^install |^systemctl ': _HOST,
        '--quiesce': 'wants the agent in the guest: test_virsh_snapshots',
        '^virsh snapshot-list|^pcow-img snapshot -l -U': 'test_virsh_snapshots types these',
    },
    'forks': {},
    'checkpoints': {'^<': 'XML'},
}


class HowtoPages(page_libvirt.LibvirtPageTestCase):
    """Of :mod:`tests.functional.test_domain_pages`."""

    howto: pages.Page | None = None

    def _begin_howto(self) -> None:
        self.shell.places |= _PLACES
        self.home('vmlinuz').symlink_to(self.guest_host.kernel)
        self.home('initrd').symlink_to(self.guest_host.initrd)
        self.do('mkdir -p /var/lib/libvirt/images')
        self.type_line(f'pcowctl template delete fast/{page_libvirt.TEMPLATE}')

    def type_line(self, line: str) -> str:
        """One of the page, or what stands on none."""
        if self.howto is not None and line in self.howto.lines:
            self.howto.took(line)
        return self.shell.type(line)

    def begin_page(self, name: str) -> list[str]:
        """The commands of a page."""
        self.howto = pages.Page(f'howto/{name}', _NOT_TYPED[name])
        return self.howto.commands()

    def end_page(self) -> None:
        assert self.howto is not None
        self.howto.check()
        self.howto = None

    def type_all(self, lines: list[str], at_least: int) -> dict[str, str]:
        """What each has printed."""
        self.assertGreaterEqual(len(lines), at_least, lines)
        return {line: self.type_line(line) for line in lines}

    def remove_domains(self, *but: str) -> None:
        """Forks and copies of web1 too."""
        for name in set(self.type_line('virsh list --all --name').split()) - set(but):
            if self.type_line(f'virsh domstate {name}').strip() != 'shut off':
                self.type_line(f'virsh destroy {name}')
            self.type_line(f'virsh undefine {name}')

    def images(self) -> set[str]:
        return {path.name.removesuffix(names.IMAGE_SUFFIX) for path in self.pool.glob('*.pcow')}

    def make_domain(self, *options: str) -> None:
        self.type_line(f'pcowctl domain-xml fast/web1 {" ".join(options)} >web1.xml')
        self.type_line('virsh define web1.xml')
        self.type_line('virsh start web1')

    def test_howto(self) -> None:
        self._begin_howto()
        self._templates()
        self._libvirt()
        self._snapshots()
        self._forks()
        self._checkpoints()

    def _templates(self) -> None:
        lines = self.begin_page('templates')
        last = lines.index('pcowctl image delete fast/web1')
        said = self.type_all(lines, 9)
        self.assertIn('scratch', said['pcowctl image list fast'])
        self.assertIn('debian12', said['pcowctl image show fast/web1'])
        self.assertEqual(8 << 30, image.info(str(self.pool / 'scratch.pcow')).virtual_size)
        self.assertEqual({'scratch'}, self.images())
        self.end_page()
        # for the pages that follow
        self.type_all([line for line in lines[:last] if 'scratch' not in line], 4)

    def _libvirt(self) -> None:
        lines = self.begin_page('libvirt')
        disk = lines.index('pcowctl domain-xml fast/web1 --bus virtio | virsh define /dev/stdin')
        back = next(number for number, line in enumerate(lines) if line.startswith('uuid='))
        self.type_all(lines[:disk], 3)
        self.assertEqual('running', self.type_line('virsh domstate web1').strip())
        self.type_line('virsh destroy web1')
        # one shell: a line uses what the one before has set
        self.type_line('\n'.join(['set -e', *lines[back:]]))
        for line in lines[back:]:
            self.howto.took(line)
        self.assertIn('<disk ', self.type_line('virsh dumpxml web1'))
        self.assertIn('nvdimm', self.home('web1-before.xml').read_text())
        self.type_line('virsh undefine web1')
        self.type_line(lines[disk])
        self.assertIn('<disk ', self.type_line('virsh dumpxml web1'))
        self.type_line('virsh undefine web1')
        self.end_page()

    def _snapshots(self) -> None:
        lines = self.begin_page('snapshots')
        made = next(number for number, line in enumerate(lines) if 'domain-xml' in line)
        for line in lines[: made + 1]:
            self.type_line(line)
        self.type_line('virsh define web1.xml')
        self.type_line('virsh start web1')
        said = self.type_all(lines[made + 1 :], 7)
        self.assertIn('release-4', said['pcowctl snapshot list --domain web1'])
        self.assertIn('release-4', self.type_line('pcowctl snapshot list --domain web1'))
        self.end_page()
        # the page on forks has its first name
        self.type_line('pcowctl snapshot rename --domain web1 release-4 before-upgrade')

    def _forks(self) -> None:
        self.type_all(self.begin_page('forks'), 3)
        self.assertLessEqual({'web1-test', 'web2'}, self.images())
        self.assertEqual('running', self.type_line('virsh domstate web1').strip())
        self.end_page()
        self.remove_domains()
        for name in ('web1-test', 'web2', 'web1'):
            self.type_line(f'pcowctl image delete fast/{name}')

    def _checkpoints(self) -> None:
        self.type_line('pcowctl image create fast/web1 --template debian12')
        lines = self.begin_page('checkpoints')
        end = next(i for i, line in enumerate(lines) if 'delete-checkpoint' in line)
        fork = next(i for i, line in enumerate(lines) if ' vm fork ' in line)
        said = self.type_all(lines[:end], 6)
        self.assertIn('warm', said['pcowctl vm tree web1'])
        self.type_all(lines[fork : fork + 2], 2)
        running = set(self.type_line('virsh list --name').split())
        self.assertEqual({'web1', 'web1-1', 'web1-2', 'copy'}, running)
        # "A domain that is off"
        self.type_line('virsh destroy web1')
        self.type_line(lines[-1])
        self.assertEqual('running', self.type_line('virsh domstate web1').strip())
        self.remove_domains('web1')
        for name in sorted(self.images() - {'debian12', 'web1', 'web1-ram'}):
            self.type_line(f'pcowctl image delete fast/{name}')
        self.type_line(lines[end])
        self.assertNotIn('warm', self.type_line('pcowctl vm tree web1'))
        self.end_page()
