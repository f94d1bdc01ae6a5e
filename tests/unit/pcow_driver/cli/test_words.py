# SPDX-License-Identifier: Apache-2.0
"""What pcowctl says to words that are wrong: which is missing, and which was probably meant."""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys

from pcow_driver.cli import app
from pcow_driver.cli import common
from pcow_driver.cli import hints
from pcow_driver.cli import image
from pcow_driver.common import exception
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from tests.unit.pcow_driver import base


class WordsTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.fast = self._pool('fast', 'web1', 'debian12')
        self.slow = self._pool('slow', 'archive')

    def _pool(self, name: str, *images: str) -> pool.Pool:
        made = registry.PoolRegistry().create(name, str(self.directory / name))
        for item in images:
            Path(made.image_path(item)).touch()
        Path(made.path, '.hidden.pcow').touch()
        return made

    def _refused(self, kind: type[exception.PcowError], reference: str) -> str:
        return str(self.assertRaises(kind, common.image_path, reference))

    def test_images(self) -> None:
        for reference, meant in (
            ('web1', 'fast/web1'),
            ('web1.pcow', 'fast/web1'),
            ('wbe1', 'fast/web1'),
            ('archiv', 'slow/archive'),
            ('fast/wbe1', 'fast/web1'),
            ('fast/debian-12', 'fast/debian12'),
        ):
            said = self._refused(exception.ImageNotFound, reference)
            self.assertTrue(said.startswith('there is no image /'), said)
            self.assertTrue(said.endswith(f' (did you mean {meant}?)'), said)
        for reference in ('nothing-like-it', 'fast/archive', 'hidden', './web1', '/no/such/web1'):
            self.assertNotIn('did you mean', self._refused(exception.ImageNotFound, reference))

    def test_pools(self) -> None:
        said = self._refused(exception.PoolNotFound, 'fsat/web1')
        self.assertIn("no pool fsat (did you mean fast?): 'pcowctl pool list' names", said)
        self.assertIn("no pool xyz: 'pcowctl", self._refused(exception.PoolNotFound, 'xyz/web1'))

    def test_a_pool_whose_directory_is_gone(self) -> None:
        os.rename(self.slow.path, self.directory / 'moved')
        self.assertNotIn('mean', self._refused(exception.ImageNotFound, 'archive'))
        self.assertIn('mean fast/web1?', self._refused(exception.ImageNotFound, 'web1'))

    def test_no_list_of_pools(self) -> None:
        (Path(registry.PoolRegistry().path)).write_text('{')
        self.assertEqual('', hints.anywhere('web1'))

    def test_reference_without_its_pool(self) -> None:
        error = self.assertRaises(exception.InvalidName, common.existing_image, 'web1')
        self.assertIn('write POOL/NAME (did you mean fast/web1?)', str(error))
        self.assertEqual((self.fast, 'web1'), common.existing_image('fast/web1'))

    def test_template(self) -> None:
        for reference in ('debian12', 'fast/debian12', 'debian12.pcow', 'fast/debian12.pcow'):
            self.assertEqual('debian12', common.base_name(self.fast, reference))
        error = self.assertRaises(
            exception.UsageInvalid, common.base_name, self.fast, 'slow/archive'
        )
        self.assertIn('slow/archive is not in the pool of the image, fast', str(error))
        missing = self.assertRaises(
            exception.ImageNotFound, common.base_name, self.fast, 'debain12'
        )
        self.assertIn('did you mean fast/debian12?', str(missing))

    def test_number_of_words(self) -> None:
        for words, wanted, said in (
            (['a'], 'IMAGE NAME', 'NAME is missing, expected: IMAGE NAME'),
            ([], 'IMAGE NAME', 'IMAGE and NAME are missing, expected: IMAGE NAME'),
            (['a', 'b', 'c'], 'IMAGE NAME', "'c' is one word too many, expected: IMAGE NAME"),
            (['a'], '', "'a' is one word too many, expected: no further words"),
        ):
            error = self.assertRaises(exception.UsageInvalid, common.check_words, words, wanted)
            self.assertTrue(str(error).startswith(said), str(error))
        common.check_words(['a', 'b'], 'IMAGE NAME')

    def test_no_size(self) -> None:
        error = self.assertRaises(exception.SizeMissing, self.fast.create_image, 'x')
        self.assertIn('the image x needs a size', str(error))

    def test_errors_of_another_process(self) -> None:
        """They are made again of their arguments."""
        error = self.assertRaises(exception.ImageNotFound, common.image_path, 'web1')
        self.assertEqual(str(error), str(exception.ImageNotFound(*error.args)))


class CommandTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.ctl = app.PcowCtl()

    def _matches(self, line: str) -> list[str]:
        self.ctl._words = line.split()
        return self.ctl.get_fuzzy_matches(self.ctl._words[0])

    def test_commands(self) -> None:
        for line, meant in (
            ('imge show fast/web1', 'image show'),
            ('image shwo fast/web1', 'image show'),
            ('pool creat x', 'pool create'),
            ('docter', 'doctor'),
            ('snapshots list fast/web1', 'snapshot list'),
        ):
            self.assertEqual([meant], self._matches(line), line)
        self.assertIn('image fork', self._matches('image frobnicate'))
        self.assertEqual([], self._matches('frobnicate'))

    def _parse(self, *words: str) -> argparse.Namespace:
        return image.Create(self.ctl, argparse.Namespace()).get_parser('create').parse_args(words)

    def test_sizes(self) -> None:
        parsed = self._parse('p/vm', '--size', '1.5 GiB', '--cluster-size', '64KiB')
        self.assertEqual((3 << 29, 64 << 10), (parsed.size, parsed.cluster_size))

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        config = self.directory / 'pcow.conf'
        config.write_text(f'[pcow]\nstate_path = {self.directory}/state\n')
        return subprocess.run(
            [sys.executable, '-m', 'pcow_driver.cli.app', '--config-file', config, *words],
            cwd=base.TOP,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env=os.environ | {'COLUMNS': '90'},
        )

    def test_what_is_no_size(self) -> None:
        for words, said in (
            (('create', 'p/vm', '--size', '-5G'), '--size: the size .-5G. .* write 5G'),
            (('resize', 'p/vm', '-5G'), 'size: the size .-5G. .* write 5G'),
            (('create', 'p/vm', '--size', '1GB'), 'write 1G or 1GiB'),
            (('create', 'p/vm', '--size', '0'), 'it is zero'),
        ):
            done = self._run('image', *words)
            self.assertEqual(2, done.returncode)
            self.assertRegex(done.stderr, said)

    def test_doctor_through_a_pipe(self) -> None:
        lines = self._run('doctor').stdout.splitlines()
        self.assertGreater(len(lines), 10)
        self.assertEqual([], [line for line in lines if len(line) > 90])
        rows = json.loads(self._run('doctor', '-f', 'json').stdout)
        counted = [row for row in rows if row['check'] == 'vm.max_map_count']
        if counted[0]['found'] == '65530':
            self.assertIn('not larger than 96 GiB together', counted[0]['what to do'])
