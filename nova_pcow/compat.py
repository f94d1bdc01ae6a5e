# SPDX-License-Identifier: Apache-2.0
"""The releases of Nova that the driver was made for: it overrides methods of the libvirt driver,
which change without notice.
"""

import importlib.metadata

SUPPORTED = {33: '2026.1', 34: '2026.2'}  # major version: OpenStack release


class UnsupportedNova(ImportError):
    """An ImportError, which Nova expects of a driver that cannot be loaded."""


def check(version: str | None = None) -> None:
    """Make sure that the installed Nova is one of :data:`SUPPORTED`.

    :param version: of Nova; the installed one if not given
    :raises UnsupportedNova:
    """
    if version is None:
        version = importlib.metadata.version('nova')
    major = version.partition('.')[0]
    if not major.isdigit() or int(major) not in SUPPORTED:
        known = ', '.join(
            f'{number}.x ({release})' for number, release in sorted(SUPPORTED.items())
        )
        raise UnsupportedNova(
            f'nova_pcow supports nova {known}, and this is nova {version}: install matching '
            f'versions'
        )
