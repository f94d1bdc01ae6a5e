# SPDX-License-Identifier: Apache-2.0
"""What is tried on file systems with DAX, on a namespace of a real kernel. A scenario returns
figures, or raises Failure.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import json
import os
from pathlib import Path
import re
import subprocess
import sys
from typing import Any

from tests.vm import journal
from tests.vm import machine
from tests.vm import reflink

REGIONS = {'ext4': 'region0', 'xfs': 'region1'}
# Bytes; the third is reflink.REGION, whose files stay, the last one random_work's
REGION_SIZES = (4 << 30, 4 << 30, 10 << 30, 1 << 30)
GOLDEN = Path('/suite/golden')  # images of earlier versions
# Tests of the library that keep files where they are told to, and that an emulator ends in minutes;
# why the others are not here is in doc/source/contributor/testing.rst.
UNIT_TESTS = (
    'test_open',
    'test_map',
    'test_mappings',
    'test_snapshot',
    'test_check',
    'test_check_layers',
    'test_check_lost',
    'test_fork',
    'test_fork_readers',
    'test_frozen',
    'test_model',
    'test_copy_on_read',
    'test_format1',
    'test_format1_chains',
    'test_format1_damage',
    'test_golden',
    'test_remains',
    'test_signals',
    'test_sizes',
    'test_whole',
    'test_watch',
)
_ARGUMENTS = {'test_golden': (str(GOLDEN),)}
# Of the programs; their directories are on the mount. Those of pcowctl are in tests/vm/pools.py,
# where there are regions.
FUNCTIONAL_TESTS = (
    'test_pcow_img',
    'test_pcow_io',
    'test_pcow_forks',
    'test_pcow_bad_images',
    'test_pcow_convert',
)
_MKFS = {
    'ext4': (
        'mkfs.ext4',
        '-q',
        '-F',
        '-b',
        '4096',
        '-m',
        '0',
        '-E',
        'stride=512,stripe_width=512,lazy_itable_init=0,nodiscard',
    ),
    'xfs': ('mkfs.xfs', '-q', '-f', '-K', '-d', 'su=2m,sw=1', '-m', 'reflink=0'),
}
_TEST_SECONDS = 1500.0
RANDOM_TEST = 'test_random'
_RANDOM_SECONDS = '45'
# It fills the pool now and then, and the library does less ahead where less than a tenth is free
_RANDOM_REGION = 'region3'
RANDOM_POOL = Path('/fs/random')
# What it prints at the end, in this order
_RANDOM_FIGURES = (
    'rounds',
    'steps',
    'stores',
    'by-calls',
    'refused',
    'waited',
    'loads',
    'in-handlers',
    'calls',
    'checksums-mib',
)
_RAN = re.compile(r'^Ran (\d+) tests? in', re.MULTILINE)
_PASSED = re.compile(r'\[  PASSED  \] (\d+) test')
_NVDIMMS = Path('/sys/bus/nd/devices')


def _namespace(region: str) -> dict[str, Any]:
    """In fsdax mode, on a region with labels; ndctl's words."""
    dimm = (_NVDIMMS / region / 'mapping0').read_text().split(',')[0]
    # a new device has an empty label area, and until that is initialised one raw namespace over
    # everything
    machine.run('ndctl', 'disable-region', region)
    machine.run('ndctl', 'init-labels', '--force', dimm)
    machine.run('ndctl', 'enable-region', region)
    made: dict[str, Any] = json.loads(
        machine.run(
            'ndctl', 'create-namespace', '--mode', 'fsdax', '--map', 'mem', '--region', region
        )
    )
    return made


def _mount(device: str, make: tuple[str, ...], kind: str, directory: Path) -> str:
    """A new file system, with DAX; the mount's options."""
    machine.run(*make, device)
    machine.run('mount', '-t', kind, '-o', 'dax=always,noatime', device, directory)
    options = next(
        line.split()[3]
        for line in Path('/proc/mounts').read_text().splitlines()
        if line.split()[1] == str(directory)
    )
    if 'dax=always' not in options.split(','):
        raise machine.Failure(f'{device} is mounted with {options}')
    return options


def _mounted(
    region: str, make: tuple[str, ...], kind: str, directory: Path
) -> tuple[dict[str, Any], str]:
    """A namespace and a mount of it."""
    made = _namespace(region)
    return made, _mount(f'/dev/{made["blockdev"]}', make, kind, directory)


def namespace(place: machine.Place, kind: str) -> dict[str, Any]:
    """The file system that the scenarios work on, and what the library says of it."""
    made, options = _mounted(REGIONS[kind], _MKFS[kind], kind, place.pool)
    image = place.pool / 'vm.pcow'
    img = place.binaries / 'pcow-img'
    machine.run(img, 'create', '-q', image, '64M')
    info = json.loads(machine.run(img, 'info', '--output=json', image))
    persistence = info['format-specific']['data']['persistence']
    if persistence != 'pmem':
        raise machine.Failure(
            f'an image on {kind} with DAX is of the class {persistence}, not pmem'
        )
    image.unlink()
    return {'namespace': made, 'mount': options, 'persistence': persistence}


def unit_test(name: str, place: machine.Place, _kind: str) -> dict[str, Any]:
    """One of the library's test programs, its files on the mount."""
    before = journal.writes(place)
    try:
        done = subprocess.run(
            [str(place.binaries / name), *_ARGUMENTS.get(name, ())],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TEST_SECONDS,
            env=os.environ | {'TMPDIR': str(place.pool)},
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        said = b''.join(text for text in (e.stdout, e.stderr) if text)
        raise machine.Failure(
            f'{name}: no end within {_TEST_SECONDS:.0f} s\n{said[-4000:].decode(errors="replace")}'
        ) from None
    passed = _PASSED.search(done.stdout + done.stderr)
    if done.returncode or not passed or passed[1] == '0':
        raise machine.Failure(
            f'{name}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}'
        )
    return {'tests': int(passed[1]), 'journal-writes': journal.writes(place) - before}


@functools.cache
def _random_device() -> str:
    return f'/dev/{_namespace(_RANDOM_REGION)["blockdev"]}'


def random_work(place: machine.Place, kind: str) -> dict[str, Any]:
    """The library's random test on a small file system, for PCOW_RANDOM_SECONDS if that
    was said.
    """
    seconds = os.environ.get('PCOW_RANDOM_SECONDS', _RANDOM_SECONDS)
    environment = os.environ | {
        'PCOW_RANDOM_POOL': str(RANDOM_POOL),
        'PCOW_RANDOM_SECONDS': seconds,
    }
    limit = _TEST_SECONDS + float(seconds)
    _mount(_random_device(), _MKFS[kind], kind, RANDOM_POOL)
    try:
        done = subprocess.run(
            [str(place.binaries / RANDOM_TEST)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
            timeout=limit,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        said = (e.stdout or b'')[-4000:].decode(errors='replace')
        raise machine.Failure(f'{RANDOM_TEST}: no end within {limit:.0f} s\n{said}') from None
    finally:
        machine.run('umount', '--lazy', RANDOM_POOL)
    if done.returncode:
        raise machine.Failure(f'{RANDOM_TEST}: exit code {done.returncode}\n{done.stdout[-4000:]}')
    seed, said = done.stdout.splitlines()[:2]
    if '(pmem)' not in said:
        raise machine.Failure(f'{RANDOM_TEST}: not of the class pmem: {said}')
    numbers = map(int, re.findall(r'\d+', said.partition('): ')[2]))
    return {'seed': seed, **dict(zip(_RANDOM_FIGURES, numbers, strict=True))}


def functional_test(name: str, place: machine.Place, _kind: str) -> dict[str, Any]:
    """A module of tests/functional."""
    before = journal.writes(place)
    environment = os.environ | {
        'PCOW_TEST_DIR': str(place.pool),
        'PCOW_BIN_DIR': str(place.binaries),
    }
    try:
        done = subprocess.run(
            [sys.executable, '-B', '-m', 'unittest', f'tests.functional.{name}'],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
            timeout=_TEST_SECONDS,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        said = (e.stdout or b'')[-4000:].decode(errors='replace')
        raise machine.Failure(f'{name}: no end within {_TEST_SECONDS:.0f} s\n{said}') from None
    ran = _RAN.search(done.stdout)
    if done.returncode or not ran or ran[1] == '0':
        raise machine.Failure(f'{name}: exit code {done.returncode}\n{done.stdout[-6000:]}')
    return {'tests': int(ran[1]), 'journal-writes': journal.writes(place) - before}


def bench(place: machine.Place, _kind: str) -> dict[str, Any]:
    """pcow-bench on the mount: only ratios count here, and how often the journal was written."""
    before = journal.writes(place)
    output = json.loads(
        machine.run(
            place.binaries / 'pcow-bench',
            '--quick',
            '--size=16M',
            '--repeat=1',
            f'--pool={place.pool}',
            '--output=json',
            timeout=_TEST_SECONDS,
        )
    )
    rows = {
        row['name']: round(row['pcow_ns'] / row['raw_ns'], 2)
        for row in output['rows']
        if row.get('raw_ns') and row.get('pcow_ns')
    }
    return {'ratios': rows, 'journal-writes': journal.writes(place) - before}


def snapshots_beside_reflink(place: machine.Place, kind: str) -> dict[str, Any]:
    """See :mod:`tests.vm.reflink`."""
    if not reflink.POOL.is_mount():
        _mounted(reflink.REGION, reflink.MKFS, 'xfs', reflink.POOL)
    return reflink.compare(place, kind)


ALL: dict[str, Callable[[machine.Place, str], dict[str, Any]]] = {
    'namespace': namespace,
    **{name: functools.partial(unit_test, name) for name in UNIT_TESTS},
    **{name: functools.partial(functional_test, name) for name in FUNCTIONAL_TESTS},
    'random': random_work,
    'journal': journal.commits,
    'bench': bench,
    'reflink': snapshots_beside_reflink,
}
