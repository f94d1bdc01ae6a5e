# SPDX-License-Identifier: Apache-2.0
"""From what fio and redis-benchmark print to rows with ratios."""

from __future__ import annotations

import base64
import csv
import dataclasses
import gzip
import json
import statistics
from typing import Any

from pcow_driver.common import exception


@dataclasses.dataclass(frozen=True)
class Measure:
    """One figure of each device."""

    name: str
    title: str
    # 'ns' (less is better), '1/s' or 'byte/s' (more is better)
    unit: str
    figure: str  # of the paper; '' if it has none
    at_least: float | None = None  # times better than qcow2; None: no target

    @property
    def less_is_better(self) -> bool:
        return self.unit == 'ns'


_TIMES_BETTER = 10.0  # than qcow2, for what the issue names
FIO = {
    'read-4k': Measure('read-4k', 'random read of 4 KiB', 'ns', '6a'),
    'write-4k': Measure('write-4k', 'random write of 4 KiB', 'ns', '6a'),
    'read-4k-mapped': Measure('read-4k-mapped', 'random read of 4 KiB, mmap', 'ns', '6a'),
    'write-4k-mapped': Measure(
        'write-4k-mapped', 'random write of 4 KiB, mmap and fdatasync', 'ns', '6a'
    ),
    'read-1m': Measure('read-1m', 'sequential read of 1 MiB', 'byte/s', '6b'),
    'write-1m': Measure('write-1m', 'sequential write of 1 MiB', 'byte/s', '6b'),
    'read-iops': Measure('read-iops', 'random reads of 4 KiB, 4 threads', '1/s', '6c'),
    'write-iops': Measure('write-iops', 'random writes of 4 KiB, 4 threads', '1/s', '6c'),
    'cow-write-4k': Measure(
        'cow-write-4k', 'first write of 4 KiB to data of the base', 'ns', '7a', _TIMES_BETTER
    ),
    'cow-write-4k-mapped': Measure(
        'cow-write-4k-mapped', 'the same, mmap and fdatasync', 'ns', '7a', _TIMES_BETTER
    ),
    'cow-iops': Measure(
        'cow-iops',
        'first writes of 4 KiB to data of the base, 4 threads',
        '1/s',
        '7b',
        _TIMES_BETTER,
    ),
    'snapshot-write-4k': Measure(
        'snapshot-write-4k', 'first write of 4 KiB since a snapshot', 'ns', '7a', _TIMES_BETTER
    ),
    'snapshot-iops': Measure(
        'snapshot-iops',
        'first writes of 4 KiB since a snapshot, 4 threads',
        '1/s',
        '7b',
        _TIMES_BETTER,
    ),
    'expand-4k': Measure(
        'expand-4k', 'write of 4 KiB that makes a file longer', 'ns', '8a', _TIMES_BETTER
    ),
}
_QUERIES = ('ping_inline', 'get', 'lrange_100', 'lrange_300', 'lrange_500')
_UPDATES = ('set', 'incr', 'lpush', 'lpop', 'mset')
REDIS = {name: Measure(f'redis-{name}', f'Redis {name.upper()}', '1/s', '9a') for name in _QUERIES}
REDIS |= {
    name: Measure(f'redis-{name}', f'Redis {name.upper()}, log with fsync', '1/s', '9b')
    for name in _UPDATES
}
MEASURES = [*FIO.values(), *REDIS.values()]


def decode(text: str) -> tuple[list[dict[str, Any]], str]:
    """What the script in the guest printed: the documents of fio, and the table of redis-benchmark.

    :raises PcowError: it is something else
    """
    try:
        documents, redis = gzip.decompress(base64.b64decode(text)).decode().split('\n---\n')
        found, at, decoder = [], 0, json.JSONDecoder()
        while at < len(documents.rstrip()):
            # what fio has to remark stands in front of the document
            at = documents.index('{', at)
            document, at = decoder.raw_decode(documents, at)
            found.append(document)
        return found, redis
    except (ValueError, OSError) as e:
        raise exception.PcowError(
            reason=f'the guest printed something else than figures ({e}): {text[:200]!r}'
        ) from None


def _median(latency: dict[str, Any]) -> float:
    """Not the mean: the host has other things to do, and then a vCPU stands still for
    milliseconds.
    """
    return float(latency['percentile']['50.000000'])


def _of_job(job: dict[str, Any], measure: Measure) -> float:
    direction = job['write' if job['write']['io_bytes'] else 'read']
    if job['error'] or not direction['total_ios']:
        raise exception.PcowError(
            reason=f'fio measured nothing for {measure.name} (error {job["error"]})'
        )
    if measure.unit == '1/s':
        return float(direction['iops'])
    if measure.unit == 'byte/s':
        return float(direction['bw_bytes'])
    # with fdatasync: a write is done when it is durable
    return _median(direction['clat_ns']) + (
        _median(job['sync']['lat_ns']) if job['sync']['total_ios'] else 0.0
    )


def of_turn(text: str) -> dict[str, float]:
    """The figures of one turn, by name of the measure, in its unit.

    :raises PcowError: one is missing
    """
    documents, redis = decode(text)
    values = {
        job['jobname']: _of_job(job, FIO[job['jobname']])
        for document in documents
        for job in document['jobs']
    }
    for line in csv.reader(redis.splitlines()):
        name = line[0].split(' ')[0].lower() if line else ''
        if name in REDIS:
            # the first list of "lpush" is the one that fills for the others; the test's own comes
            # first
            values.setdefault(REDIS[name].name, float(line[1]))
    missing = [measure.name for measure in MEASURES if measure.name not in values]
    if missing:
        raise exception.PcowError(reason=f'the guest measured no {", ".join(missing)}')
    return values


def rows(turns: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row for each measure from all turns of each device, by the medians of the turns.

    ``ratio`` is time by time of raw (less is better in every row), ``qcow2_ratio`` how many times
    better than qcow2 pcow is.
    """
    found = []
    for measure in MEASURES:
        values = {
            device: statistics.median(turn[measure.name] for turn in all_turns)
            for device, all_turns in turns.items()
        }
        times = {
            device: value if measure.less_is_better else 1e9 / value
            for device, value in values.items()
        }
        better = {device: times[device] / times['pcow'] for device in times}
        bounds = (
            []
            if measure.at_least is None
            else [
                {
                    'what': f'{device}/pcow',
                    'value': better[device],
                    'at-least': measure.at_least,
                    'met': better[device] >= measure.at_least,
                }
                for device in better
                if device.startswith('qcow2')
            ]
        )
        found.append(
            {
                'name': measure.name,
                'title': measure.title,
                'figure': measure.figure,
                'unit': measure.unit,
                'threads': 4 if measure.name.endswith('iops') else 1,
                'raw_ns': times['raw'],
                'paper_ns': None,
                'pcow_ns': times['pcow'],
                'ratio': times['pcow'] / times['raw'],
                # the first bound, in terms of the ratio
                'target': times['qcow2'] / times['raw'] / measure.at_least
                if measure.at_least
                else None,
                'met': all(bound['met'] for bound in bounds) if bounds else None,
                'targets': bounds,
                'qcow2_ratio': better['qcow2'],
                'qcow2_tuned_ratio': better['qcow2-tuned'],
                'values': values,
                'turns': {
                    device: [turn[measure.name] for turn in all_turns]
                    for device, all_turns in turns.items()
                },
            }
        )
    return found
