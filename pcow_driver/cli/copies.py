# SPDX-License-Identifier: Apache-2.0
"""pcowctl image fork, pcowctl image export."""

import argparse

from cliff import command
from cliff import show

from pcow_driver.cli import common
from pcow_driver.cli import image as image_commands
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.copies import fork
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host


def _new_name(reference: str, path: str) -> str:
    """The name in NAME or POOL/NAME, which must be in the directory of the image at path.

    :raises InvalidName: it is in another pool
    """
    if '/' not in reference:
        return names.check_name('image', reference.removesuffix(names.IMAGE_SUFFIX))
    found, name = common.split_reference(reference)
    if not common.same_directory(found.path, path):
        raise exception.InvalidName(
            kind='image', name=reference, reason=f'a fork lies in the pool of its image, {path}'
        )
    return name


class Fork(show.ShowOne):
    """Make an image on a snapshot of another; the other may be in use, and keeps the snapshot."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--live',
            metavar='DOMAIN',
            help="Snapshot this libvirt domain's image now, as fork-NEW, and stand on that.",
        )
        parser.add_argument(
            '--device',
            metavar='DEVICE',
            help='Which of its images, if it has several: alias, path or file name.',
        )
        parser.add_argument(
            '--quiesce',
            action='store_true',
            help="With --live: have the guest's agent freeze its file systems for the moment.",
        )
        # one list: argparse cannot tell optional first words when options stand in between
        parser.add_argument(
            'words',
            nargs='*',
            metavar='[IMAGE SNAPSHOT] NEW',
            help=f'{common.IMAGE_HELP} NEW: name of the new image in the same pool.',
        )
        parser.usage = f'{parser.prog} [options] (IMAGE SNAPSHOT | --live DOMAIN) NEW'
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> image_commands.Shown:
        words = list(parsed_args.words)
        wanted = 'NEW' if parsed_args.live is not None else 'IMAGE SNAPSHOT NEW'
        common.check_words(words, wanted)
        if parsed_args.live is None:
            if parsed_args.device is not None or parsed_args.quiesce:
                raise exception.UsageInvalid(reason='--device and --quiesce go with --live')
            path = common.image_path(words[0])
            return image_commands.show_path(fork.fork(path, words[1], _new_name(words[2], path)))
        with libvirt_host.connect() as connection:
            found = domain.Domain(connection, parsed_args.live)
            name = _new_name(words[0], found.select(parsed_args.device).path)
            return image_commands.show_path(
                fork.fork_live(found, name, parsed_args.device, quiesce=parsed_args.quiesce)
            )


class Export(command.Command):
    """Copy an image, or a snapshot of it, into a new file; also while a guest runs on it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--domain',
            metavar='DOMAIN',
            help="Export this libvirt domain's image, whether it runs or not.",
        )
        parser.add_argument(
            '--device',
            metavar='DEVICE',
            help='Which of its images, if it has several: alias, path or file name.',
        )
        parser.add_argument(
            '--snapshot',
            metavar='NAME',
            help='What to export; default: the present state. Needed if the image is in use, '
            'without --domain.',
        )
        parser.add_argument(
            '--quiesce',
            action='store_true',
            help="With --domain, without --snapshot: have the guest's agent freeze its file "
            "systems "
            'for the moment.',
        )
        parser.add_argument(
            '--format', choices=fork.FORMATS, required=True, help='pcow: a template, sealed.'
        )
        parser.add_argument(
            '--accept-damage',
            action='store_true',
            help='Export it as it is where it is known to be damaged.',
        )
        parser.add_argument(
            'words',
            nargs='*',
            metavar='[IMAGE] FILE',
            help=f'{common.IMAGE_HELP} FILE: the new file.',
        )
        parser.usage = f'{parser.prog} [options] --format FORMAT (IMAGE | --domain DOMAIN) FILE'
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        words = list(parsed_args.words)
        wanted = 'FILE' if parsed_args.domain is not None else 'IMAGE FILE'
        common.check_words(words, wanted)
        if parsed_args.domain is None:
            if parsed_args.device is not None or parsed_args.quiesce:
                raise exception.UsageInvalid(reason='--device and --quiesce go with --domain')
            fork.export(
                common.image_path(words[0]),
                words[1],
                parsed_args.format,
                snapshot=parsed_args.snapshot,
                accept_damage=parsed_args.accept_damage,
            )
            return
        if parsed_args.quiesce and parsed_args.snapshot is not None:
            raise exception.UsageInvalid(
                reason='--quiesce is for the present state: leave it out, or --snapshot'
            )
        with libvirt_host.connect() as connection:
            fork.export_domain(
                domain.Domain(connection, parsed_args.domain),
                words[0],
                parsed_args.format,
                parsed_args.device,
                snapshot=parsed_args.snapshot,
                quiesce=parsed_args.quiesce,
                accept_damage=parsed_args.accept_damage,
            )
