# SPDX-License-Identifier: Apache-2.0
"""Serves the images that are disks of a libvirt domain (:mod:`pcow_driver.virt.disk_xml`), from
before its QEMU starts until it has ended.

The libvirt hook calls this, whoever starts the domain and whatever ends it, so nobody else has to
know. nbdkit runs as the user whose image it is. QEMU reaches the socket through a directory of the
domain's own, in ``/run``, that nobody but its group can enter.
"""

from __future__ import annotations

import functools
import glob
import os

from pcow_driver.common import exception
from pcow_driver.common import users
from pcow_driver.export import nbd
from pcow_driver.pools import device
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_xml

_MODE = 0o710


def serve(domain_xml: str, group: int, peer: str | None = None) -> None:
    """Serve the disks of a domain that is about to start; all of them, or an error.

    What is left of an earlier time of the domain is ended first.

    :param group: GID of QEMU
    :param peer: profile of AppArmor of the only QEMU that may connect
    :raises XmlInvalid: the domain would look for a disk elsewhere
    :raises ImageNotFound:
    :raises ToolFailed: somebody has the image open, for instance
    """
    uuid = _uuid(domain_xml)
    for disk in _checked(domain_xml, uuid):
        directory = os.path.dirname(os.path.dirname(disk_xml.socket_path(uuid, disk.target)))
        try:
            owner = os.stat(disk.path).st_uid
        except OSError:
            raise exception.ImageNotFound(path=disk.path) from None
        for above in (os.path.dirname(disk_xml.DIRECTORY), disk_xml.DIRECTORY):
            if not os.path.isdir(above):
                os.mkdir(above)
                os.chmod(above, 0o755)  # noqa: S103 - QEMU has to get through, whatever the umask
        if not os.path.isdir(directory):
            os.mkdir(directory, mode=0o700)
        os.chown(directory, owner, group, follow_symlinks=False)
        os.chmod(directory, _MODE)
        users.run_as(owner, functools.partial(_start, _export(directory), disk.path, peer))


def _start(directory: str, path: str, peer: str | None) -> None:
    nbd.stop(directory)  # it has the image open
    nbd.start(directory, path, window=device.window(path), peer=peer)
    nbd.let_in(directory)


def unserve(domain_xml: str) -> None:
    """End what serves the disks of a domain that has ended; what its guest has written is durable
    then. It may be called again.

    :raises ToolFailed: nbdkit does not end
    """
    prefix = os.path.join(disk_xml.DIRECTORY, f'{_uuid(domain_xml)}-')
    for directory in glob.glob(f'{prefix}*'):
        owner = os.lstat(directory).st_uid
        users.run_as(owner, functools.partial(nbd.stop, _export(directory)))
        os.rmdir(directory)


def check_stays(domain_xml: str) -> None:
    """Called on the host to which a running guest is about to come: its disks do not.

    :raises DomainInvalid: it has some
    """
    for disk in disk_xml.disks(domain_xml):
        raise exception.DomainInvalid(
            domain=_uuid(domain_xml),
            reason=(
                f'{disk.path} is a disk of it, which nbdkit serves, and does not travel with a '
                f'running guest: shut it down, take the image to the new host (pcowctl image '
                f'send), and define the domain there'
            ),
        )


def _export(directory: str) -> str:
    return os.path.join(directory, disk_xml.EXPORT)


def _uuid(domain_xml: str) -> str:
    return disk_xml.check_uuid(libvirt_xml.parse(domain_xml).findtext('uuid') or '')


def _checked(domain_xml: str, uuid: str) -> list[disk_xml.Disk]:
    """:raises XmlInvalid: the domain was changed, or copied from another one"""
    found = disk_xml.disks(domain_xml)
    sockets = {
        target.get('dev'): host.get('socket')
        for item in libvirt_xml.parse(domain_xml).findall('devices/disk')
        if (target := item.find('target')) is not None
        and (host := item.find("source[@protocol='nbd']/host")) is not None
    }
    for disk in found:
        wanted = disk_xml.socket_path(uuid, disk.target)
        if sockets.get(disk.target) != wanted:
            raise exception.XmlInvalid(
                reason=(
                    f'its disk {disk.target} is not at {wanted}, where {disk.path} is served, as '
                    f"the domain was changed, or copied: 'pcowctl domain-xml --bus virtio --uuid "
                    f"{uuid}' prints it as it should be"
                )
            )
    return found
