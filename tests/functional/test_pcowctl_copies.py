# SPDX-License-Identifier: Apache-2.0
"""pcowctl image fork and image export, on files that somebody writes to; no virtual machine."""

from pathlib import Path
import shutil
import subprocess
from typing import Any

from tests.functional import test_pcowctl
from tests.functional.test_pcowctl import BIN
from tests.functional.test_pcowctl import MIB
from tests.unit.pcow_driver import base


class CopiesTest(test_pcowctl.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl('pool', 'create', 'p', self.pool)
        self.ctl('image', 'create', 'p/vm', '--size', '8M')
        self.path = self.pool / 'vm.pcow'
        self.io(self.path, 'write -P 1 0 1M')
        self.ctl('snapshot', 'create', 'p/vm', 'one')
        self.io(self.path, 'write -P 2 0 64k')
        self.writer = subprocess.Popen(
            [BIN / 'pcow-io', self.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addCleanup(self._end_writer)
        assert self.writer.stdin and self.writer.stdout
        self.writer.stdin.write('length\n')
        self.writer.stdin.flush()
        self.writer.stdout.readline()

    def _end_writer(self) -> None:
        if self.writer.poll() is None:
            self.writer.communicate('quit\n', timeout=60)

    def snapshots(self) -> dict[str, dict[str, Any]]:
        return {row['name']: row for row in self.show('snapshot', 'list', 'p/vm')}

    def test_fork(self) -> None:
        made = self.show('image', 'fork', 'p/vm', 'one', 'p/fork')
        self.assertEqual(
            ('vm.pcow', 'one', 2), (made['base'], made['base snapshot'], made['chain depth'])
        )
        self.io(self.pool / 'fork.pcow', 'read -P 1 0 1M', 'write -P 3 0 64k')
        self.show('image', 'fork', 'p/vm', 'one', 'bare-name')
        self.assertEqual(['bare-name.pcow', 'fork.pcow', 'vm.pcow'], self.files())
        self.assertIn('fork', self.fails('image', 'delete', '--force', 'p/vm'))
        self._end_writer()
        self.assertIn("stand on snapshot 'one'", self.fails('snapshot', 'delete', 'p/vm', 'one'))
        self.assertTrue(self.snapshots()['one']['pinned'])
        for name in ('fork', 'bare-name'):
            self.ctl('image', 'delete', f'p/{name}')
        self.assertIn('64 KiB given back', self.ctl('snapshot', 'delete', 'p/vm', 'one'))
        self.assertEqual({}, self.snapshots())
        self.io(self.path, 'read -P 2 0 64k', 'read -P 1 64k 960k')

    def test_bad_forks(self) -> None:
        self.ctl('pool', 'create', 'other', self.directory / 'other')
        for words, message in (
            (('p/vm', 'none', 'x'), "no snapshot 'none'"),
            (('p/vm', 'one', 'vm'), 'exists already'),
            (('p/vm', 'one', 'other/x'), 'lies in the pool'),
            (('p/none', 'one', 'x'), 'no image'),
            (('p/vm', 'one', '.x'), 'begins with'),
            (('p/vm', 'one'), 'expected: IMAGE SNAPSHOT NEW'),
            (('--quiesce', 'p/vm', 'one', 'x'), 'go with --live'),
            (('--live', 'd', 'a', 'b'), 'expected: NEW'),
        ):
            self.assertIn(message, self.fails('image', 'fork', *words), words)
        self.assertEqual(['vm.pcow'], self.files())

    def test_export(self) -> None:
        for image_format in ('raw', 'qcow2', 'pcow'):
            target = self.directory / f'x.{image_format}'
            self.ctl(
                'image', 'export', '--format', image_format, '--snapshot', 'one', 'p/vm', target
            )
            raw = self.directory / 'seen.raw'
            self.run_program(
                BIN / 'pcow-img', 'convert', '-f', image_format, '-O', 'raw', target, raw
            )
            self.assertEqual(b'\1' * MIB + bytes(7 * MIB), raw.read_bytes())
            again = self.fails(
                'image', 'export', '--format', image_format, '--snapshot', 'one', 'p/vm', target
            )
            self.assertIn('exists already', again)
        self.assertTrue(self.show('image', 'show', self.directory / 'x.pcow')['template'])
        self.assertIn(
            'a snapshot of it can be read meanwhile',
            self.fails('image', 'export', '--format', 'raw', 'p/vm', 'y'),
        )
        self._end_writer()
        self.ctl('image', 'export', '--format', 'raw', 'p/vm', self.directory / 'now.raw')
        self.assertEqual(b'\2' * 65536, (self.directory / 'now.raw').read_bytes()[:65536])

    def test_bad_exports(self) -> None:
        for words, message in (
            (('--snapshot', 'none', 'p/vm', 'x'), "no snapshot 'none'"),
            (('p/vm',), 'expected: IMAGE FILE'),
            (('--device', 'd', 'p/vm', 'x'), 'go with --domain'),
            (('--domain', 'd', 'a', 'b'), 'expected: FILE'),
            (('--quiesce', '--domain', 'd', '--snapshot', 'one', 'x'), 'for the present state'),
        ):
            self.assertIn(message, self.fails('image', 'export', '--format', 'raw', *words), words)

    def test_list_shows_sizes(self) -> None:
        row = self.snapshots()['one']
        self.assertEqual(
            (0, 65536, False), tuple(row[key] for key in ('shared size', 'delete frees', 'pinned'))
        )
        # what is absent may be taken ahead of the writer
        self.assertTrue(MIB <= row['data size'] <= 2 * MIB, row)


if __name__ == '__main__':
    test_pcowctl.unittest.main()


class ServeTest(test_pcowctl.TestCase):
    def test_file_and_socket(self) -> None:
        self.ctl('pool', 'create', 'p', self.pool)
        source = self.directory / 'source'
        source.write_bytes(b'content' * 100000)
        self.ctl('template', 'build', '--source-format', 'raw', source, 'p/base')
        self.ctl('image', 'create', 'p/vm', '--template', 'base')
        directory = self.directory / 'export'
        shown = self.show('image', 'serve', '--file', 'p/vm', directory)
        self.addCleanup(self.status, *self.command('image', 'unserve', directory))
        file = Path(shown['file'])
        self.assertEqual(b'content' * 100000, file.read_bytes()[:700000])
        self.assertEqual(f'nbd+unix:///?socket={directory}/socket', shown['uri'])
        with file.open('r+b') as stream:
            stream.write(b'CHANGED')
        self.assertIn('open for writing elsewhere', self.fails('image', 'delete', 'p/vm'))
        self.ctl('image', 'unserve', directory)
        self.assertFalse(directory.exists())
        self.io(self.pool / 'vm.pcow', 'read -P 67 2M 1', 'read -P 99 2097159 1')
        self.assertIn('no DAX info block', self._serve_plain())

    def test_damaged(self) -> None:
        """What reads it would take that for the data."""
        self.ctl('pool', 'create', 'p', self.pool)
        self.ctl('image', 'create', 'p/a', '--size', '8M')
        path = self.pool / 'a.pcow'
        self.io(path, 'write -P 7 0 64k')
        self.run_program(BIN / 'pcow-img', 'seal', '-q', '--checksums', path)
        with path.open('r+b') as stream:
            stream.seek(6 * MIB + 5000)
            stream.write(b'x')
        words = ('image', 'serve', '--whole', '--read-only', 'p/a', self.directory / 'export')
        text = self.fails(*words)
        self.assertIn('a.pcow is damaged (the 2 MiB from guest byte 0', text)
        self.assertIn('give --accept-damage', text)
        self.assertFalse((self.directory / 'export').exists())
        self.ctl(*words, '--accept-damage')
        self.ctl('image', 'unserve', self.directory / 'export')

    def test_damage_that_a_copy_finds(self) -> None:
        """It is known from then on, as if a scrub had found it, also if it lies below."""
        template = self.make_template()
        self.ctl('image', 'create', 'p/web1', '--template', 't')
        base.flip(str(template))
        out = self.directory / 'out'
        ways = (
            ('image', 'export', 'p/web1', out, '--format', 'raw'),
            ('image', 'send', 'p/web1'),
            ('image', 'send', 'p/t'),
            ('image', 'serve', 'p/web1', out),
        )
        for words in ways:
            with self.subTest(words=words):
                shutil.rmtree(self.directory / 'state/scrubs', ignore_errors=True)
                self.ctl('pool', 'check', 'p')
                self.assertIn('t.pcow is damaged', self.fails(*words))
                self.assertFalse(out.exists())
                self.assertEqual('t', self.show('pool', 'show', 'p')['damaged'])
                self.assertEqual(2, self.status(*self.command('pool', 'check', 'p')))
                refused = self.fails('image', 'create', 'p/web4', '--template', 't')
                self.assertIn('t.pcow is damaged, so nothing new may stand on it', refused)

    def _serve_plain(self) -> str:
        self.ctl('image', 'create', 'p/plain', '--size', '8M')
        return self.fails('image', 'serve', 'p/plain', self.directory / 'export')
