# SPDX-License-Identifier: Apache-2.0
"""pcowctl image serve, pcowctl image unserve."""

import argparse
import os

from cliff import command
from cliff import show

from pcow_driver.cli import common
from pcow_driver.copies import verify
from pcow_driver.export import nbd
from pcow_driver.pools import device


class Serve(show.ShowOne):
    """Serve an image over NBD, and as a plain file, for programs that cannot map it; 'image
    unserve' ends that.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', metavar='IMAGE', help=common.IMAGE_HELP)
        parser.add_argument(
            'directory',
            metavar='DIRECTORY',
            help='New directory for the socket and the file; only this user can look into it.',
        )
        parser.add_argument(
            '--snapshot',
            metavar='NAME',
            help='A snapshot of it, read-only; also while the image is in use.',
        )
        parser.add_argument('--read-only', action='store_true', help='Refuse writes.')
        parser.add_argument(
            '--whole',
            action='store_true',
            help="All of the image, DAX info block included; default: the data of the guest's "
            "device.",
        )
        parser.add_argument(
            '--accept-damage',
            action='store_true',
            help='Serve it as it is where it is known to be damaged.',
        )
        parser.add_argument('--file', action='store_true', help='Show it as a file too (FUSE).')
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], tuple[object, ...]]:
        path = common.image_path(parsed_args.image)
        if not parsed_args.accept_damage:
            verify.check_chain_for_command(path)
        directory = os.path.abspath(parsed_args.directory)
        window = (
            None
            if parsed_args.whole
            else device.window(path, snapshot=parsed_args.snapshot, force_share=True)
        )
        uri = nbd.start(
            directory,
            path,
            window=window,
            snapshot=parsed_args.snapshot,
            read_only=parsed_args.read_only,
        )
        try:
            file = nbd.mount(directory) if parsed_args.file else None
        except BaseException:
            nbd.stop(directory)
            raise
        return ('uri', 'file'), (uri, file)


class Unserve(command.Command):
    """End what 'image serve' began; what was written is durable then."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'directory', metavar='DIRECTORY', help='As it was given to image serve.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        nbd.stop(os.path.abspath(parsed_args.directory))
