# SPDX-License-Identifier: Apache-2.0
"""pcowctl domain tell-damage: what the libvirt hook starts."""

import argparse

from cliff import command

from pcow_driver.virt import notices


class TellDamage(command.Command):
    """Tell a libvirt domain that has started of damage of what it stands on, by an element in its
    metadata; the libvirt hook starts this.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('domain', metavar='DOMAIN', help='Its name.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        notices.tell_domain(parsed_args.domain)
