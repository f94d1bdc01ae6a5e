# SPDX-License-Identifier: Apache-2.0
"""Templates on a file system with the immutable flag: what each command says to root, and that
clearing up is possible.
"""

import os
import subprocess

from pcow_driver.common import immutable
from tests.functional import images
from tests.functional import test_pcowctl
from tools.lib.quickstart import teardown

MIB = 1 << 20
BIN = test_pcowctl.BIN
# of the first data slab, in the owner table of an image (doc/source/reference/format.rst)
OWNER = (64 << 10) + 8
WAY_OUT = 'immutable.*chattr -i'


class ProtectedTemplateTest(test_pcowctl.TestCase):
    """A pool in /var/tmp, which is on a disk."""

    def setUp(self) -> None:
        super().setUp()
        place = self._temporary('/var/tmp')
        # runs before what the line above has registered
        self.addCleanup(teardown.delete, place)
        self.pool = place / 'pool'
        self.template = self.make_template()
        self.assertTrue(
            immutable.is_set(str(self.template)),
            'these tests need a file system with the immutable flag in /var/tmp',
        )
        self.ctl('image', 'create', 'p/child', '--template', 't')
        self.before = images.digest(self.template)

    def img(self, *args: object) -> str:
        """What pcow-img says when it fails."""
        done = self.run_program(BIN / 'pcow-img', *args, exit_code=1)
        self.assertEqual(1, len(done.stderr.splitlines()), done.stderr)
        return done.stderr

    def test_pcow_img_says_what_stands_in_the_way(self) -> None:
        child, other = self.pool / 'child.pcow', self.pool / 'other.pcow'
        self.run_program(BIN / 'pcow-io', '-c', 'write -P 7 0 64k', child)
        for words in (
            ('check', '-r', 'all', self.template),
            ('unseal', self.template),
            ('seal', self.template),
            ('resize', self.template, '64M'),
            ('snapshot', '-c', 'x', self.template),
            ('commit', child),
            ('rebase', '-b', '', self.template),
        ):
            self.assertRegex(self.img(*words), f't.pcow is {WAY_OUT}', words)
        self.assertRegex(self.io(self.template, 'write 0 4k', exit_code=1), f't.pcow is {WAY_OUT}')
        self.run_program(BIN / 'pcow-img', 'create', '-q', other, '4M')
        self.assertRegex(
            self.img('convert', '-f', 'pcow', '-O', 'pcow', other, self.template),
            'immutable.*another name',
        )
        self.assertEqual(self.before, images.digest(self.template))
        # the way out that it names
        self.run_program('chattr', '-i', self.template)
        self.assertRegex(self.img('resize', self.template, '64M'), 'sealed')
        self.run_program(BIN / 'pcow-img', 'unseal', self.template)
        self.run_program(BIN / 'pcow-img', 'resize', self.template, '64M')

    def test_snapshots_of_a_template(self) -> None:
        """Marking one takes a store to the template: pcow-img refuses, pcowctl does it."""
        image = self.pool / 'two.pcow'
        for words in (
            ('create', '-q', image, '4M'),
            ('snapshot', '-c', 'one', image),
            ('seal', image),
        ):
            self.run_program(BIN / 'pcow-img', *words)
        immutable.set_flag(str(image), True)
        self.assertRegex(
            self.img('create', '-b', image, '-o', 'base_snapshot=one', self.pool / 'x.pcow'),
            WAY_OUT,
        )
        self.ctl('image', 'fork', 'p/two', 'one', 'fork')
        self.assertTrue(immutable.is_set(str(image)))
        for words in (
            ('delete', 'p/two', 'one'),
            ('rename', 'p/two', 'one', 'new'),
            ('create', 'p/two', 'x'),
        ):
            self.assertRegex(self.fails('snapshot', *words), WAY_OUT, words)
        self.ctl('image', 'delete', 'p/fork')
        self.ctl('template', 'delete', 'p/two')

    def test_pcowctl(self) -> None:
        self.assertRegex(self.fails('template', 'delete', 'p/t'), 'child')
        self.assertRegex(self.fails('image', 'delete', 'p/t'), 'template')
        self.assertRegex(self.fails('image', 'resize', 'p/t', '64M'), WAY_OUT)
        self.assertRegex(self.fails('pool', 'remove', 'p'), 'still holds')
        self.ctl('image', 'check', '--repair', 'p/t')
        self.assertTrue(immutable.is_set(str(self.template)))
        self.assertEqual(self.before, images.digest(self.template))
        self.ctl('image', 'delete', 'p/child')
        found = self.show('pool', 'garbage', 'p')
        self.assertEqual(['unused-template'], [item['kind'] for item in found], found)
        self.assertIn(
            'would be deleted',
            self.ctl('pool', 'garbage', 'p', '--delete', 'unused-template', '--dry-run'),
        )
        self.ctl('pool', 'garbage', 'p', '--delete', 'unused-template')
        self.assertFalse(self.template.exists())
        self.ctl('pool', 'remove', 'p')

    def test_damaged_template_is_repaired(self) -> None:
        """The owner of its first data slab is damaged: repaired in place, protected again, and its
        child goes on.
        """
        immutable.set_flag(str(self.template), False)
        images.patch(self.template, OWNER, bytes([self.template.read_bytes()[OWNER] ^ 0x10]))
        immutable.set_flag(str(self.template), True)
        self.assertEqual(2, self.status(*self.command('image', 'check', 'p/t')))
        self.ctl('image', 'check', '--repair', 'p/t')
        self.assertTrue(immutable.is_set(str(self.template)))
        # its mirror had what it held: nothing is another one for who stands on it
        self.assertEqual(
            b'\x11' * 4096, self.guest_view(self.pool / 'child.pcow')[2 * MIB :][:4096]
        )

    def test_received_template_is_protected(self) -> None:
        sent = subprocess.run(
            self.command('image', 'send', 'p/t'),
            env=self.environment,
            cwd=test_pcowctl.TOP,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
        done = subprocess.run(
            self.command('image', 'receive', 'p/copy'),
            env=self.environment,
            cwd=test_pcowctl.TOP,
            input=sent,
            capture_output=True,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stderr)
        copy = self.pool / 'copy.pcow'
        self.assertTrue(immutable.is_set(str(copy)))
        self.assertRaises(PermissionError, os.unlink, copy)
        self.ctl('image', 'delete', 'p/child')  # of the uuid that both have
        self.ctl('template', 'delete', 'p/copy')
