# SPDX-License-Identifier: Apache-2.0
"""pcowctl server ...: snapshots inside the images of a server, on the host that it is on, and
images that stand for a checkpoint of a running one.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from cliff import command
from cliff import lister

from nova_pcow.records import warm_records
from nova_pcow.snapshots import in_place
from nova_pcow.warm_images import warm_client
from nova_pcow.warm_images import warm_end
from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.virt import libvirt_host

_IMAGE_SECONDS = 600.0


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


class Warm(command.Command):
    """Make an image of a running server from which others go on in the midst of its run, on its
    host; elsewhere they boot from it. Needs the environment of the openstack command.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('server', metavar='SERVER', help='Name or ID of a server of Nova.')
        parser.add_argument('image', metavar='IMAGE', help='Name of the image.')
        parser.add_argument(
            '--timeout',
            metavar='SECONDSs',
            type=common.seconds_argument,
            default=_IMAGE_SECONDS,
            help='How long to wait for the image; default: 600s.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        made = warm_client.make(parsed_args.server, parsed_args.image, timeout=parsed_args.timeout)
        self.app.stdout.write(f'{made}\n')


class ListWarm(lister.Lister):
    """List the checkpoints that this host keeps for images of Glance."""

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]:
        del parsed_args
        return (
            ('image', 'server', 'project', 'taken', 'state', 'images on it'),
            [
                *(_row(record) for record in warm_records.find()),
                *((image, '-', '-', '-', 'damaged', '-') for image in warm_records.unreadable()),
            ],
        )


def _row(record: warm_records.Record) -> tuple[Any, ...]:
    try:
        standing: int | None = len(warm_end.children(record))
    except exception.PcowError:  # nobody knows
        standing = None
    return (
        record.image,
        record.server,
        record.project,
        record.taken,
        warm_end.condition(record),
        '-' if standing is None else standing,
    )


class DeleteWarm(command.Command):
    """Give up the checkpoint of an image on this host; servers that are made of the image boot."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', metavar='IMAGE', help='ID of the image in Glance.')
        parser.add_argument(
            '--parent-deleted',
            action='store_true',
            help='Nova has no such server as that it was made of: its images go with the last one.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        record = warm_records.get(parsed_args.image)
        if record is None:
            raise exception.UsageInvalid(
                reason=f'this host has no checkpoint for an image {parsed_args.image}: pcowctl '
                f'server list-warm'
            )
        with libvirt_host.connect() as connection:
            warm_end.remove(
                record,
                warm_end.find_parent(connection, record),
                is_parent_deleted=parsed_args.parent_deleted,
            )
