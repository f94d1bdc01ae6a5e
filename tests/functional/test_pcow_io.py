# SPDX-License-Identifier: Apache-2.0
"""pcow-io: loads and stores in a mapped image, as a VM does them."""

import json
import os
import random
import signal
import time

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB

# Every way to reach the content must show the same.
ENGINES = (('--engine', 'signal'), ('--engine', 'minor'), ('--no-map',))


class CommandTest(images.ImageTestCase):
    def test_output_as_qemu_io(self):
        """The same commands give the same lines, but for the times."""
        path = self.create('a.pcow')
        self.run_program('qemu-img', 'create', '-q', '-f', 'raw', 'a.raw', '16M')
        commands = (
            'write -P 0xab 64k 4k',
            'read -P 0xab 64k 4k',
            'read -P 1 64k 4k',
            'write 1.5M 100',
            'read -v 1536k 100',
            'length',
            'write -z 64k 8k',
            'read -P 0 64k 8k',
            'discard 1M 1M',
            'read -q 0 1M',
            'write -q -P 7 0 512',
            'read -P 7 -s 256 -l 256 0 1k',
            'r -P 0 512 512',
            'w 3M 3M',
        )
        for command in commands:
            theirs = self.run_program(
                'qemu-io',
                '-f',
                'raw',
                '-c',
                command,
                'a.raw',
                code=int(command == 'read -P 1 64k 4k'),
            )
            ours = self.run_program('pcow-io', '-c', command, path, code=theirs.returncode)
            self.assertEqual(self.timeless(theirs.stdout), self.timeless(ours.stdout), command)

    def test_stray_write(self):
        """Somebody else overwrites metadata: pcow-io says so, check finds it and loses nothing."""
        path = self.create('a.pcow')
        self.io(path, 'write -P 7 0 4M')
        process = self.start('pcow-io', path)
        process.stdin.write('write -P 8 8M 1M\nread -P 8 8M 1M\n')
        while 'read' not in process.stdout.readline():
            pass
        with open(path, 'r+b') as file:
            file.seek(MIB)  # page bitmaps
            file.write(bytes(4096))
        _, complaint = process.communicate('quit\n')
        self.assertEqual(1, process.returncode)
        self.assertIn('page of bitmaps', complaint)
        self.assertIn('somebody else has written to the file', complaint)
        text = self.run_program('pcow-img', 'check', path, code=2).stdout
        self.assertIn('nothing is lost', text)
        self.run_program('pcow-img', 'check', '-r', 'all', path)
        self.assert_clean(path)
        self.io(path, 'read -P 8 8M 1M', 'read -P 7 0 4M')

    def test_more_in_a_page_than_in_its_mirror(self):
        """Memory of the writer may have lost a bit: that nothing is lost is not said then."""
        path = self.create('a.pcow')
        self.io(path, 'write -P 7 0 64k')
        found = next(x for x in self.img_json('map', path) if x['present'])
        with open(path, 'r+b') as file:
            file.seek(MIB + found['offset'] // (2 * MIB) * 64 + 60)
            file.write(b'\x10')
        text = self.run_program('pcow-img', 'check', path, code=2).stdout
        self.assertIn('its mirror is whole, and counts; the page names 1 pages of data', text)
        self.assertNotIn('nothing is lost', text)
        self.run_program('pcow-img', 'check', '-r', 'all', path)
        self.io(path, 'read -P 7 0 64k', 'read -P 0 64k 1M')

    @staticmethod
    def timeless(text):
        return [line.split('; ')[0] for line in text.splitlines()]

    def test_pattern_verification(self):
        path = self.create('a.pcow')
        self.io(path, 'write -P 1 4096 4096')
        text = self.io(path, 'read -P 1 4095 2', code=1)
        self.assertIn('Pattern verification failed at offset 4095, 2 bytes\n', text)
        text = self.io(path, 'read -P 1 -s 1 -l 100 4095 4k')
        self.assertNotIn('failed', text)
        self.assertIn(
            'failed at offset 4095, 100 bytes', self.io(path, 'read -P 1 -l 100 4095 4k', code=1)
        )

    def test_json(self):
        path = self.create('a.pcow')
        self.io(path, 'write -q -P 0xab 4096 4')
        found = json.loads(self.io(path, 'read -j 4096 5'))
        self.assertEqual({'offset': 4096, 'length': 5, 'data': 'abababab00'}, found)
        found = json.loads(self.io(path, 'read -j 1M 5M'))
        self.assertEqual(bytes(5 * MIB), bytes.fromhex(found['data']))

    def test_a_failure_does_not_stop_the_rest(self):
        path = self.create('a.pcow')
        text = self.io(
            path,
            'frobnicate',
            'read -P 1 0 4k',
            'write -P 2 0 4k',
            'quit',
            'write -P 3 0 4k',
            code=1,
        )
        self.assertIn('wrote 4096/4096', text)
        self.io(path, 'read -P 2 0 4k')

    def test_stdin(self):
        path = self.create('a.pcow')
        result = self.run_program(
            'pcow-io',
            path,
            stdin='write -P 9 0 4k\n\n  length \nread -P 9 0 4k\nquit\nnot reached\n',
        )
        self.assertRegex(result.stdout, '(?s)^wrote 4096.*\n16 MiB\nread 4096/4096')
        self.assertEqual('', result.stderr)
        self.run_program('pcow-io', path, stdin='read -P 8 0 4k', code=1)

    def test_bad_commands(self):
        path = self.create('a.pcow')
        before = images.digest(path)
        for command, message in (
            ('frobnicate', "'frobnicate' is not known; see 'help'"),
            ('raed 0 4k', "did you mean 'read'"),
            ('read 0 4kB', 'in 1000 or in 1024: write 4K or 4KiB'),
            ('write', 'bad argument count 0'),
            ('write 1', 'bad argument count 1'),
            ('read 1 2 3', 'bad argument count 3'),
            ('write -Y 0 1', "'-Y' is not known"),
            ('read -P', "'-P' needs a value"),
            ('read -P 256 0 1', 'not a pattern'),
            ('read -P -1 0 1', 'not a pattern'),
            ('read -P x 0 1', 'not a pattern'),
            ('read 0 4x', 'not a size'),
            ('read -1 4', "'-1' is not known"),
            ('read 16M 1', 'beyond the end'),
            ('write 0 16777217', 'beyond the end'),
            ('read 7E 1', 'beyond the end'),
            ('write 8E 1', 'too large'),
            ('read -s 1 0 4k', 'give -P too'),
            ('read -P 0 -s 5k 0 4k', 'exceeds end'),
            ('read -P 0 -s 1 -l 4k 0 4k', 'exceeds end'),
            ('write -z -P 1 0 1', 'only one of'),
            ('write -s none 0 1', 'none'),
            ('write -s /dev/null 0 1', 'empty'),
            ('resize 0', 'out of range'),
            ('resize 8M', 'shrink'),
            ('sleep x', 'not a number'),
            ('snapshot', 'bad argument count'),
            ('snapshot create', 'usage'),
            ('snapshot revert none', "'none'"),
            ('help frobnicate', 'not known'),
            ('length 1', 'bad argument count'),
            (' '.join(['w'] * 40), 'more than 32'),
        ):
            result = self.run_program('pcow-io', '--no-map', '-c', command, path, code=1)
            self.one_line(result, 'pcow-io', message)
            self.assertEqual('', result.stdout)
        self.assertEqual(before, images.digest(path))

    def test_bad_options(self):
        path = self.create('a.pcow')
        for args, message in (
            (('--engine', 'uffd', path), "'signal' or 'minor', not 'uffd'"),
            (('--full', 'x', path), "'fail' or 'wait'"),
            (('-Z', path), "'-Z'"),
            ((), 'one image file name'),
            ((path, path), 'one image file name'),
            (('--vma-budget', '0', path), 'number'),
            (('-f', 'raw', path), "'pcow' or 'pcow1'"),
            (('-s', 'none', path), "'none'"),
            (('none.pcow',), 'No such file'),
        ):
            self.one_line(self.run_program('pcow-io', *args, code=1), 'pcow-io', message)

    def test_help_and_version(self):
        self.assertTrue(self.run_program('pcow-io', '--help').stdout.startswith('usage: pcow-io'))
        self.assertRegex(self.run_program('pcow-io', '--version').stdout, r'^pcow-io version \d')
        path = self.create('a.pcow')
        text = self.io(path, 'help')
        for command in (
            'read',
            'write',
            'discard',
            'flush',
            'length',
            'map',
            'info',
            'resize',
            'sleep',
            'snapshot',
            'quit',
            'help',
        ):
            self.assertRegex(text, f'(?m)^{command} ')

    def test_map_and_info(self):
        path = self.create('a.pcow')
        text = self.io(path, 'write 1M 64k', 'map', 'info')
        self.assertRegex(
            text, r'(?m)^64 KiB \(0x10000\) bytes     allocated at offset 1 MiB \(0x100000\)$'
        )
        self.assertRegex(
            text, r'(?m)^1 MiB \(0x100000\) bytes not allocated at offset 0 bytes \(0x0\)$'
        )
        self.assertRegex(text, '(?m)^engine: signal$')
        self.assertRegex(text, '(?m)^write traps: [1-9]')
        self.assertRegex(text, '(?m)^data size: 64 KiB$')

    def test_machine_readable(self):
        path = self.create('a.pcow')
        self.assertRegex(self.io(path, 'read -C 0 64k'), r'^65536,1,\d+\.\d+,\d+\.\d+,\d+\.\d+\n$')

    def test_write_from_file(self):
        path = self.create('a.pcow')
        content = os.urandom(70001)
        self.path('content').write_bytes(content)
        self.io(path, f'write -s {self.path("content")} 4093 70001')
        self.img('convert', path, 'a.raw')
        self.assertEqual(content, self.path('a.raw').read_bytes()[4093 : 4093 + 70001])


class EngineTest(images.ImageTestCase):
    def test_content(self):
        for options in ENGINES:
            path = self.create(f'a{options[-1]}.pcow')
            self.io(
                path,
                'read -P 0 0 16M',
                'write -P 1 0 1',
                'read -P 0 1 16777215',
                'write -P 2 2097151 2',
                'read -P 2 2097151 2',
                'write -P 3 4M 4M',
                'flush',
                'read -P 3 4M 4M',
                'discard 5M 1M',
                'read -P 0 5M 1M',
                'read -P 3 6M 2M',
                'write -z 7M 4097',
                'read -P 0 7M 4097',
                'read -P 3 7344129 1044479',
                'resize 20M',
                'read -P 0 16M 4M',
                'write -P 4 19M 1M',
                'resize -s 18M',
                'length',
                options=options,
            )
            self.io(
                path,
                'read -P 1 0 1',
                'read -P 3 4M 1M',
                'read -P 0 5M 1M',
                'read -P 3 6M 1M',
                'read -P 0 8M 10M',
                options=options,
            )
            self.assert_clean(path)

    def test_copy_on_write(self):
        base = self.create('base.pcow')
        self.io(base, 'write -P 1 0 6M')
        self.img('seal', base)
        for options in ENGINES:
            top = self.create(f'top{options[-1]}.pcow', None, '-b', 'base.pcow')
            self.io(
                top,
                'read -P 1 0 6M',
                'write -P 2 4095 2',
                'read -P 1 0 4095',
                'read -P 2 4095 2',
                'read -P 1 4097 2093055',
                'write -P 0 1M 64k',
                'write -P 3 5M 2M',
                'discard 2M 1M',
                'read -P 0 2M 1M',
                options=options,
            )
            self.io(
                top,
                'read -P 2 4095 2',
                'read -P 0 1M 64k',
                'read -P 3 5M 2M',
                'read -P 0 2M 1M',
                'read -P 1 3M 2M',
                'read -P 0 7M 9M',
                options=options,
            )
            self.assert_clean(top, base)
        self.io(base, 'read -P 1 0 6M', options=('-r',))

    def test_snapshots_under_the_map(self):
        for options in ENGINES:
            path = self.create(f'a{options[-1]}.pcow')
            text = self.io(
                path,
                'write -P 1 0 4M',
                'snapshot create one',
                'write -P 2 1M 1M',
                'snapshot create two',
                'write -P 3 0 64k',
                'read -P 3 0 64k',
                'snapshot revert one',
                'read -P 1 0 4M',
                'write -P 4 3M 64k',
                'snapshot create three',
                'snapshot revert two',
                'read -P 1 0 1M',
                'read -P 2 1M 1M',
                'snapshot delete one',
                'read -P 2 1M 1M',
                'read -P 1 2M 2M',
                'snapshot list',
                options=options,
            )
            self.assertRegex(text, r'(?m)^\d+ \(on \d+\), .*: three$')
            self.io(path, 'read -P 4 3M 64k', 'read -P 1 0 3M', options=(*options, '-s', 'three'))
            self.assert_clean(path)

    def test_read_only(self):
        path = self.create('a.pcow')
        self.io(path, 'write -P 1 0 64k')
        self.img('snapshot', '-c', 's', path)
        self.io(path, 'write -P 2 0 64k')
        before = images.digest(path)
        for options in ENGINES:
            for more, pattern in ((('-r',), 2), (('-U',), 2), (('-s', 's'), 1)):
                self.io(
                    path,
                    f'read -P {pattern} 0 64k',
                    'read -P 0 1M 1M',
                    'flush',
                    options=(*options, *more),
                )
                for command in ('write 0 4k', 'discard 0 4k', 'resize 20M', 'snapshot create x'):
                    result = self.run_program(
                        'pcow-io', *options, *more, '-c', command, path, code=1
                    )
                    self.one_line(result, 'pcow-io', 'read-only|Read-only')
        self.assertEqual(before, images.digest(path))

    def test_few_mappings(self):
        """A scattered writer stays inside its budget of mappings."""
        base = self.create('base.pcow', '256M')
        self.io(base, 'write -P 1 0 256M')
        top = self.create('top.pcow', None, '-b', 'base.pcow', '-o', 'cluster_size=4k')
        chance = random.Random(5)
        pages = chance.sample(range(256 * 256), 3000)
        text = self.io(
            top,
            *[f'write -q -P {page % 250 + 2} {page * 4}k 4k' for page in pages],
            'info',
            options=('--vma-budget', '600'),
        )
        used = int(text.split('mappings: ')[1].split()[0])
        self.assertLessEqual(used, 600)
        self.assertGreater(int(text.split('slabs promoted: ')[1].split()[0]), 0)
        self.io(top, *[f'read -q -P {page % 250 + 2} {page * 4}k 4k' for page in pages])
        self.assert_clean(top)


class RandomOperationsTest(images.ImageTestCase):
    """The same random operations on a pcow image and on a raw file by qemu-io give the same
    content.
    """

    SIZE = 32 * MIB

    def operations(self, chance, count):
        for _ in range(count):
            length = chance.choice((1, 511, 4096, 4097, 65536, 100000, 3 * MIB))
            offset = chance.randrange(self.SIZE - length)
            if chance.random() < 0.5:
                offset &= ~4095
            what = chance.choice((f'-P {chance.randrange(1, 256)}',) * 3 + ('-z',))
            yield f'write -q {what} {offset} {length}'

    def check(self, options, seed):
        chance = random.Random(seed)
        model = self.path('model.raw')
        self.run_program('qemu-img', 'create', '-q', '-f', 'raw', model, str(self.SIZE))
        image = self.create('0.pcow', self.SIZE)
        snapshots = {}
        for step in range(8):
            commands = list(self.operations(chance, 25))
            self.io(image, *commands, options=options)
            self.qemu_io(model, *commands)
            self.assert_same(model, 'raw', image, 'pcow')
            self.assert_clean(image)
            event = chance.choice(('snapshot', 'revert', 'overlay', 'nothing'))
            if event == 'snapshot':
                snapshots[f's{step}'] = self.path(f's{step}.raw')
                self.img('snapshot', '-c', f's{step}', image)
                self.run_program('cp', '--sparse=always', model, snapshots[f's{step}'])
            elif event == 'revert' and snapshots:
                name = chance.choice(sorted(snapshots))
                self.img('snapshot', '-a', name, image)
                self.run_program('cp', '--sparse=always', snapshots[name], model)
            elif event == 'overlay':
                self.img('seal', '-q', image)
                image = self.create(f'{step + 1}.pcow', None, '-b', image.name)
                snapshots = {}
        self.img('convert', '-O', 'qcow2', image, 'end.qcow2')
        self.run_program('qemu-img', 'compare', '-f', 'qcow2', '-F', 'raw', 'end.qcow2', model)

    def test_signal(self):
        self.check(('--engine', 'signal'), 11)

    def test_minor(self):
        self.check(('--engine', 'minor'), 12)

    def test_not_mapped(self):
        self.check(('--no-map',), 13)

    def test_few_mappings(self):
        self.check(('--vma-budget', '40'), 14)


class FullPoolTest(images.ImageTestCase):
    def setUp(self):
        super().setUp()
        self.pool = self.mount_pool('8M')
        self.image = self.pool / 'a.pcow'
        self.img('create', '-q', self.image, '64M')

    def test_wait_and_go_on(self):
        """A store waits, and goes on when there is space: nothing is lost."""
        for options in (('--engine', 'signal'), ('--engine', 'minor')):
            process = self.start(
                'pcow-io',
                '--full',
                'wait',
                *options,
                '-c',
                'write -P 1 0 16M',
                '-c',
                'read -P 1 0 16M',
                '-c',
                'info',
                self.image,
            )
            self.assertRegex(process.stderr.readline(), r'pcow-io: pool full at offset \d+')
            time.sleep(0.2)
            self.assertIsNone(process.poll())
            self.run_program('mount', '-o', 'remount,size=40M', self.pool)
            output, errors = process.communicate(timeout=images.TIMEOUT)
            self.assertEqual(0, process.returncode, output + errors)
            self.assertRegex(errors, 'pool has space again')
            self.assertIn('wrote 16777216/16777216 bytes at offset 0', output)
            self.assertRegex(output, '(?m)^pool full waits: [1-9]')
            self.assert_clean(self.image)
            self.image.unlink()
            self.run_program('mount', '-o', 'remount,size=8M', self.pool)
            self.img('create', '-q', self.image, '64M')

    def test_waiting_can_be_interrupted(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            process = self.start('pcow-io', '--full', 'wait', '-c', 'write -P 1 0 16M', self.image)
            self.assertRegex(process.stderr.readline(), 'pool full')
            process.send_signal(number)
            process.communicate(timeout=images.TIMEOUT)
            self.assertEqual(-number, process.returncode)
            self.assert_clean(self.image)

    def test_fail(self):
        """A command does not wait for ever: the store gets SIGBUS, which is an error in words and
        not the end.
        """
        for options in (('--engine', 'signal'), ('--engine', 'minor')):
            result = self.run_program(
                'pcow-io',
                *options,
                '-c',
                'write -P 1 0 1M',
                '-c',
                'write -P 2 1M 16M',
                '-c',
                'read -P 1 0 1M',
                '-c',
                'length',
                self.image,
                code=1,
            )
            self.one_line(
                result,
                'pcow-io',
                r'write failed: .*a\.pcow: the pool is full; free space or extend it',
            )
            self.assertIn('read 1048576/1048576', result.stdout)
            self.assertIn('64 MiB', result.stdout)
            self.assert_clean(self.image)

    def test_not_mapped(self):
        result = self.run_program(
            'pcow-io',
            '--no-map',
            '-c',
            'write -P 1 0 1M',
            '-c',
            'write -P 2 1M 16M',
            self.image,
            code=1,
        )
        self.one_line(result, 'pcow-io', r'write failed: .*a\.pcow.*full')
        self.io(self.image, 'read -P 1 0 1M')
        self.assert_clean(self.image)

    def test_space_comes_from_a_discard(self):
        self.run_program('pcow-io', '--no-map', '-c', 'write -P 2 0 16M', self.image, code=1)
        self.io(self.image, 'discard 0 4M', 'write -P 3 20M 3M', 'read -P 3 20M 3M')
        self.assert_clean(self.image)

    def test_create_on_a_full_pool(self):
        self.run_program('dd', 'if=/dev/zero', f'of={self.pool / "filler"}', 'bs=4k', code=1)
        result = self.run_program('pcow-img', 'create', '-q', self.pool / 'b.pcow', '4M', code=1)
        self.one_line(result, 'pcow-img', r'b\.pcow.*(space|full)')
        self.assertFalse((self.pool / 'b.pcow').exists())


class KilledTest(images.ImageTestCase):
    ROUNDS = 12

    def test_what_was_written_survives(self):
        """kill -9 at any moment: every write that was answered is there, and no repair
        is needed.
        """
        chance = random.Random(21)
        base = self.create('base.pcow', '32M')
        self.io(base, 'write -P 0xee 0 32M')
        self.img('seal', base)
        for options in (('--engine', 'signal'), ('--engine', 'minor')):
            image = self.create(f'top{options[-1]}.pcow', None, '-b', 'base.pcow')
            model = {}
            for _ in range(self.ROUNDS):
                self.one_life(image, options, model, chance)
                # slabs that were being prepared may have kept their blocks, until the next clean
                # end; that is all
                self.assertEqual(0, self.check(image)['corruptions'])
                self.io(
                    image,
                    *[
                        f'read -q -P {pattern} {page * 4}k 4k'
                        for page, pattern in sorted(model.items())
                    ],
                )
            self.io(image, 'flush', options=options)
            self.assertEqual({'corruptions': 0, 'leaks': 0}, self.check(image))

    def check(self, image):
        command = (
            'sh',
            '-c',
            '"$0" check --output=json "$1"; true',
            images.program('pcow-img'),
            image,
        )
        result = json.loads(self.run_program(*command).stdout)
        return {key: result[key] for key in ('corruptions', 'leaks')}

    def one_life(self, image, options, model, chance):
        process = self.start('pcow-io', *options, image)
        deadline = time.monotonic() + chance.uniform(0.01, 0.25)
        number = 0
        while time.monotonic() < deadline:
            page, pattern = chance.randrange(32 * 256), chance.randrange(1, 256)
            number += 1
            process.stdin.write(f'write -P {pattern} {page * 4}k 4k\n')
            if number % 40 == 0:
                process.stdin.write(f'snapshot create {time.monotonic_ns()}\n')
            process.stdin.flush()
            line = process.stdout.readline()
            if not line.startswith('wrote 4096/4096'):
                break
            process.stdout.readline()
            model[page] = pattern
        # one more that may be half done
        page = chance.randrange(32 * 256)
        model.pop(page, None)
        process.stdin.write(f'write -P 1 {page * 4}k 4k\n')
        process.stdin.flush()
        process.send_signal(signal.SIGKILL)
        process.wait()

    def test_lock_goes_with_the_process(self):
        path = self.create('a.pcow')
        process = self.start('pcow-io', path)
        process.stdin.write('write -P 1 0 64k\n')
        process.stdin.flush()
        process.stdout.readline()
        self.run_program('pcow-io', '-c', 'length', path, code=1)
        process.kill()
        process.wait()
        self.io(path, 'read -P 1 0 64k')


class SparseTest(images.ImageTestCase):
    def test_space_is_what_was_written(self):
        path = self.create('a.pcow', '1G')
        self.io(path, *[f'write -q {offset}M 4k' for offset in range(0, 1024, 32)])
        self.assertLess(self.allocated(path), 4 * MIB)
        self.assertLess(self.allocated(self.create('b.pcow', '16T')), 64 * KIB)
        fine = self.create('c.pcow', '64M', '-o', 'cluster_size=4k')
        self.io(fine, 'write 10M 4k')
        self.assertLess(self.allocated(fine), 64 * KIB)
