# SPDX-License-Identifier: Apache-2.0
"""pcow-img on snapshots of an image that a writer holds: forks, exports, sizes, and what is refused
in words.
"""

import contextlib
from pathlib import Path
import subprocess

from tests.functional import images
from tests.functional.images import KIB
from tests.functional.images import MIB


class TestCase(images.ImageTestCase):
    def use(self, path: Path) -> 'subprocess.Popen[str]':
        """A process that holds the image as its writer, as QEMU would."""
        user = self.start('pcow-io', path)
        self.tell(user, 'length')
        return user

    @staticmethod
    def tell(user: 'subprocess.Popen[str]', command: str) -> str:
        assert user.stdin is not None and user.stdout is not None
        user.stdin.write(command + '\n')
        user.stdin.flush()
        return user.stdout.readline()

    def make(self, name: str = 'a.pcow') -> Path:
        """Snapshots one (1s in the first 4 MiB), two (2s in the second MiB), and 3s in
        the first.
        """
        path = self.create(name)
        self.io(path, 'write -P 1 0 4M')
        self.img('snapshot', '-c', 'one', path)
        self.io(path, 'write -P 2 1M 1M')
        self.img('snapshot', '-c', 'two', path)
        self.io(path, 'write -P 3 0 64k')
        return path

    def list(self, path: Path) -> dict[str, dict[str, object]]:
        return {entry['name']: entry for entry in self.img_json('snapshot', '-l', '-U', path)}


class ForkTest(TestCase):
    def test_of_an_image_in_use(self) -> None:
        path = self.make()
        user = self.use(path)
        self.img_fails(
            'create', '-b', path, 'top.pcow', message='make the image on a snapshot of it'
        )
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=one', 'top.pcow')
        self.assertEqual(
            {'one': True, 'two': False},
            {name: entry['pinned'] for name, entry in self.list(path).items()},
        )
        self.io('top.pcow', 'read -P 1 0 4M', 'write -P 9 0 64k', 'read -P 9 0 64k')
        self.tell(user, 'write -P 4 0 4M')
        self.io('top.pcow', 'read -P 1 64k 2M')
        self.assertEqual(
            'one', self.img_json('info', 'top.pcow')['format-specific']['data']['base-snapshot']
        )
        user.communicate('quit\n')
        self.assert_clean(path, self.path('top.pcow'))

    def test_a_fork_keeps_its_snapshot(self) -> None:
        path = self.make()
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=one', 'top.pcow')
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=one', 'other.pcow')
        self.io(path, 'read -P 3 0 64k')  # a writer closes it, which brings the mirror up to date
        content = images.digest(path)
        self.img_fails(
            'snapshot',
            '-d',
            'one',
            path,
            message="2 images stand on snapshot 'one': '(top|other).pcow', '(top|other).pcow'",
        )
        self.img_fails('snapshot', '--unpin', 'one', path, message="stand on snapshot 'one'")
        self.assertEqual(content, images.digest(path))
        self.img('snapshot', '-d', 'two', path)
        self.path('other.pcow').unlink()
        self.img('rebase', '-b', '', 'top.pcow')
        self.assertIn('given back', self.img('snapshot', '-d', 'one', path))
        self.io('top.pcow', 'read -P 1 0 4M')

    def test_of_a_template(self) -> None:
        path = self.make()
        self.img('seal', '-q', path)
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=two', 'top.pcow')
        self.img('unseal', '-q', path)
        self.img_fails('snapshot', '-d', 'two', path, message='top.pcow')
        self.io('top.pcow', 'read -P 2 1M 1M', 'read -P 1 0 1M')

    def test_convert_onto_a_snapshot(self) -> None:
        path = self.make()
        self.img('convert', '-B', path, '-o', 'base_snapshot=one', '-l', 'two', path, 'thin.pcow')
        self.io('thin.pcow', 'read -P 2 1M 1M', 'read -P 1 0 1M')
        self.assertEqual(
            1 * MIB, self.img_json('info', 'thin.pcow')['format-specific']['data']['data-size']
        )
        self.img_fails('snapshot', '-d', 'one', path, message='thin.pcow')

    def test_a_base_edited_under_its_children(self) -> None:
        """On its present state: noticed. On a snapshot: it does not matter."""
        path = self.make()
        self.img('create', '-q', '-b', path, 'now.pcow')
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=two', 'then.pcow')
        self.io('now.pcow', 'read -P 3 0 64k')
        self.io(path, 'write -P 4 0 64k')
        self.img_fails('map', 'now.pcow', message='was changed since')
        self.io('then.pcow', 'read -P 1 0 1M')


class ExportTest(TestCase):
    def test_while_it_is_in_use(self) -> None:
        path = self.make()
        user = self.use(path)
        self.img_fails(
            'convert', '-O', 'raw', path, 'x.raw', message='a snapshot of it can be read meanwhile'
        )
        for image_format in ('raw', 'qcow2', 'pcow'):
            options = ['-o', 'sealed=on'] if image_format == 'pcow' else []
            for force in ([], ['-U']):
                target = self.path(f'x.{image_format}')
                target.unlink(missing_ok=True)
                self.tell(user, 'write -P 4 0 8M')
                self.img('convert', *force, '-l', 'two', '-O', image_format, *options, path, target)
                raw = self.path('seen.raw')
                self.img('convert', '-f', image_format, '-O', 'raw', target, raw)
                self.qemu_io(
                    raw, 'read -P 1 0 1M', 'read -P 2 1M 1M', 'read -P 1 2M 2M', 'read -P 0 4M 12M'
                )
        self.assertTrue(self.img_json('info', 'x.pcow')['format-specific']['data']['sealed'])
        self.img_fails(
            'convert',
            '-O',
            'pcow',
            '-o',
            'sealed=maybe',
            '-l',
            'one',
            path,
            'y.pcow',
            message="not 'maybe'",
        )
        self.img_fails(
            'convert', '-O', 'raw', '-l', 'none', path, 'y.raw', message="no snapshot 'none'"
        )
        user.communicate('quit\n')
        self.assert_clean(path)

    def test_what_is_exported_is_not_deleted(self) -> None:
        path = self.make()
        reader = self.start('pcow-io', '-r', '-s', 'one', path)
        self.tell(reader, 'length')
        self.img_fails('snapshot', '-d', 'one', path, message="snapshot 'one' is in use")
        self.img('snapshot', '-d', 'two', path)
        self.assertIn('4194304/4194304', self.tell(reader, 'read -P 1 0 4M'))
        reader.communicate('quit\n')
        self.img('snapshot', '-d', 'one', path)
        self.assert_clean(path)


class SizesTest(TestCase):
    def test_own_shared_and_freed(self) -> None:
        path = self.make()
        sizes = {
            name: [entry[f'{key}'] for key in ('data-size', 'shared-size', 'delete-frees')]
            for name, entry in self.list(path).items()
        }
        self.assertEqual({'one': [4 * MIB, 0, MIB], 'two': [MIB, 3 * MIB, 0]}, sizes)

    def test_delete_says_what_the_pool_got_back(self) -> None:
        path = self.make()
        for name in ('one', 'two'):
            before = self.allocated(path)
            freed = self.img_json('snapshot', '-d', name, path)['freed']
            self.assertEqual(before - self.allocated(path), freed)
            self.assertEqual({'one': MIB, 'two': 64 * KIB}[name], freed)
        self.img('snapshot', '-c', 'words', path)
        self.assertEqual(
            "Snapshot 'words' deleted, 0 B given back to the pool.\n",
            self.img('snapshot', '-d', 'words', path),
        )
        self.img('snapshot', '-c', 'quiet', path)
        self.assertEqual('', self.img('snapshot', '-q', '-d', 'quiet', path))

    def test_tree(self) -> None:
        path = self.make()
        self.img('snapshot', '-a', 'one', path)
        self.img('snapshot', '-c', 'branch', path)
        self.img('create', '-q', '-b', path, '-o', 'base_snapshot=two', 'top.pcow')
        lines = self.img('snapshot', '-l', '--tree', path).splitlines()
        self.assertRegex(lines[0], 'VM SIZE +OWN +SHARED +FREES +DATE +TAG')
        self.assertEqual(
            ['   one', ' p   two', '*    branch'],
            [
                line[-len(tail) :]
                for line, tail in zip(lines[1:], ('   one', ' p   two', '*    branch'), strict=True)
            ],
        )
        self.img_fails('snapshot', '--tree', '--output=json', path, message='parent-id')
        self.img_fails('snapshot', '--tree', '-d', 'one', path, message='goes with -l')

    def test_a_deep_tree(self) -> None:
        path = self.create('a.pcow')
        for number in range(40):
            self.img('snapshot', '-c', f's{number}', path)
        lines = self.img('snapshot', '--tree', path).splitlines()
        self.assertTrue(lines[1].endswith('   s0'))
        self.assertTrue(lines[2].endswith('     s1'))
        self.assertTrue(lines[40].endswith(' (39) s39'))


class CopyOnReadTest(TestCase):
    def test_switch(self) -> None:
        path = self.create('a.pcow', '16M', '-o', 'copy_on_read=on')
        generation = self.img_json('info', path)['format-specific']['data']['generation']
        self.assertTrue(self.img_json('info', path)['format-specific']['data']['copy-on-read'])
        self.assertIn('copy on read: true', self.img('info', path))
        self.img('amend', '-o', 'copy_on_read=off', path)
        data = self.img_json('info', path)['format-specific']['data']
        self.assertEqual((False, generation), (data['copy-on-read'], data['generation']))
        self.img('amend', '-o', 'copy_on_read=on', path)
        self.img('seal', '-q', path)
        self.img('unseal', '-q', path)
        self.assertTrue(self.img_json('info', path)['format-specific']['data']['copy-on-read'])
        self.img_fails('amend', path, message='expecting -o copy_on_read')
        self.img_fails('amend', '-o', 'copy_on_read=yes', path, message="'on' or 'off', not 'yes'")
        self.img_fails('amend', '-o', 'colour=red', path, message="'colour' is not known")
        self.img_fails('create', '-o', 'copy_on_read=1', 'b.pcow', '2M', message="'on' or 'off'")
        self.assert_clean(path)


class BadCasesTest(TestCase):
    def test_the_wrong_way_to_a_running_vm(self) -> None:
        path = self.make()
        user = self.use(path)
        for options, words in (
            (('-a', 'one'), 'pcowctl snapshot revert --reset'),
            (('-c', 'x'), 'pcowctl snapshot create'),
            (('-d', 'one'), 'pcowctl snapshot delete'),
            (('--rename', 'one', 'x'), 'pcowctl snapshot rename'),
        ):
            self.img_fails('snapshot', *options, path, message=words)
        user.communicate('quit\n')
        self.assertEqual(['one', 'two'], list(self.list(path)))

    def test_two_at_once(self) -> None:
        """Each of many is done whole or refused in words; none is lost."""
        path = self.make()
        racers = {
            f'r{number}': self.start('pcow-img', 'snapshot', '-c', f'r{number}', path)
            for number in range(12)
        }
        done = set()
        for name, racer in racers.items():
            _stdout, stderr = racer.communicate(timeout=images.TIMEOUT)
            if racer.returncode == 0:
                done.add(name)
            else:
                self.assertIn('in use', stderr)
        self.assertEqual({'one', 'two'} | done, set(self.list(path)))
        self.assertTrue(done)
        self.assert_clean(path)

    def test_on_a_full_pool(self) -> None:
        """The record may still fit; when it does not, it is said and nothing has changed."""
        pool = self.mount_pool('8M')
        path = pool / 'a.pcow'
        self.img('create', '-q', path, '64M')
        self.io(path, 'write -P 1 0 1M')
        generation = self.img_json('info', path)['format-specific']['data']['generation']
        with open(pool / 'ballast', 'wb', buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        made = 0
        while True:
            result = subprocess.run(
                [images.program('pcow-img'), 'snapshot', '-c', f's{made}', str(path)],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode:
                break
            made += 1
        self.one_line(
            result, 'pcow-img', 'no space for the record of a snapshot; free space in the pool'
        )
        self.assertEqual(made, len(self.list(path)))
        self.assertLess(made, 100)
        self.io(path, 'read -P 1 0 1M', options=('-r',))
        self.assert_clean(path)
        # and an image that stands on it would not notice anything
        self.assertEqual(
            generation + made, self.img_json('info', path)['format-specific']['data']['generation']
        )
        if made:
            self.img('snapshot', '-a', 's0', path)
        (pool / 'ballast').unlink()
        self.img('snapshot', '-c', 'works', path)
