# SPDX-License-Identifier: Apache-2.0
"""pcow-img: the subcommands that make, describe and change images."""

import os
import time

from tests.functional import format1
from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB


class CommandLineTest(images.ImageTestCase):
    COMMANDS = (
        'amend',
        'check',
        'checksum',
        'commit',
        'compare',
        'convert',
        'create',
        'info',
        'map',
        'measure',
        'probe',
        'rebase',
        'resize',
        'seal',
        'snapshot',
        'unseal',
    )

    def test_help_and_version(self):
        text = self.img('--help')
        for command in self.COMMANDS:
            self.assertRegex(text, rf'(?m)^  {command} ')
            self.assertTrue(self.img(command, '--help').startswith(f'usage: pcow-img {command} '))
            self.assertEqual(self.img('--version'), self.img(command, '--version'))
        self.assertRegex(self.img('-V'), r'^pcow-img version \d+\.\d+')

    def test_unknown_is_one_line(self):
        self.img_fails(message='expecting a command')
        self.img_fails('frobnicate', message="'frobnicate' is not known")
        for command in self.COMMANDS:
            code = 2 if command == 'compare' else 1
            self.img_fails(
                command,
                '--no-such-option',
                'x',
                'y',
                message="'--no-such-option' is not known",
                code=code,
            )
            self.img_fails(command, '-Z', 'x', 'y', message="'-Z' is not known", code=code)
            self.img_fails(command, message='is missing|expecting', code=code)
            self.img_fails(command, 'a', 'b', 'c', message='too many|expecting', code=code)

    def test_words_name_what_is_meant(self):
        self.img_fails('chek', 'a.pcow', message="did you mean 'check'")
        self.img_fails('create', message='create: FILE SIZE is missing')
        self.img_fails('resize', message='resize: FILE SIZE is missing')
        self.img_fails('create', 'a.pcow', '2M', 'x', message="'x' is one word too many")
        self.img_fails('convert', 'a.pcow', message='convert: DESTINATION is missing')
        path = self.create('a.pcow')
        self.img('snapshot', '-c', 'before-upgrade', path)
        self.img('snapshot', '-c', '.loading-1', path)
        for words in (
            ('snapshot', '-d', 'before-upgrad', path),
            ('convert', '-l', 'beforeupgrade', path, 'x.raw'),
            ('map', '-S', 'Before-upgrade', path),
            ('create', '-b', path, '-o', 'base_snapshot=before-ugprade', 'x.pcow'),
        ):
            self.img_fails(*words, message="did you mean 'before-upgrade'")
        for name in ('other', '.loading-2'):
            self.img_fails('snapshot', '-d', name, path, message=f"'{name}'; pcow-img snapshot -l")

    def test_option_without_value(self):
        self.img_fails('create', '-b', message="'-b' needs a value")
        self.img_fails('info', '--output', message="'--output' needs a value")
        self.img_fails('info', '--output', 'xml', 'x', message="must be 'human' or 'json'")


class CreateTest(images.ImageTestCase):
    def test_message_and_size(self):
        text = self.img('create', '-f', 'pcow', '-o', 'cluster_size=4k', 'a.pcow', '1.5G')
        self.assertEqual("Formatting 'a.pcow', fmt=pcow cluster_size=4096 size=1610612736\n", text)
        self.assertEqual('', self.img('create', '-q', 'b.pcow', '2M'))
        info = self.img_json('info', 'a.pcow')
        self.assertEqual((1610612736, 4096), (info['virtual-size'], info['cluster-size']))
        self.assertLess(self.allocated(self.path('a.pcow')), 64 * KIB)

    def test_sizes_are_rounded_up(self):
        result = self.run_program('pcow-img', 'create', 'a.pcow', '1000001')
        self.assertRegex(result.stderr, '1000001 rounded up to 2097152')
        self.assertEqual(2 * MIB, self.img_json('info', 'a.pcow')['virtual-size'])
        self.assertEqual('', self.run_program('pcow-img', 'create', '-q', 'b.pcow', '3M').stderr)

    def test_bad_sizes(self):
        for size, message in (
            ('0', 'out of range'),
            ('17T', 'out of range'),
            ('8E', 'too large'),
            ('-1', "'-1' is no option, and no size either"),
            ('-5G', "'-5G' is no option, and no size either"),
            ('+5G', 'has a sign, which a size has not: write 5G'),
            ('1GB', 'write 1G or 1GiB'),
            ('1.5', 'not a size'),
            ('1Q', 'not a size'),
            ('', 'not a size'),
            ('1G2', 'not a size'),
            ('0x', 'not a size'),
            ('99999999999999999999', 'too large'),
            ('nan', 'not a size'),
        ):
            self.img_fails('create', 'a.pcow', size, message=message)
        self.img_fails('create', 'a.pcow', message='needs a size')
        for cluster_size in ('3k', '2k', '4M', '0x', 'x'):
            self.img_fails(
                'create',
                '-o',
                f'cluster_size={cluster_size}',
                'a.pcow',
                '4M',
                message='cluster.size',
            )
        self.img_fails(
            'create', '-o', 'colour=red', 'a.pcow', '4M', message="'colour' is not known"
        )
        self.img_fails('create', '-o', 'cluster_size', 'a.pcow', '4M', message='needs a value')
        self.assertEqual([], os.listdir(self.directory))

    def test_units(self):
        for size in ('1.5G', '1536MiB', '1.5 GiB', '0x60000000'):
            self.img('create', '-q', 'a.pcow', size)
            self.assertEqual(1536 * MIB, self.img_json('info', 'a.pcow')['virtual-size'], size)
            self.path('a.pcow').unlink()
        self.img('create', '-q', '-o', 'cluster_size=16KiB', 'a.pcow', '2M')
        self.assertEqual(16 * KIB, self.img_json('info', 'a.pcow')['cluster-size'])

    def test_name_that_qemu_would_map_raw(self):
        for name in ('a.qcow2', 'a.img', 'a', '.pcow', 'a.pcow.bak'):
            self.img_fails('create', name, '2M', message=r'not called \*.pcow.*-f pcow')
        self.assertEqual([], os.listdir(self.directory))
        self.img('create', '-q', '-f', 'pcow', 'a.qcow2', '2M')
        self.assertEqual(2 * MIB, self.img_json('info', 'a.qcow2')['virtual-size'])

    def test_existing_file_is_kept(self):
        path = self.create('a.pcow')
        before = images.digest(path)
        self.img_fails('create', path, '4M', message='a.pcow exists')
        self.assertEqual(before, images.digest(path))
        self.img_fails('create', 'no/such/dir.pcow', '4M', message='No such file')
        self.img_fails('create', '-f', 'qcow2', 'b.qcow2', '4M', message='qemu-img')

    def test_base(self):
        self.create('base.pcow', '6M')
        text = self.img('create', '-b', 'base.pcow', '-F', 'pcow', 'top.pcow')
        self.assertIn('size=6291456 backing_file=base.pcow backing_fmt=pcow', text)
        info = self.img_json('info', 'top.pcow')
        self.assertEqual(
            ('base.pcow', 'pcow'), (info['backing-filename'], info['backing-filename-format'])
        )
        # a bare name lies beside the image, also from another directory
        top = self.path('sub')
        top.mkdir()
        self.run_program(
            'env',
            '-C',
            '/',
            images.program('pcow-img'),
            'create',
            '-q',
            '-b',
            'base.pcow',
            self.path('other.pcow'),
        )
        self.img('create', '-q', '-b', self.path('base.pcow'), 'absolute.pcow')
        self.img_fails('create', '-b', self.path('base.pcow'), 'sub/top.pcow', message='directory')
        self.img_fails('create', '-b', 'none.pcow', 'x.pcow', message=r'none\.pcow')
        self.img_fails(
            'create', '-b', 'base.pcow', '-F', 'qcow2', 'x.pcow', message="'qcow2' is not supported"
        )
        self.img_fails('create', '-F', 'pcow', 'x.pcow', '4M', message='need a base')
        self.assertFalse(self.path('x.pcow').exists())

    def test_unchecked_base(self):
        self.img_fails('create', '-u', '-b', 'later.pcow', 'top.pcow', message='needs a size')
        self.img('create', '-q', '-u', '-b', 'later.pcow', 'top.pcow', '4M')
        self.img_fails('map', 'top.pcow', message='later.pcow is missing')
        self.create('later.pcow', '4M')
        self.img_fails('map', 'top.pcow', message='accept it with pcow-img rebase -u -b')
        self.img('rebase', '-q', '-u', '-b', 'later.pcow', 'top.pcow')
        self.img('map', 'top.pcow')

    def test_base_snapshot(self):
        base = self.create('base.pcow')
        self.io(base, 'write -P 1 0 64k')
        self.img('snapshot', '-c', 'one,two', base)
        self.io(base, 'write -P 2 0 64k')
        self.img('create', '-q', '-b', base, '-o', 'base_snapshot=one,,two', 'top.pcow')
        self.io('top.pcow', 'read -P 1 0 64k')
        self.assertEqual(
            'one,two', self.img_json('info', 'top.pcow')['format-specific']['data']['base-snapshot']
        )
        self.img_fails('create', '-b', base, '-o', 'base_snapshot=none', 'x.pcow', message="'none'")


class InfoTest(images.ImageTestCase):
    def test_json(self):
        self.create('base.pcow')
        top = self.create('top.pcow', None, '-b', 'base.pcow')
        self.io(top, 'write 0 64k')
        info = self.img_json('info', top)
        data = info['format-specific']['data']
        self.assertEqual(
            (str(top), 'pcow', 16 * MIB, 64 * KIB),
            tuple(info[key] for key in ('filename', 'format', 'virtual-size', 'cluster-size')),
        )
        self.assertEqual(str(self.path('base.pcow')), info['full-backing-filename'])
        self.assertEqual(self.allocated(top), info['actual-size'])
        self.assertEqual(
            (2, 64 * KIB, False, 2, 2),
            tuple(
                data[key] for key in ('format', 'data-size', 'sealed', 'chain-depth', 'base-format')
            ),
        )
        self.assertRegex(data['uuid'], '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$')
        chain = self.img_json('info', '--backing-chain', top)
        self.assertEqual(
            [str(top), str(self.path('base.pcow'))], [image['filename'] for image in chain]
        )
        self.assertEqual(data['base-uuid'], chain[1]['format-specific']['data']['uuid'])
        self.assertNotIn('backing-filename', chain[1])

    def test_human(self):
        top = self.create('top.pcow', '16M', '-u', '-b', 'base.pcow')
        self.create('base.pcow')
        self.img('rebase', '-q', '-u', '-b', 'base.pcow', top)
        self.img('snapshot', '-c', 'first', top)
        text = self.img('info', top)
        for line in (
            'file format: pcow',
            r'virtual size: 16 MiB \(16777216 bytes\)',
            'cluster_size: 65536',
            'backing file: base.pcow',
            'Snapshot list:',
            '.* first',
            '    sealed: false',
            '    chain depth: 2',
        ):
            self.assertRegex(text, f'(?m)^{line}')

    def test_same_words_as_qemu_img(self):
        """A script that reads qemu-img's output finds the same keys."""
        self.run_program('qemu-img', 'create', '-q', '-f', 'qcow2', 'a.qcow2', '16M')
        self.create('a.pcow')
        theirs = self.run_program('qemu-img', 'info', '--output=json', 'a.qcow2').stdout
        for key in (
            'virtual-size',
            'filename',
            'cluster-size',
            'format',
            'actual-size',
            'format-specific',
        ):
            self.assertIn(f'"{key}":', theirs)
            self.assertIn(key, self.img_json('info', 'a.pcow'))

    def test_base_gone(self):
        """What can be said about the image is said."""
        base = self.create('base.pcow')
        self.create('top.pcow', None, '-b', 'base.pcow')
        base.unlink()
        result = self.run_program('pcow-img', 'info', '--output=json', 'top.pcow')
        self.assertRegex(result.stderr, 'warning: top.pcow: its base base.pcow is missing')
        self.assertIn('"backing-filename": "base.pcow"', result.stdout)
        self.img_fails('info', '--backing-chain', 'top.pcow', message='base.pcow is missing')

    def test_while_in_use(self):
        path = self.create('a.pcow')
        user = self.start('pcow-io', path)
        user.stdin.write('length\n')
        user.stdin.flush()
        self.assertEqual('16 MiB\n', user.stdout.readline())
        self.img_fails('info', path, message=r'open for writing elsewhere.*\(-U\)')
        self.assertEqual(16 * MIB, self.img_json('info', '-U', path)['virtual-size'])
        self.img('map', '-U', path)
        self.img('snapshot', '-l', '-U', path)
        self.img_fails('snapshot', '-c', 'x', path, message='in use')
        self.img_fails('resize', path, '+2M', message='in use')
        self.img_fails('seal', path, message='in use')
        self.run_program('pcow-io', '-c', 'length', path, code=1)
        self.io(path, 'length', options=('-U',))

    def test_file_name_that_is_not_utf8(self):
        name = b'bad\xff.pcow'
        path = os.path.join(os.fsencode(self.directory), name)
        self.run_program('pcow-img', 'create', '-q', os.fsdecode(path), '2M')
        self.assertTrue(
            self.img_json('info', os.fsdecode(path))['filename'].endswith('bad\ufffd.pcow')
        )


class MapTest(images.ImageTestCase):
    def test_json(self):
        base = self.create('base.pcow')
        self.io(base, 'write 0 64k', 'write 4M 4k')
        top = self.create('top.pcow', None, '-b', 'base.pcow')
        self.io(top, 'write 64k 64k')
        extents = self.img_json('map', top)
        self.assertEqual(16 * MIB, sum(extent['length'] for extent in extents))
        end = 0
        for extent in extents:
            self.assertEqual(end, extent['start'])
            end += extent['length']
            self.assertEqual(extent['present'], 'offset' in extent)
            self.assertEqual(extent['present'], 'filename' in extent)
        own = [extent for extent in extents if extent['present'] and extent['depth'] == 0]
        self.assertEqual(
            [(64 * KIB, 64 * KIB, str(top))],
            [(e['start'], e['length'], e['filename']) for e in own],
        )
        below = next(extent for extent in extents if extent['depth'] == 1)
        self.assertEqual(
            (0, 64 * KIB, str(base)), (below['start'], below['length'], below['filename'])
        )
        # the offset is where the byte is
        with top.open('rb') as file:
            file.seek(own[0]['offset'])
            self.assertEqual(b'\xcd' * 64 * KIB, file.read(64 * KIB))

    def test_range_and_human(self):
        path = self.create('a.pcow')
        self.io(path, 'write 1M 64k')
        self.assertEqual(
            [(512 * KIB, 512 * KIB), (MIB, 64 * KIB), (MIB + 64 * KIB, 448 * KIB)],
            [
                (e['start'], e['length'])
                for e in self.img_json('map', '-s', '512k', '-l', '1M', path)
            ],
        )
        lines = self.img('map', path).splitlines()
        self.assertEqual(['Offset', 'Length', 'Mapped', 'to', 'File'], lines[0].split())
        self.assertEqual(
            ['0x100000', '0x10000', str(path)], [lines[1].split()[i] for i in (0, 1, 3)]
        )
        self.img_fails('map', '-s', '16M', path, message='not below the image size')

    def test_snapshot(self):
        path = self.create('a.pcow')
        self.io(path, 'write 0 64k')
        self.img('snapshot', '-c', 's', path)
        self.io(path, 'write 1M 64k')
        self.assertEqual(
            [0], [e['start'] for e in self.img_json('map', '-S', 's', path) if e['data']]
        )


class SnapshotTest(images.ImageTestCase):
    def list(self, path):
        return self.img_json('snapshot', '-l', path)

    def test_tree(self):
        path = self.create('a.pcow')
        before = time.time()
        for number, name in enumerate(('one', 'two', 'drei ä')):
            self.io(path, f'write -P {number + 1} 0 64k')
            self.assertEqual('', self.img('snapshot', '-c', name, path))
        self.img('snapshot', '-a', 'one', path)
        self.io(path, 'read -P 1 0 64k', 'write -P 9 0 64k')
        self.img('snapshot', '-c', 'branch', path)
        tree = {entry['name']: entry for entry in self.list(path)}
        self.assertEqual(['one', 'two', 'drei ä', 'branch'], list(tree))
        self.assertIsNone(tree['one']['parent-id'])
        self.assertEqual(tree['one']['id'], tree['two']['parent-id'])
        self.assertEqual(tree['two']['id'], tree['drei ä']['parent-id'])
        self.assertEqual(tree['one']['id'], tree['branch']['parent-id'])
        self.assertEqual(['branch'], [name for name, entry in tree.items() if entry['current']])
        self.assertTrue(
            all(before - 2 <= entry['date-sec'] <= time.time() + 2 for entry in tree.values())
        )
        for name, pattern in (('one', 1), ('two', 2), ('drei ä', 3), ('branch', 9)):
            self.io(path, f'read -P {pattern} 0 64k', options=('-s', name))
        self.img('snapshot', '-d', 'two', path)
        self.img('snapshot', '--rename', 'drei ä', 'three', path)
        tree = {entry['name']: entry for entry in self.list(path)}
        self.assertEqual(['one', 'three', 'branch'], list(tree))
        self.assertEqual(tree['one']['id'], tree['three']['parent-id'])
        self.img('snapshot', '-a', 'three', path)
        self.io(path, 'read -P 3 0 64k')
        self.assert_clean(path)

    def test_human(self):
        path = self.create('a.pcow')
        self.assertEqual('', self.img('snapshot', '-l', path))
        self.img('snapshot', '-c', 'the name', path)
        text = self.img('snapshot', path)
        self.assertRegex(
            text,
            r'(?m)^Snapshot list:\nID +PARENT +VM SIZE +OWN +SHARED +FREES +DATE +TAG\n1 .* \*  '
            r'the name$',
        )

    def test_bad_requests(self):
        path = self.create('a.pcow')
        self.img('snapshot', '-c', 'one', path)
        content = images.digest(path)
        self.img_fails('snapshot', '-c', 'one', path, message="'one'")
        self.img_fails('snapshot', '-a', 'none', path, message="'none'")
        self.img_fails('snapshot', '-d', 'none', path, message="'none'")
        self.img_fails('snapshot', '--rename', 'none', 'x', path, message="'none'")
        self.img_fails('snapshot', '-c', '', path, message='name')
        self.img_fails('snapshot', '-c', 'x' * 128, path, message='name')
        self.img_fails('snapshot', '-c', 'a\nb', path, message='name')
        self.img_fails('snapshot', '-c', 'x', '-l', path, message='only one of')
        self.img_fails('snapshot', '--rename', 'one', message='old and the new')
        self.assertEqual(content, images.digest(path))
        self.img('snapshot', '-c', 'x' * 127, path)
        self.assertEqual(['one', 'x' * 127], [entry['name'] for entry in self.list(path)])


class ChangeTest(images.ImageTestCase):
    def test_resize(self):
        path = self.create('a.pcow', '8M')
        self.io(path, 'write -P 1 0 8M')
        self.assertEqual('Image resized.\n', self.img('resize', path, '+4M'))
        self.io(path, 'read -P 1 0 8M', 'read -P 0 8M 4M')
        self.assertEqual('', self.img('resize', '-q', '--shrink', path, '-8M'))
        self.img('resize', path, '8M')
        self.io(path, 'read -P 1 0 4M', 'read -P 0 4M 4M')
        result = self.run_program('pcow-img', 'resize', path, '+1')
        self.assertIn('rounded up to 10485760', result.stderr)
        self.assert_clean(path)

    def test_resize_refused(self):
        path = self.create('a.pcow', '8M')
        result = self.run_program('pcow-img', 'resize', path, '4M', code=1)
        self.assertRegex(result.stderr, 'warning: shrinking.*\n.*use the --shrink option')
        self.img_fails('resize', '--shrink', path, '-8M', message='zero or less')
        self.img_fails('resize', path, '17T', message='out of range')
        self.img_fails('resize', path, '+17T', message='out of range')
        self.img_fails('resize', path, 'big', message='not a size')
        self.img_fails('resize', '-f', 'raw', path, '16M', message="'raw' is not for this command")
        self.assertEqual(8 * MIB, self.img_json('info', path)['virtual-size'])

    def test_seal(self):
        path = self.create('a.pcow')
        self.assertEqual('Image sealed.\n', self.img('seal', path))
        self.assertTrue(self.img_json('info', path)['format-specific']['data']['sealed'])
        self.img_fails('snapshot', '-c', 'x', path, message='sealed')
        self.run_program('pcow-io', '-c', 'write 0 4k', path, code=1)
        self.io(path, 'read -P 0 0 16M', options=('-r',))
        self.create('top.pcow', None, '-b', 'a.pcow')
        self.assertEqual('', self.img('unseal', '-q', path))
        self.io(path, 'write 0 4k')
        self.img_fails('map', 'top.pcow', message='changed since')

    def test_commit(self):
        base = self.create('base.pcow')
        self.io(base, 'write -P 1 0 8M')
        top = self.create('top.pcow', None, '-b', 'base.pcow')
        self.io(top, 'write -P 2 1M 5000', 'write -P 3 12M 64k')
        self.img('convert', '-O', 'raw', top, 'expected.raw')
        self.assertEqual('Image committed.\n', self.img('commit', top))
        self.assertEqual(0, self.img_json('info', top)['format-specific']['data']['data-size'])
        self.assert_same(base, 'pcow', self.path('expected.raw'), 'raw')
        self.assert_same(top, 'pcow', self.path('expected.raw'), 'raw')
        self.assert_clean(base, top)
        self.assertRegex(self.img('commit', '-p', top), r'\(100\.00/100%\)')

    def test_commit_refused(self):
        base = self.create('base.pcow')
        self.img_fails('commit', base, message='no base')
        top = self.create('top.pcow', None, '-b', 'base.pcow')
        self.io(top, 'write 0 64k')
        self.img('snapshot', '-c', 's', top)
        self.img_fails('commit', top, message='snapshots')
        self.img('snapshot', '-d', 's', top)
        self.img('seal', base)
        self.img_fails('commit', top, message='sealed')
        self.io(top, 'read -P 0xcd 0 64k')

    def test_rebase_keeps_content(self):
        one, two = self.create('one.pcow'), self.create('two.pcow', '8M')
        self.io(one, 'write -P 1 0 4M', 'write -P 9 10M 4k')
        self.io(two, 'write -P 2 2M 4M')
        top = self.create('top.pcow', None, '-b', 'one.pcow')
        self.io(top, 'write -P 3 3M 64k')
        self.img('convert', '-O', 'raw', top, 'expected.raw')
        self.assertRegex(
            self.img('rebase', '-p', '-b', 'two.pcow', '-F', 'pcow', top), r'\(100\.00/100%\)'
        )
        self.assertEqual('two.pcow', self.img_json('info', top)['backing-filename'])
        self.assert_same(top, 'pcow', self.path('expected.raw'), 'raw')
        one.unlink()
        self.img('rebase', '-b', '', top)
        two.unlink()
        self.assertNotIn('backing-filename', self.img_json('info', top))
        self.assert_same(top, 'pcow', self.path('expected.raw'), 'raw')
        self.assert_clean(top)

    def test_rebase_unsafe(self):
        base = self.create('base.pcow')
        self.io(base, 'write -P 1 0 64k')
        top = self.create('top.pcow', None, '-b', 'base.pcow')
        base.rename(self.path('renamed.pcow'))
        self.img_fails('map', top, message='base.pcow is missing')
        self.img_fails('rebase', '-b', 'renamed.pcow', top, message='base.pcow is missing')
        self.img('rebase', '-u', '-b', 'renamed.pcow', top)
        self.io(top, 'read -P 1 0 64k')

    def test_rebase_refused(self):
        top = self.create('top.pcow')
        self.img_fails('rebase', top, message='-b')
        self.img_fails('rebase', '-b', 'none.pcow', top, message='none.pcow')
        self.img_fails('rebase', '-b', 'top.pcow', top, message='top.pcow')
        self.img_fails('rebase', '-b', '', '-o', 'base_snapshot=x', top, message='needs a base')
        self.img_fails('rebase', '-b', 'x', '-F', 'raw', top, message="'raw' is not supported")
        self.assertNotIn('backing-filename', self.img_json('info', top))


class CompareMeasureTest(images.ImageTestCase):
    def test_compare(self):
        one, two = self.create('one.pcow', '16M'), self.create('two.pcow', '20M')
        for path in (one, two):
            self.io(path, 'write -P 1 0 5M')
        text = self.img('compare', one, two)
        self.assertEqual('Warning: Image size mismatch!\nImages are identical.\n', text)
        self.assertEqual(
            'Strict mode: Image size mismatch!\n', self.img('compare', '-s', one, two, code=1)
        )
        self.assertEqual('', self.img('compare', '-q', one, two))
        self.io(two, 'write -P 2 18M 4k')
        self.assertIn('Content mismatch at offset 18874368!', self.img('compare', one, two, code=1))
        self.io(one, 'write -P 3 4097 1')
        self.assertIn('Content mismatch at offset 4097!', self.img('compare', one, two, code=1))
        self.assertRegex(self.img('compare', '-p', one, one), r'\(100\.00/100%\)')

    def test_compare_as_qemu_img(self):
        for name in ('a.raw', 'b.raw'):
            self.path(name).write_bytes(os.urandom(512) * 8192)
        self.assertEqual(
            self.run_program(
                'qemu-img', 'compare', '-f', 'raw', '-F', 'raw', 'a.raw', 'a.raw'
            ).stdout,
            self.img('compare', '-f', 'raw', '-F', 'raw', 'a.raw', 'a.raw'),
        )
        self.run_program('qemu-img', 'compare', '-f', 'raw', '-F', 'raw', 'a.raw', 'b.raw', code=1)
        self.img('compare', '-f', 'raw', '-F', 'raw', 'a.raw', 'b.raw', code=1)

    def test_compare_errors(self):
        self.create('a.pcow')
        self.img_fails('compare', 'a.pcow', 'none.pcow', message='none.pcow', code=2)
        self.img_fails('compare', 'a.pcow', 'a.img', message='-F raw', code=2)
        self.img_fails(
            'compare', '-f', 'vmdk', 'a.pcow', 'a.pcow', message="'vmdk' is not known", code=2
        )

    def test_measure(self):
        path = self.path('a.raw')
        with path.open('wb') as file:
            file.truncate(64 * MIB)
            for offset in (0, 10 * MIB, 63 * MIB):
                file.seek(offset)
                file.write(b'x' * 100 * KIB)
        for cluster_size in ('4k', '64k', '2M'):
            need = self.img_json(
                'measure', '-f', 'raw', '-O', 'pcow', '-o', f'cluster_size={cluster_size}', path
            )
            self.img('convert', '-f', 'raw', '-o', f'cluster_size={cluster_size}', path, 'a.pcow')
            self.assertLessEqual(self.allocated(self.path('a.pcow')), need['required'])
            self.assertEqual(70 * MIB, need['fully-allocated'])
        empty = self.img_json('measure', '--size', '1G')
        self.assertLess(empty['required'], 64 * KIB)
        self.assertGreater(empty['fully-allocated'], 1 << 30)
        self.assertRegex(
            self.img('measure', '--size', '4M'),
            r'^required size: \d+\nfully allocated size: \d+\n$',
        )
        self.img_fails('measure', '-f', 'raw', '-O', 'qcow2', path, message='qemu-img the others')
        self.img_fails('measure', path, message='-f raw')
        self.img_fails('measure', '-f', 'raw', '--size', '1G', path, message='either')

    def test_probe(self):
        known = ('volatile', 'page-cache', 'pmem')
        self.assertIn(self.img_json('probe', self.directory)['persistence'], known)
        self.assertRegex(self.img('probe', '/tmp'), 'persistence: (volatile|page-cache|pmem)')
        self.img_fails('probe', 'none', message='No such file')


class Format1Test(images.ImageTestCase):
    def test_read(self):
        path = self.path('old.pcow')
        format1.write(path, 64, {3: b'\x11' * 65536, 40: b'\x22' * 65536})
        info = self.img_json('info', '-f', 'pcow1', path)
        self.assertEqual(
            ('pcow1', 1, 4 * MIB),
            (info['format'], info['format-specific']['data']['format'], info['virtual-size']),
        )
        self.assertEqual(
            [(3 * 65536, 65536), (40 * 65536, 65536)],
            [
                (e['start'], e['length'])
                for e in self.img_json('map', '-f', 'pcow1', path)
                if e['data']
            ],
        )
        self.io(path, 'read -P 0x11 192k 64k', 'read -P 0 0 192k', options=('-f', 'pcow1'))
        self.img('check', '-f', 'pcow1', path, code=63)
        self.img_fails('info', path, message='not a pcow image.*-f')

    def test_convert(self):
        path = self.path('old.pcow')
        format1.write(path, 100, {3: b'\x11' * 65536, 99: os.urandom(65536)})
        self.img('convert', '-q', '-f', 'pcow1', path, 'new.pcow')
        self.assertEqual(8 * MIB, self.img_json('info', 'new.pcow')['virtual-size'])
        self.assert_same(path, 'pcow1', self.path('new.pcow'), 'pcow')
        self.img_fails('resize', '-f', 'pcow1', path, '8M', message='read-only')
        self.img_fails('convert', '-O', 'pcow1', 'new.pcow', 'x', message='only read')

    def test_as_base(self):
        format1.write(self.path('old.pcow'), 64, {3: b'\x11' * 65536})
        top = self.create('top.pcow', None, '-b', 'old.pcow', '-F', 'pcow1')
        self.io(top, 'read -P 0x11 192k 64k', 'write -P 5 193k 1k', 'read -P 0x11 194k 62k')
        info = self.img_json('info', '--backing-chain', top)
        self.assertEqual(['pcow', 'pcow1'], [image['format'] for image in info])
        self.assertEqual('pcow1', info[0]['backing-filename-format'])
