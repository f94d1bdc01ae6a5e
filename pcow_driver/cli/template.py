# SPDX-License-Identifier: Apache-2.0
"""pcowctl template ..."""

import argparse

from cliff import command
from cliff import lister
from cliff import show

from pcow_driver.cli import common
from pcow_driver.cli import image as image_commands
from pcow_driver.common import conf
from pcow_driver.images import info_block


class Build(show.ShowOne):
    """Make a template, bootable from persistent memory with DAX, of a qcow2 or raw disk image."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = common.takes_sizes(super().get_parser(prog_name))
        parser.add_argument(
            'source', help='The disk image: a bare file system or a partitioned disk.'
        )
        parser.add_argument('template', help=common.POOL_IMAGE_HELP)
        parser.add_argument(
            '--source-format',
            required=True,
            choices=('qcow2', 'raw'),
            help='Format of the source; it is never guessed.',
        )
        parser.add_argument(
            '--size',
            type=common.size_argument,
            help='Virtual size, rounded up to 2 MiB; default: just enough. Guests may grow their '
            'file system into it.',
        )
        parser.add_argument(
            '--page-map',
            choices=[item.value for item in info_block.PageMap],
            default=info_block.PageMap.RAM.value,
            help='Where guests keep 64 bytes per 4 KiB page: in their RAM (default), or in the '
            'image, '
            'which then grows by 1.6%% of its size at boot.',
        )
        parser.add_argument(
            '--align',
            action='store_true',
            help='Have the largest partition begin at a multiple of 2 MiB, so that guests can map '
            'it by 2 MiB at a time.',
        )
        parser.add_argument(
            '--cluster-size',
            type=common.size_argument,
            help='4k to 2M; default: [pcow] cluster_size.',
        )
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> image_commands.Shown:
        from pcow_driver.templates import template  # its inspectors take long to import

        found, name = common.split_reference(parsed_args.template)
        size = parsed_args.size
        return image_commands.show_path(
            template.build(
                found,
                name,
                parsed_args.source,
                parsed_args.source_format,
                size=None if size is None else common.image_size(self, size),
                page_map=info_block.PageMap(parsed_args.page_map),
                align=parsed_args.align,
                cluster_size=parsed_args.cluster_size or conf.CONF.pcow.cluster_size,
            )
        )


class List(lister.Lister):
    """List the templates of a pool, or of all pools."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('pool', nargs='?', help='Name of the pool.')
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> image_commands.Rows:
        return image_commands.list_rows(parsed_args.pool, sealed=True)


class Show(show.ShowOne):
    """Show a template and what stands on it."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('template', help=common.POOL_IMAGE_HELP)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> image_commands.Shown:
        found, name = common.existing_image(parsed_args.template)
        columns, values = image_commands.show_path(found.existing_path(name))
        return (*columns, 'children'), (*values, ', '.join(found.children(name)))


class Delete(command.Command):
    """Delete a template on which nothing stands."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('template', help=common.POOL_IMAGE_HELP)
        return parser

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        found, name = common.existing_image(parsed_args.template)
        found.delete_template(name)
