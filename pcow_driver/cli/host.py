# SPDX-License-Identifier: Apache-2.0
"""pcowctl host ..."""

import argparse
from collections.abc import Iterator
from typing import Any

from cliff import lister

from pcow_driver.provision import host


class Setup(lister.Lister):
    """Make the directories that root and the services share, or put their owners, groups and modes
    right.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--group',
            help='Of the services that work on pools (nova-compute, cinder-volume); without it, '
            'root does alone.',
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        rows = [
            (item.path, item.group, f'{item.mode:04o}', item.done)
            for item in host.set_up(parsed_args.group)
        ]
        return ('directory', 'group', 'mode', 'done'), iter(rows)
