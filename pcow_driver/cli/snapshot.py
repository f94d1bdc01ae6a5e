# SPDX-License-Identifier: Apache-2.0
"""pcowctl snapshot ...: on an image file, or on the image of a domain with --domain."""

import argparse
from collections.abc import Iterator
import contextlib
from typing import Any

from cliff import command
from cliff import lister

from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.copies import verify
from pcow_driver.health import scrub
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host

DAMAGED = 2


class _Target:
    """What the arguments name; after resolve() either path or domain_name is set."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words  # names of the arguments after the image

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            '--domain',
            metavar='DOMAIN',
            help="Work on this libvirt domain's image, whether it runs or not.",
        )
        parser.add_argument(
            '--device',
            metavar='DEVICE',
            help='Which of its images, if it has several: alias, path or file name.',
        )
        metavar = ' '.join(('[IMAGE]', *self.words))
        # one list for all positional arguments: argparse cannot tell an optional first one when
        # options stand in between
        parser.add_argument(
            'words', nargs='*', metavar=metavar, help=f'{common.IMAGE_HELP} Left out with --domain.'
        )
        rest = ''.join(f' {word}' for word in self.words)
        parser.usage = f'{parser.prog} [options] (IMAGE{rest} | --domain DOMAIN{rest})'

    def resolve(self, parsed_args: argparse.Namespace) -> tuple[str | None, list[str]]:
        """Path of the image (None with --domain) and the other words."""
        words = list(parsed_args.words)
        given = () if parsed_args.domain is not None else ('IMAGE',)
        common.check_words(words, ' '.join((*given, *self.words)))
        if parsed_args.domain is not None:
            return None, words
        if parsed_args.device is not None:
            raise exception.UsageInvalid(reason='--device goes with --domain')
        return common.image_path(words[0]), words[1:]


@contextlib.contextmanager
def _domain(parsed_args: argparse.Namespace) -> Iterator[domain.Domain]:
    with libvirt_host.connect() as connection:
        yield domain.Domain(connection, parsed_args.domain)


class _SnapshotCommand(command.Command):
    _target = _Target(('NAME',))

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        self._target.add_to(parser)
        return parser


class Create(_SnapshotCommand):
    """Freeze what an image holds now as a snapshot; a guest may go on meanwhile."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--quiesce',
            action='store_true',
            help="With --domain: have the guest's agent freeze its file systems for the moment.",
        )
        common.add_max_wait(parser, 'whose buffers are in the image, with --domain')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        path, (name,) = self._target.resolve(parsed_args)
        if path is not None:
            for option in ('quiesce', 'max-wait'):
                if getattr(parsed_args, option.replace('-', '_')):
                    raise exception.UsageInvalid(reason=f'--{option} goes with --domain')
            with room.for_snapshot(path):
                image.snapshot_create(path, name)
            return
        with _domain(parsed_args) as found:
            found.snapshot_create(
                name, parsed_args.device, quiesce=parsed_args.quiesce, max_wait=parsed_args.max_wait
            )


class Revert(_SnapshotCommand):
    """Go back to a snapshot; what was written since is dropped, other snapshots stay."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('--reset', action='store_true', help='Restart the guest if it runs.')
        parser.add_argument(
            '--image-only',
            action='store_true',
            help='With --domain: also to a snapshot of the whole VM, whose '
            'disks and RAM stay as they are.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        path, (name,) = self._target.resolve(parsed_args)
        if path is not None:
            image.snapshot_revert(path, name)
            return
        with _domain(parsed_args) as found:
            found.snapshot_revert(
                name, parsed_args.device, reset=parsed_args.reset, image_only=parsed_args.image_only
            )


class Delete(_SnapshotCommand):
    """Delete a snapshot; what still needs its data keeps it."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        path, (name,) = self._target.resolve(parsed_args)
        freed: int | None
        if path is not None:
            freed = image.snapshot_delete(path, name)
        else:
            with _domain(parsed_args) as found:
                freed = found.snapshot_delete(name, parsed_args.device)
        if freed is not None and self.app_args is not None and self.app_args.verbose_level:
            self.app.stdout.write(
                f'Snapshot {name} deleted, {units.format_size(freed)} given back to the pool.\n'
            )


class Checksum(_SnapshotCommand):
    """Make checksums of the data of a snapshot, for 'pool scrub'; a guest may go on meanwhile: exit
    code 2 if some of it is damaged, and got none.

    It waits for all others: idle class of I/O, lowest priority. What has a checksum keeps it, and
    is compared. A guest's RAM and devices in the snapshot get none while the image is in use.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--rate',
            type=common.size_argument,
            default=0,
            help='Read no more a second (200M); default: as fast as it goes.',
        )
        parser.add_argument(
            '--accept-damage',
            action='store_true',
            help='Make them also of what is known to be damaged: it counts as whole then.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        path, (name,) = self._target.resolve(parsed_args)
        if path is None:
            with _domain(parsed_args) as found:
                path = found.select(parsed_args.device).path
        scrub.be_polite()
        try:
            image.checksum(
                path, name, rate=parsed_args.rate, accept_damage=parsed_args.accept_damage
            )
        except exception.ChecksumsRefused as e:
            self.app.stderr.write(f'pcowctl: {e}\n')
            verify.note_damage(path)
            return DAMAGED
        return 0


class Rename(_SnapshotCommand):
    """Rename a snapshot."""

    _target = _Target(('NAME', 'NEW_NAME'))

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        path, (name, new_name) = self._target.resolve(parsed_args)
        if path is not None:
            image.snapshot_rename(path, name, new_name)
            return
        with _domain(parsed_args) as found:
            found.snapshot_rename(name, new_name, parsed_args.device)


class List(lister.Lister):
    """List the snapshots of an image in order of creation."""

    _target = _Target(())

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        self._target.add_to(parser)
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        path, _words = self._target.resolve(parsed_args)
        if path is not None:
            snapshots = image.snapshot_list(path, force_share=True)
        else:
            with _domain(parsed_args) as found:
                snapshots = found.snapshot_list(parsed_args.device)
        return (
            (
                'id',
                'name',
                'parent',
                'date',
                'virtual size',
                'data size',
                'shared size',
                'delete frees',
                'VM state size',
                'current',
                'pinned',
            ),
            self._rows(snapshots),
        )

    @staticmethod
    def _rows(snapshots: list[model.Snapshot]) -> list[tuple[Any, ...]]:
        by_id = {snapshot.id: snapshot.name for snapshot in snapshots}
        return [
            (
                item.id,
                item.name,
                by_id.get(item.parent_id or '', ''),
                item.date.isoformat(timespec='seconds'),
                common.Size(item.virtual_size),
                common.Size(item.data_size),
                common.Size(item.shared_size),
                common.Size(item.delete_frees),
                common.Size(item.vm_state_size),
                item.current,
                item.pinned,
            )
            for item in snapshots
        ]
