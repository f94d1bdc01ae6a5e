# SPDX-License-Identifier: Apache-2.0
"""tools/bench: figures are kept, shown and turned into documentation; the guest is a real one, its
benchmark the shortest.
"""

import json
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import testtools

from tests.functional import images
from tests.functional import long

GUEST_SECONDS = 900
PLACE = Path('/dev/shm')


class BenchTestCase(testtools.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.directory = Path(tempfile.mkdtemp(prefix='pcow-test-'))
        self.addCleanup(shutil.rmtree, self.directory, ignore_errors=True)

    def command(self, *arguments: str) -> list[str]:
        return [
            sys.executable,
            '-m',
            'tools.lib.bench',
            f'--output-dir={self.directory}',
            *arguments,
        ]

    def bench(self, *arguments: str, timeout: float = images.TIMEOUT) -> str:
        done = subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=images.TOP,
            check=False,
        )
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def kept(self, name: str) -> dict[str, Any]:
        result = json.loads((self.directory / f'{name}.json').read_text())
        self.assertTrue({'rows', 'machine'} <= set(result))
        self.assertTrue({'cpu', 'cores', 'memory', 'kernel'} <= set(result['machine']))
        return dict(result)


class ToolsBenchTest(BenchTestCase):
    def test_ablation(self) -> None:
        """Without a guess of engine minor that engine's row is there, and is not what it was."""
        self.bench(
            'ablation', '--rounds=1', '--size=16M', '--rows=cow-4k-scattered', '--guess=keep'
        )
        rows = self.kept('ablation')['rows']
        assert isinstance(rows, list)
        self.assertEqual({'nothing', 'keep'}, {row['without'] for row in rows})
        for row in rows:
            self.assertEqual('cow-4k-scattered', row['name'])
            self.assertGreater(row['ns'], 0)
            self.assertGreater(row['with_ns'], 0)
        self.assertIn('cow-4k-scattered', (self.directory / 'ablation.txt').read_text())

    def test_datapath_and_docs(self) -> None:
        shown = self.bench('--quick', '--rows=cow-4k,open-map')
        self.assertIn((self.directory / 'datapath.txt').read_text(), shown)
        rows = self.kept('datapath')['rows']
        # traps are measured with each engine that this machine has
        self.assertEqual(
            [('cow-4k', 1), ('cow-4k', 2), ('open-map', 1)],
            [(row['name'], row['threads']) for row in rows if row['engine'] == 'signal'],
        )
        target = self.directory / 'docs'
        self.bench('docs', '--target', str(target))
        self.assertEqual(
            {'datapath.json', 'datapath.inc', 'datapath.svg'},
            {path.name for path in target.iterdir()},
        )

    def test_snapshots_beside_qcow2(self) -> None:
        before = set(PLACE.iterdir())
        shown = self.bench('snapshots', '--quick', '--no-vm', '--virtual-size=1G')
        result = self.kept('snapshots')
        rows = {row['name']: row for row in result['rows']}
        self.assertEqual(
            {
                f'{part}-{way}-{operation}'
                for part in ('large', 'sweep-512', 'sweep-4096', 'sweep-65536')
                for way in ('open', 'mapped', 'returned', 'command')
                for operation in ('create', 'revert', 'delete')
            },
            set(rows),
        )
        for row in rows.values():
            self.assertGreater(row['pcow_ns'], 0, row)
            # QEMU's own time is taken off, and of a small snapshot nothing may be left
            if row['qcow2_ns'] == 0:
                self.assertIsNone(row['ratio'], row)
                self.assertNotEqual('command', row['way'], row)
                self.assertTrue(
                    row['part'].startswith('sweep') or row['operation'] == 'revert', row
                )
                continue
            self.assertGreater(row['qcow2_ns'], 0, row)
            self.assertAlmostEqual(row['pcow_ns'] / row['qcow2_ns'], row['ratio'])
        sizes = [
            (row['operation'], row['virtual_size'] // images.MIB, row['written'] // images.MIB)
            for row in result['sizes']
        ]
        self.assertEqual(
            [
                (operation, virtual, 16)
                for virtual in (1024, 8192)
                for operation in ('create', 'revert', 'delete')
            ],
            sizes,
        )
        self.assertIn('by what was written', shown)
        judged = [rows[f'large-open-{operation}'] for operation in ('create', 'revert', 'delete')]
        self.assertEqual([0.01, 0.01, 0.10], [row['target'] for row in judged])
        for row in judged:
            if row['ratio'] is not None:
                self.assertEqual(row['ratio'] <= row['target'], row['met'])
                self.assertIn('met' if row['met'] else 'MISSED', shown)
        for floor in (
            result['freeze_ns'],
            result['remap_ns'],
            result['punch_ns'],
            rows['large-command-create']['start_ns'],
        ):
            self.assertGreater(floor, 0)
        self.assertFalse(
            [path for path in set(PLACE.iterdir()) - before if path.name.startswith('pcow-bench-')]
        )

    def test_pool(self) -> None:
        """Makes no statement on times: the machine is anybody's."""
        text = self.bench('pool', '--few=5', '--many=60', '--times=3')
        self.assertIn('60 images', text)
        rows = {row['name']: row for row in self.kept('pool')['rows']}
        self.assertEqual({'create', 'delete', 'list'}, set(rows))
        for row in rows.values():
            self.assertAlmostEqual(row['ratio'], row['many_ns'] / row['few_ns'])

    def test_persist(self) -> None:
        """Makes no statement on times."""
        parts = 'fixation' + (',several,restart,automatic,resident' if long.LONG else '')
        before = set(PLACE.iterdir())
        shown = self.bench(
            'persist',
            '--rounds=1',
            '--cases=256:16',
            f'--parts={parts}',
            '--seconds=2',
            '--pauses=2',
        )
        result = self.kept('persist')
        (row,) = result['rows']
        (turn,) = row['turns']
        self.assertLess(0, turn['durable'])
        self.assertLess(turn['durable'], turn['ended'])
        self.assertEqual([256, 1024] * long.LONG, [row['memory'] for row in result['restart']])
        self.assertEqual([2] * long.LONG, [len(row['pauses']) for row in result['automatic']])
        self.assertIn('Fixation of one VM', shown)
        self.assertEqual(
            [], [path for path in set(PLACE.iterdir()) - before if 'quickstart' in path.name]
        )

    def test_soak(self) -> None:
        self.bench('soak', '--minutes=0.05', '--size=16M', '--threads=2')
        values = {row['name']: row['value'] for row in self.kept('soak')['rows']}
        self.assertEqual((2, 16 * images.MIB), (values['threads'], values['size']))
        self.assertGreater(values['verified-bytes'], 0)

    def test_an_error_of_the_program_is_passed_on(self) -> None:
        done = subprocess.run(
            self.command('--rows=nonsense'),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=images.TIMEOUT,
            cwd=images.TOP,
            check=False,
        )
        self.assertEqual(1, done.returncode)
        self.assertIn("no row 'nonsense'", done.stderr)
        self.assertNotIn('Traceback', done.stderr)
        self.assertEqual([], list(self.directory.iterdir()))


class GuestBenchTest(BenchTestCase):
    @long.only_long
    def test_a_guest_measures_all_devices(self) -> None:
        before = set(PLACE.iterdir())
        self.bench('guest', '--quick', timeout=GUEST_SECONDS)
        result = self.kept('guest')
        self.assertEqual('TCG', result['guest']['accelerator'])
        rows = {row['name']: row for row in result['rows']}
        for name in (
            'read-4k',
            'write-4k',
            'read-1m',
            'write-1m',
            'read-iops',
            'write-iops',
            'cow-write-4k',
            'cow-iops',
            'expand-4k',
            'redis-set',
            'redis-mset',
        ):
            self.assertEqual({'pcow', 'raw', 'qcow2', 'qcow2-tuned'}, set(rows[name]['values']))
            self.assertTrue(all(value > 0 for value in rows[name]['values'].values()), rows[name])
        for row in rows.values():
            self.assertAlmostEqual(row['pcow_ns'] / row['raw_ns'], row['ratio'])
            if row['targets']:
                self.assertEqual(
                    all(bound['value'] >= bound['at-least'] for bound in row['targets']), row['met']
                )
        self.assertFalse(
            [path for path in set(PLACE.iterdir()) - before if path.name.startswith('pcow-bench-')]
        )

    @long.only_long
    def test_interrupted(self) -> None:
        before = set(PLACE.iterdir())
        process = subprocess.Popen(
            self.command('guest', '--quick'),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=images.TOP,
        )
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + GUEST_SECONDS
        while not (
            found := [
                path
                for path in set(PLACE.iterdir()) - before
                if path.name.startswith('pcow-bench-') and (path / 'console.sock').exists()
            ]
        ):
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _out, errors = process.communicate(timeout=images.TIMEOUT)
        self.assertEqual(143, process.returncode, errors)
        self.assertFalse(found[0].exists())
        # no QEMU either: its command line names the directory
        for entry in Path('/proc').iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    self.assertNotIn(str(found[0]).encode(), (entry / 'cmdline').read_bytes())
                except OSError:
                    continue
