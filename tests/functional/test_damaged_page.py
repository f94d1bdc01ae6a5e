# SPDX-License-Identifier: Apache-2.0
"""The commands of the runbook on damaged images, typed as they stand there, in the directory of the
pool, on an image that is damaged so, until the guest's data are what they were.

What is not typed is named with its reason in ``_NOT_TYPED``.
"""

import shlex

from pcow_driver.images import protection
from tests.functional import images
from tests.functional import pages
from tests.functional import test_pcowctl
from tests.functional.images import KIB
from tests.functional.images import MIB
from tests.functional.images import SLAB

_NAME = 'howto/runbook-damaged-image'
_NOT_TYPED = {
    '^ssh HOST |^chattr |^mv ': 'a template that another host has: migration_page sends one',
    '^pcow-img rebase -u -b debian12.pcow ': 'a base that was changed: test_templates_protected',
}
OFFSET = test_pcowctl.OFFSET
MIRROR = SLAB  # where the mirror of the metadata begins
BITMAPS = MIB
LOST = 4 * MIB  # in the guest's image; the page writes 64 KiB there
HEADS = 3 * SLAB


def commands(of: str) -> list[str]:
    """Of one section of the page."""
    return pages.Page(_NAME, only=of).lines


class DamagedPageTest(test_pcowctl.TestCase):
    page = pages.Page(_NAME, _NOT_TYPED)
    parts = 0

    @classmethod
    def tearDownClass(cls) -> None:
        if cls.parts == 3:  # all of them were run
            cls.page.check()
        super().tearDownClass()

    def setUp(self) -> None:
        super().setUp()
        type(self).parts += 1
        self.ctl('pool', 'create', 'fast', self.pool)
        self.elsewhere = self.directory / 'elsewhere'
        self.elsewhere.mkdir()
        patterns = {'at_0': 0x11, 'at_1048576': 0x22, 'at_6291456': 0x33}
        self.source = self.make_qcow2('debian12.qcow2', 8 * MIB, **patterns)
        (self.pool / 'debian12.qcow2').symlink_to(self.source)
        self.ctl('template', 'build', self.source, 'fast/debian12', '--source-format', 'qcow2')
        self.ctl('image', 'create', 'fast/web1', '--template', 'debian12')
        self.image = self.pool / 'web1.pcow'
        self.ctl('snapshot', 'create', 'fast/web1', 'before-upgrade')
        self.old = self.guest_view(self.image)
        self.io(self.image, f'write -P 0xbb {LOST} 64k')
        self.new = self.guest_view(self.image)
        self.shell = pages.Shell(
            self.pool,
            self.environment | {'PYTHONPATH': str(test_pcowctl.TOP)},
            {'/elsewhere': str(self.elsewhere)},
            prelude=f'pcowctl() {{ {shlex.join(self.command())} "$@"; }}',
        )

    def type_in(self, line: str, exit_code: int = 0) -> str:
        self.page.took(line)
        return self.shell.type(line, exit_code)

    def damage(self, *places: int) -> None:
        """The page that says which pages of a slab are data, in the copies that begin there."""
        for place in places:
            images.patch(self.image, place + BITMAPS, bytes(4 * KIB))

    def test_nothing_is_lost(self) -> None:
        lines = commands('What to do')
        self.damage(0)
        self.type_in(lines[0])
        self.assertIn('ERROR', self.type_in(lines[1], exit_code=2))
        self.assertEqual('pcow-img check -r all web1.pcow', lines[2])
        self.type_in(lines[2])
        self.type_in(lines[3])
        self.assertEqual(self.new, self.guest_view(self.image))

    def test_something_is_lost(self) -> None:
        lines = commands('What to do')
        self.damage(0, MIRROR)
        self.assertIn('Loss: ', self.type_in(lines[1], exit_code=2))
        self.type_in(lines[2], exit_code=2)
        accept = next(n for n, line in enumerate(lines) if '--accept-loss' in line)
        rebase = next(n for n, line in enumerate(lines) if ' rebase ' in line)
        for line in lines[accept:rebase]:
            self.type_in(line)
        self.assertEqual(self.new, self.guest_view(self.image))
        self.assertIn('before-upgrade', self.type_in(lines[rebase + 1]))
        self.type_in(lines[rebase + 2])
        self.assertEqual(self.old, self.guest_view(self.image))

    def test_damaged_data_of_a_template(self) -> None:
        lines = commands('Data is damaged')
        template = self.pool / 'debian12.pcow'
        with protection.lifted(str(template)), template.open('r+b') as file:
            file.seek(HEADS)
            at = file.read(2 * SLAB).index(b'\x22' * 64)  # not of a UUID
            file.seek(HEADS + at)
            file.write(b'\x23')
        scrub = lines[-1]
        self.assertEqual('pcowctl pool scrub fast', scrub)
        said = self.type_in(scrub, exit_code=2)
        self.assertIn('debian12', said)
        build = next(n for n, line in enumerate(lines) if 'template build' in line)
        for line in lines[build:]:
            said = self.type_in(line, exit_code=int(line.startswith('cmp')))
            if line.startswith('cmp'):
                self.assertEqual(1, len(said.splitlines()), said)
                self.assertRegex(said, r'^ *\d+ +43 +42$')  # octal
        self.assertEqual(self.new[OFFSET:], self.guest_view(self.image)[OFFSET:])
