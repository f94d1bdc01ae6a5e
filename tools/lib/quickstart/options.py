# SPDX-License-Identifier: Apache-2.0
"""The command line of tools/quickstart."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
from pathlib import Path

from pcow_driver.common import exception


@dataclasses.dataclass(frozen=True)
class Options:
    """Absolute paths; None where the quickstart brings its own."""

    pool: Path | None
    image: Path | None
    kernel: Path | None
    initrd: Path | None
    rounds: int
    keep: bool
    stop: bool
    json: Path | None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='tools/quickstart',
        description='Build what is missing, then do the main job with real parts: a pool, a '
        'template of a Debian 12 guest, a thin '
        'image on it, a VM that boots from it through libvirt, a snapshot while it runs, a revert. '
        'Leaves nothing running.',
    )
    parser.add_argument(
        '--pool',
        metavar='DIR',
        type=Path,
        help='Directory for the pool, on a mounted fsdax or any other file system; default: on '
        'tmpfs. '
        'A pool that is there already is used; what is made in it is deleted at the end.',
    )
    parser.add_argument(
        '--image',
        metavar='FILE',
        type=Path,
        help='Your own guest: a qcow2 file with an ext4 or xfs root; default: Debian 12, minimal.',
    )
    parser.add_argument(
        '--kernel',
        metavar='FILE',
        type=Path,
        help="Your own kernel; default: Debian's cloud kernel.",
    )
    parser.add_argument(
        '--initrd',
        metavar='FILE',
        type=Path,
        help='An initrd with the modules of your kernel, if it needs any.',
    )
    parser.add_argument(
        '--rounds',
        metavar='N',
        type=int,
        default=3,
        help='How often each of raw and pcow is booted to compare them; default: %(default)s.',
    )
    parser.add_argument(
        '--keep', action='store_true', help='Let the VM run on, and say how to reach it.'
    )
    parser.add_argument('--stop', action='store_true', help='End what --keep kept, and clear up.')
    parser.add_argument(
        '--json', metavar='FILE', type=Path, help='Write the figures to a file as well.'
    )
    return parser


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _file(path: Path | None, option: str) -> Path | None:
    if path is None:
        return None
    if not path.is_file():
        raise exception.UsageInvalid(reason=f'{option} {path}: there is no such file')
    return path.absolute()


def parse(arguments: Sequence[str]) -> Options:
    """:raises UsageInvalid: an argument that cannot be used"""
    parsed = _parser().parse_args(arguments)
    if parsed.pool is not None and not parsed.pool.is_dir():
        raise exception.UsageInvalid(
            reason=f'--pool {parsed.pool}: it is not a directory; make it, or mount it'
        )
    if parsed.json is not None and not parsed.json.absolute().parent.is_dir():
        raise exception.UsageInvalid(reason=f'--json {parsed.json}: its directory is not there')
    if parsed.rounds < 1:
        raise exception.UsageInvalid(reason=f'--rounds {parsed.rounds}: give at least 1')
    if parsed.initrd is not None and parsed.kernel is None:
        raise exception.UsageInvalid(reason='--initrd goes with --kernel')
    return Options(
        pool=_absolute(parsed.pool),
        image=_file(parsed.image, '--image'),
        kernel=_file(parsed.kernel, '--kernel'),
        initrd=_file(parsed.initrd, '--initrd'),
        rounds=parsed.rounds,
        keep=parsed.keep,
        stop=parsed.stop,
        json=_absolute(parsed.json),
    )
