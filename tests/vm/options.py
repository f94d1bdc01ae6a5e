# SPDX-License-Identifier: Apache-2.0
"""The command line of tools/vm-test."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import os
from pathlib import Path

from pcow_driver.common import exception
from tests.vm import fsdax
from tests.vm import kernels
from tests.vm import media
from tests.vm import scenarios

_TOP = Path(__file__).resolve().parents[2]
_POOLS = {
    'kvm': ('tmpfs', 'pmem', 'xfs', 'page-cache'),
    'tcg': ('tmpfs',),
    'fsdax': (*fsdax.REGIONS, 'pmem'),
}
# with machines of their own, which start more than once
FSDAX_MACHINES = (
    *('pools', 'pools-session', 'power', 'caches', 'caches-twice', 'confinement'),
    *('persist', 'persist-shutdown', 'persist-cut', 'persist-panic'),
)
_MOST_ROUNDS = 1000


@dataclasses.dataclass(frozen=True)
class Options:
    what: str  # kvm, tcg, fsdax
    only: tuple[str, ...]  # scenarios, as NAME or NAME@POOL; empty: all
    output: str  # human, json
    cpus: int
    rounds: int | None  # of the scenario persist
    binaries: Path  # directory of the programs under test
    unit_tests: Path  # directory of the C tests
    # suite of Debian whose kernel the outer machine runs; None: that of the guests
    host_kernel: str | None
    # QEMU that the outer machine runs in; None: the one under test
    outer: Path | None
    keep: bool
    write_docs: bool
    verbose: bool


def parse(arguments: Sequence[str]) -> Options:
    """:raises UsageInvalid: a scenario that does not exist, or no pool of that name"""
    parser = argparse.ArgumentParser(
        prog='tools/vm-test', description='Run guests on pcow images and compare every byte.'
    )
    parser.add_argument(
        'what',
        choices=('kvm', 'tcg', 'fsdax'),
        help='kvm: under real KVM faults, in a virtual machine that emulates SVM; tcg: the same '
        'under TCG, here; '
        'fsdax: tests of library, programs and pools on file systems with DAX, in a virtual '
        'machine.',
    )
    parser.add_argument(
        '--only',
        metavar='NAME',
        action='append',
        default=[],
        help=f'Only this scenario, on all pools or on one (NAME@POOL); may be given several times. '
        f'Scenarios: {", ".join(scenarios.ALL)}; with kvm also {", ".join(media.ALL)}; '
        f'with fsdax {", ".join((*fsdax.ALL, *FSDAX_MACHINES))}. '
        'Pools: tmpfs; with kvm also pmem (ext4 with DAX), xfs (the same), page-cache (ext4 on a '
        'disk); '
        'with fsdax ext4, xfs.',
    )
    parser.add_argument(
        '--output',
        choices=('human', 'json'),
        default='human',
        help='json: all results as one array.',
    )
    parser.add_argument(
        '--cpus',
        metavar='N',
        type=int,
        default=2,
        help='CPUs of the guests under test; default: %(default)s.',
    )
    parser.add_argument(
        '--rounds',
        metavar='N',
        type=int,
        help='With persist: how often its host goes down, each time by a power cut, a panic or '
        'in order, at random; default: once each.',
    )
    parser.add_argument(
        '--binaries',
        metavar='DIR',
        type=Path,
        default=os.environ.get('PCOW_BIN_DIR') or _TOP / 'build/bin',
        help='Where the programs under test are; default: %(default)s.',
    )
    parser.add_argument(
        '--unit-tests',
        metavar='DIR',
        type=Path,
        default=_TOP / 'build/meson/tests',
        help='Where the C tests were built, in unit/libpcow and vm/outer; default: %(default)s.',
    )
    parser.add_argument(
        '--host-kernel',
        metavar='SUITE',
        help="With kvm: the outer machine, where KVM is, runs the kernel of another suite of "
        "Debian, as "
        "bookworm-backports or trixie-backports; the guests keep theirs. It is fetched from the "
        "mirror that "
        "this machine's apt uses.",
    )
    parser.add_argument(
        '--outer-qemu',
        metavar='FILE',
        type=Path,
        help='A QEMU for the outer machine, to try another one than the one under test.',
    )
    parser.add_argument(
        '--keep', action='store_true', help='Leave the files of the run, and say where they are.'
    )
    parser.add_argument(
        '--write-docs',
        action='store_true',
        help='Write the session of commands that the operator guide shows.',
    )
    parser.add_argument(
        '--verbose', action='store_true', help='Show the counters of every scenario.'
    )
    parsed = parser.parse_args(arguments)
    for item in parsed.only:
        name, _at, pool = item.partition('@')
        known = (*fsdax.ALL, *FSDAX_MACHINES) if parsed.what == 'fsdax' else tuple(scenarios.ALL)
        known += tuple(media.ALL) if parsed.what == 'kvm' else ()
        if name not in known:
            raise exception.UsageInvalid(
                reason=f'--only {item}: there is no scenario {name}; there are {", ".join(known)}'
            )
        if pool and pool not in _POOLS[parsed.what]:
            raise exception.UsageInvalid(
                reason=f'--only {item}: there is no pool {pool} with {parsed.what}'
            )
    if parsed.host_kernel is not None and parsed.what != 'kvm':
        raise exception.UsageInvalid(
            reason=f'--host-kernel {parsed.host_kernel}: only kvm has a host of its own'
        )
    if parsed.host_kernel is not None and not kernels.is_suite(parsed.host_kernel):
        raise exception.UsageInvalid(
            reason=f'--host-kernel {parsed.host_kernel}: that is no name of a suite'
        )
    if not 1 <= parsed.cpus <= 8:
        raise exception.UsageInvalid(reason=f'--cpus {parsed.cpus}: give 1 to 8')
    if parsed.rounds is not None and not 1 <= parsed.rounds <= _MOST_ROUNDS:
        raise exception.UsageInvalid(reason=f'--rounds {parsed.rounds}: give 1 to {_MOST_ROUNDS}')
    return Options(
        what=parsed.what,
        only=tuple(parsed.only),
        output=parsed.output,
        cpus=parsed.cpus,
        rounds=parsed.rounds,
        binaries=parsed.binaries.resolve(),
        unit_tests=parsed.unit_tests.resolve(),
        host_kernel=parsed.host_kernel,
        outer=parsed.outer_qemu,
        keep=parsed.keep,
        write_docs=parsed.write_docs,
        verbose=parsed.verbose,
    )
