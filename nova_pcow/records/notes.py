# SPDX-License-Identifier: Apache-2.0
"""What a host remembers of live migrations, so that a service that was killed meanwhile mistakes no
image for another, and of resizes that have failed.

A note is a file in ``[pcow] state_path``, durable before what it speaks of happens.
"""

from __future__ import annotations

import os

from oslo_log import log as logging

from pcow_driver.common import durable
from pcow_driver.common import exception
from pcow_driver.common import locks

LOG = logging.getLogger(__name__)

# the server's images here are made for its arrival; says the UUID of their pool
ARRIVING = 'arriving'
# the server may run on the host that it says, and what is here be old
LEAVING = 'leaving'
# a resize has made its devices larger, and failed; says how large (JSON)
GROWN = 'grown'
# its devices may have the sizes of a resize that waits for its end, on this host (JSON)
RESIZING = 'resizing'


def path(kind: str, uuid: str) -> str:
    return os.path.join(_directory(), f'{uuid}.{kind}')


def _directory() -> str:
    return os.path.join(locks.state_path(), 'live-migrations')


def put(kind: str, uuid: str, text: str) -> None:
    """:raises StateInvalid: it cannot be written"""
    target = path(kind, uuid)
    try:
        os.makedirs(_directory(), mode=0o750, exist_ok=True)
        durable.replace(target, text)
    except OSError as e:
        raise exception.StateInvalid(path=target, reason=str(e.strerror)) from None


def get(kind: str, uuid: str) -> str | None:
    """:raises StateInvalid: it cannot be read"""
    source = path(kind, uuid)
    try:
        return durable.read(source)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise exception.StateInvalid(path=source, reason=str(e.strerror)) from None


def servers(kind: str) -> list[str]:
    """Of which there is a note of this kind."""
    try:
        files = sorted(os.listdir(_directory()))
    except FileNotFoundError:
        return []
    except OSError as e:
        LOG.error('The notes of live migrations in %s cannot be read: %s', _directory(), e.strerror)
        return []
    return [name.removesuffix(f'.{kind}') for name in files if name.endswith(f'.{kind}')]


def forget(*kinds: str, uuid: str) -> None:
    """:raises StateInvalid: it stays"""
    for kind in kinds:
        target = path(kind, uuid)
        try:
            durable.remove(target)
        except OSError as e:
            raise exception.StateInvalid(path=target, reason=str(e.strerror)) from None
