# SPDX-License-Identifier: Apache-2.0
"""pcowctl pool set, drain, extend, capacity, check."""

import argparse
from collections.abc import Iterator
import dataclasses
from typing import Any

from cliff import command
from cliff import lister
from cliff import show

from pcow_driver.cli import common
from pcow_driver.cli import pool as pool_commands
from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.pools import capacity
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.provision import provision

Rows = tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]


class Set(show.ShowOne):
    """Set the limits of a pool on this host."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument(
            '--overcommit',
            type=float,
            help=(
                'What images may come to hold, as a multiple of the space that templates and other '
                'files leave; 1: every guest can '
                'fill its image; 0: no limit; default: 20.'
            ),
        )
        parser.add_argument(
            '--reserve',
            type=int,
            help='Percent of the space that are never provisioned for images; default: 0.',
        )
        parser.add_argument(
            '--low', type=int, help="Percent free below which 'pool check' warns; default: 20."
        )
        parser.add_argument(
            '--critical',
            type=int,
            help="Percent free below which 'pool check' says critical; default: 5.",
        )
        parser.add_argument(
            '--dry-run', action='store_true', help='Print what the limits would be, and stop.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> pool_commands.Shown:
        wanted = {
            key: value
            for key in ('overcommit', 'reserve', 'low', 'critical')
            if (value := getattr(parsed_args, key)) is not None
        }
        pools = registry.PoolRegistry()
        settings = pools.changed(parsed_args.name, **wanted)
        if not parsed_args.dry_run:
            settings = pools.set(parsed_args.name, **wanted).settings
        return (
            ('overcommit', 'reserve', 'low', 'critical', 'draining'),
            (
                settings.overcommit,
                settings.reserve,
                settings.low,
                settings.critical,
                settings.draining,
            ),
        )


class Drain(lister.Lister):
    """Let a pool take nothing new, and list what is still in it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument('--end', action='store_true', help='Let it take new images again.')
        parser.add_argument('--dry-run', action='store_true', help='Only list what is in it.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Rows:
        pools = registry.PoolRegistry()
        if parsed_args.dry_run:
            found = pools.get(parsed_args.name)
        else:
            found = pools.set(parsed_args.name, draining=not parsed_args.end)
        rows = (
            (
                item.name,
                item.path,
                common.OptionalSize(item.summary.actual_size if item.summary else None),
                item.error or '',
            )
            for item in found.listed()
        )
        return ('name', 'path', 'allocated size', 'problem'), rows


class Extend(show.ShowOne):
    """Make a pool larger: one in DRAM up to --size, one whose file system is smaller than its
    device up to that.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument('--size', type=common.size_argument, help='New size of a pool in DRAM.')
        parser.add_argument(
            '--dry-run', action='store_true', help='Print what would be done, and stop.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> pool_commands.Shown:
        plan = provision.plan_extend(parsed_args.name, parsed_args.size)
        if not pool_commands.carry_out(self.app, plan, parsed_args.dry_run):
            return (), ()
        found = registry.PoolRegistry().get(parsed_args.name).capacity()
        return ('total', 'free'), (common.Size(found.total), common.Size(found.free))


class Show(lister.Lister):
    """Show where the space of a pool is: per image, and in all."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Rows:
        return (
            ('name', 'kind', 'virtual', 'allocated', 'own data', 'reserved', 'shared'),
            self._rows(capacity.usage(registry.PoolRegistry().get(parsed_args.name))),
        )

    @staticmethod
    def _rows(usage: capacity.PoolUsage) -> Iterator[tuple[Any, ...]]:
        for item in usage.images:
            yield (
                item.name,
                'template' if item.template else 'image',
                *map(
                    common.Size,
                    (item.virtual, item.allocated, item.own, item.reserved, item.shared),
                ),
            )
        yield ('(beside images)', 'other files', *map(common.Size, (0, usage.others, 0, 0, 0)))
        yield (
            '(may be provisioned)',
            'limit',
            *map(common.OptionalSize, (usage.limit, None, None, None, None)),
        )
        yield (
            f'{usage.name} (all)',
            f'pool, {units.format_size(usage.total)}',
            *map(
                common.Size,
                (
                    usage.provisioned,
                    usage.allocated,
                    sum(item.own for item in usage.images),
                    sum(item.reserved for item in usage.images),
                    sum(item.shared for item in usage.images),
                ),
            ),
        )


class Check(command.Command):
    """Say whether pools run out of space: exit code 0 ok, 1 low, 2 critical, 3 unknown.

    With --prometheus also write figures of pools and images for a node exporter's text file
    collector.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', nargs='*', help='Names of pools; default: all.')
        parser.add_argument(
            '--prometheus',
            metavar='FILE',
            help='File to write, for example in /var/lib/prometheus/node-exporter.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        pools, with_figures = registry.PoolRegistry(), parsed_args.prometheus is not None
        worst, usages, unknown = capacity.State.OK, [], []
        try:
            wanted = parsed_args.name or [entry.name for entry in pools.list()]
            list_is_unknown = False
        except exception.PcowError as e:
            wanted, list_is_unknown, worst = [], True, self._unknown('', e)
        for name in wanted:
            try:
                found = pools.get(name)
                usage = _with_class(found, capacity.usage(found, with_shared=with_figures))
                usage = _with_damage(usage)
            except (exception.PcowError, OSError) as e:
                worst = self._unknown(f' {name}', e)
                unknown.append(name)
                continue
            usages.append(usage)
            worst = max(worst, usage.state)
            unreadable = (
                f'; cannot be read: {", ".join(usage.unreadable)}' if usage.unreadable else ''
            )
            self.app.stdout.write(
                f'{usage.state.name} {name}: {usage.reason}{unreadable}{_mirrorless(found)}\n'
            )
        if with_figures:
            try:
                _write_atomically(
                    parsed_args.prometheus,
                    capacity.prometheus(usages, unknown=unknown, list_is_unknown=list_is_unknown),
                )
            except OSError as e:
                worst = self._unknown(
                    '', f'{parsed_args.prometheus} cannot be written ({e.strerror})'
                )
        return int(worst)

    def _unknown(self, name: str, why: object) -> capacity.State:
        """Monitoring takes any other exit code for a pool that was looked at."""
        self.app.stdout.write(f'UNKNOWN{name}: {why}\n')
        return capacity.State.UNKNOWN


def _with_class(found: pool.Pool, usage: capacity.PoolUsage) -> capacity.PoolUsage:
    """Space is not all that a pool can lose."""
    try:
        if not found.has_lost_pmem():
            return usage
        now = found.persistence()
    except exception.PcowError:  # a full pool has no room for the file with which it is tried
        return usage
    return dataclasses.replace(
        usage,
        state=capacity.State.CRITICAL,
        reason=(
            f'{found.path} was class pmem when it was made, and is {now} now: what guests flush is '
            f'not durable (pcowctl doctor); '
            f'{usage.reason}'
        ),
    )


def _with_damage(usage: capacity.PoolUsage) -> capacity.PoolUsage:
    if not usage.damaged:
        return usage
    return dataclasses.replace(
        usage,
        state=capacity.State.CRITICAL,
        reason=(
            f'a scrub has found these damaged: {", ".join(usage.damaged)} (pcowctl pool scrub '
            f'{usage.name}); {usage.reason}'
        ),
    )


def _mirrorless(found: pool.Pool) -> str:
    try:
        plain = found.without_mirror()
    except (exception.PcowError, OSError):  # the state says so
        return ''
    return f'; without a mirror (pcow-img amend): {names.some(plain)}' if plain else ''


def _write_atomically(path: str, text: str) -> None:
    """A collector never sees half a file, and may be any user."""
    durable.replace(path, text, mode=0o644)
