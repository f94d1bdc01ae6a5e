# SPDX-License-Identifier: Apache-2.0
"""``pcow-privsep-helper``: starts the daemon of :mod:`~pcow_driver.privileged.services` for a
service that is not root.

sudo or rootwrap runs it as root, with whatever arguments the service gives. So it takes nothing
from them but the socket: one context, no configuration, and the user is the one who listens at the
socket, which the kernel says (SO_PEERCRED). oslo.privsep's own ``privsep-helper`` starts any
context, with the capabilities that a file of the caller's names.
"""

from __future__ import annotations

import argparse
import os
import pwd
import socket
import struct
import sys

from pcow_driver.privileged import services

# isort: split
from oslo_config import cfg
from oslo_privsep import capabilities
from oslo_privsep import comm
from oslo_privsep import daemon

_CREDENTIALS = struct.Struct('iII')  # struct ucred, unix(7)


def _connect(path: str) -> tuple[socket.socket, int, int]:
    """The socket, and user and group of who listens there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    _pid, user, group = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return connection, user, group


def _become(user: int, group: int) -> None:
    """For good, with its groups; what is permitted stays permitted until the daemon gives up all
    but its own.
    """
    try:
        groups = os.getgrouplist(pwd.getpwuid(user).pw_name, group)
    except KeyError:
        groups = [group]
    capabilities.set_keepcaps(True)
    os.setgroups(groups)
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    capabilities.set_keepcaps(False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog='pcow-privsep-helper',
        allow_abbrev=False,
        description=(
            "Started by a service (see [pcow_privileged] helper_command) by way of sudo or "
            "rootwrap: sets the immutable flag of that "
            "user's templates."
        ),
    )
    parser.add_argument('--privsep_context', required=True, choices=[services.CONTEXT])
    parser.add_argument('--privsep_sock_path', required=True)
    arguments = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error('it is started as root: by sudo or rootwrap')
    try:
        connection, user, group = _connect(arguments.privsep_sock_path)
    except OSError as e:
        parser.error(f'--privsep_sock_path: {e.strerror}')
    if user == 0:
        parser.error('root needs no daemon')
    if os.fork() != 0:
        return 0  # the caller waits for this
    cfg.CONF([], project='pcow', default_config_files=[], default_config_dirs=[], use_env=False)
    channel = comm.ServerChannel(connection)
    daemon.replace_logging(daemon.PrivsepLogHandler(channel))
    try:
        _become(user, group)
        daemon.Daemon(channel, services.context).run()
    except BaseException as e:
        print(f'pcow-privsep-helper: {e}', file=sys.stderr)
        os._exit(1)
    os._exit(0)


if __name__ == '__main__':
    sys.exit(main())
