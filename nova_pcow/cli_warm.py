# SPDX-License-Identifier: Apache-2.0
"""pcowctl server warm, list-warm, delete-warm: images that stand for a checkpoint of a running
server.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from cliff import command
from cliff import lister

from nova_pcow import warm
from nova_pcow import warm_client
from nova_pcow import warm_records
from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.virt import domain

_SECONDS = 600.0


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
            default=_SECONDS,
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
            ('image', 'server', 'project', 'taken', 'state', 'children'),
            [
                (
                    record.image,
                    record.server,
                    record.project,
                    record.taken,
                    _state(record),
                    len(warm.children(record)),
                )
                for record in warm_records.find()
            ],
        )


def _state(record: warm_records.Record) -> str:
    if not record.is_complete:
        return 'in the making'
    return 'parent deleted' if record.is_orphaned else 'ready'


class DeleteWarm(command.Command):
    """Give up the checkpoint of an image on this host; servers that are made of the image boot."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', metavar='IMAGE', help='ID of the image in Glance.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        record = warm_records.get(parsed_args.image)
        if record is None:
            raise exception.UsageInvalid(
                reason=f'this host has no checkpoint for an image {parsed_args.image}: pcowctl '
                f'server list-warm'
            )
        with domain.connect() as connection:
            warm.remove(record, warm.find_parent(connection, record))
