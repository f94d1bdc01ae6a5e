# SPDX-License-Identifier: Apache-2.0
"""Serves the images that are disks of a libvirt domain (:mod:`pcow_driver.virt.disk_xml`), from
before its QEMU starts until it has ended.

The libvirt hook calls this, whoever starts the domain and whatever ends it, so nobody else has to
know. nbdkit runs as the user whose image it is. QEMU reaches the socket through a directory of the
domain's own, in ``/run``, that nobody but its group can enter.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import stat

from pcow_driver.common import descriptors
from pcow_driver.common import exception
from pcow_driver.common import users
from pcow_driver.export import nbd
from pcow_driver.pools import device
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_xml

_MODE = 0o710
# Where SELinux runs: what is made below gets the label of the directory (etc/selinux/pcow.fc).
_SELINUX_ENABLED, _SELINUX_NAME = '/sys/fs/selinux', 'security.selinux'
_LABEL = b'system_u:object_r:pcow_disk_t:s0\0'


def serve(domain_xml: str, group: int, peer: str | None = None) -> None:
    """Serve the disks of a domain that is about to start; all of them, or an error.

    What is left of an earlier time of the domain is ended first.

    :param group: GID of QEMU
    :param peer: profile of AppArmor of the only QEMU that may connect
    :raises XmlInvalid: the domain would look for a disk elsewhere
    :raises ImageNotFound:
    :raises PathRefused: the image is no file; or it is root's, and others may exchange it; or
        others may exchange the directory of the domain
    :raises ToolFailed: somebody has the image open, for instance
    """
    uuid = _uuid(domain_xml)
    for disk in _checked(domain_xml, uuid):
        directory = os.path.dirname(os.path.dirname(disk_xml.socket_path(uuid, disk.target)))
        owner = _owner(disk.path)
        for above in (os.path.dirname(disk_xml.DIRECTORY), disk_xml.DIRECTORY):
            # another domain may be starting
            with contextlib.suppress(FileExistsError):
                descriptors.make(above)
                os.chmod(above, 0o755)  # noqa: S103 - QEMU has to get through, whatever the umask
        descriptors.check_for_root(directory)
        _label(disk_xml.DIRECTORY)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode=0o700)
        _stop(directory)  # it has the image open
        os.chown(directory, owner, group, follow_symlinks=False)
        os.chmod(directory, _MODE)
        users.run_as(owner, functools.partial(_start, _export(directory), disk.path, peer))


def _label(directory: str) -> None:
    """/run is empty after each start of the host, and nobody runs restorecon there."""
    if os.path.isdir(_SELINUX_ENABLED):
        # the module of pcow is not installed, for instance
        with contextlib.suppress(OSError):
            os.setxattr(directory, _SELINUX_NAME, _LABEL)


def _owner(path: str) -> int:
    """UID of who an image belongs to, and is served as.

    What root serves, nobody else may exchange for a file of his own.

    :raises ImageNotFound:
    :raises PathRefused:
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        raise exception.ImageNotFound(path=path) from None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise exception.PathRefused(
            path=path, reason='it is a link, or no file: name the image itself'
        )
    if status.st_uid == os.geteuid() == 0:
        with descriptors.parent(path, trusted=True):
            pass
    return status.st_uid


def _start(directory: str, path: str, peer: str | None) -> None:
    window = device.window(path)
    # an image that was resized: as memory the guest has what its info block tells
    device.grow(path, window.size)
    nbd.start(directory, path, window=window, peer=peer)
    nbd.let_in(directory)


def _stop(directory: str) -> None:
    """As the user who started it: the image may belong to another one by now."""
    export = _export(directory)
    with contextlib.suppress(FileNotFoundError):
        users.run_as(os.lstat(export).st_uid, functools.partial(nbd.stop, export))


def unserve(domain_xml: str) -> None:
    """End what serves the disks of a domain that has ended; what its guest has written is durable
    then. It may be called again.

    :raises ExportFailed: of one of them it cannot be ended; the others are
    """
    failed = []
    for directory in glob.glob(os.path.join(disk_xml.DIRECTORY, f'{_uuid(domain_xml)}-*')):
        try:
            descriptors.check_for_root(directory)
            _stop(directory)
            os.rmdir(directory)
        except (exception.PcowError, OSError) as e:
            failed.append(f'{directory}: {e}')
    if failed:
        raise exception.ExportFailed(path=disk_xml.DIRECTORY, reason='; '.join(failed))


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
        target.get('dev'): [
            host.get('socket')
            for source in item.iter('source')  # also below an overlay
            if source.get('protocol') == 'nbd'
            for host in source.findall('host')
        ]
        for item in libvirt_xml.parse(domain_xml).findall('devices/disk')
        if (target := item.find('target')) is not None
    }
    for disk in found:
        wanted, there = disk_xml.socket_path(uuid, disk.target), sockets.get(disk.target, [])
        if wanted in there:
            continue
        if not there:
            raise exception.XmlInvalid(
                reason=(
                    f'its disk {disk.target} is another one than {disk.path}, on which it was '
                    f'defined: if that is an overlay of it, merge it first (virsh blockcommit), as '
                    f'what was written since is there; else define the domain without'
                )
            )
        raise exception.XmlInvalid(
            reason=(
                f'its disk {disk.target} is not at {wanted}, where {disk.path} is served, as '
                f"the domain was changed, or copied: 'pcowctl domain-xml --bus virtio --uuid "
                f"{uuid}' prints it as it should be"
            )
        )
    return found
