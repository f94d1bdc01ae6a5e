# SPDX-License-Identifier: Apache-2.0
"""pcow-bench: that it measures what it says and cleans up.  Never how fast anything is."""

import json
import re
import signal
import time

from tests.functional import images

ROWS = {
    'first-touch-single', 'first-touch-sequential', 'first-touch-clustered', 'cow-4k', 'cow-64k', 'cow-2m', 'steady-read-4k',
    'steady-read-4k-scattered', 'steady-write-4k', 'steady-store-flush', 'open-map', 'snapshot-create', 'snapshot-revert',
}
TRAP_ROWS = {name for name in ROWS if name.startswith(('first-touch', 'cow'))}
UFFD_ROWS = {name for name in ROWS if name.startswith(('first-touch', 'snapshot'))}


class BenchTest(images.ImageTestCase):

    def setUp(self) -> None:
        super().setUp()
        self.pool = self.path('own-pool')
        self.pool.mkdir()

    def bench(self, *args, code=0):
        result = self.run_program('pcow-bench', f'--pool={self.pool}', *args, code=code)
        self.assertEqual([], list(self.pool.iterdir()))
        return result

    def check_row(self, row):
        numbers = ['limit_ns', 'raw_ns', 'raw_p99_ns', 'pcow_ns', 'pcow_p99_ns', 'ratio']
        if row['name'] == 'open-map':
            numbers.remove('limit_ns')
        for key in numbers:
            self.assertIsInstance(row[key], float, (row['name'], key))
            self.assertGreater(row[key], 0, (row['name'], key))
        # printed numbers are rounded
        self.assertAlmostEqual(row['pcow_ns'] / row['raw_ns'], row['ratio'], delta=0.01 * row['ratio'])
        self.assertIn('paper_ns', row)
        self.assertIn('target', row)
        self.assertEqual(all(target['met'] for target in row['targets']) if row['targets'] else None, row['met'])
        for target in row['targets']:
            self.assertEqual(target['value'] <= target['at-most'], target['met'])
            if target['what'] == 'pcow/raw':
                self.assertEqual(target['at-most'], row['target'])

    def test_every_row_as_json(self):
        result = json.loads(self.bench('--quick', '--output=json').stdout)
        self.assertEqual({'rows', 'limits', 'machine', 'run'}, set(result))
        self.assertTrue(result['run']['quick'])
        self.assertEqual(ROWS, {row['name'] for row in result['rows']})
        for row in result['rows']:
            self.check_row(row)
        for key, value in result['limits'].items():
            self.assertGreater(value, 0, key)
        machine = result['machine']
        self.assertEqual(str(self.pool), machine['pool'])
        self.assertIn(machine['persistence'], ('volatile', 'page-cache', 'pmem'))
        self.assertGreater(machine['cores'], 0)
        self.assertGreater(machine['max_map_count'], 0)
        for key in ('cpu', 'kernel'):
            self.assertTrue(machine[key], key)
        seen = {(row['name'], row['threads'], row['engine']) for row in result['rows']}
        expected = {(name, threads, 'signal') for name in ROWS for threads in ((1, 2) if name in TRAP_ROWS else (1,))}
        if 'engine_uffd_skipped' not in result['run']:
            expected |= {(name, threads, 'uffd') for name in UFFD_ROWS for threads in ((1, 2) if name in TRAP_ROWS else (1,))}
        self.assertEqual(expected, seen)
        self.assertEqual(len(seen), len(result['rows']))

    def test_the_stores_really_trap(self):
        rows = json.loads(self.bench('--quick', '--output=json', '--rows=first-touch-single,cow-4k,cow-64k,cow-2m').stdout)['rows']
        copied = {row['name']: row['details']['pages_copied_per_store'] for row in rows}
        self.assertEqual({'first-touch-single': 0, 'cow-4k': 1, 'cow-64k': 16, 'cow-2m': 511}, copied)
        for row in rows:
            self.assertGreaterEqual(row['details']['traps_per_store'], 1, row['name'])

    def test_table_and_json_of_one_run(self):
        target = self.path('bench.json')
        table = self.bench('--quick', '--rows=cow-4k,open-map', f'--json-file={target}').stdout
        rows = json.loads(target.read_text())['rows']
        self.assertEqual([('cow-4k', 1), ('cow-4k', 2), ('open-map', 1)], [(row['name'], row['threads']) for row in rows])
        self.assertEqual([row['name'] for row in rows], re.findall(r'^(cow-4k|open-map) ', table, re.MULTILINE))
        # no other row
        self.assertFalse(re.search(r'^(first-touch|steady|snapshot)', table, re.MULTILINE), table)

    def test_bad_arguments(self):
        for args, message in (
            (('--rows=nonsense',), "no row 'nonsense'"),
            (('--size=1M',), '--size takes a multiple of 2M'),
            (('--size=17M',), '--size takes a multiple of 2M'),
            (('--repeat=0',), '--repeat takes a number'),
            (('--output=xml',), '--output must be'),
            (('operand',), "'operand' is not expected"),
            (('--quick', '--json-file=/nonexistent/bench.json'), 'cannot write /nonexistent/bench.json'),
            (('--size=8T', '--rows=cow-4k'), 'left and .* are needed'),
        ):
            self.one_line(self.bench(*args, code=1), 'pcow-bench', message)
        self.one_line(self.run_program('pcow-bench', '--pool', self.path('none'), code=1), 'pcow-bench', 'no pool at .*/none')

    def start_endless(self):
        """A run that goes on until something ends it, when it has made its files and measures."""
        process = self.start('pcow-bench', f'--pool={self.pool}', '--size=64M', '--repeat=1000', '--rows=cow-4k')
        deadline = time.monotonic() + images.TIMEOUT
        while not list(self.pool.glob('pcow-bench.*/base.pcow')):
            self.assertIsNone(process.poll())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.05)
        return process

    def interrupted(self, number):
        process = self.start_endless()
        process.send_signal(number)
        self.assertEqual(-number, process.wait(images.TIMEOUT))
        self.assertEqual([], list(self.pool.iterdir()))

    def test_interrupted(self):
        self.interrupted(signal.SIGINT)
        self.interrupted(signal.SIGTERM)

    def test_small_pool(self):
        self.pool = self.mount_pool('40M')
        self.one_line(self.bench('--quick', code=1), 'pcow-bench', 'left and .* are needed')

    def test_pool_filled_meanwhile(self):
        """Whatever that does to the measuring process, its files go away."""
        self.pool = self.mount_pool('400M')
        process = self.start_endless()
        filler = self.pool / 'filler'
        with self.assertRaises(OSError), filler.open('wb', buffering=0) as file:
            while True:
                file.write(bytes(images.MIB))
        _, errors = process.communicate(timeout=images.TIMEOUT)
        self.assertEqual(1, process.returncode, errors)
        self.assertRegex(errors, '^pcow-bench: .+')
        self.assertEqual([filler], list(self.pool.iterdir()))
