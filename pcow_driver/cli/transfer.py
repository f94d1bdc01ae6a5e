# SPDX-License-Identifier: Apache-2.0
"""pcowctl image send, receive"""

import argparse
import os
import sys

from cliff import command

from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.copies import transfer


class Send(command.Command):
    """Write an image, or a template, that nobody writes to as a stream for 'image receive' to
    stdout.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.IMAGE_HELP)
        parser.add_argument(
            '--accept-damage',
            action='store_true',
            help='Send it as it is where checksums tell that it is damaged.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        if os.isatty(sys.stdout.fileno()):
            raise exception.UsageInvalid(
                reason="it is not for a terminal: give it to 'image receive', by ssh for instance"
            )
        transfer.send(
            common.image_path(parsed_args.image),
            sys.stdout.buffer,
            accept_damage=parsed_args.accept_damage,
        )


class Receive(command.Command):
    """Make an image of what 'image send' wrote, read from stdin: all of it or nothing."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.POOL_IMAGE_HELP)
        parser.add_argument(
            '--discard',
            action='store_true',
            help='Instead delete it, if it has arrived, and let it fail, if it is on its way; says '
            f'{transfer.KEPT!r} if clones of it need a part, which stays for them.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        pool, name = common.split_reference(parsed_args.image)
        if parsed_args.discard:
            if not transfer.discard(pool, name):
                self.app.stdout.write(f'{transfer.KEPT}\n')
        else:
            transfer.receive(pool, name, sys.stdin.buffer)
