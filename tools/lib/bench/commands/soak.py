# SPDX-License-Identifier: Apache-2.0
"""Random use of an image for a long time, every byte compared: ``pcow-bench --soak``."""

import argparse
from typing import Any

from pcow_driver.common import exception
from tools.lib.bench import plot
from tools.lib.bench import program
from tools.lib.bench import table

HELP = 'use an image at random for a long time and compare every byte'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--minutes', type=float, default=30.0, help='default: 30')
    for option, text in (
        ('--pool', 'directory for the files'),
        ('--size', 'of the image'),
        ('--threads', 'that use it'),
        ('--seed', 'of the random numbers'),
    ):
        parser.add_argument(option, help=text)


def run(options: argparse.Namespace) -> dict[str, Any]:
    seconds = round(options.minutes * 60)
    if seconds < 1:
        raise exception.UsageInvalid(
            reason=f'--minutes {options.minutes:g}: give at least a second'
        )
    result = program.run(
        [f'--soak={seconds}', *program.given(options, 'pool', 'size', 'threads', 'seed')]
    )
    result['rows'] = [{'name': name, 'value': value} for name, value in result['soak'].items()]
    return result


def tables(result: dict[str, Any]) -> list[table.Table]:
    rows: list[tuple[str, ...]] = [
        (row['name'].replace('-', ' '), f'{row["value"]:,}') for row in result['rows']
    ]
    return [
        table.Table('A soak: no byte was wrong, no check found anything', ('what', 'count'), rows)
    ]


def plots(_result: dict[str, Any]) -> dict[str, plot.Bars]:
    return {}
