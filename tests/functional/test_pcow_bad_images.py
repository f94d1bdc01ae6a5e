# SPDX-License-Identifier: Apache-2.0
"""Truncated, bit-flipped, foreign and hostile images: one clear message that names the file, and
the file unchanged.
"""

import json
import os
import random
import re
import struct
import subprocess

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB


class BadImageTest(images.ImageTestCase):
    def refused(self, path, message, *, code=1):
        """Every reader and writer refuses the image, names it, and leaves it as it is."""
        before = images.digest(path)
        self.img_fails('info', path, message=message)
        self.img_fails('map', path, message=message)
        self.img_fails('snapshot', '-l', path, message=message)
        self.img_fails('snapshot', '-c', 'x', path, message=message)
        self.img_fails('convert', '-f', 'pcow', path, 'out.raw', message=message)
        self.img_fails('resize', path, '+2M', message=message)
        self.img_fails('compare', '-f', 'pcow', '-F', 'pcow', path, path, message=message, code=2)
        self.one_line(
            self.run_program('pcow-io', '-c', 'read 0 4k', path, code=1), 'pcow-io', message
        )
        self.assertEqual(before, images.digest(path))
        self.assertFalse(self.path('out.raw').exists())

    def test_foreign(self):
        self.run_program('qemu-img', 'create', '-q', '-f', 'qcow2', 'q.pcow', '4M')
        self.refused(self.path('q.pcow'), 'q.pcow is not a pcow image')
        for name, content in (
            ('empty', b''),
            ('short', b'\x89PCOW\r\n\x1a'),
            ('noise', os.urandom(4 * MIB)),
            ('zeros', bytes(4 * MIB)),
        ):
            path = self.path(f'{name}.pcow')
            path.write_bytes(content)
            self.refused(path, rf'{name}\.pcow .*not a pcow|{name}\.pcow is too short')
            self.assertIn(self.run_any('check', path), (1, 63), name)

    def test_not_a_file(self):
        self.img_fails('info', 'none.pcow', message='none.pcow: No such file')
        self.img_fails('info', self.directory, message='not a regular file|Is a directory')
        os.mkfifo(self.path('fifo.pcow'))
        self.img_fails('info', 'fifo.pcow', message='fifo.pcow.*regular file')
        self.img_fails(
            'convert',
            '-f',
            'raw',
            'fifo.pcow',
            'x.pcow',
            message='fifo.pcow is neither a regular file',
        )
        self.img_fails('convert', '-f', 'qcow2', 'fifo.pcow', 'x.pcow', message='fifo.pcow')
        self.img_fails('info', '/dev/null', message='/dev/null.*regular file')
        self.img_fails('check', 'none.pcow', message='none.pcow')

    def test_truncated(self):
        path = self.create_plain('a.pcow')
        self.io(path, 'write 0 8M')
        content = path.read_bytes()
        for size in (1, 511, 4096, 64 * KIB, MIB, 2 * MIB - 1, 2 * MIB + 4096, 5 * MIB):
            path.write_bytes(content[:size])
            self.refused(path, r'a\.pcow')

    def test_shorter_by_whole_slabs(self):
        """Owners behind the end of file count as nothing; what was there cannot be told from what
        was never written.
        """
        path = self.create_plain('a.pcow')
        self.io(path, 'write -P 1 0 8M')
        with path.open('r+b') as file:
            file.truncate(6 * MIB)
        result = self.run_program('pcow-img', 'check', path, code=self.check_code(path))
        self.assertNotIn('Traceback', result.stderr)

    def check_code(self, path):
        return self.run_any('check', path)

    def run_any(self, *args):
        """Exit code of pcow-img, whatever it is, as long as it ends by itself."""
        command = [images.program('pcow-img'), *map(str, args)]
        result = self.run_program('sh', '-c', '"$@" >/dev/null 2>err; echo $?', 'sh', *command)
        self.assertNotRegex(self.path('err').read_text(errors='replace'), 'Sanitizer|runtime error')
        return int(result.stdout)

    def test_header_bit_flips(self):
        """A bit that flips in the fixed header is noticed; check -r all puts the header back from
        its copy.
        """
        path = self.create_plain('a.pcow')
        self.io(path, 'write -P 1 0 64k')
        content = path.read_bytes()
        chance = random.Random(3)
        for _ in range(20):
            offset, bit = chance.randrange(512), chance.randrange(8)
            images.patch(path, offset, bytes([content[offset] ^ (1 << bit)]))
            self.img_fails('info', path, message=r'a\.pcow')
            self.assertEqual(2, self.run_any('check', path), f'offset {offset}')
            self.assertEqual(0, self.run_any('check', '-r', 'all', path), f'offset {offset}')
            self.io(path, 'read -P 1 0 64k')

    def test_random_damage(self):
        """Whatever is in the metadata, every command ends by itself; after a repair that succeeded
        the image is usable.
        """
        path = self.create_plain('a.pcow', '32M')
        for name in ('one', 'two'):
            self.io(path, 'write 0 5M')
            self.img('snapshot', '-c', name, path)
        content = path.read_bytes()
        chance = random.Random(4)
        for number in range(60):
            path.write_bytes(content)
            for _ in range(chance.choice((1, 3, 50))):
                area = chance.choice(
                    ((0, 4096), (64 * KIB, 65 * KIB), (192 * KIB, 193 * KIB), (MIB, MIB + KIB))
                )
                offset = chance.randrange(*area)
                images.patch(path, offset, chance.randbytes(chance.choice((1, 8))))
            for command in ('info', 'map', 'check'):
                self.assertIn(self.run_any(command, path), (0, 1, 2, 3, 63), f'damage {number}')
            self.path('a.pcow.rescue').unlink(missing_ok=True)
            if self.run_any('check', '-r', 'all', '--accept-loss', path) in (0, 3):
                self.assertIn(self.run_any('check', path), (0, 3), f'damage {number}')
                self.assertEqual(0, self.run_any('map', path), f'damage {number}')

    def test_unknown_features(self):
        path = self.create_plain('a.pcow')
        images.patch_header(path, 16, struct.pack('<Q', 1 << 40))
        self.refused(path, r'a\.pcow.*(feature|newer)')
        path = self.create_plain('b.pcow')
        images.patch_header(path, 24, struct.pack('<Q', 1 << 3))
        self.img('info', path)
        self.img_fails('snapshot', '-c', 'x', path, message=r'b\.pcow.*(feature|newer)')
        path = self.create_plain('c.pcow')
        images.patch_header(path, 32, struct.pack('<Q', 1 << 3))
        self.io(path, 'write 0 4k')
        path = self.create_plain('d.pcow')
        images.patch_header(path, 8, struct.pack('<I', 3))
        self.refused(path, r'd\.pcow.*(version|newer)')

    def test_forged_sizes(self):
        for offset, size, values in (
            (56, 4, (0, 11, 22, 63, 0xFFFFFFFF)),
            (60, 4, (0, 13)),
            (64, 4, (20, 63)),
            (68, 4, (0, 40)),
            (12, 4, (0, 512, 1 << 31)),
        ):
            for value in values:
                path = self.create_plain('a.pcow')
                images.patch_header(path, offset, struct.pack('<I', value)[:size])
                self.refused(path, r'a\.pcow')
                path.unlink()


class BadBaseTest(images.ImageTestCase):
    def setUp(self):
        super().setUp()
        self.base = self.create_plain('base.pcow')
        self.io(self.base, 'write -P 1 0 64k')
        self.top = self.create_plain('top.pcow', None, '-b', 'base.pcow')

    def refused(self, message):
        before = images.digest(self.top)
        self.img_fails('map', self.top, message=message)
        self.img_fails('snapshot', '-c', 'x', self.top, message=message)
        self.img_fails('convert', '-f', 'pcow', self.top, 'out.raw', message=message)
        self.one_line(
            self.run_program('pcow-io', '-c', 'read 0 4k', self.top, code=1), 'pcow-io', message
        )
        self.assertEqual(before, images.digest(self.top))

    def refused_and_warned_of(self, message):
        """The file is whole, which check says; that nobody can open it is said as well."""
        self.refused(message)
        result = self.run_program('pcow-img', 'check', self.top)
        self.one_line(result, 'pcow-img', f'warning: .*{message}')
        self.assertIn('No errors were found on the image.', result.stdout)
        result = self.run_program('pcow-img', 'check', '--output=json', self.top)
        self.one_line(result, 'pcow-img', f'warning: .*{message}')
        (found,) = json.loads(result.stdout)['findings']
        self.assertEqual('note', found['kind'])
        self.assertRegex(found['message'], message)
        result = self.run_program('pcow-img', 'check', '-q', self.top)
        self.assertEqual(('', ''), (result.stdout, result.stderr))

    def test_missing(self):
        self.base.unlink()
        self.refused_and_warned_of('top.pcow: its base base.pcow is missing.*rebase')

    def test_changed(self):
        self.io(self.base, 'write -P 2 0 4k')
        self.refused_and_warned_of('top.pcow: its base .*base.pcow was changed since.*rebase -u')
        self.img('rebase', '-u', '-b', 'base.pcow', self.top)
        self.io(self.top, 'read -P 2 0 4k')

    def test_snapshot_deleted(self):
        """By a copy of the base that has not been marked."""
        self.img('snapshot', '-c', 's', self.base)
        copy = self.path('copy')
        copy.write_bytes(self.base.read_bytes())
        self.top.unlink()
        self.img('create', '-q', '-b', self.base, '-o', 'base_snapshot=s', self.top)
        copy.rename(self.base)
        self.img('snapshot', '-d', 's', self.base)
        self.refused_and_warned_of('top.pcow.*snapshot')

    def test_two_down(self):
        middle = self.top.rename(self.path('middle.pcow'))
        self.top = self.create_plain('top.pcow', None, '-b', 'middle.pcow')
        self.base.unlink()
        self.refused_and_warned_of('middle.pcow: its base base.pcow is missing')
        self.assertFalse(self.run_program('pcow-img', 'check', '-U', middle, code=0).stdout == '')

    def test_base_in_use(self):
        """That will pass."""
        self.top.unlink()
        self.img('snapshot', '-c', 's', self.base)
        self.img('create', '-q', '-b', self.base, '-o', 'base_snapshot=s', self.top)
        user = self.start('pcow-io', self.base)
        user.stdin.write('write 0 4k\n')
        user.stdin.flush()
        user.stdout.readline()
        self.assertEqual('', self.run_program('pcow-img', 'check', self.top).stderr)

    def test_another_image(self):
        self.base.unlink()
        self.create_plain('base.pcow')
        self.refused_and_warned_of('top.pcow.*another image.*uuid')

    def test_failed_command_is_no_change(self):
        """A command on the base that was refused must not make the images on it invalid."""
        self.img('snapshot', '-c', 's', self.base)
        self.img('rebase', '-u', '-b', 'base.pcow', self.top)
        self.create_plain('other.pcow', None, '-b', 'base.pcow')
        self.img_fails('snapshot', '-c', 's', self.base, message="'s'")
        self.img_fails('snapshot', '-d', 'none', self.base, message="'none'")
        self.img_fails('snapshot', '-a', 'none', self.base, message="'none'")
        self.img_fails('resize', self.base, '0', message='out of range')
        self.io('other.pcow', 'read -P 1 0 64k')

    def test_in_use_by_a_writer(self):
        self.img('info', '--backing-chain', self.top)
        user = self.start('pcow-io', self.base)
        user.stdin.write('length\n')
        user.stdin.flush()
        user.stdout.readline()
        self.refused('base.pcow.*open for writing elsewhere')

    def test_base_is_held_while_in_use(self):
        user = self.start('pcow-io', self.top)
        user.stdin.write('length\n')
        user.stdin.flush()
        user.stdout.readline()
        self.one_line(
            self.run_program('pcow-io', '-c', 'write 0 4k', self.base, code=1), 'pcow-io', 'in use'
        )
        self.io(self.base, 'read -P 1 0 64k', options=('-r',))

    def test_forged_names(self):
        """No path that an image names is followed out of its directory."""
        outside = self.path('outside.pcow')
        self.base.rename(outside)
        pool = self.path('pool')
        pool.mkdir()
        top = pool / 'top.pcow'
        self.top.rename(top)
        self.top = top
        for name in (
            b'../outside.pcow',
            str(outside).encode(),
            b'/etc/passwd',
            b'.',
            b'..',
            b'',
            b'a/../b',
            b'x' * 256,
        ):
            images.patch_base(top, 40, name.ljust(256, b'\0')[:256])
            self.refused(r'top\.pcow')
        (pool / 'link.pcow').symlink_to(outside)
        images.patch_base(top, 40, b'link.pcow'.ljust(256, b'\0'))
        self.refused('link.pcow is a symbolic link; refused')

    def test_control_characters_are_not_shown(self):
        """A name from an image cannot send escape sequences to a terminal."""
        for name in (b'\x1b]0;owned\x07.pcow', b'\xc2\x9b31m\xc3\xa9.pcow', b'\x9b31m.pcow'):
            images.patch_base(self.top, 40, name.ljust(256, b'\0'))
            for command in ('info', 'map', 'check'):
                result = subprocess.run(
                    [images.program('pcow-img'), command, 'top.pcow'],
                    cwd=self.directory,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
                shown = result.stdout.decode()
                self.assertRegex(shown, r'\?(31m|\]0;owned)')
                self.assertFalse(re.search('[\x00-\x09\x0b-\x1f\x7f-\x9f]', shown), shown)

    def test_loop(self):
        """A chain that leads back to itself ends with a message."""
        images.patch_base(self.top, 40, b'top.pcow'.ljust(256, b'\0'))
        images.patch_base(self.top, 36, struct.pack('<I', 1))
        self.refused(r'top\.pcow')

    def test_deep_chain(self):
        name = 'base.pcow'
        for number in range(127):
            self.create_plain(f'{number}.pcow', None, '-b', name)
            name = f'{number}.pcow'
        self.io(name, 'read -P 1 0 64k')
        self.assertEqual(128, len(self.img_json('info', '--backing-chain', name)))
        self.img_fails('create', '-b', name, 'too-deep.pcow', message='has 128 files already')
        self.assertFalse(self.path('too-deep.pcow').exists())


class CheckTest(images.ImageTestCase):
    def test_clean(self):
        path = self.create_plain('a.pcow')
        self.io(path, 'write 0 3M')
        result = self.img_json('check', path)
        self.assertEqual(
            {
                'filename': str(path),
                'format': 'pcow',
                'check-errors': 0,
                'corruptions': 0,
                'certain': True,
                'corruptions-certain': 0,
                'corruptions-fixed': 0,
                'leaks': 0,
                'leaks-fixed': 0,
                'leaks-doubtful': 0,
                'lost-size': 0,
                'lost-size-is': 'exact',
                'lost': [],
                'lost-left-out': 0,
                'refused': False,
            },
            {
                key: value
                for key, value in result.items()
                if key not in ('findings', 'slabs', 'slabs-used')
            },
        )
        self.assertGreaterEqual(result['slabs'], result['slabs-used'])
        self.assertIn('No errors were found on the image.', self.img('check', path))
        self.assertEqual('', self.img('check', '-q', path))

    def test_corruption(self):
        path = self.create_plain('a.pcow')
        self.io(path, 'write -P 1 0 2M', 'write -P 2 4M 2M')
        # the owner word of the first data slab: its checksum is now wrong
        offset = 64 * KIB + 8
        byte = path.read_bytes()[offset]
        images.patch(path, offset, bytes([byte ^ 0x10]))
        result = self.img_json('check', path, code=2)
        self.assertEqual((1, 0), (result['corruptions'], result['corruptions-fixed']))
        self.assertIn('corruption', [finding['kind'] for finding in result['findings']])
        before = images.digest(path)
        self.assertIn('1 errors were found on the image.', self.img('check', path, code=2))
        self.img('check', '-r', 'leaks', path, code=2)
        self.assertEqual(before, images.digest(path))
        self.img('check', '-r', 'all', path, code=2)
        self.assertEqual(before, images.digest(path))
        self.assertIn('found and repaired', self.img('check', '-r', 'all', '--accept-loss', path))
        self.assert_clean(path)
        self.io(path, 'read -P 2 4M 2M')

    def test_wrong_usage(self):
        path = self.create_plain('a.pcow')
        self.img_fails('check', '-r', 'some', path, message="'leaks' or 'all'")
        self.img_fails('check', '-r', 'all', '-U', path, message='-U')
        self.img_fails('check', '-f', 'raw', path, message='does not support checks', code=63)

    def test_in_use(self):
        path = self.create_plain('a.pcow')
        user = self.start('pcow-io', path)
        user.stdin.write('write 0 4k\n')
        user.stdin.flush()
        user.stdout.readline()
        self.img_fails('check', path, message='a.pcow')
        self.img('check', '-U', path)
