# SPDX-License-Identifier: Apache-2.0
"""AppArmor's profile of a server, where libvirt confines QEMU so: a volume is added to it first.

Before a server starts libvirt calls the hook (etc/libvirt/hooks/qemu.d/pcow); for a volume that
comes later it calls nobody.
"""

from __future__ import annotations

import os
from typing import Any

from lxml import etree
from nova import privsep
from oslo_concurrency import processutils

from pcow_driver.common import exception
from pcow_driver.virt import libvirt_call

HOOK = '/etc/libvirt/hooks/qemu.d/pcow'


def profile(host: Any, instance: Any) -> str | None:
    """Under which libvirt runs the QEMU of a server; None: under none.

    :param host: nova.virt.libvirt.host.Host
    """
    connection = libvirt_call.Proxy(host.get_connection())
    capabilities = etree.fromstring(connection.getCapabilities().encode())
    models = {item.text for item in capabilities.findall('host/secmodel/model')}
    return f'libvirt-{instance.uuid}' if 'apparmor' in models else None


def let_in(path: str, instance: Any) -> None:
    """Have the running QEMU of a server open an image with its bases, or connect to a socket.

    :raises ConfigInvalid: the hook is not installed, or refuses
    """
    try:
        _grant(path, instance.uuid)
    except (processutils.ProcessExecutionError, OSError) as e:
        said = str(getattr(e, 'stderr', None) or e).strip().removeprefix('pcow: ')
        raise exception.ConfigInvalid(reason=f'{HOOK}: {said}') from None


@privsep.sys_admin_pctxt.entrypoint
def _grant(path: str, uuid: str) -> None:
    processutils.execute(HOOK, '--grant', os.path.abspath(path), str(uuid))
