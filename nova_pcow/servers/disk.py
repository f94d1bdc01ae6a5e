# SPDX-License-Identifier: Apache-2.0
"""Volumes on pcow images as disks of servers without persistent memory: nbdkit serves QEMU the data
on a socket.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from nova.virt.libvirt import config as vconfig

from nova_pcow import conf
from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.export import nbd
from pcow_driver.export import nbdkit
from pcow_driver.pools import device
from pcow_driver.virt import disk_xml


class NbdDisk(vconfig.LibvirtConfigGuestDisk):
    """Another disk, from a socket; Nova's own knows network disks by host and port only."""

    def __init__(self, disk: vconfig.LibvirtConfigGuestDisk, socket: str) -> None:
        super().__init__()
        self.__dict__.update(vars(disk))
        self.source_type, self.source_protocol = 'network', 'nbd'
        self.source_hosts: list[str] = []
        self.source_ports: list[str] = []
        self._socket = socket

    def format_dom(self) -> Any:
        element = super().format_dom()
        disk_xml.add_socket(element.find('source'), self._socket)
        return element


def complete(found: Any, volume_id: str) -> Any:
    """A device that Nova has read from a domain, with the socket that it does not read: the host
    has no name then.
    """
    is_ours = isinstance(found, vconfig.LibvirtConfigGuestDisk) and (
        found.source_protocol,
        found.source_hosts,
    ) == ('nbd', [None])
    return NbdDisk(found, socket_path(volume_id)) if is_ours else found


def start(path: str, volume_id: str, peer: str | None = None) -> None:
    """Serve the data of a volume until :func:`stop`, also when nova-compute ends.

    :param peer: profile of AppArmor of the only QEMU that may connect
    :raises ImageNotFound:
    :raises DeviceInvalid: no info block
    :raises ToolFailed: somebody has the image open, for instance
    :raises ExportFailed:
    :raises ConfigInvalid: the group of QEMU is not there, or this user may not give it something
    """
    directory = _directory(volume_id)
    with locks.lock(f'disk-{volume_id}'):
        os.makedirs(os.path.dirname(directory), mode=0o711, exist_ok=True)
        nbd.stop(directory)  # of a server whose host ended without a word
        nbd.start(directory, path, window=device.window(path), peer=peer)
        try:
            _let_in(directory)
        except BaseException:
            nbd.stop(directory)
            raise


def _let_in(directory: str) -> None:
    group = conf.CONF.nova_pcow.qemu_group
    if not group:
        return
    try:
        nbd.let_in(directory, group)
    except (OSError, LookupError) as e:
        raise exception.ConfigInvalid(
            reason=f'[nova_pcow] qemu_group {group} cannot be given a socket: {e}'
        ) from None


def stop(volume_id: str) -> None:
    """What the guest has written is durable then.

    :raises ExportFailed:
    """
    with locks.lock(f'disk-{volume_id}'):
        nbd.stop(_directory(volume_id))


def socket_path(volume_id: str) -> str:
    """Where a volume is served."""
    return os.path.join(_directory(volume_id), nbdkit.SOCKET)


def _directory(volume_id: str) -> str:
    """Short, because the path of a socket has at most 107 characters."""
    return os.path.join(
        locks.state_path(), 'disks', hashlib.blake2s(volume_id.encode(), digest_size=8).hexdigest()
    )
