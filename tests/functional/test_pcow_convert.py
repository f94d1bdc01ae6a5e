# SPDX-License-Identifier: Apache-2.0
"""pcow-img convert: every pair of formats, and that DESTINATION is complete or not there."""

import glob
import json
import os
from pathlib import Path
import random
import shutil
import signal
import subprocess
import time

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB


class ConvertTest(images.ImageTestCase):
    def make_raw(self, name='a.raw', size=64 * MIB + 512 * 3):
        """A sparse file with data of odd places and sizes, and a size that is no multiple of
        anything.
        """
        chance = random.Random(7)
        path = self.path(name)
        with path.open('wb') as file:
            file.truncate(size)
            for offset in (0, MIB - 100, 32 * MIB, size - 700):
                file.seek(offset)
                file.write(chance.randbytes(max(0, min(300 * KIB + 17, size - offset))))
            file.seek(2 * MIB)
            file.write(b'\0' * MIB)  # written, but zeros
        return path

    def make_qcow2(self, raw):
        path = raw.with_suffix('.qcow2')
        self.run_program('qemu-img', 'convert', '-q', '-f', 'raw', '-O', 'qcow2', raw, path)
        return path

    def test_all_pairs(self):
        raw = self.make_raw()
        self.make_qcow2(raw)
        self.img('convert', '-q', '-f', 'raw', '-O', 'pcow', raw, 'a.pcow')
        for source in ('raw', 'qcow2', 'pcow'):
            for target in ('raw', 'qcow2', 'pcow'):
                copy = self.path(f'copy-{source}.{target}')
                self.assertEqual(
                    '', self.img('convert', '-q', '-f', source, '-O', target, f'a.{source}', copy)
                )
                self.assertLess(self.allocated(copy), 3 * MIB, 'sparse stays sparse')
                self.assert_same(raw, 'raw', copy, target)
                if target == 'qcow2':
                    self.run_program('qemu-img', 'check', '-q', copy)
                elif target == 'pcow':
                    self.assert_clean(copy)
                elif source == 'raw':
                    self.assertEqual(raw.stat().st_size, copy.stat().st_size)
        self.assertEqual([], [name for name in os.listdir(self.directory) if name.startswith('.')])

    def test_default_formats_and_note(self):
        raw = self.make_raw(size=3 * MIB)
        result = self.run_program('pcow-img', 'convert', '-f', 'raw', raw, 'b.pcow')
        self.assertRegex(result.stderr, 'note: image size 3145728 rounded up to 4194304')
        self.img('convert', 'b.pcow', 'b.img')
        self.assertEqual(4 * MIB, self.path('b.img').stat().st_size)
        self.assert_same(raw, 'raw', self.path('b.img'), 'raw')

    def test_format_must_be_said(self):
        """A guest could write the header of any format to its raw disk."""
        raw = self.make_raw()
        qcow2 = self.make_qcow2(raw)
        for path in (raw, qcow2):
            self.img_fails('convert', path, 'x.pcow', message='say which format it has with -f raw')
        self.img_fails('convert', '-f', 'qcow2', raw, 'x.pcow', message='is not a qcow2 image')
        self.img_fails('convert', '-f', 'pcow', raw, 'x.pcow', message='not a pcow image')
        self.img_fails('convert', '-f', 'vdi', raw, 'x.pcow', message="'vdi' is not known")
        fake = self.path('fake.pcow')
        qcow2.rename(fake)
        self.img_fails('convert', fake, 'x.raw', message='not a pcow image')
        # said to be raw, it is raw, whatever is in it
        self.img('convert', '-q', '-f', 'raw', fake, 'x.pcow')
        self.assert_same(fake, 'raw', self.path('x.pcow'), 'pcow')

    def test_new_files_have_the_format_of_their_name(self):
        self.create('a.pcow', '4M')
        for name, image_format in (('b.qcow2', 'qcow2'), ('b.raw', 'raw'), ('b.img', 'raw')):
            self.img('convert', 'a.pcow', name)
            info = self.run_program('qemu-img', 'info', '--output=json', name).stdout
            self.assertEqual(image_format, json.loads(info)['format'], name)
        self.img('convert', 'a.pcow', 'b.pcow')
        self.assertEqual(4 * MIB, self.img_json('info', 'b.pcow')['virtual-size'])
        for name in ('c', 'c.vmdk', 'c.PCOW', '.qcow2', 'c.qcow2.bak'):
            self.img_fails('convert', 'a.pcow', name, message='does not tell which format')
            self.assertFalse(self.path(name).exists())
        # what is asked for counts, whatever the name
        self.img('convert', '-O', 'raw', 'a.pcow', 'd.qcow2')
        self.assertEqual(bytes(4 * MIB), self.path('d.qcow2').read_bytes())
        self.img('convert', '-O', 'pcow', 'a.pcow', 'd')
        self.assertEqual(4 * MIB, self.img_json('info', 'd')['virtual-size'])

    def test_options(self):
        raw = self.make_raw()
        self.img('convert', '-q', '-f', 'raw', '-o', 'cluster_size=4k', raw, 'a.pcow')
        self.assertEqual(4096, self.img_json('info', 'a.pcow')['cluster-size'])
        self.img(
            'convert',
            '-O',
            'qcow2',
            '-o',
            'cluster_size=128k',
            '-o',
            'compat=1.1',
            'a.pcow',
            'a.qcow2',
        )
        self.assertIn(
            '"cluster-size": 131072',
            self.run_program('qemu-img', 'info', '--output=json', 'a.qcow2').stdout,
        )
        self.img_fails(
            'convert',
            '-O',
            'qcow2',
            '-o',
            'backing_file=/etc/passwd',
            'a.pcow',
            'x',
            message="'backing_file' of -o is not",
        )
        self.img_fails(
            'convert',
            '-O',
            'raw',
            '-o',
            'cluster_size=4k',
            'a.pcow',
            'x',
            message="'cluster_size' of -o is not",
        )
        self.img_fails(
            'convert', '-o', 'cluster_size=5k', 'a.pcow', 'x.pcow', message='power of two'
        )
        self.assertFalse(self.path('x.pcow').exists())

    def test_progress(self):
        self.make_raw()
        lines = self.img('convert', '-p', '-f', 'raw', 'a.raw', 'a.pcow').splitlines()
        self.assertEqual(('    (0.00/100%)', '    (100.00/100%)'), (lines[0], lines[-2]))
        self.assertEqual('', self.img('convert', '-p', '-q', '-f', 'raw', 'a.raw', 'b.pcow'))

    def test_snapshot(self):
        path = self.create('a.pcow')
        self.io(path, 'write -P 1 0 64k')
        self.img('snapshot', '-c', 's', path)
        self.io(path, 'write -P 2 0 64k')
        self.img('convert', '-l', 's', path, 'b.pcow')
        self.io('b.pcow', 'read -P 1 0 64k')
        self.img_fails('convert', '-l', 'none', path, 'c.pcow', message="'none'")
        self.run_program('qemu-img', 'create', '-q', '-f', 'qcow2', 'a.qcow2', '4M')
        self.qemu_io('a.qcow2', 'write -P 3 0 64k', image_format='qcow2')
        self.run_program('qemu-img', 'snapshot', '-c', 'q', 'a.qcow2')
        self.qemu_io('a.qcow2', 'write -P 4 0 64k', image_format='qcow2')
        self.img('convert', '-f', 'qcow2', '-l', 'q', 'a.qcow2', 'd.pcow')
        self.io('d.pcow', 'read -P 3 0 64k')
        self.img_fails(
            'convert', '-f', 'raw', '-l', 'q', 'a.qcow2', 'e.pcow', message='no snapshots'
        )

    def test_base(self):
        """Only what differs from the base is kept, also zeros over data."""
        base = self.create('base.pcow', '16M')
        self.io(base, 'write -P 1 0 8M')
        self.img('convert', '-O', 'raw', base, 'a.raw')
        self.qemu_io(
            'a.raw',
            'write -P 2 1M 64k',
            'write -P 0 4M 64k',
            'write -z -u 6M 1M',
            'write -P 3 15M 4k',
        )
        self.img(
            'convert',
            '-f',
            'raw',
            '-O',
            'pcow',
            '-B',
            'base.pcow',
            '-F',
            'pcow',
            'a.raw',
            'top.pcow',
        )
        self.assertEqual('base.pcow', self.img_json('info', 'top.pcow')['backing-filename'])
        self.assert_same(self.path('a.raw'), 'raw', self.path('top.pcow'), 'pcow')
        self.assertLess(self.allocated(self.path('top.pcow')), MIB)
        self.assert_clean(self.path('top.pcow'), base)
        # a larger and a smaller image on it
        for size in (20 * MIB, 3 * MIB):
            with self.path('a.raw').open('r+b') as file:
                file.truncate(size)
            self.img('convert', '-q', '-f', 'raw', '-B', 'base.pcow', 'a.raw', 'other.pcow')
            self.assert_same(self.path('a.raw'), 'raw', self.path('other.pcow'), 'pcow')
        self.img_fails(
            'convert',
            '-O',
            'qcow2',
            '-B',
            'base.pcow',
            'top.pcow',
            'x',
            message='-B is for new images of format pcow',
        )
        self.img_fails('convert', '-B', 'none.pcow', 'top.pcow', 'x.pcow', message='none.pcow')

    def test_into_existing(self):
        raw = self.make_raw(size=8 * MIB)
        qcow2 = self.make_qcow2(raw)
        self.img('convert', '-q', '-f', 'raw', raw, 'full.pcow')
        for target, image_format, make in (
            (self.path('t.raw'), 'raw', ('truncate', '-s', '10M', 't.raw')),
            (
                self.path('t.qcow2'),
                'qcow2',
                ('qemu-img', 'create', '-q', '-f', 'qcow2', 't.qcow2', '10M'),
            ),
            (self.path('t.pcow'), 'pcow', None),
        ):
            if make:
                self.run_program(*make)
                self.qemu_io(target, 'write -P 0xff 0 10M', image_format=image_format)
            else:
                self.create(target.name, '10M')
                self.io(target, 'write -P 0xff 0 10M')
            inode = target.stat().st_ino
            self.img('convert', '-n', '-f', 'qcow2', '-O', image_format, qcow2, target)
            self.assertEqual(inode, target.stat().st_ino)
            self.img('compare', '-f', 'raw', '-F', image_format, raw, target)
        self.create('small.pcow', '4M')
        self.img_fails(
            'convert', '-n', 'full.pcow', 'small.pcow', message='less than the 8388608 of full.pcow'
        )
        self.img_fails('convert', '-n', 'full.pcow', 'none.raw', message='No such file')

    def test_block_device(self):
        raw = self.make_raw(size=8 * MIB)
        with self.path('disk').open('wb') as file:
            file.truncate(8 * MIB)
        device = self.run_program('losetup', '--show', '-f', 'disk').stdout.strip()
        self.addCleanup(subprocess.run, ['losetup', '-d', device], check=False)
        self.run_program(
            'dd', 'if=/dev/urandom', f'of={device}', 'bs=1M', 'count=8', 'oflag=direct'
        )
        self.img_fails(
            'convert', '-f', 'raw', '-O', 'raw', raw, device, message='not a regular file.*-n'
        )
        self.img('convert', '-n', '-f', 'raw', '-O', 'raw', raw, device)
        self.img('compare', '-f', 'raw', '-F', 'raw', raw, device)
        self.img('convert', '-f', 'raw', device, 'b.pcow')
        self.assert_same(raw, 'raw', self.path('b.pcow'), 'pcow')

    def test_replaces_existing(self):
        raw = self.make_raw(size=4 * MIB)
        target = self.path('t.pcow')
        target.write_bytes(b'old')
        target.chmod(0o640)
        os.chown(target, 12, 34)
        self.img('convert', '-f', 'raw', raw, target)
        status = target.stat()
        self.assertEqual((0o640, 12, 34), (status.st_mode & 0o777, status.st_uid, status.st_gid))
        link = self.path('link.pcow')
        link.symlink_to('t.pcow')
        self.io(target, 'write -P 1 0 4k')
        self.img('convert', '-f', 'raw', raw, link)
        self.assertTrue(link.is_symlink())
        self.assert_same(raw, 'raw', target, 'pcow')

    def test_format_is_of_the_name_that_is_given(self):
        """Not of the file that a link leads to, which is what is replaced."""
        raw = self.make_raw(size=4 * MIB)
        target, link = self.create('t.pcow'), self.path('link.raw')
        link.symlink_to('t.pcow')
        self.img('convert', '-f', 'raw', raw, link)
        self.assertTrue(link.is_symlink())
        self.assertEqual(raw.read_bytes(), target.read_bytes())
        self.path('other.pcow').symlink_to('disk.raw')
        self.path('disk.raw').write_bytes(b'')
        self.img('convert', '-f', 'raw', raw, 'other.pcow')
        self.assert_same(raw, 'raw', self.path('disk.raw'), 'pcow')
        self.img('convert', '-n', '-f', 'raw', raw, link)
        self.assertEqual(raw.read_bytes(), target.read_bytes())
        # nor is it the format of a source
        self.img_fails('convert', link, 'x.raw', message='say which format')
        self.assert_same(raw, 'raw', self.path('other.pcow'), 'pcow')
        self.img('convert', 'other.pcow', 'x.raw')
        self.assertEqual(raw.read_bytes(), self.path('x.raw').read_bytes())

    def test_source_behind_a_link_of_another_user(self):
        """In its place, or on the way to it, whose owner would choose what root reads."""
        raw = self.make_raw(size=4 * MIB)
        self.make_qcow2(raw)
        theirs = self.path('theirs')
        theirs.mkdir()
        self.path('chain.raw').symlink_to('theirs/way/a.raw')
        links = {'raw': raw, 'qcow2': '../a.qcow2', 'way': '..', 'slash': '../'}
        for name, target in links.items():
            (theirs / name).symlink_to(target)
        sources = {
            'theirs/raw': 'raw',
            'theirs/qcow2': 'qcow2',
            'theirs/way/a.raw': 'raw',
            'theirs/slash//./a.qcow2': 'qcow2',
            str(theirs / 'way/a.raw'): 'raw',
            'chain.raw': 'raw',
        }
        for owner in (12, 0):
            for name in links:
                os.chown(theirs / name, owner, -1, follow_symlinks=False)
            for number, (source, kind) in enumerate(sources.items()):
                for command in (
                    ('convert', '-f', kind, source, f'{number}.pcow'),
                    ('measure', '-f', kind, source),
                    ('compare', '-f', kind, '-F', 'raw', source, raw),
                ):
                    if owner:
                        code = 2 if command[0] == 'compare' else 1
                        self.img_fails(*command, message='symbolic link of another', code=code)
                    else:
                        self.img(*command)
        self.path('loop').symlink_to('loop')
        self.img_fails('measure', '-f', 'raw', 'loop', message='one of a loop')
        self.img_fails('measure', '-f', 'raw', 'a.raw/x', message='Not a directory')
        self.img_fails('measure', '-f', 'raw', '/', message='neither a regular file nor')
        with raw.open('rb') as file:
            self.img('convert', '-f', 'raw', f'/proc/{os.getpid()}/fd/{file.fileno()}', 'p.pcow')
        self.assert_same(raw, 'raw', self.path('p.pcow'), 'pcow')

    def convert_and_stop(self, target):
        """A conversion of 256 MiB to target, stopped in the middle of it."""
        with self.path('large.raw').open('wb') as file:
            for _ in range(256):
                file.write(random.randbytes(MIB))
        process = self.start('pcow-img', 'convert', '-f', 'raw', 'large.raw', target)
        while not glob.glob(str(self.path('.*.partial'))):
            self.assertIsNone(process.poll(), 'it ended before it could be stopped')
        process.send_signal(signal.SIGSTOP)
        return process

    def finish(self, process):
        process.send_signal(signal.SIGCONT)
        errors = process.communicate()[1]
        return process.returncode, errors

    def test_destination_is_held(self):
        target = self.create('t.pcow')
        convert = self.convert_and_stop(target)
        # nobody can begin to use what is about to go
        result = self.run_program('pcow-io', '-c', 'write 0 4k', target, code=1)
        self.assertRegex(result.stderr, 'in use')
        self.img_fails(
            'convert', '-f', 'raw', self.make_raw(size=4 * MIB), target, message='in use'
        )
        self.assertEqual((0, ''), self.finish(convert))
        self.assert_same(self.path('large.raw'), 'raw', target, 'pcow')
        self.io(target, 'write -P 1 0 4k')

    def test_destination_that_appears(self):
        convert = self.convert_and_stop('t.pcow')
        self.create('t.pcow', '4M')
        code, errors = self.finish(convert)
        self.assertEqual(1, code)
        self.assertRegex(
            errors, 't.pcow: cannot put the finished image there: another file has appeared'
        )
        self.assertEqual(4 * MIB, self.img_json('info', 't.pcow')['virtual-size'])
        self.assertEqual([], glob.glob(str(self.path('.*.partial'))))

    def test_destination_that_must_not_be_replaced(self):
        raw = self.make_raw(size=4 * MIB)
        sealed = self.create('sealed.pcow')
        self.img('seal', sealed)
        self.img_fails('convert', '-f', 'raw', raw, sealed, message='sealed')
        busy = self.create('busy.pcow')
        user = self.start('pcow-io', busy)
        user.stdin.write('length\n')
        user.stdin.flush()
        user.stdout.readline()
        self.img_fails('convert', '-f', 'raw', raw, busy, message='in use')
        self.img_fails('convert', '-f', 'raw', raw, raw, message='the same file')
        self.img_fails(
            'convert', '-f', 'raw', '-O', 'raw', raw, self.directory, message='not a regular file'
        )
        self.img_fails('convert', '-f', 'raw', raw, 'none/x.pcow', message='No such file')
        self.img_fails('convert', '-f', 'raw', 'none', 'x.pcow', message='No such file')
        self.path('dangling.pcow').symlink_to('nowhere')
        self.img_fails('convert', '-f', 'raw', raw, 'dangling.pcow', message='dangling')

    def test_qcow2_that_names_files(self):
        """Nothing that a qcow2 file names is opened."""
        secret = self.path('secret')
        secret.write_bytes(b'S' * MIB)
        self.run_program(
            'qemu-img', 'create', '-q', '-f', 'qcow2', '-b', secret, '-F', 'raw', 'backed.qcow2'
        )
        self.run_program(
            'qemu-img',
            'create',
            '-q',
            '-f',
            'qcow2',
            '-o',
            'data_file=secret,data_file_raw=on',
            'data.qcow2',
            '1M',
        )
        self.img_fails(
            'convert',
            '-f',
            'qcow2',
            'backed.qcow2',
            'x.pcow',
            message='has a backing file.*not followed',
        )
        self.img_fails(
            'convert', '-f', 'qcow2', 'data.qcow2', 'x.pcow', message='external file.*not followed'
        )
        self.img_fails(
            'compare',
            '-f',
            'qcow2',
            '-F',
            'raw',
            'backed.qcow2',
            secret,
            message='backing file',
            code=2,
        )
        self.assertFalse(self.path('x.pcow').exists())

    def test_hostile_qcow2(self):
        qcow2 = self.make_qcow2(self.make_raw())
        good = qcow2.read_bytes()
        for name, content, message in (
            ('short', good[:50], 'not a qcow2 image'),
            ('version', good[:7] + b'\x09' + good[8:], 'version 9'),
            ('encrypted', good[:35] + b'\x01' + good[36:], 'encrypted'),
            ('truncated', good[: len(good) // 2], 'damaged or cut short'),
            ('huge', good[:24] + b'\x7f' + good[25:], 'x.qcow2'),
        ):
            self.path('x.qcow2').write_bytes(content)
            result = self.run_program(
                'pcow-img', 'convert', '-f', 'qcow2', 'x.qcow2', 'x.pcow', code=1
            )
            self.assertRegex(result.stderr, message, name)
            self.assertEqual(
                ['a.qcow2', 'a.raw', 'x.qcow2'], sorted(os.listdir(self.directory)), name
            )

    def test_odd_file_names(self):
        """Neither a protocol nor an option of QEMU can be said by a file name."""
        for name in ('nbd:x', 'json:{}', 'a,b=c', 'quote"back\\slash', ' space ', 'ä'):
            raw = self.make_raw(size=4 * MIB)
            qcow2 = self.path(name)
            self.img('convert', '-f', 'raw', '-O', 'qcow2', raw, f'./{name}')
            self.img('convert', '-f', 'qcow2', '-O', 'raw', f'./{name}', 'back')
            self.assertEqual(images.digest(raw), images.digest(self.path('back')))
            qcow2.unlink()
            self.path('back').unlink()


class LibraryTest(images.ImageTestCase):
    """libnbd is there for qcow2 images alone: its many libraries would take longer to load than
    most commands run.
    """

    def test_only_loaded_for_qcow2(self):
        program = images.program('pcow-img')
        loaded = subprocess.run(
            [program],
            env={'LD_TRACE_LOADED_OBJECTS': '1'},
            capture_output=True,
            text=True,
            check=True,
            timeout=images.TIMEOUT,
        ).stdout
        self.assertIn('libc.so', loaded)
        self.assertNotIn('libnbd', loaded)

    def test_cannot_be_loaded(self):
        (self.directory / 'libnbd.so.0').touch()
        self.run_program('pcow-img', 'create', '-q', self.path('a.pcow'), '8M')
        done = subprocess.run(
            [
                images.program('pcow-img'),
                'convert',
                '-O',
                'qcow2',
                self.path('a.pcow'),
                self.path('b.qcow2'),
            ],
            env=dict(os.environ, LD_LIBRARY_PATH=str(self.directory)),
            capture_output=True,
            text=True,
            check=False,
            timeout=images.TIMEOUT,
        )
        self.assertEqual(1, done.returncode)
        self.assertIn('package libnbd0', done.stderr)
        self.assertFalse(self.path('b.qcow2').exists())


class InterruptedConvertTest(images.ImageTestCase):
    def setUp(self):
        super().setUp()
        block = random.Random(1).randbytes(MIB)
        with self.path('big.raw').open('wb') as file:
            for _ in range(512):
                file.write(block)
        self.img('convert', '-f', 'raw', '-O', 'qcow2', 'big.raw', 'big.qcow2')

    def interrupt(self, number, *args, target=None):
        """Send a signal in the middle of a conversion; a ``target`` that was complete by then is
        deleted, and made again.
        """
        for _ in range(5):
            process = self.start('pcow-img', 'convert', '-p', *args)
            while '(0.00/100%)' not in process.stdout.read(16):
                pass
            process.stdout.read(40)  # some progress was made
            process.send_signal(number)
            output, errors = process.communicate(timeout=images.TIMEOUT)
            if process.returncode != 0 or target is None:
                break
            target.unlink()
        self.assertEqual(-number, process.returncode, output + errors)
        return errors

    def test_leaves_nothing(self):
        before = sorted(os.listdir(self.directory))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for source, target in (
                ('raw', 'pcow'),
                ('qcow2', 'pcow'),
                ('raw', 'qcow2'),
                ('qcow2', 'raw'),
            ):
                errors = self.interrupt(
                    number, '-f', source, '-O', target, f'big.{source}', 'x', target=self.path('x')
                )
                self.assertIn('x: interrupted', errors)
                self.assertEqual(before, sorted(os.listdir(self.directory)))

    def test_keeps_old_destination(self):
        target = self.create('x.pcow')
        self.io(target, 'write -P 5 0 1M')
        self.interrupt(signal.SIGTERM, '-f', 'raw', 'big.raw', target)
        self.io(target, 'read -P 5 0 1M')

    def test_killed(self):
        """kill -9 leaves a file of another name, and no process."""
        sockets = set(glob.glob('/tmp/libnbd*'))
        self.interrupt(signal.SIGKILL, '-f', 'qcow2', '-O', 'pcow', 'big.qcow2', 'x.pcow')
        self.assertFalse(self.path('x.pcow').exists())
        left = [name for name in os.listdir(self.directory) if name.endswith('.partial')]
        self.assertEqual(['.x.pcow.'], [name[:8] for name in left])
        for _ in range(100):
            if not self.users():
                break
            time.sleep(0.1)
        else:
            self.fail(f'qemu-nbd still runs: {self.users()}')
        for directory in set(glob.glob('/tmp/libnbd*')) - sockets:
            shutil.rmtree(directory, ignore_errors=True)

    def users(self):
        """Processes that have the test's directory in their arguments."""
        found = []
        for process in Path('/proc').glob('[0-9]*'):
            try:
                if str(self.directory) in (process / 'cmdline').read_text(errors='replace'):
                    found.append(process.name)
            except OSError:
                continue  # it has ended
        return found

    def test_full_pool(self):
        pool = self.mount_pool('64M')
        for target in ('raw', 'qcow2', 'pcow'):
            result = self.run_program(
                'pcow-img', 'convert', '-f', 'raw', '-O', target, 'big.raw', pool / 'x', code=1
            )
            self.assertRegex(result.stderr, '(?i)space|full')
            self.assertEqual([], os.listdir(pool))
