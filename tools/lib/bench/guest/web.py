# SPDX-License-Identifier: Apache-2.0
"""A web server in the guest, which answers to itself."""

from __future__ import annotations

from tools.lib.bench.guest import console

PACKAGES = ('apache2', 'apache2-utils', 'iproute2')
REQUESTS = 20
_SECONDS = 300.0
_ASK = (
    f'ab -q -n {REQUESTS} http://127.0.0.1/ >/tmp/ab 2>&1 && '
    f'grep "Complete requests: *{REQUESTS}" /tmp/ab || {{ cat /tmp/ab; false; }}'
)


def start(guest: console.Guest) -> None:
    """It has answered when this ends.

    :raises PcowError: it does not
    """
    guest.run(
        'export PATH=/usr/sbin:/usr/bin:/sbin:/bin; mkdir -p /run/lock; ip link set lo up; '
        'apachectl start 2>&1; for i in 1 2 3 4 5 6 7 8 9; do '
        f'ab -q -n 1 http://127.0.0.1/ >/dev/null 2>&1 && break; sleep 2; done; {_ASK}',
        _SECONDS,
    )


def ask(guest: console.Guest) -> None:
    """So many requests.

    :raises PcowError: not all of them were answered
    """
    guest.run(_ASK, _SECONDS)
