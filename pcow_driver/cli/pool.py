# SPDX-License-Identifier: Apache-2.0
"""pcowctl pool ..."""

import argparse
from collections.abc import Iterator
from typing import Any

from cliff import command
from cliff import lister
from cliff import show

from pcow_driver import exception
from pcow_driver import pool
from pcow_driver import registry
from pcow_driver.cli import common

Shown = tuple[tuple[str, ...], tuple[Any, ...]]


def _show(found: pool.Pool) -> Shown:
    capacity, images = found.capacity(), found.images()
    infos = [item.info for item in images if item.info]
    return (('name', 'path', 'uuid', 'created', 'persistence', 'total', 'free', 'images', 'templates', 'virtual size',
             'allocated size', 'unreadable'),
            (found.name, found.path, found.uuid, found.created, found.persistence(), common.Size(capacity.total),
             common.Size(capacity.free), sum(not info.sealed for info in infos), sum(info.sealed for info in infos),
             common.Size(sum(info.virtual_size for info in infos)), common.Size(sum(info.actual_size for info in infos)),
             ', '.join(item.name for item in images if not item.info)))


class Create(show.ShowOne):
    """Make a directory a pool; it is made if it is missing."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool on this host.')
        parser.add_argument('directory', help='Directory on fsdax (keeps data), on tmpfs (volatile) or any file system.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return _show(registry.PoolRegistry().create(parsed_args.name, parsed_args.directory))


class Import(show.ShowOne):
    """Make a pool known on this host that exists already."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('directory', help='Directory of the pool.')
        parser.add_argument('--name', help='Name on this host; default: the name it was made with.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return _show(registry.PoolRegistry().import_(parsed_args.directory, parsed_args.name))


class List(lister.Lister):
    """List the pools of this host."""

    def take_action(self, parsed_args: argparse.Namespace) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        return ('name', 'persistence', 'total', 'free', 'path', 'problem'), self._rows()

    @staticmethod
    def _rows() -> Iterator[tuple[Any, ...]]:
        pools = registry.PoolRegistry()
        for entry in pools.list():
            try:
                found = pools.get(entry.name)
                capacity = found.capacity()
                yield (entry.name, found.persistence(), common.OptionalSize(capacity.total), common.OptionalSize(capacity.free),
                       entry.path, '')
            except exception.PcowError as e:
                yield entry.name, '-', common.OptionalSize(None), common.OptionalSize(None), entry.path, str(e)


class Show(show.ShowOne):
    """Show a pool: what survives in it, its space, what is in it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return _show(registry.PoolRegistry().get(parsed_args.name))


class Remove(command.Command):
    """Remove a pool that holds no images; its directory stays."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument('--forget', action='store_true',
                            help='Only forget its name on this host, images or not; pool import brings it back.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        registry.PoolRegistry().remove(parsed_args.name, forget=parsed_args.forget)
