# SPDX-License-Identifier: Apache-2.0
"""What qemu-img may take of the host for an image that a tenant has made (CVE-2015-5162).

CPU grows with what a sound image of that size makes it do, at a tenth of the speed that an old
processor has with compressed clusters: 100 GiB may take three hours.
"""

from pcow_driver.common import tool
from pcow_driver.common import units

_FIRST = 30  # seconds of CPU, as Nova gives to 'qemu-img info'
_LOOK = 100 * units.MIB  # in each further second, of which the metadata alone are read
_COPY = 10 * units.MIB


def of_look(size: int) -> tool.Limits:
    """To look at the metadata of an image of so many bytes."""
    return tool.Limits(cpu=_FIRST + size // _LOOK)


def of_copy(size: int) -> tool.Limits:
    """To copy so many bytes."""
    return tool.Limits(cpu=_FIRST + size // _COPY)
