# SPDX-License-Identifier: Apache-2.0
"""pcowctl domain serve, domain unserve, domain check-stays: what the libvirt hook calls."""

import argparse
import sys

from cliff import command

from pcow_driver.virt import disk_server


class Serve(command.Command):
    """Serve the images that are disks of a libvirt domain, whose XML is on stdin; the libvirt hook
    calls this before QEMU starts.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--group', metavar='GID', type=int, required=True, help='Group that QEMU runs in.'
        )
        parser.add_argument(
            '--peer',
            metavar='PROFILE',
            help='Profile of AppArmor of the only QEMU that may connect.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        disk_server.serve(sys.stdin.read(), parsed_args.group, parsed_args.peer)


class Unserve(command.Command):
    """End what 'domain serve' began; what was written is durable then."""

    def take_action(self, _parsed_args: argparse.Namespace) -> None:
        disk_server.unserve(sys.stdin.read())


class CheckStays(command.Command):
    """Refuse a running guest that is about to come from another host, if images are its disks."""

    def take_action(self, _parsed_args: argparse.Namespace) -> None:
        disk_server.check_stays(sys.stdin.read())
