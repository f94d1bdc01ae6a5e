# SPDX-License-Identifier: Apache-2.0
"""pcowctl vm protect, pcowctl host fixate, recover and watch: VMs that outlive a power failure."""

import argparse
from collections.abc import Sequence
import signal
from types import FrameType
from typing import Any

from cliff import command
from cliff import lister

from pcow_driver.cli import common
from pcow_driver.common import exception
from pcow_driver.fixation import fixate
from pcow_driver.fixation import overview
from pcow_driver.fixation import policy
from pcow_driver.fixation import recover
from pcow_driver.fixation import watch
from pcow_driver.virt import domain
from pcow_driver.virt import guest_hook
from pcow_driver.virt import libvirt_host


class Protect(lister.Lister):
    """Have a VM go on where it was after a power failure, or list those that do.

    It needs pcow-protect.service, which takes checkpoints and has VMs go on, and
    pcow-fixate.service, which has the last one taken when the host goes down.
    """

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            'domain', metavar='DOMAIN', nargs='?', help='Name of the libvirt domain.'
        )
        parser.add_argument(
            '--list', dest='list_all', action='store_true', help='List all that are protected.'
        )
        parser.add_argument(
            '--interval',
            metavar='{auto|SECONDSs|off}',
            help='Between automatic checkpoints; auto, the default: 10s, or longer, so that they '
            'take at most 3 %% of the time.',
        )
        parser.add_argument(
            '--on-shutdown',
            choices=policy.ON_SHUTDOWN,
            help='When the host goes down: keep its last moment (default), or leave it to others.',
        )
        parser.add_argument(
            '--priority',
            type=int,
            metavar='N',
            help='Where time is short the highest goes first; default: 0.',
        )
        parser.add_argument(
            '--guest-hook',
            action=argparse.BooleanOptionalAction,
            help=f'Whether {guest_hook.PATH} of the guest is run before a fixation and after a '
            'recovery; default: no.',
        )
        parser.add_argument(
            '--remove', action='store_true', help='Protect it no longer; its checkpoints stay.'
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        name = parsed_args.domain
        wanted = {
            key: value
            for key in ('interval', 'on_shutdown', 'priority', 'guest_hook')
            if (value := getattr(parsed_args, key)) is not None
        }
        if (name is None) != parsed_args.list_all or (parsed_args.list_all and wanted):
            raise exception.UsageInvalid(reason='give DOMAIN, or --list alone')
        if parsed_args.remove and (wanted or name is None):
            raise exception.UsageInvalid(reason='--remove goes with DOMAIN alone')
        with libvirt_host.connect() as connection:
            if name is not None:
                found = domain.Domain(connection, name)
                if parsed_args.remove:
                    policy.remove(found)
                else:
                    policy.change(found, **wanted)
            rows = overview.rows(connection, name)
        return (
            (
                'name',
                'state',
                'interval',
                'on shutdown',
                'priority',
                'guest hook',
                'outlives',
                'last checkpoint',
                'age',
                'fixation',
            ),
            [
                (
                    row.name,
                    row.state,
                    str(row.policy.interval),
                    row.policy.on_shutdown,
                    row.policy.priority,
                    'yes' if row.policy.guest_hook else 'no',
                    row.outlives,
                    row.checkpoint,
                    '' if row.age is None else f'{row.age:.0f} s',
                    common.Duration(row.durable),
                )
                for row in rows
            ],
        )


class Fixate(lister.Lister):
    """Keep the last moment of each protected VM, and end its QEMU; for a host that goes down.

    A VM that cannot be kept runs on, and goes on from its last checkpoint later, unless it is shut
    down before; then it is left to its owner. The exit code is 1.
    """

    _left: Sequence[str] = ()

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--deadline',
            type=common.seconds_argument,
            metavar='SECONDSs',
            help='Begin nothing that would take longer, and end then.',
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        done = list(fixate.fixate_all(fixate.wanted(), parsed_args.deadline))
        self._left = [one.name for one in done if one.problem]
        return (
            ('name', 'checkpoint', 'time', 'problem'),
            [(one.name, one.checkpoint, common.Duration(one.time), one.problem) for one in done],
        )

    def run(self, parsed_args: argparse.Namespace) -> int:
        return super().run(parsed_args) or (1 if self._left else 0)


class Recover(lister.Lister):
    """Have protected VMs go on that were fixated, or ran when the host ended: exit code 1 if one
    does not.
    """

    _left: Sequence[str] = ()

    def get_parser(self, prog_name: str) -> argparse.ArgumentParser:
        parser = super().get_parser(prog_name)
        parser.add_argument(
            '--failed', action='store_true', help='Also those that could not go on before.'
        )
        return parser

    def take_action(
        self, parsed_args: argparse.Namespace
    ) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        done = recover.recover_all(failed=parsed_args.failed)
        self._left = [one.name for one in done if not one.checkpoint]
        return (
            ('name', 'checkpoint', 'age', 'time', 'problem'),
            [
                (
                    one.name,
                    one.checkpoint,
                    f'{one.age:.0f} s' if one.checkpoint else '',
                    common.Duration(one.time),
                    one.problem,
                )
                for one in done
            ],
        )

    def run(self, parsed_args: argparse.Namespace) -> int:
        return super().run(parsed_args) or (1 if self._left else 0)


class Watch(command.Command):
    """Take the checkpoints of protected VMs, and have those go on that were killed, or fixated
    before the host was started, until SIGTERM or SIGINT; pcow-protect.service runs it.
    """

    def take_action(self, parsed_args: argparse.Namespace) -> None:
        loop = watch.Watch()

        def end(_number: int, _frame: FrameType | None) -> None:
            loop.end()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        loop.run()
