# SPDX-License-Identifier: Apache-2.0
"""The command line of tools/openstack-aio."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pcow_driver.common import exception
from tools.lib.openstack_aio import settings as settings_module

MAX_SERVERS = 40
TEMPEST_SUITES = ('volume', 'compute', 'scenario', 'scenario-disk')
VOLUME_BACKENDS = (settings_module.PCOW_BACKEND,)
_STATE = Path(__file__).resolve().parents[3] / 'build' / 'openstack'


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='tools/openstack-aio',
        description='A real OpenStack on this machine, on the loopback interface only: keystone, '
        'placement, glance, neutron, '
        'cinder, nova, MariaDB, RabbitMQ, libvirt. Needs root. Nothing outside its directory is '
        'touched.',
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        '--state',
        metavar='DIR',
        type=Path,
        default=_STATE,
        help='Directory of all that it keeps; default: build/openstack in the checkout.',
    )
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)

    up = commands.add_parser('up', parents=[common], help='Start it, or what of it does not run.')
    up.add_argument(
        '--compute-driver',
        metavar='CLASS',
        default=settings_module.PCOW_COMPUTE_DRIVER,
        help='What nova-compute loads; default: %(default)s.',
    )
    up.add_argument(
        '--volume-backend',
        metavar='NAME',
        action='append',
        choices=VOLUME_BACKENDS,
        help=f'A backend of cinder ({", ".join(VOLUME_BACKENDS)}); may be given several times, the '
        f'first one is the '
        'default volume type. Default: pcow.',
    )
    up.add_argument('--no-volume-backend', action='store_true', help='Cinder without a backend.')
    up.add_argument(
        '--pool',
        metavar='DIR',
        type=Path,
        help='Directory for the pools, on a mounted fsdax or any other file system; default: on '
        'tmpfs.',
    )
    up.add_argument(
        '--port-offset',
        metavar='N',
        type=int,
        help="Added to every port; default: 0, or that of the last time. Keystone's is 5000.",
    )
    up.add_argument('--debug', action='store_true', help='Services log at level debug.')

    down = commands.add_parser(
        'down', parents=[common], help='End all that up and node2 started; servers are powered off.'
    )
    down.add_argument(
        '--purge',
        action='store_true',
        help='Delete what it kept as well: databases, images, pools on tmpfs.',
    )

    commands.add_parser(
        'status', parents=[common], help='Show its processes; the exit code is 0 if all of it runs.'
    )

    logs = commands.add_parser('logs', parents=[common], help='Show the end of the logs.')
    logs.add_argument(
        'service', metavar='SERVICE', nargs='?', help='Only that one, as status names it.'
    )
    logs.add_argument(
        '--lines', metavar='N', type=int, help='Default: 40 of one service, 3 of each.'
    )

    node2 = commands.add_parser(
        'node2', parents=[common], help='Add a second compute node, node2 at 127.0.0.2.'
    )
    node2.add_argument(
        '--compute-driver',
        metavar='CLASS',
        help='What its nova-compute loads; default: as the first node.',
    )

    node2.add_argument(
        '--shared-pools',
        action='store_true',
        help='It sees the pools of the first node, as on storage that both reach: servers can be '
        'evacuated.',
    )

    life = commands.add_parser(
        'life-cycle',
        parents=[common],
        help='Take a server through its life, migrations included if node2 is there, and print a '
        'table.',
    )
    life.add_argument(
        '--volume',
        action='store_true',
        help="Instead that of a Cinder volume, attached to a server as an NVDIMM.",
    )
    life.add_argument(
        '--row',
        metavar='NAME',
        action='append',
        help='Only this row (and those given likewise), such as pause.',
    )
    kills = commands.add_parser(
        'volume-kills',
        parents=[common],
        help='Kill cinder-volume in the middle of each operation, and print what became of it.',
    )
    kills.add_argument(
        '--kills', metavar='N', type=int, default=3, help='Of each operation; default: 3.'
    )
    kills.add_argument(
        '--row',
        metavar='NAME',
        action='append',
        help='Only this one (and those given likewise), such as clone.',
    )
    times = commands.add_parser(
        'times',
        parents=[common],
        help='Measure server create and snapshot from one image, beside servers on an ordinary '
        'disk.',
    )
    times.add_argument(
        '--servers', metavar='N', type=int, default=10, help='How many of each kind; default: 10.'
    )
    tempest_tests = commands.add_parser(
        'tempest',
        parents=[common],
        help="Run OpenStack's integration tests on servers and volumes in persistent memory.",
    )
    tempest_tests.add_argument(
        'suite', metavar='SUITE', choices=TEMPEST_SUITES, help=f'{", ".join(TEMPEST_SUITES)}.'
    )
    tempest_tests.add_argument(
        '--only', metavar='REGEX', help='Those of the tests whose names match.'
    )
    image = commands.add_parser(
        'image',
        parents=[common],
        help='Put a guest with kernel and ramdisk into Glance, and flavors.',
    )
    image.add_argument(
        '--debian',
        action='store_true',
        help='Debian 12 with a shell on its console; default: a tiny guest that checks its own '
        'data.',
    )
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The chosen command with its options; paths are absolute.

    :raises UsageInvalid: an argument that cannot be used
    """
    chosen = _parser().parse_args(arguments)
    chosen.state = chosen.state.absolute()
    if len(str(chosen.state)) > settings_module.MAX_STATE_PATH:
        raise exception.UsageInvalid(
            reason=f'--state {chosen.state}: the path is too long for the sockets in it; '
            f'at most {settings_module.MAX_STATE_PATH} characters'
        )
    if chosen.command == 'up':
        _check_up(chosen)
    if chosen.command == 'volume-kills' and chosen.kills < 1:
        raise exception.UsageInvalid(reason=f'--kills {chosen.kills}: give at least 1')
    if chosen.command == 'times' and not 1 <= chosen.servers <= MAX_SERVERS:
        raise exception.UsageInvalid(reason=f'--servers {chosen.servers}: give 1 to {MAX_SERVERS}')
    if chosen.command == 'logs' and chosen.lines is not None and chosen.lines < 1:
        raise exception.UsageInvalid(reason=f'--lines {chosen.lines}: give at least 1')
    return chosen


def _check_up(chosen: argparse.Namespace) -> None:
    if chosen.no_volume_backend and chosen.volume_backend:
        raise exception.UsageInvalid(
            reason='--volume-backend and --no-volume-backend exclude each other'
        )
    backends = (
        () if chosen.no_volume_backend else chosen.volume_backend or (settings_module.PCOW_BACKEND,)
    )
    chosen.volume_backends = tuple(dict.fromkeys(backends))
    if (
        chosen.port_offset is not None
        and not 0 <= chosen.port_offset <= settings_module.MAX_PORT_OFFSET
    ):
        raise exception.UsageInvalid(
            reason=f'--port-offset {chosen.port_offset}: give 0 to '
            f'{settings_module.MAX_PORT_OFFSET}'
        )
    if chosen.pool is not None:
        if not chosen.pool.is_dir():
            raise exception.UsageInvalid(
                reason=f'--pool {chosen.pool}: it is not a directory; make it, or mount it'
            )
        chosen.pool = chosen.pool.absolute()
