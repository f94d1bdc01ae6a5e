# SPDX-License-Identifier: Apache-2.0
"""pcow-img: checksums of data that is final, and damage of it."""

import fcntl
import os
import struct
import time

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB

# where the first data lies: behind the three slabs at the begin of the group
DATA = 6 * MIB
# and where the page bitmaps do
BITMAPS = 1 * MIB


class ChecksumTest(images.ImageTestCase):
    def setUp(self):
        super().setUp()
        self.img('create', '-q', '-f', 'pcow', 'a.pcow', '64M')
        self.run_program('pcow-io', '-c', 'write -P 5 0 12M', self.path('a.pcow'))

    def info(self):
        return self.img_json('info', 'a.pcow')['format-specific']['data']

    def damage(self):
        with open(self.path('a.pcow'), 'r+b') as f:
            f.seek(DATA + 70 * KIB)
            f.write(b'x')

    def test_sealed(self):
        self.assertEqual(
            'Image sealed, with checksums.\n', self.img('seal', '--checksums', 'a.pcow')
        )
        self.assertTrue(self.info()['checksums'])
        self.assertIn('sealed: true, with checksums\n', self.img('info', 'a.pcow'))
        self.assertIn(
            'Data: 12 MiB verified, 0 B damaged, 0 B with a damaged checksum, '
            '0 B without a checksum\n',
            self.img('check', '--data', 'a.pcow'),
        )
        self.damage()
        self.assertEqual(0, self.img_json('check', 'a.pcow')['corruptions'])
        text = self.img('check', '--data', 'a.pcow', code=2)
        self.assertIn(
            'ERROR: the 2 MiB from guest byte 0 of the active layer (file slab 3): it is not what '
            'its checksum was made of\n',
            text,
        )
        result = self.img_json('check', '--data', 'a.pcow', code=2)
        self.assertEqual(
            [1, 0, True, 10 * MIB, 2 * MIB, 0, 0],
            [
                result[key]
                for key in (
                    'corruptions',
                    'corruptions-fixed',
                    'data-checked',
                    'data-verified',
                    'data-damaged',
                    'data-unjudged',
                    'data-without-checksum',
                )
            ],
        )
        # no repair touches it
        self.img('check', '-q', '-r', 'all', '--data', 'a.pcow', code=2)
        self.img('check', '-q', '--data', 'a.pcow', code=2)

    def test_convert(self):
        """Damage does not pass into a copy that has no checksums."""
        self.img('seal', '-q', '--checksums', 'a.pcow')
        self.img('convert', '-q', '-O', 'raw', 'a.pcow', 'whole')
        self.damage()
        self.path('old').write_bytes(b'old')
        for target in (('-O', 'raw', 'a.pcow', 'old'), ('-O', 'qcow2', 'a.pcow', 'new')):
            self.img_fails(
                'convert',
                *target,
                message=r'a\.pcow is damaged: the 2 MiB from guest byte 0 .*--accept-damage$',
            )
        self.assertEqual(b'old', self.path('old').read_bytes())
        self.assertFalse(self.path('new').exists())
        self.img('convert', '-q', '--accept-damage', '-O', 'raw', 'a.pcow', 'old')
        self.img('compare', '-q', 'a.pcow', '-F', 'raw', 'whole', code=1)
        self.img('compare', '-q', 'a.pcow', '-F', 'raw', 'old')
        # a server goes on; what is copied of it has what is damaged below
        self.img('create', '-q', '-b', 'a.pcow', 'server.pcow')
        self.img_fails(
            'convert', '-O', 'raw', 'server.pcow', 'new', message=r'a\.pcow is damaged: the 2 MiB'
        )
        self.img('convert', '-q', '--accept-damage', '-O', 'raw', 'server.pcow', 'new')

    def test_convert_to_a_template(self):
        """It gets checksums of its own, unless nobody has looked at what they would be of."""
        convert = ('convert', '-q', '-o', 'sealed=on')
        self.img('seal', '-q', '--checksums', 'a.pcow')
        self.img(*convert, 'a.pcow', 'whole.pcow')
        for name, *options in (('off', '-o', 'checksums=off'), ('accepted', '--accept-damage')):
            self.img(*convert, *options, 'a.pcow', f'{name}.pcow')
            result = self.img_json('check', '--data', f'{name}.pcow')
            self.assertEqual(
                (0, 12 * MIB), (result['data-verified'], result['data-without-checksum'])
            )
        result = self.img_json('check', '--data', 'whole.pcow')
        self.assertEqual((12 * MIB, 0), (result['data-verified'], result['data-without-checksum']))
        self.assertTrue(self.img_json('info', 'whole.pcow')['format-specific']['data']['checksums'])
        self.damage()
        self.img(*convert, '--accept-damage', '-o', 'checksums=on', 'a.pcow', 'meant.pcow')
        self.assertEqual(12 * MIB, self.img_json('check', '--data', 'meant.pcow')['data-verified'])
        for words, message in (
            (('-o', 'checksums=on'), 'goes with sealed=on'),
            (('-o', 'sealed=on,checksums=perhaps'), "not 'perhaps'"),
        ):
            self.img_fails('convert', *words, 'whole.pcow', 'no.pcow', message=message)
        self.img_fails(
            'convert', '-O', 'raw', '-o', 'checksums=on', 'whole.pcow', 'no', message='not known'
        )

    def test_convert_of_a_snapshot(self):
        """Also while somebody writes to the image."""
        self.img('snapshot', '-c', 's1', 'a.pcow')
        self.img('checksum', '-q', 'a.pcow')
        user = self.start('pcow-io', self.path('a.pcow'))
        user.stdin.write('read 0 4k\n')
        user.stdin.flush()
        user.stdout.readline()
        self.img('convert', '-q', '-O', 'raw', '-l', 's1', 'a.pcow', 'whole')
        self.damage()
        self.img_fails(
            'convert', '-O', 'raw', '-l', 's1', 'a.pcow', 'no', message="of snapshot 's1'"
        )
        user.communicate('quit\n')
        self.img_fails('convert', '-O', 'raw', 'a.pcow', 'no', message="of snapshot 's1'")
        self.img('convert', '-q', '--accept-damage', '-O', 'raw', 'a.pcow', 'as-it-is')

    def test_convert_without_a_lock(self):
        self.img('seal', '-q', '--checksums', 'a.pcow')
        with self.path('a.pcow').open('r+b') as file:
            lock = struct.pack('hhqqi4x', fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
            self.img_fails('convert', '-O', 'raw', 'a.pcow', 'no', message='a.pcow')
            self.img('convert', '-q', '-U', '-O', 'raw', 'a.pcow', 'whole')
        self.img('compare', '-q', 'a.pcow', '-F', 'raw', 'whole')
        self.damage()
        self.img_fails('convert', '-U', '-O', 'raw', 'a.pcow', 'no', message='is damaged')

    def test_sealed_without(self):
        self.assertEqual('Image sealed.\n', self.img('seal', 'a.pcow'))
        self.assertFalse(self.info()['checksums'])
        result = self.img_json('check', '--data', 'a.pcow')
        self.assertEqual((0, 12 * MIB), (result['data-verified'], result['data-without-checksum']))

    def test_snapshots(self):
        self.img_fails('checksum', 'a.pcow', 's1', message="has no snapshot 's1'")
        self.img('snapshot', '-c', 's1', 'a.pcow')
        self.run_program('pcow-io', '-c', 'write -P 6 0 2M', self.path('a.pcow'))
        self.assertEqual('Checksums made.\n', self.img('checksum', 'a.pcow'))
        self.assertEqual('', self.img('checksum', '-q', 'a.pcow', 's1'))
        result = self.img_json('check', '--data', 'a.pcow')
        self.assertEqual(
            (12 * MIB, 2 * MIB), (result['data-verified'], result['data-without-checksum'])
        )
        self.damage()
        self.assertIn("of snapshot 's1'", self.img('check', '--data', 'a.pcow', code=2))

    def drop_checksum(self):
        """That of the first slab with data."""
        images.patch(self.path('a.pcow'), 4 * MIB + DATA // (2 * MIB) * 64, bytes(64))

    def check_not_blessed(self, words, whose, *command):
        """Nothing is made of it, and it stays found, until somebody accepts it."""
        name = self.path('a.pcow')
        result = self.run_program('pcow-img', *command, 'a.pcow', code=2)
        line = f'the 2 MiB from guest byte 0 of {whose} (file slab 3): {words}'
        self.assertIn(f'ERROR: {line}\n', result.stdout)
        self.assertNotIn('made.', result.stdout)
        self.assertRegex(
            result.stderr, r'^pcow-img: .* is damaged: the 2 MiB .* --accept-damage\n$'
        )
        self.assertIn(line, self.img('check', '--data', name, code=2))

    def test_damage_of_a_snapshot_is_not_blessed(self):
        for words in ('it is not what its checksum was made of', 'its checksum is gone'):
            self.img('create', '-q', '-f', 'pcow', 'b.pcow', '64M')
            self.run_program('pcow-io', '-c', 'write -P 5 0 12M', self.path('b.pcow'))
            self.path('b.pcow').replace(self.path('a.pcow'))
            self.img('snapshot', '-c', 's1', 'a.pcow')
            self.img('snapshot', '-c', 's2', 'a.pcow')
            self.img('checksum', '-q', 'a.pcow')
            self.damage()
            if 'gone' in words:
                self.drop_checksum()
            for command in (('checksum',), ('checksum', '--rate', '1G')):
                self.check_not_blessed(words, "snapshot 's1'", *command)
            with self.subTest('beside a writer'):
                user = self.start('pcow-io', self.path('a.pcow'))
                user.stdin.write('read 0 4k\n')
                user.stdin.flush()
                user.stdout.readline()
                result = self.run_program('pcow-img', 'checksum', 'a.pcow', code=2)
                user.communicate('quit\n')
                self.assertEqual(1, result.stdout.count('ERROR: '))
            text = self.img('checksum', '--accept-damage', 'a.pcow')
            self.assertIn(
                f"Accepted: the 2 MiB from guest byte 0 of snapshot 's1' (file slab 3): {words}\n",
                text,
            )
            self.img('check', '-q', '--data', 'a.pcow')

    def test_damage_of_a_template_is_not_blessed(self):
        self.img('seal', '-q', '--checksums', 'a.pcow')
        self.damage()
        self.drop_checksum()
        self.img('check', '-q', '--data', 'a.pcow', code=2)
        self.img('unseal', '-q', 'a.pcow')
        self.check_not_blessed('its checksum is gone', 'the active layer', 'seal', '--checksums')
        self.assertFalse(self.img_json('info', 'a.pcow')['format-specific']['data']['sealed'])
        self.img('seal', '-q', '--checksums', '--accept-damage', 'a.pcow')
        self.img('check', '-q', '--data', 'a.pcow')

    def test_older_image(self):
        self.img('create', '-q', '-f', 'pcow', '-o', 'mirror=off', 'old.pcow', '64M')
        self.run_program('pcow-io', '-c', 'write -P 5 0 4M', self.path('old.pcow'))
        self.img_fails('seal', '--checksums', 'old.pcow', message='amend -o mirror=on')
        self.img('amend', '-f', 'pcow', '-o', 'mirror=on', 'old.pcow')
        self.img('seal', '-q', '--checksums', 'old.pcow')
        self.assertEqual(4 * MIB, self.img_json('check', '--data', 'old.pcow')['data-verified'])

    def test_older_image_that_is_damaged(self):
        """Its mirror would say from then on that it is whole."""
        self.img('create', '-q', '-f', 'pcow', '-o', 'mirror=off', 'old.pcow', '64M')
        self.run_program('pcow-io', '-c', 'write -P 5 0 4M', self.path('old.pcow'))
        self.img('snapshot', '-c', 's1', 'old.pcow')
        with self.path('old.pcow').open('r+b') as file:
            file.seek(BITMAPS)
            whole = file.read(4096)
            file.seek(BITMAPS)
            file.write(bytes(4096))
        self.img_fails(
            'amend', '-f', 'pcow', '-o', 'mirror=on', 'old.pcow', message='may have lost .* repair'
        )
        self.img_fails('seal', '--checksums', 'old.pcow', message='amend -o mirror=on')
        with self.path('old.pcow').open('r+b') as file:
            file.seek(BITMAPS)
            file.write(whole)
        self.img('amend', '-f', 'pcow', '-o', 'mirror=on', 'old.pcow')

    def test_rate(self):
        begun = time.monotonic()
        self.img('seal', '-q', '--checksums', '--rate', '12M', 'a.pcow')
        self.assertGreater(time.monotonic() - begun, 0.9)
        begun = time.monotonic()
        self.img('check', '-q', '--data', '--rate', '12M', 'a.pcow')
        self.assertGreater(time.monotonic() - begun, 0.9)
        self.img_fails('check', '--rate', 'x', 'a.pcow', message='rate')
