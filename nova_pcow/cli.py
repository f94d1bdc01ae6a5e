# SPDX-License-Identifier: Apache-2.0
"""pcowctl server ...: snapshots inside the images of a server, on the host that it is on."""

import argparse

from cliff import command

from nova_pcow import in_place


class _ServerCommand(command.Command):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'server', help='ID of a server of Nova on this host, or the name of its domain.'
        )
        parser.add_argument('name', help='Name of the snapshot.')
        return parser


class Snapshot(_ServerCommand):
    """Freeze what all persistent memory of a server of Nova's holds at one moment; the guest goes
    on.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        with in_place.server(parsed_args.server) as found:
            found.snapshot(parsed_args.name)


class Revert(_ServerCommand):
    """Take a server of Nova's back to a snapshot, in place: what was written since is dropped, for
    Nova it is as it was.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('--reset', action='store_true', help='Restart the guest if it runs.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        with in_place.server(parsed_args.server) as found:
            for alias in found.revert(parsed_args.name, reset=parsed_args.reset):
                self.app.stdout.write(f'{alias} is back at {parsed_args.name}\n')
