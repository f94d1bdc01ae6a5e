# SPDX-License-Identifier: Apache-2.0
"""pcowctl pool garbage"""

import argparse
from collections.abc import Iterator
import os
from typing import Any

from cliff import lister

from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.health import garbage
from pcow_driver.pools import registry
from pcow_driver.virt import libvirt_host


class Garbage(lister.Lister):
    """List what nobody needs in a pool, with reasons; delete kinds of it with --delete."""

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument('name', help='Name of the pool.')
        parser.add_argument(
            '--delete',
            action='append',
            default=[],
            choices=[kind.value for kind in garbage.Kind],
            help='Delete what is found of this kind (leak: repair); may be repeated.',
        )
        parser.add_argument(
            '--dry-run',
            action='store_true',
            help='With --delete: say what would be deleted, and delete nothing.',
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        if parsed_args.dry_run and not parsed_args.delete:
            raise exception.UsageInvalid(reason='--dry-run goes with --delete')
        found = registry.PoolRegistry().get(parsed_args.name)
        rows = []
        for finding in garbage.find(found, _domain_images()):
            done = ''
            if finding.kind in parsed_args.delete:
                try:
                    if parsed_args.dry_run:
                        garbage.look_again(found, finding)
                        done = 'would be deleted'
                    else:
                        garbage.delete(found, finding)
                        done = 'deleted'
                except exception.PcowError as e:
                    done = f'kept: {e}'
            rows.append(
                (
                    finding.kind.value,
                    os.path.basename(finding.path),
                    common.Size(finding.size),
                    finding.reason,
                    done,
                )
            )
        return ('kind', 'file', 'size', 'reason', 'done'), iter(rows)


def _domain_images() -> libvirt_host.Files | None:
    try:
        return libvirt_host.all_images()
    except exception.LibvirtFailed:
        return None  # then no image is called unused
