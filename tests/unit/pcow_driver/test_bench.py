# SPDX-License-Identifier: Apache-2.0
"""tools/bench: what is made of figures.  That they are measured is in tests/functional."""

import base64
import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import testtools

from pcow_driver.common import exception
from tests.unit.pcow_driver import base
from tools.lib.bench import __main__ as bench
from tools.lib.bench import plot
from tools.lib.bench import store
from tools.lib.bench import table
from tools.lib.bench.commands import density
from tools.lib.bench.commands import persist
from tools.lib.bench.commands import vm as vm_command
from tools.lib.bench.guest import disks
from tools.lib.bench.guest import figures
from tools.lib.bench.persist import redis

MACHINE = {'cpu': 'A CPU', 'cores': 2, 'memory': 1 << 34, 'kernel': 'Linux 6.1 x86_64'}
ROW = {
    'name': 'cow-4k',
    'threads': 1,
    'engine': 'signal',
    'limit_ns': 2000.0,
    'raw_ns': 1000.0,
    'paper_ns': None,
    'pcow_ns': 8000.0,
    'ratio': 8.0,
    'limit_ratio': 4.0,
    'paper_ratio': None,
    'target': 7.0,
    'met': False,
    'details': {},
    'targets': [
        {'what': 'pcow/raw', 'value': 8.0, 'at-most': 7.0, 'met': False},
        {'what': 'ns', 'value': 8000.0, 'at-most': 9000.0, 'met': True},
        {'what': 'qcow2/pcow', 'value': 12.0, 'at-least': 10.0, 'met': True},
    ],
}


UNPUBLISHED: set[str] = set()


class DensityTest(testtools.TestCase):
    SMAPS = """\
7f0000000000-7f0010000000 rw-p 00000000 00:00 0
Pss:               1024 kB
7f1000000000-7f1000200000 rw-s 00400000 00:1b 7 /dev/shm/run/pcow-0.pcow
Pss:                  8 kB
7f2000000000-7f2000001000 rw-p 00000000 00:00 0 [heap]
Pss:                  4 kB
VmFlags: rd wr mr mw me ac
"""

    def test_what_a_process_maps(self) -> None:
        with mock.patch.object(Path, 'read_text', return_value=self.SMAPS):
            self.assertEqual(
                {'ram': 1 << 20, 'image': 8 << 10, 'emulator': 4 << 10},
                density._smaps(1, Path('/dev/shm/run/pcow-0')),
            )

    def test_counts(self) -> None:
        self.assertEqual([1, 4], density._counts('4,1'))
        for text in ('', '0', 'x', '1,,2'):
            self.assertRaises(exception.UsageInvalid, density._counts, text)

    def test_table(self) -> None:
        row = {'guests': 1, 'used': 1 << 20, 'ram': 2 << 20, 'image': 0, 'emulator': 0}
        rows = [{**row, 'side': side} for side in density.SIDES]
        rows[1]['ram'] = 1 << 20
        (found,) = density.tables({'rows': rows, 'memory': 256 << 20})
        self.assertEqual(('1.00', '0.50'), found.rows[1][-2:])
        self.assertEqual({'density'}, set(density.plots({'rows': rows})))


class TableTest(testtools.TestCase):
    def test_numbers(self) -> None:
        for ns, text in (
            (None, '-'),
            (float('nan'), '-'),
            (3.14159, '3.14 ns'),
            (999.4, '999 ns'),
            (1234.0, '1.23 us'),
            (45.6e6, '45.6 ms'),
            (7.89e9, '7.89 s'),
            (7.89e12, '7890 s'),
        ):
            self.assertEqual(text, table.time_text(ns))
        for value, text in ((None, '-'), (0.5, '0.50'), (12.34, '12.3'), (123.4, '123')):
            self.assertEqual(text, table.ratio_text(value))

    def test_terminal_and_documentation(self) -> None:
        shown = table.Table(
            'Title', ('a', 'long heading'), [('1', '-'), ('twenty', '2')], 'A note.'
        )
        self.assertEqual(
            'Title\n\na       long heading\n--------------------\n1       -\ntwenty  2\n\nA '
            'note.\n',
            shown.text(),
        )
        self.assertEqual(
            '.. list-table:: Title\n   :header-rows: 1\n\n   * - a\n     - long heading\n   * - '
            '1\n     - \\-\n'
            '   * - twenty\n     - 2\n\nA note.\n',
            shown.rst(),
        )


class DispatchTest(base.TestCase):
    def bench(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = bench.main([f'--output-dir={self.directory / "kept"}', *arguments])
        return code, out.getvalue(), err.getvalue()

    def test_every_benchmark_has_its_parts(self) -> None:
        known = bench.benchmarks()
        self.assertTrue({'boot', 'datapath', 'guest', 'soak'} <= set(known))
        for module in known.values():
            self.assertTrue(module.HELP)
            for name in ('add_arguments', 'run', 'tables', 'plots'):
                self.assertTrue(callable(getattr(module, name)), (module, name))

    def test_the_default_benchmark(self) -> None:
        known = {'datapath': None, 'guest': None}
        for given, meant in (
            ([], ['datapath']),
            (['--quick'], ['datapath', '--quick']),
            (['guest'], ['guest']),
            (['--output-dir', 'x', '--rows=a'], ['--output-dir', 'x', 'datapath', '--rows=a']),
            (['--output-dir=x', 'docs'], ['--output-dir=x', 'docs']),
            (['-h'], ['-h']),
        ):
            self.assertEqual(meant, bench._with_default(given, known))

    def test_docs_from_kept_figures(self) -> None:
        known = bench.benchmarks()
        result: dict[str, Any] = {'rows': [ROW], 'machine': MACHINE}
        store.keep(self.directory / 'kept', 'datapath', known['datapath'], result)
        text = (self.directory / 'kept' / 'datapath.txt').read_text()
        self.assertIn('A CPU, 2 cores, 16 GiB of memory', text)
        self.assertIn(
            'pcow/raw 8.00, at most 7.00: MISSED; time 8.00 us, at most 9.00 us: met; '
            'qcow2/pcow 12.0, at least 10.0: met',
            text,
        )
        target = self.directory / 'docs'
        code, out, _err = self.bench('docs', '--target', str(target))
        self.assertEqual(0, code)
        self.assertEqual(
            {'datapath.json', 'datapath.inc', 'datapath.svg'},
            {path.name for path in target.iterdir()},
        )
        self.assertEqual(3, len(out.splitlines()))
        self.assertEqual(result, json.loads((target / 'datapath.json').read_text()))
        self.assertIn('   * - cow-4k', (target / 'datapath.inc').read_text())
        drawn = (target / 'datapath.svg').read_text()
        self.assertIn('cow-4k', drawn)
        # nothing in it but the figures: a second time it is the same file
        self.assertEqual(0, self.bench('docs', '--target', str(target))[0])
        self.assertEqual(drawn, (target / 'datapath.svg').read_text())

    def test_published_tables_follow_from_published_figures(self) -> None:
        published = bench.TOP / 'doc' / 'source' / '_static' / 'benchmarks'
        for name, benchmark in bench.benchmarks().items():
            if name in UNPUBLISHED:
                self.assertFalse((published / f'{name}.json').exists(), name)
                continue
            result = json.loads((published / f'{name}.json').read_text())
            self.assertEqual(
                store.shown(benchmark, result), (published / f'{name}.inc').read_text(), name
            )

    def test_docs_without_figures(self) -> None:
        code, _out, err = self.bench('docs', '--target', str(self.directory / 'docs'))
        self.assertEqual((1, 1), (code, len(err.splitlines())))
        self.assertIn('holds no figures: run tools/bench first', err)
        (self.directory / 'kept').mkdir()
        for content in ('nonsense', '[]', '{"rows": 1, "machine": {}}'):
            (self.directory / 'kept' / 'datapath.json').write_text(content)
            code, _out, err = self.bench('docs', '--target', str(self.directory / 'docs'))
            self.assertEqual(1, code)
            self.assertRegex(err, r'^bench: .*datapath.json holds no figures of tools/bench')

    def test_bad_arguments(self) -> None:
        for arguments, message in (
            (('soak', '--minutes=0'), '--minutes 0'),
            (('guest', '--rounds=0'), '--rounds 0'),
            (('boot', '--rounds=0'), '--rounds 0'),
        ):
            code, _out, err = self.bench(*arguments)
            self.assertEqual(1, code)
            self.assertIn(message, err)


class BootFiguresTest(testtools.TestCase):
    def test_what_a_way_takes_more(self) -> None:
        rows = [
            {
                'name': name,
                'clock': clock,
                'processor': clock / 2,
                'turns': [{'clock': clock, 'processor': clock / 2}],
            }
            for name, clock in (('direct', 4.0), ('shim', 5.0))
        ]
        shown = bench.benchmarks()['boot'].tables(
            {'rows': rows, 'accelerator': 'TCG', 'cpus': 1, 'rounds': 1, 'load': 0.5}
        )[0]
        self.assertEqual(('shim', '2.50 s (2.50 to 2.50)', '0.50 s', '1.25'), shown.rows[1][:4])
        self.assertEqual(('5.00 s (5.00 to 5.00)', '1.00 s', '1.25'), shown.rows[1][4:])


class GuestFiguresTest(testtools.TestCase):
    @staticmethod
    def document(name: str, index: int) -> str:
        direction = (
            'write'
            if any(word in name for word in ('write', 'cow', 'snapshot', 'expand'))
            else 'read'
        )
        empty = {'io_bytes': 0, 'total_ios': 0, 'iops': 0, 'bw_bytes': 0, 'clat_ns': {}}
        full = {
            'io_bytes': 4096,
            'total_ios': 1,
            'iops': 100.0 * index,
            'bw_bytes': 1000.0 * index,
            'clat_ns': {'percentile': {'50.000000': 10.0 * index}},
        }
        sync: dict[str, Any] = {'total_ios': 0}
        if name.endswith('mapped') and direction == 'write':
            sync = {'total_ios': 1, 'lat_ns': {'percentile': {'50.000000': 7.0}}}
        job = {'jobname': name, 'error': 0, 'read': empty, 'write': empty, 'sync': sync} | {
            direction: full
        }
        return f'fio: a remark {index}\n' + json.dumps({'jobs': [job]})

    def turn(self, factor: int = 1, leave_out: str = '') -> str:
        documents = '\n'.join(
            self.document(name, factor * (number + 1))
            for number, name in enumerate(figures.FIO)
            if name != leave_out
        )
        redis = (
            '"test","rps"\n"PING_INLINE","900"\n"SET","500.5"\n"GET","800"\n"INCR","400"\n"LPUSH","300"\n"LPOP","200"\n'
            '"LPUSH (needed to benchmark LRANGE)","1"\n"LRANGE_100 (first 100 elements)","90"\n'
            '"LRANGE_300 (first 300 elements)","80"\n"LRANGE_500 (first 500 elements)","70"\n"MSET '
            '(10 keys)","100"\n'
        )
        return base64.encodebytes(gzip.compress(f'{documents}\n---\n{redis}'.encode())).decode()

    def test_a_turn(self) -> None:
        values = figures.of_turn(self.turn())
        self.assertEqual({measure.name for measure in figures.MEASURES}, set(values))
        names = list(figures.FIO)
        self.assertEqual(10.0 * (names.index('read-4k') + 1), values['read-4k'])
        # what makes the write durable is part of it
        self.assertEqual(
            10.0 * (names.index('write-4k-mapped') + 1) + 7.0, values['write-4k-mapped']
        )
        self.assertEqual(1000.0 * (names.index('read-1m') + 1), values['read-1m'])
        self.assertEqual(100.0 * (names.index('cow-iops') + 1), values['cow-iops'])
        self.assertEqual(
            (500.5, 300.0, 100.0),
            (values['redis-set'], values['redis-lpush'], values['redis-mset']),
        )
        self.assertEqual((900.0, 80.0), (values['redis-ping_inline'], values['redis-lrange_300']))

    def test_what_is_missing_is_told(self) -> None:
        error = self.assertRaises(
            exception.PcowError, figures.of_turn, self.turn(leave_out='cow-iops')
        )
        self.assertIn('measured no cow-iops', str(error))
        for text in ('', 'not base64!', base64.b64encode(b'not gzip').decode()):
            self.assertRaises(exception.PcowError, figures.of_turn, text)

    def test_rows(self) -> None:
        one, two, twenty = (figures.of_turn(self.turn(factor)) for factor in (1, 2, 20))
        rows = figures.rows(
            {
                'pcow': [one, twenty, one],
                'raw': [one, one],
                'qcow2': [twenty],
                'qcow2-tuned': [twenty, two, one],
            }
        )
        by_name = {row['name']: row for row in rows}
        self.assertEqual(
            [measure.name for measure in figures.MEASURES], [row['name'] for row in rows]
        )
        cow = by_name['cow-write-4k']
        self.assertEqual(
            (1.0, 20.0, 2.0, False),
            (cow['ratio'], cow['qcow2_ratio'], cow['qcow2_tuned_ratio'], cow['met']),
        )
        self.assertEqual([True, False], [bound['met'] for bound in cow['targets']])
        # more is better, and one good turn makes no median: pcow did as many as raw, the qcow2s 20
        # times and twice as many
        self.assertAlmostEqual(1 / 20, by_name['cow-iops']['qcow2_ratio'])
        self.assertAlmostEqual(1 / 2, by_name['cow-iops']['qcow2_tuned_ratio'])
        self.assertAlmostEqual(1.0, by_name['cow-iops']['ratio'])
        self.assertIsNone(by_name['read-4k']['met'])
        module = bench.benchmarks()['guest']
        result = {
            'rows': rows,
            'machine': MACHINE,
            'guest': {
                'rounds': 1,
                'operations': 5,
                'devices': {'pcow': '', 'raw': '', 'qcow2': '', 'qcow2-tuned': ''},
            },
        }
        (shown,) = module.tables(result)
        self.assertEqual(len(rows), len(shown.rows))
        self.assertEqual({len(shown.columns)}, {len(row) for row in shown.rows})
        # where there are several turns, the least and the most of them stand beside the median
        cells = next(row for row in shown.rows if row[0] == figures.FIO['cow-iops'].title)[2:6]
        self.assertEqual(
            (
                '1100/s (1100/s to 22000/s)',
                '1100/s (1100/s to 1100/s)',
                '22000/s',
                '2200/s (1100/s to 22000/s)',
            ),
            cells,
        )
        (bars,) = module.plots(result).values()
        self.assertIsInstance(bars, plot.Bars)
        self.assertEqual({len(bars.groups)}, {len(values) for values in bars.series.values()})

    def test_what_is_published_follows_from_its_turns(self) -> None:
        published = bench.TOP / 'doc' / 'source' / '_static' / 'benchmarks'
        result = store.load(published / 'guest.json')
        turns = {
            device: [
                {row['name']: row['turns'][device][number] for row in result['rows']}
                for number in range(result['guest']['rounds'])
            ]
            for device in result['guest']['devices']
        }
        self.assertEqual(figures.rows(turns), result['rows'])

    def test_the_file_system_has_room(self) -> None:
        for scale in (disks.FULL, disks.QUICK):
            self.assertEqual(0, scale.size % (2 << 20))
            self.assertGreater(scale.size, scale.steady + 3 * scale.rounds * scale.cow)


class PersistTest(testtools.TestCase):
    def result(self, rate: float) -> dict[str, Any]:
        turn = {'durable': 19.0, 'ended': 300.0, 'recovery': 500.0}
        side = {'rate': 100.0, 'cpu': 0.1, 'checkpoints': 4.0}
        return {
            'rows': [{'memory': 256, 'dirty': 64, 'turns': [turn]}],
            'several': [
                {'count': 8, 'memory': 256, 'dirty': 64, 'turns': [turn | {'recovered': 900.0}]}
            ],
            'restart': [
                {
                    'memory': 256,
                    'turns': [{'start': 40.0, 'revert': 4.0, 'running': 61.0, 'answered': 150.0}],
                }
            ],
            'automatic': [
                {
                    'seconds': 40.0,
                    'sides': {'without': [side], 'with': [side | {'rate': rate, 'cpu': 0.13}]},
                    'pauses': [5.0] * 99 + [50.0],
                }
            ],
            # the machine was half as fast in the second turn
            'resident': [{'sides': {'pcow': [99.0, 49.5, 99.0], 'raw': [100.0, 50.0, 100.0]}}],
            'redis': [
                {'used': 2 << 30, 'sides': {'recovered': [0.5, 0.6], 'booted': [11.0, 11.0]}}
            ],
            'flush': [10000.0],
            'rounds': 1,
            'load': 0.0,
            'machine': MACHINE,
        }

    def shown(self, rate: float) -> str:
        return '\n'.join(item.text() for item in persist.tables(self.result(rate)))

    def test_tables(self) -> None:
        said = self.shown(97.0)
        for met in (
            'at most 20 ms: met',
            'at most 150 ms: met',
            'at least 0.97: met',
            'at most 3%: met',
            'at most 10 ms: met',
            '0.990 (95 % sure: 0.990 to 0.990; 100 MiB/s raw)',
            'at least 0.98: met',
            'at least 20 times: met',
        ):
            self.assertIn(met, said)
        self.assertIn('at most 60 ms: MISSED', said)
        self.assertIn('10.0 us per MiB', said)
        self.assertIn('at least 0.97: MISSED', self.shown(96.0))

    def test_resident_is_judged_when_it_is_known(self) -> None:
        result = self.result(97.0)
        for values, judged in (
            ([95.0, 99.0, 99.0], 'not known'),
            ([95.0, 96.0, 97.0], 'MISSED'),
            ([98.5, 99.0, 99.5], 'met'),
        ):
            result['resident'] = [{'sides': {'pcow': values, 'raw': [100.0] * len(values)}}]
            said = '\n'.join(item.text() for item in persist.tables(result))
            self.assertIn(f'at least 0.98: {judged}', said)

    def test_interval(self) -> None:
        values = [float(number) for number in range(101)]
        least, most = persist.interval(values)
        self.assertEqual((least, most), persist.interval(values))
        self.assertTrue(30 < least < 50 < most < 70, (least, most))

    def test_parts_that_were_not_measured(self) -> None:
        result = self.result(97.0) | {'rows': [], 'several': [], 'automatic': [], 'flush': []}
        (only,) = persist.tables(result)
        self.assertEqual(8, len(only.rows))

    def test_refused(self) -> None:
        for words in ('--cases=256', '--cases=256:200', '--parts=x', '--rounds=0', '--seconds=0'):
            with (
                contextlib.redirect_stderr(io.StringIO()) as said,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                self.assertEqual(1, bench.main(['persist', words]))
            self.assertIn(words.partition('=')[0], said.getvalue())

    def test_rate_of_redis(self) -> None:
        said = '"test","rps"\n"GET key:__rand_int__","16447.37","0.219"\n'
        self.assertEqual(16447.37, redis.rate(said))
        self.assertRaises(exception.PcowError, redis.rate, 'LOADING')

    def test_percentile(self) -> None:
        self.assertEqual(99, persist.percentile([*range(1, 101)], 0.99))
        self.assertEqual(7, persist.percentile([7], 0.99))


class VmTest(testtools.TestCase):
    def result(self, pause: float) -> dict[str, Any]:
        ours = {
            'pause': pause,
            'durable': 20.0,
            'revert': 29.0,
            'restart': 61.0,
            'fork': 60.0,
            'answer': 150.0,
            'bytes': float(1 << 20),
        }
        savevm = {'pause': 500.0, 'durable': 500.0, 'revert': 9.0, 'restart': 9.0, 'bytes': 3e8}
        other = {'pause': 90.0, 'durable': 90.0, 'restart': 9.0, 'bytes': 3e8}
        turns = {'pcow': ours, 'savevm': savevm, 'mapped-ram': other, 'x-ignore-shared': other}
        fork = {'all': 1500.0, 'each': 100.0}
        for when, own in (('idle', 4), ('served', 26)):
            fork[f'{when}_own'] = float(own << 20)
            fork[f'{when}_taken'], fork[f'{when}_stored'] = 3e6, 2e6
        return {
            'rows': [
                {
                    'memory': 4096,
                    'dirty': 64,
                    'turns': {title: [turn] for title, turn in turns.items()},
                }
            ],
            'forks': [{'count': 16, 'memory': 256, 'turns': [fork]}],
            'rounds': 1,
            'load': 0.0,
            'machine': MACHINE,
        }

    def shown(self, pause: float) -> str:
        return '\n'.join(item.text() for item in vm_command.tables(self.result(pause)))

    def test_tables(self) -> None:
        said = self.shown(10.0)
        for words in (
            'at most 10 ms: met',
            'at most 30 ms: met',
            'at most 60 ms: MISSED',
            'at most 150 ms: met',
            'at least 50: met',
            'at least 100: met',
            'at most 1.5 s: met',
            'at most 4 MiB: met',
            'at most 25 MiB: MISSED',
            '1.50 of its pages',
            'at most 1.5: met',
        ):
            self.assertIn(words, said)
        self.assertIn('at least 50: MISSED', self.shown(10.1))

    def test_parts_that_were_not_measured(self) -> None:
        self.assertEqual(1, len(vm_command.tables(self.result(1.0) | {'forks': []})))
        self.assertEqual(1, len(vm_command.tables(self.result(1.0) | {'rows': []})))

    def test_refused(self) -> None:
        for words in ('--cases=512', '--cases=512:300', '--forks=0', '--forks=x', '--rounds=0'):
            with (
                contextlib.redirect_stderr(io.StringIO()) as said,
                contextlib.redirect_stdout(io.StringIO()),
            ):
                self.assertEqual(1, bench.main(['vm', words]))
            self.assertIn(words.partition('=')[0], said.getvalue())
