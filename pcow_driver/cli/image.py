# SPDX-License-Identifier: Apache-2.0
"""pcowctl image ..."""

import argparse
from collections.abc import Iterator
import contextlib
import os
from typing import Any

from cliff import command
from cliff import lister
from cliff import show
from oslo_log import log as logging

from pcow_driver.cli import common
from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.copies import verify
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import pool
from pcow_driver.pools import registry
from pcow_driver.snapshots import trash

LOG = logging.getLogger(__name__)

Shown = tuple[tuple[str, ...], tuple[Any, ...]]
Rows = tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]


def show_path(path: str) -> Shown:
    info = image.info(path, force_share=True)
    return (
        (
            'path',
            'uuid',
            'format',
            'virtual size',
            'allocated size',
            'data size',
            'cluster size',
            'template',
            'base',
            'base snapshot',
            'chain depth',
            'snapshots',
            'persistence',
        ),
        (
            path,
            info.uuid,
            info.format,
            common.Size(info.virtual_size),
            common.Size(info.actual_size),
            common.Size(info.data_size),
            common.Size(info.cluster_size),
            info.sealed,
            info.base_filename or '',
            info.base_snapshot or '',
            info.chain_depth,
            len(info.snapshots),
            info.persistence,
        ),
    )


def list_rows(pool_name: str | None, *, sealed: bool) -> Rows:
    """Images or templates of one pool or of all; those that cannot be read are listed with the
    images.

    What is deleted for its owner and kept for its clones is neither.
    """
    pools = registry.PoolRegistry()
    chosen: list[pool.Pool] = (
        [pools.get(pool_name)] if pool_name else [pools.get(entry.name) for entry in pools.list()]
    )

    def rows() -> Iterator[tuple[Any, ...]]:
        for found in chosen:
            images = found.listed()
            deleted = trash.deleted_images(found)
            for item in images:
                if item.name in deleted:
                    continue
                if item.summary is None:
                    if not sealed:
                        yield (
                            found.name,
                            item.name,
                            common.OptionalSize(None),
                            common.OptionalSize(None),
                            '',
                            '',
                            item.error,
                        )
                elif item.summary.sealed == sealed:
                    yield (
                        found.name,
                        item.name,
                        common.OptionalSize(item.summary.virtual_size),
                        common.OptionalSize(item.summary.actual_size),
                        item.summary.base_filename or '',
                        item.summary.snapshots,
                        '',
                    )

    return (
        'pool',
        'name',
        'virtual size',
        'allocated size',
        'base',
        'snapshots',
        'problem',
    ), rows()


class Create(show.ShowOne):
    """Create an image in a pool: empty, or thin on a template."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = common.takes_sizes(super().get_parser(prog_name))
        parser.add_argument('image', help=common.POOL_IMAGE_HELP)
        parser.add_argument(
            '--template',
            metavar='NAME',
            help='Template or image of the same pool to stand on; POOL/NAME too.',
        )
        parser.add_argument(
            '--template-snapshot', metavar='NAME', help='Snapshot of it to stand on.'
        )
        parser.add_argument(
            '--size',
            type=common.size_argument,
            help='Virtual size, rounded up to 2 MiB; default: that of the template.',
        )
        parser.add_argument(
            '--cluster-size',
            type=common.size_argument,
            help='4k to 2M; default: [pcow] cluster_size.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        found, name = common.split_reference(parsed_args.image)
        size, template = parsed_args.size, parsed_args.template
        base = None if template is None else common.base_name(found, template)
        if base is not None:
            verify.compare_if_due(found, base)
        return show_path(
            found.create_image(
                name,
                size=None if size is None else common.image_size(self, size),
                base=base,
                base_snapshot=parsed_args.template_snapshot,
                cluster_size=parsed_args.cluster_size or conf.CONF.pcow.cluster_size,
            )
        )


class List(lister.Lister):
    """List the images of a pool, or of all pools."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('pool', nargs='?', help='Name of the pool.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Rows:
        return list_rows(parsed_args.pool, sealed=False)


class Show(show.ShowOne):
    """Show an image."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.IMAGE_HELP)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        return show_path(common.image_path(parsed_args.image))


class Delete(command.Command):
    """Delete an image of a pool, if nobody has it open and nothing stands on it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.POOL_IMAGE_HELP)
        parser.add_argument(
            '--force',
            action='store_true',
            help='Also if it is damaged, or others of the pool cannot be read.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        found, name = common.existing_image(parsed_args.image)
        found.delete_image(name, force=parsed_args.force)


def _loss(item: model.Loss) -> str:
    whose = f'snapshot {item.snapshot}' if item.snapshot else f'layer {item.layer or "unknown"}'
    where = '' if item.guest_offset is None else f' from byte {item.guest_offset} on'
    return f'{item.kind}: {item.length} bytes of {whose}{where}'


def _losses(result: model.CheckResult) -> str:
    more = [f'and {result.lost_left_out} more'] if result.lost_left_out else []
    return '\n'.join([*map(_loss, result.lost), *more])


class Check(show.ShowOne):
    """Check an image for damage; exit code 2 if damage was found and not repaired, 3 if only space
    is lost.
    """

    _status = 0

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('image', help=common.IMAGE_HELP)
        parser.add_argument(
            '--repair',
            action='store_true',
            help='Repair what can be repaired, if nothing is lost by it.',
        )
        parser.add_argument(
            '--accept-loss',
            action='store_true',
            help='With --repair: also if something is lost; what is dropped is kept beside it.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        if parsed_args.accept_loss and not parsed_args.repair:
            raise exception.PcowError(reason='--accept-loss is for a repair: give --repair, too')
        result = image.check(
            common.image_path(parsed_args.image),
            repair=parsed_args.repair,
            accept_loss=parsed_args.accept_loss,
        )
        if result.refused:
            LOG.warning(
                'Nothing was repaired, as data would be lost. Keep a copy of %s first, then go on '
                'with: pcowctl image check --repair --accept-loss %s',
                result.filename,
                parsed_args.image,
            )
        if result.corrupted:
            self._status = 2
        elif result.leaks > result.leaks_fixed:
            self._status = 3
        return (
            (
                'path',
                'clean',
                'corruptions',
                'corruptions fixed',
                'leaked slabs',
                'leaked slabs fixed',
                'lost data',
                'lost data is',
                'lost',
                'kept in',
                'slabs',
                'slabs used',
                'findings',
            ),
            (
                result.filename,
                result.clean,
                result.corruptions,
                result.corruptions_fixed,
                result.leaks,
                result.leaks_fixed,
                common.OptionalSize(result.lost_size),
                result.lost_size_is,
                _losses(result),
                result.rescue or '',
                result.slabs,
                result.slabs_used,
                '\n'.join(f'{finding.kind}: {finding.message}' for finding in result.findings),
            ),
        )

    def run(self, parsed_args: argparse.Namespace) -> int:
        return super().run(parsed_args) or self._status


class Resize(show.ShowOne):
    """Change the virtual size of an image that nobody has open."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = common.takes_sizes(super().get_parser(prog_name))
        parser.add_argument('image', help=common.IMAGE_HELP)
        parser.add_argument(
            'size', type=common.size_argument, help='New virtual size, rounded up to 2 MiB.'
        )
        parser.add_argument(
            '--shrink', action='store_true', help='Allow giving up data beyond the new end.'
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> Shown:
        path = common.image_path(parsed_args.image)
        size = common.image_size(self, parsed_args.size)
        found = registry.PoolRegistry().find(os.path.dirname(path))
        with contextlib.nullcontext() if found is None else found.lock():
            growth = size - image.info(path, force_share=True).virtual_size
            if found is not None and growth > 0:
                found.check_room(growth)
            image.resize(path, size, shrink=parsed_args.shrink)
        if found is not None:
            found.remember(os.path.basename(path).removesuffix(names.IMAGE_SUFFIX))
        return show_path(path)
