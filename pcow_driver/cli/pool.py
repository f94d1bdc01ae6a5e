# SPDX-License-Identifier: Apache-2.0
"""pcowctl pool ..."""

import argparse
from collections.abc import Iterator
import os
from typing import Any

from cliff import command
from cliff import lister
from cliff import show

from pcow_driver.cli import common
from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import units
from pcow_driver.pmem import filesystem
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.provision import adopt
from pcow_driver.provision import dismantle
from pcow_driver.provision import durability
from pcow_driver.provision import ndctl
from pcow_driver.provision import plan as plan_module
from pcow_driver.provision import provision

Shown = tuple[tuple[str, ...], tuple[Any, ...]]


def _region(path: str) -> ndctl.Region | None:
    """The persistent memory under a mount point; None if nobody can tell."""
    try:
        found = ndctl.of_blockdev(provision.mount_source(path))
    except exception.PcowError:
        return None
    return found[0] if found else None


def _show(found: pool.Pool) -> Shown:
    capacity, images, scrub = found.capacity(), found.listed(), scrubs.read(found.uuid)
    infos = [item.summary for item in images if item.summary]
    persistence = found.persistence()
    kept = durability.of(persistence, _region(found.path) if persistence == 'pmem' else None)
    return (
        (
            'name',
            'path',
            'uuid',
            'created',
            'persistence',
            'survives',
            'lost by',
            'based on',
            'total',
            'free',
            'images',
            'templates',
            'virtual size',
            'allocated size',
            'unreadable',
            'last scrub',
            'damaged',
        ),
        (
            found.name,
            found.path,
            found.uuid,
            found.created,
            persistence,
            kept.survives,
            kept.lost_by,
            kept.note,
            common.Size(capacity.total),
            common.Size(capacity.free),
            sum(not info.sealed for info in infos),
            sum(info.sealed for info in infos),
            common.Size(sum(info.virtual_size for info in infos)),
            common.Size(sum(info.actual_size for info in infos)),
            ', '.join(item.name for item in images if not item.summary),
            scrub.told(),
            ', '.join(scrub.damaged()),
        ),
    )


def carry_out(app: Any, plan: plan_module.Plan, dry_run: bool) -> bool:
    """Print the steps of a plan while they are done, or only print them; False if they were not
    done.
    """
    if dry_run:
        for line in plan.lines():
            app.stdout.write(f'{line}\n')
        return False
    plan.run(lambda line: app.stderr.write(f'{line}\n'))
    return True


class Create(show.ShowOne):
    """Make a pool: of a directory, of a region or namespace of persistent memory, or of DRAM.

    With a region, a namespace or a device: make what is missing (labels, an fsdax namespace, a file
    system whose extents can be mapped in pieces of 2 MiB), mount it with DAX, see that it works,
    and have it mounted at boot. Nothing that carries data is touched without --force.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool on this host.')
        parser.add_argument(
            'directory',
            nargs='?',
            help=(
                'Directory of the pool: an existing file system (fsdax keeps data, tmpfs does '
                'not), or where the new one is mounted; '
                'default for a new one: NAME in [pcow] pools_path.'
            ),
        )
        source = parser.add_mutually_exclusive_group()
        source.add_argument('--region', help="Make a namespace in this region ('ndctl list -R').")
        source.add_argument(
            '--namespace', help="Take this namespace ('ndctl list -N'); it becomes mode fsdax."
        )
        source.add_argument('--device', help='Take this block device, which has DAX already.')
        source.add_argument(
            '--memory',
            action='store_true',
            help='DRAM (tmpfs): fast, and lost with the host; needs --size.',
        )
        parser.add_argument(
            '--huge',
            action='store_true',
            help='With --memory: of pages of 2 MiB, as far as there are any.',
        )
        parser.add_argument(
            '--size',
            type=common.size_argument,
            help='With --region (default: all that is free) and --memory.',
        )
        parser.add_argument(
            '--fs',
            choices=filesystem.KINDS,
            default='xfs',
            help='File system to make; default: xfs.',
        )
        parser.add_argument(
            '--align',
            type=common.size_argument,
            default=units.SLAB_SIZE,
            help='Alignment of the namespace, 2M (default) or 1G.',
        )
        parser.add_argument(
            '--owner',
            type=common.owner_argument,
            metavar='USER[:GROUP]',
            help="Whose the pool is, a service's for instance; default: who makes it. Its file "
            "system is its own.",
        )
        parser.add_argument(
            '--force', action='store_true', help='Destroy what the namespace or device carries.'
        )
        parser.add_argument(
            '--dry-run',
            action='store_true',
            help='Look at everything, print what would be done, and stop.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        plan = self._plan(parsed_args)
        if not carry_out(self.app, plan, parsed_args.dry_run):
            return (), ()
        return _show(registry.PoolRegistry().get(parsed_args.name))

    @staticmethod
    def _plan(args: argparse.Namespace) -> plan_module.Plan:
        from_pmem = any((args.region, args.namespace, args.device))
        if args.directory is None and not from_pmem and not args.memory:
            raise exception.UsageInvalid(
                reason='give a directory, or one of --region, --namespace, --device and --memory'
            )
        if args.size is not None and not args.region and not args.memory:
            raise exception.UsageInvalid(reason='--size goes with --region and --memory')
        if args.huge and not args.memory:
            raise exception.UsageInvalid(reason='--huge goes with --memory')
        directory = os.path.abspath(
            args.directory or os.path.join(conf.CONF.pcow.pools_path, args.name)
        )
        if from_pmem:
            return provision.plan_create(
                provision.Request(
                    name=args.name,
                    directory=directory,
                    filesystem=args.fs,
                    region=args.region,
                    namespace=args.namespace,
                    device=args.device,
                    size=args.size,
                    align=args.align,
                    force=args.force,
                    owner=args.owner,
                )
            )
        if args.memory:
            if args.size is None:
                raise exception.UsageInvalid(
                    reason='--memory needs --size: without a limit guests could fill all memory'
                )
            return provision.plan_memory(
                args.name, directory, args.size, huge=args.huge, owner=args.owner
            )
        return adopt.plan_directory(args.name, directory, args.owner)


class Import(show.ShowOne):
    """Make a pool known on this host that exists already."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('directory', help='Directory of the pool.')
        parser.add_argument('--name', help='Name on this host; default: the name it was made with.')
        parser.add_argument(
            '--dry-run', action='store_true', help='Print what would be done, and stop.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        if not carry_out(
            self.app,
            adopt.plan_import(parsed_args.directory, parsed_args.name),
            parsed_args.dry_run,
        ):
            return (), ()
        return _show(
            registry.PoolRegistry().find(parsed_args.directory)
            or pool.open_directory(parsed_args.directory)
        )


class List(lister.Lister):
    """List the pools of this host."""

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        return ('name', 'persistence', 'total', 'free', 'path', 'problem'), self._rows()

    @staticmethod
    def _rows() -> Iterator[tuple[Any, ...]]:
        pools = registry.PoolRegistry()
        for entry in pools.list():
            try:
                found = pools.get(entry.name)
                capacity = found.capacity()
                yield (
                    entry.name,
                    found.persistence(),
                    common.OptionalSize(capacity.total),
                    common.OptionalSize(capacity.free),
                    entry.path,
                    '',
                )
            except exception.PcowError as e:
                yield (
                    entry.name,
                    '-',
                    common.OptionalSize(None),
                    common.OptionalSize(None),
                    entry.path,
                    str(e),
                )


class Show(show.ShowOne):
    """Show a pool: what survives in it, its space, what is in it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return _show(registry.PoolRegistry().get(parsed_args.name))


class Remove(command.Command):
    """Remove a pool that holds no images; its directory stays, or with --destroy goes with all that
    is under it.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        how = parser.add_mutually_exclusive_group()
        how.add_argument(
            '--forget',
            action='store_true',
            help='Only forget its name on this host, images or not; pool import brings it back.',
        )
        how.add_argument(
            '--destroy',
            action='store_true',
            help=('Also unmount it, no longer mount it at boot, and destroy its namespace.'),
        )
        parser.add_argument(
            '--dry-run', action='store_true', help='Print what would be done, and stop.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        if parsed_args.destroy:
            plan = dismantle.plan_destroy(parsed_args.name)
        else:
            plan = dismantle.plan_remove(parsed_args.name, forget=parsed_args.forget)
        carry_out(self.app, plan, parsed_args.dry_run)
