# SPDX-License-Identifier: Apache-2.0
"""pcowctl vm ...: checkpoints of a whole virtual machine."""

import argparse
from collections.abc import Iterator
import contextlib
from typing import Any

from cliff import columns
from cliff import command
from cliff import lister
from cliff import show

from pcow_driver.cli import common
from pcow_driver.common import units
from pcow_driver.fixation import records
from pcow_driver.fixation import runs
from pcow_driver.virt import domain
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host
from pcow_driver.vm import checkpoint
from pcow_driver.vm import fork
from pcow_driver.vm import tree


class _Name(columns.FormattableColumn[str]):
    """Of a checkpoint, under the one that it descends from."""

    def __init__(self, name: str, depth: int) -> None:
        super().__init__(name)
        self._depth = depth

    def human_readable(self) -> str:
        return f'{"  " * self._depth}{self._value}'


@contextlib.contextmanager
def _domain(parsed_args: argparse.Namespace) -> Iterator[domain.Domain]:
    with libvirt_host.connect() as connection:
        yield domain.Domain(connection, parsed_args.domain)


def _add_words(parser: argparse.ArgumentParser, *, name: bool = True) -> argparse.ArgumentParser:
    parser.add_argument('domain', metavar='DOMAIN', help='Name of the libvirt domain.')
    if name:
        parser.add_argument('name', metavar='NAME', help='Name of the checkpoint.')
    return parser


class Checkpoint(show.ShowOne):
    """Keep RAM, devices and persistent memory of a VM as they are now; the guest goes on."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = _add_words(super().get_parser(prog_name))
        common.add_max_wait(parser, 'that it only reads')
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        with _domain(parsed_args) as found:
            taken = checkpoint.take(found, parsed_args.name, max_wait=parsed_args.max_wait)
        return (
            ('name', 'pause', 'durable after', 'VM state size'),
            (
                parsed_args.name,
                common.Duration(taken.pause),
                common.Duration(taken.durable),
                common.Size(taken.state_size),
            ),
        )


class Tree(lister.Lister):
    """List the checkpoints of a VM, each under the one that it descends from."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = _add_words(super().get_parser(prog_name), name=False)
        parser.add_argument(
            '--json', dest='formatter', action='store_const', const='json', help='As -f json.'
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        with _domain(parsed_args) as found:
            checkpoints = tree.checkpoints(found)
        return (
            (
                'name',
                'parent',
                'date',
                'VM state size',
                'data size',
                'shared size',
                'delete frees',
                'current',
            ),
            [
                (
                    _Name(item.name, depth),
                    item.parent or '',
                    item.date.isoformat(timespec='seconds'),
                    common.Size(item.state_size),
                    common.Size(item.data_size),
                    common.Size(item.shared_size),
                    common.Size(item.delete_frees),
                    item.current,
                )
                for depth, item in tree.branches(checkpoints)
            ],
        )


class _Quiet(command.Command):
    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        return _add_words(super().get_parser(prog_name))

    def _say(self, text: str) -> None:
        if self.app_args is not None and self.app_args.verbose_level:
            self.app.stdout.write(f'{text}\n')


class Revert(_Quiet):
    """Have a VM go on from a checkpoint; what it has stored since is dropped. If it is off, it is
    started.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        common.add_max_wait(parser, 'that it only reads')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        with _domain(parsed_args) as found:
            with records.alone(found.uuid):
                records.check_mine(found.uuid)
                done = checkpoint.revert(found, parsed_args.name, max_wait=parsed_args.max_wait)
                runs.note_revert(found, parsed_args.name)
        started = ', started anew' if done.started else ''
        self._say(
            f'{parsed_args.domain} is at {parsed_args.name} after '
            f'{common.milliseconds(done.time)}{started}.'
        )


class DeleteCheckpoint(_Quiet):
    """Delete a checkpoint; what still needs its data keeps it."""

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        with _domain(parsed_args) as found:
            freed = checkpoint.delete(found, parsed_args.name)
        self._say(
            f'Checkpoint {parsed_args.name} deleted, {units.format_size(freed)} given back to the '
            f'pool.'
        )


class Fork(lister.Lister):
    """Start VMs that go on from a checkpoint of another one, each on images of its own that hold
    what it stores.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = _add_words(super().get_parser(prog_name), name=False)
        of = parser.add_mutually_exclusive_group(required=True)
        of.add_argument('--checkpoint', metavar='NAME', help='Go on from this checkpoint.')
        of.add_argument(
            '--live',
            action='store_true',
            help='Go on from this moment: a checkpoint, fork-NAME of the first child, is taken.',
        )
        parser.add_argument(
            '--name',
            required=True,
            metavar='PATTERN',
            help='Name of the new domain; {n} is its number, from 1 on.',
        )
        parser.add_argument('--count', type=int, default=1, metavar='N', help='Default: 1.')
        parser.add_argument(
            '--insecure',
            action='store_true',
            help='Also a guest without generation id, which makes the same random numbers as its '
            'parent.',
        )
        parser.add_argument(
            '--guest-hook',
            action='store_true',
            help=f'Have {guest_hook.PATH} of each guest run, which makes it another machine; no '
            'fork stays whose hook does not end well.',
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        children = fork.child_names(parsed_args.name, parsed_args.count)
        with libvirt_host.connect() as connection:
            parent = domain.Domain(connection, parsed_args.domain)
            made = fork.fork(
                connection,
                parent,
                parsed_args.checkpoint,
                children,
                insecure=parsed_args.insecure,
                with_hook=parsed_args.guest_hook,
            )
            return (
                ('name', 'RAM', 'running after'),
                [(one.name, one.images[0], common.Duration(one.time)) for one in made],
            )
