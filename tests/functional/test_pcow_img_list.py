# SPDX-License-Identifier: Apache-2.0
"""pcow-img list: what is said of the images of a directory, of all or of some."""

import os

from tests.functional import images
from tests.functional.images import MIB


class ListTest(images.ImageTestCase):
    def setUp(self):
        super().setUp()
        self.base = self.create('base.pcow')
        self.img('seal', self.base)
        self.top = self.create('top.pcow', '16M', '-b', 'base.pcow', '-F', 'pcow')
        self.io(self.top, 'write -P 1 0 4M')
        self.create('.hidden.pcow')
        self.path('bad.pcow').write_bytes(bytes(4 * MIB))
        os.symlink('top.pcow', self.path('link.pcow'))

    def listed(self, *arguments):
        found = self.img_json('list', *arguments)
        return {item['name']: item for item in found}

    def test_json(self):
        found = self.listed(self.directory)
        self.assertEqual({'base.pcow', 'top.pcow', 'bad.pcow'}, set(found))
        self.assertIn('not a pcow image', found['bad.pcow']['error'])
        top, base = found['top.pcow'], found['base.pcow']
        self.assertEqual((True, 0), (base['sealed'], base['may-grow']))
        self.assertEqual(('base.pcow', base['uuid']), (top['base'], top['base-uuid']))
        self.assertEqual(self.allocated(self.top), top['actual-size'])
        self.assertEqual(22 * MIB, top['may-grow-frozen'])

    def test_names(self):
        found = self.listed(self.directory, 'top.pcow', 'none.pcow', 'link.pcow', '../base.pcow')
        self.assertEqual({'top.pcow': self.listed(self.directory)['top.pcow']}, found)

    def test_base(self):
        uuid = self.listed(self.directory)['base.pcow']['uuid']
        for cache in ((), ('--cache', self.path('cache')), ('--cache', self.path('cache'))):
            found = self.listed('--base-uuid', uuid, *cache, self.directory)
            self.assertEqual({'top.pcow', 'bad.pcow'}, set(found))
            os.unlink(self.path('bad.pcow'))
            self.assertEqual({'top.pcow'}, set(self.listed('--base-uuid', uuid, self.directory)))
            self.path('bad.pcow').write_bytes(bytes(4 * MIB))

    def test_total(self):
        top = self.listed(self.directory)['top.pcow']
        total = self.img_json('list', '--total', self.directory)
        self.assertEqual((3, 1, 1), tuple(total[key] for key in ('images', 'sealed', 'unreadable')))
        for key in ('actual-size', 'may-grow', 'may-grow-frozen'):
            self.assertEqual(top[key], total[key])
        self.assertRegex(
            self.img('list', '--total', self.directory),
            r'^3 images, 1 of them sealed, 1 cannot be read\nof those that are not sealed: disk '
            r'size \S+ MiB, may grow by \S+ MiB, and by 22 MiB after snapshots\n$',
        )

    def test_human(self):
        text = self.img('list', self.directory)
        self.assertRegex(text, r'(?m)^top.pcow: 16 MiB, disk size \S+ MiB, on base.pcow$')
        self.assertRegex(text, r'(?m)^base.pcow: 16 MiB, sealed, disk size \S+ KiB$')
        self.assertRegex(text, r'(?m)^bad.pcow: .*not a pcow image')

    def test_long_file(self):
        """A QEMU that was taken over makes its own image as long as the file system has it, at no
        cost: to look at that costs nothing, either.
        """
        self.path('top.pcow').open('ab').truncate(64 << 40)
        size = self.path('top.pcow').stat().st_size
        listed = self.run_program(
            'prlimit', '--cpu=3', images.program('pcow-img'), 'list', self.directory
        ).stdout
        self.assertIn('top.pcow: 16 MiB', listed)
        self.run_program(
            'prlimit', '--cpu=30', images.program('pcow-img'), 'check', '--data', self.top
        )
        self.assertEqual(64 << 40, size)

    def test_refused(self):
        self.img_fails('list', message='DIRECTORY is missing')
        self.img_fails('list', self.path('none'), message='cannot be listed: No such file')
        self.img_fails('list', self.top, message='cannot be listed: Not a directory')
        self.img_fails('list', '--cache', message="'--cache' needs a value")
