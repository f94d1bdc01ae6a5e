# SPDX-License-Identifier: Apache-2.0
"""A repair that loses something: what it says before, what it refuses, what it keeps, and the way
of the runbook from the damage to the data.
"""

import json
from pathlib import Path
import re
import stat

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB
from tests.functional.images import SLAB

_OWNERS, _RECORDS, _BITMAPS = 64 * KIB, 192 * KIB, MIB


class RescueTest(images.ImageTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.base = self.path('base.pcow')
        self.img('create', '-q', self.base, '8M')
        self.io(self.base, 'write -P 0xba 0 8M')
        self.img('seal', self.base)
        self.top = self.path('top.pcow')
        self.create_plain('top.pcow', None, '-b', 'base.pcow', '-F', 'pcow')
        self.io(self.top, 'write -P 1 0 64k', 'write -P 2 2M 64k')
        self.img('snapshot', '-c', 'before "it"', self.top)
        self.io(self.top, 'write -P 3 4M 64k')
        self.lost = 0

    def slab(self, offset: int) -> int:
        """The file slab of a guest offset: which one that is, a thread has its part in."""
        return next(
            item['offset'] // SLAB
            for item in self.img_json('map', self.top)
            if item['depth'] == 0 and item['start'] == offset and item['present']
        )

    def lose(self, *offsets: int) -> list[int]:
        """Damage the owner words of file slabs, which are given in their order."""
        slabs = [self.slab(offset) for offset in offsets]
        for slab in slabs:
            images.patch(self.top, _OWNERS + 8 * slab, b'\xff' * 8)
        return sorted(slabs)

    def damage(self) -> list[int]:
        """Of the snapshot's two."""
        return self.lose(0, 2 * MIB)

    def test_words_and_numbers(self):
        slabs = self.damage()
        before = images.digest(self.top)
        text = self.img('check', self.top, code=2)
        self.assertIn('Loss: 65536 bytes of data of a layer that nothing names\n', text)
        self.assertIn('A repair would lose at most 131072 bytes of guest data and VM state.', text)
        found = self.img_json('check', self.top, code=2)
        self.assertEqual((131072, 'at-most'), (found['lost-size'], found['lost-size-is']))
        self.assertFalse(found['refused'])
        self.assertEqual(
            [('data', 65536, slab * SLAB) for slab in slabs],
            [(item['kind'], item['length'], item['offset']) for item in found['lost']],
        )
        for arguments in (('-r', 'all'), ('-r', 'leaks')):
            result = self.run_program('pcow-img', 'check', *arguments, self.top, code=2)
            if arguments[1] == 'all':
                self.assertIn('Keep a copy of the file first', result.stderr)
                self.assertIn('check -r all --accept-loss', result.stderr)
            self.assertEqual(before, images.digest(self.top))
        self.assertTrue(self.img_json('check', '-r', 'all', self.top, code=2)['refused'])
        result = self.run_program('pcow-img', 'check', '-q', '-r', 'all', self.top, code=2)
        self.assertEqual('', result.stdout)
        self.assertRegex(result.stderr, r'^\S+: .*: nothing was repaired: it would lose .*\n$')
        self.assertEqual(before, images.digest(self.top))
        self.img_fails('check', '--accept-loss', self.top, message='for a repair')
        self.img_fails(
            *('check', '-q', '-r', 'all', '--accept-loss', self.top),
            message=r'has lost at most 131072 bytes .* is kept in .*top\.pcow\.rescue$',
            code=0,
        )

    def test_layers_are_named(self):
        """Cut short at a slab: nothing is read as the base's bytes."""
        of_each = {
            self.slab(0): (1, 'before "it"', 0, 65536, 0),
            self.slab(2 * MIB): (1, 'before "it"', 2 * MIB, 65536, 0),
            self.slab(4 * MIB): (2, None, 4 * MIB, 65536, 0),
        }
        kept = of_each.pop(1)[2] // MIB // 2
        with self.top.open('r+b') as file:
            file.truncate(2 * SLAB)
        for command in ('info', 'map', 'commit'):
            self.img_fails(command, self.top, message='cut short.*Put a whole copy back')
        self.img_fails('convert', '-O', 'raw', self.top, 'out', message='cut short')
        found = self.img_json('check', self.top, code=2)
        self.assertEqual((65536 + 65536, 'exact'), (found['lost-size'], found['lost-size-is']))
        self.assertEqual(
            [of_each[slab] for slab in sorted(of_each)],
            [
                (
                    item['layer'],
                    item.get('snapshot'),
                    item['guest-offset'],
                    item['length'],
                    item['content'],
                )
                for item in found['lost']
            ],
        )
        text = self.img('check', self.top, code=2)
        self.assertIn(
            'Loss: 65536 bytes of data of snapshot \'before "it"\' (layer 1), from guest byte ',
            text,
        )
        self.assertIn(' on; nothing of it is in the file\n', text)
        self.img('check', '-q', '-r', 'all', '--accept-loss', self.top)
        patterns = [1, 2, 3]
        for number in range(3):
            pattern = patterns[number] if number == kept else 0xBA
            self.io(self.top, f'read -P {pattern} {2 * number}M 64k')

    def test_next_to_nothing_is_left(self):
        """What would have told how much there was is gone, too."""
        for size, words in (
            (64 * KIB, 'guest data and VM state, and nothing tells how much'),
            (128 * KIB, 'about 6291456 bytes'),
            (MIB, 'at most 6291456 bytes'),
            (MIB + 64 * KIB, '196608 bytes'),
        ):
            cut = self.path('cut.pcow')
            cut.write_bytes(self.top.read_bytes()[:size])
            self.assertIn(f'A repair would lose {words}', self.img('check', cut, code=2))
            found = self.img_json('check', cut, code=2)
            known = re.search(r'\d+', words)
            self.assertEqual(int(known[0]) if known else None, found['lost-size'])
            self.assertEqual('unknown' == found['lost-size-is'], known is None)
            result = self.run_program('pcow-img', 'check', '-r', 'all', cut, code=2)
            self.assertIn(f'it would lose {words}', result.stderr)
            self.assertEqual(size, cut.stat().st_size)

    def test_the_way_back(self):
        """What the runbook says: keep, repair, list, take out, put back."""
        first = self.slab(0)
        order = [b'\1', b'\2'] if self.damage()[0] == first else [b'\2', b'\1']
        self.top.chmod(0o640)
        result = self.img_json('check', '-r', 'all', '--accept-loss', self.top)
        rescue = self.path('top.pcow.rescue')
        self.assertEqual(str(rescue), result['rescue'])
        self.assertEqual(0o640, stat.S_IMODE(rescue.stat().st_mode))
        self.assertEqual(131072, result['lost-size'])
        self.io(self.top, 'read -P 0xba 0 64k', 'read -P 3 4M 64k')
        self.assertIn('before "it"', self.img('snapshot', '-l', self.top))
        table = self.img('rescue', rescue)
        self.assertEqual(
            [('65536', '65536'), ('65536', '65536')],
            re.findall(r'^\d+ +data +0 +- +(\d+) +(\d+)', table, re.MULTILINE),
        )
        self.img('rescue', '-x', 'out', rescue)
        listed = json.loads(self.img('rescue', '--output=json', rescue))
        self.assertTrue(listed['repaired'])
        self.assertEqual(['before "it"', None], [x.get('snapshot') for x in listed['layers']])
        files = sorted(self.path('out').iterdir())
        self.assertEqual([byte * 65536 for byte in order], [file.read_bytes() for file in files])
        self.assertEqual(0o600, stat.S_IMODE(files[0].stat().st_mode))
        self.io(self.top, f'write -s {files[order.index(bytes([1]))]} 0 64k')
        self.io(self.top, 'read -P 1 0 64k')
        self.img_fails('rescue', '-x', 'out', rescue, message='cannot make the directory')
        # a second loss is not mixed with the first
        self.lose(4 * MIB)
        self.img_fails(
            'check', '-r', 'all', '--accept-loss', self.top, message='keeps what an earlier repair'
        )

    def test_bitmaps(self):
        """They look like those of slabs that were never stored to, but are told as data."""
        images.patch(self.top, _BITMAPS, bytes(4096))
        found = self.img_json('check', self.top, code=2)
        self.assertEqual((196608, 'estimate'), (found['lost-size'], found['lost-size-is']))
        self.assertIn('may be data', self.img('check', self.top, code=2))
        before = images.digest(self.top)
        result = self.run_program('pcow-img', 'check', '-r', 'leaks', self.top, code=2)
        self.assertIn('check -r leaks --accept-loss', result.stderr)
        self.assertEqual(before, images.digest(self.top))
        self.img('check', '-q', '-r', 'leaks', '--accept-loss', self.top)
        self.img('rescue', '-x', 'out', 'top.pcow.rescue')
        self.assertEqual(
            ['data-layer-1-at-0', 'data-layer-1-at-2097152', 'data-layer-2-at-4194304'],
            sorted(file.name.partition('-')[2] for file in self.path('out').iterdir()),
        )

    def test_slab_table(self):
        """A page of it that is zeros: nothing has an owner, and the pages are kept."""
        images.patch(self.top, _OWNERS, bytes(4096))
        found = self.img_json('check', self.top, code=2)
        self.assertEqual((196608, 'at-most'), (found['lost-size'], found['lost-size-is']))
        self.img('check', '-q', '-r', 'leaks', self.top, code=2)
        self.img('check', '-q', '-r', 'leaks', '--accept-loss', self.top)
        self.assertEqual(3, self.img('rescue', 'top.pcow.rescue').count(' 65536          65536'))

    def test_slab_table_and_bitmaps(self):
        """Nothing tells what of three slabs was data: neither 0 bytes nor a mere leak."""
        images.patch(self.top, _OWNERS, bytes(4096))
        images.patch(self.top, _BITMAPS, bytes(4096))
        found = self.img_json('check', self.top, code=2)
        self.assertEqual((None, 'unknown'), (found['lost-size'], found['lost-size-is']))
        self.assertEqual(['unknown'] * 3, [item['kind'] for item in found['lost']])
        text = self.img('check', self.top, code=2)
        self.assertIn('would lose guest data and VM state, and nothing tells how much.', text)
        self.assertTrue(self.img_json('check', '-r', 'leaks', self.top, code=2)['refused'])
        self.img('check', '-q', '-r', 'leaks', '--accept-loss', self.top)
        self.assertIn(b'"lost-size": null}', self.path('top.pcow.rescue').read_bytes())
        self.assertEqual(3, self.img('rescue', 'top.pcow.rescue').count('unknown'))
        self.img('check', self.top)

    def test_layer_records_and_their_mirror(self):
        """Whatever they said, no byte of it can be counted: that is not 0."""
        path = self.create('mirrored.pcow', '16M')
        self.io(path, 'write -P 1 0 64k')
        self.img('snapshot', '-c', 's1', path)
        for copy in (0, 2 * MIB):
            images.patch(path, _RECORDS + copy, bytes(4096))
        found = self.img_json('check', path, code=2)
        self.assertEqual((None, 'unknown'), (found['lost-size'], found['lost-size-is']))
        text = self.img('check', path, code=2)
        self.assertIn('Loss: what a part of the metadata that is gone said', text)
        self.assertIn('would lose guest data and VM state, and nothing tells how much.', text)

    def test_no_copy_of_what_may_be_lost(self):
        """It opens, and would give the base's bytes."""
        child = self.path('child.pcow')
        self.img('create', '-q', '-b', 'top.pcow', child)
        healthy = self.top.read_bytes()
        for offset in (_OWNERS, _BITMAPS):
            self.top.write_bytes(healthy)
            images.patch(self.top, offset, bytes(4096))
            # each host crash may leave owner words without their bitmaps there
            cached = offset == _BITMAPS and self.probe() == 'page-cache'
            for source in (self.top, child):
                words = ('convert', '-q', '-O', 'raw', source, 'out')
                if cached:
                    self.assertRegex(
                        self.run_program('pcow-img', *words).stderr,
                        r'warning: .*top\.pcow: .*196608 bytes .* may be lost, or were not flushed',
                    )
                    self.path('out').unlink()
                else:
                    self.img_fails(
                        *words,
                        message=r'top\.pcow may have lost .*196608 bytes .* see pcow-img check'
                        '.*--accept-damage',
                    )
            self.assertFalse(self.path('out').exists())
            if not cached:
                self.img_fails('compare', self.top, self.base, message='may have lost', code=2)
            self.img('convert', '-q', '--accept-damage', '-O', 'raw', self.top, 'out')
            self.assertEqual(b'\xba' * 8 * MIB, self.path('out').read_bytes())
            self.path('out').unlink()
        self.img('check', '-q', '-r', 'leaks', '--accept-loss', self.top)
        self.img('convert', '-q', '-O', 'raw', child, 'out')

    def probe(self) -> str:
        return self.img_json('probe', self.directory)['persistence']

    def test_copy_on_a_base_that_may_have_lost(self):
        images.patch(self.top, _OWNERS, bytes(4096))
        words = ('-O', 'pcow', '-B', 'top.pcow', self.base, 'out.pcow')
        self.img_fails('convert', *words, message=r'top\.pcow may have lost .*--accept-damage')
        self.img('convert', '-q', '--accept-damage', *words)
        self.io('out.pcow', 'read -P 0xba 0 8M')

    def kill_after(self, path: Path, *commands: str) -> None:
        """pcow-io, when it has done these."""
        process = self.start('pcow-io', '--no-map', path)
        for command in (*commands, 'read 0 4k'):
            process.stdin.write(f'{command}\n')
        while 'read' not in process.stdout.readline():
            pass
        process.kill()
        process.wait()

    def test_what_a_killed_writer_had_set_free(self):
        """It keeps its blocks, and no owner word says whose it was: a leak, and no lost data."""
        for mirror in ('off', 'on'):
            for commands in (
                ('snapshot revert clean',),
                ('snapshot create full', 'snapshot revert clean', 'snapshot delete full'),
            ):
                path = self.create(f'{mirror}{len(commands)}.pcow', '16M', '-o', f'mirror={mirror}')
                self.img('snapshot', '-c', 'clean', path)
                self.kill_after(path, 'write -P 5 0 8M', 'flush', *commands)
                found = self.img_json('check', path, code=3)
                self.assertEqual((0, 0), (found['leaks-doubtful'], found['lost-size']), found)
                self.assertGreaterEqual(found['leaks'], 4)
                self.assertEqual('', self.img('convert', '-q', '-O', 'raw', path, 'out'))
                self.assertEqual(bytes(16 * MIB), self.path('out').read_bytes())
                self.path('out').unlink()
                self.img('check', '-r', 'leaks', path)
                self.assert_clean(path)
                self.io(path, 'read -P 0 0 16M', 'write -P 6 0 8M', 'read -P 6 0 8M')
                self.assert_clean(path)

    def test_files_that_are_none(self):
        rescue = self.path('x.rescue')
        good = b'{"pcow-rescue": 1, "uuid": "00", "date": 1}\n'
        for content, message in (
            (b'', 'end is missing'),
            (b'no\n', 'none of a rescue file'),
            (b'{"pcow-rescue": 2}\n', 'none of a rescue file'),
            (good, 'interrupted before it changed anything'),
            (good * 2, 'none of a rescue file'),
            (good + b'{"at": 0, "bytes": 1}\nx\n', 'outside'),
            (good + b'{"lost": "data", "there": 4096}\n{"at": 4000, "bytes": 97}\n', 'outside'),
            (good + b'{"lost": "data", "there": 9}\n{"at": 0, "bytes": 9}\nshort', 'cut short'),
            (good + b'{"lost": "data"}\n' * 2 + b'{"end": 3}\n', 'has 2 ranges.*tells of 3'),
            (good + b'{"lost": "data"}\n' * 2 + b'{"end": 1}\n', 'has 2 ranges.*tells of 1'),
            (good + b'{"end": 0}\n{"lost": "data"}\n', 'has 1 ranges.*tells of 0'),
            (good + b'{"lost": "../../x", "there": 9, "guest-offset": "../x"}\n', 'end is missing'),
        ):
            rescue.write_bytes(content)
            result = self.run_program('pcow-img', 'rescue', '--output=json', rescue, code=1)
            self.one_line(result, 'pcow-img', message)
        self.img_fails('rescue', '-x', 'out', rescue, message='end is missing')
        self.assertEqual(
            ['0001-unknown-layer-0-at-0'], [file.name for file in self.path('out').iterdir()]
        )
        self.img_fails('rescue', 'none', message='cannot open none')
