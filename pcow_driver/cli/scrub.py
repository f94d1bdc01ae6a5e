# SPDX-License-Identifier: Apache-2.0
"""pcowctl pool scrub"""

import argparse

from cliff import command

from pcow_driver.cli import common
from pcow_driver.common import units
from pcow_driver.health import scrub
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs

DAMAGED = 2
UNKNOWN = 3


class Scrub(command.Command):
    """Compare the data of templates and images with their checksums: exit code 0 if none is
    damaged, 2 if one is, 3 if none is known to be and one could not be looked at.

    It waits for all others: idle class of I/O, lowest priority. What it finds is kept for 'pool
    show' and 'pool check'; nothing new is made on an image that it has found damaged.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument(
            '--rate',
            type=common.size_argument,
            default=0,
            help='Look at no more a second (200M); default: as fast as it goes.',
        )
        parser.add_argument(
            '--resume',
            action='store_true',
            help='Go on where the last one was interrupted, if it was.',
        )
        parser.add_argument(
            '--accept',
            metavar='IMAGE',
            help='Look at nothing; let this image be used although it is damaged.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        found = registry.PoolRegistry().get(parsed_args.name)
        if parsed_args.accept is not None:
            scrub.accept(found, parsed_args.accept)
            return 0
        scrub.be_polite()
        result = scrub.scrub(
            found, rate=parsed_args.rate, resume=parsed_args.resume, tell=self._tell
        )
        damaged = result.damaged()
        if damaged:
            self.app.stdout.write(f'DAMAGED {found.name}: {", ".join(damaged)}\n')
        return DAMAGED if damaged else UNKNOWN if result.unknown() else 0

    def _tell(self, name: str, result: scrubs.Result) -> None:
        state = (
            'DAMAGED'
            if result.is_damaged and not result.accepted
            else 'UNKNOWN'
            if result.problem
            else 'ACCEPTED'
            if result.is_damaged
            else 'OK'
        )
        text = result.problem or (
            f'{units.format_size(result.verified)} verified, '
            f'{units.format_size(result.without)} without a checksum'
        )
        self.app.stdout.write(f'{state} {name}: {"; ".join((text, *result.findings))}\n')
        self.app.stdout.flush()
