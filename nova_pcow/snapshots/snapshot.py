# SPDX-License-Identifier: Apache-2.0
"""Images of servers in Glance, taken from a frozen layer while the server runs, and servers that
are suspended.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import importlib
import os
from typing import Any

from oslo_log import log as logging

from nova_pcow.common import reserved
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import tool
from pcow_driver.export import nbd
from pcow_driver.images import image
from pcow_driver.pools import device
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)

FORMATS = ('qcow2', 'raw')
_SUSPEND_XML = f'<domainsnapshot><name>{reserved.SUSPENDED}</name></domainsnapshot>'


@contextlib.contextmanager
def frozen(found: domain.Domain, path: str, name: str, *, quiesce: bool) -> Iterator[str | None]:
    """A snapshot of the root of a running guest that stays for the context; None of one that is
    off, which needs none.

    What an earlier call left behind, because its process was killed, is deleted first.
    """
    if not found.active():
        yield None
        return
    for left in found.snapshot_list(path):
        if left.name.startswith(reserved.UPLOAD_PREFIX):
            found.snapshot_delete(left.name, path)
    snapshot = reserved.UPLOAD_PREFIX + name
    found.snapshot_create(snapshot, path, quiesce=quiesce)
    try:
        yield snapshot
    finally:
        try:
            found.snapshot_delete(snapshot, path)
        except exception.PcowError as e:
            LOG.warning(
                '%s: the snapshot %s stays until the next image is made: %s',
                found.name,
                snapshot,
                e,
            )


def export(
    path: str, window: device.Window, snapshot: str | None, target: str, target_format: str
) -> None:
    """Write the data of a device, without the DAX info block in front of it, to the new file
    ``target``.

    Only its own format is ever given for a file: what a guest wrote to the start of its device is
    nothing but data.

    :param target_format: one of FORMATS
    :raises ToolFailed:
    """
    with nbd.serve(path, window=window, snapshot=snapshot, read_only=True) as uri:
        tool.run(tool.find('qemu_img'), 'convert', '-f', 'raw', '-O', target_format, uri, target)


def _libvirt() -> Any:
    return importlib.import_module('libvirt')


class SuspendRefused(exception.PcowError):
    msg_fmt = (
        'the disk %(disk)s takes no snapshot, and the state of a suspended server is one of all '
        'its disks: detach it '
        'first, or stop the server instead (openstack server stop)'
    )


def _check_disks(virtual_domain: Any) -> None:
    """:raises SuspendRefused: libvirt would refuse it, after what is there of an earlier suspension
    was given up
    """
    for item in libvirt_xml.parse(virtual_domain.XMLDesc(0)).findall('devices/disk'):
        if item.find('source') is None or item.find('readonly') is not None:
            continue
        driver, target = item.find('driver'), item.find('target')
        kind = 'raw' if driver is None else driver.get('type', 'raw')
        if kind != 'qcow2':
            raise SuspendRefused(disk=f'{"" if target is None else target.get("dev")} ({kind})')


def suspend(virtual_domain: Any, found: domain.Domain, begin: Callable[[], None]) -> None:
    """Save RAM and devices beside what lies in the images, and end the guest, in one step of
    libvirt.

    A file of its own (virDomainManagedSave) would lack the images; a snapshot of the whole VM has
    all at one moment.

    :param virtual_domain: virDomain
    :param found: the same
    :param begin: called when nothing is left of an earlier one
    :raises libvirtError:
    :raises PcowError: a disk of it takes no snapshot, what an earlier one has left in an image
        cannot be deleted, or a pool has no room
    """
    _check_disks(virtual_domain)
    found.check_answers()
    libvirt = _libvirt()
    forget_suspended(virtual_domain)
    # QEMU refuses a snapshot for one of the same name in any image
    for item in found.images():
        if reserved.SUSPENDED in {one.name for one in found.snapshot_list(item.path)}:
            found.snapshot_delete(reserved.SUSPENDED, item.path)
    # it goes on with what it can write once more before the snapshot is deleted
    with room.for_long_snapshot(*found.writable()):
        begin()
        virtual_domain.snapshotCreateXML(_SUSPEND_XML, libvirt.VIR_DOMAIN_SNAPSHOT_CREATE_HALT)


def suspended(virtual_domain: Any) -> Any:
    """The snapshot (virDomainSnapshot) that a suspended server resumes from, or None."""
    found = [
        item for item in virtual_domain.listAllSnapshots() if item.getName() == reserved.SUSPENDED
    ]
    return found[0] if found else None


def go_back(virtual_domain: Any) -> None:
    """Have the guest where :func:`suspend` ended it, paused.

    :param virtual_domain: off, or paused at a start that was cut off, which has no use any more
    :raises libvirtError: then it is still suspended
    """
    libvirt, found = _libvirt(), suspended(virtual_domain)
    if virtual_domain.isActive():
        virtual_domain.destroy()
    virtual_domain.revertToSnapshot(found, libvirt.VIR_DOMAIN_SNAPSHOT_REVERT_PAUSED)


def forget_suspended(virtual_domain: Any) -> None:
    """Give up the state that a suspended server would resume from; what it has written stays.

    :raises libvirtError:
    """
    found = suspended(virtual_domain)
    if found is not None:
        found.delete()
        _drop_suspended(virtual_domain)


def _drop_suspended(virtual_domain: Any) -> None:
    """Delete the part of that state which is in images of a domain that is off: libvirt does its
    disks and knows of no others.

    Also in volumes, which the server leaves to others.
    """
    if virtual_domain.isActive():
        return
    for item in libvirt_xml.nvdimms(virtual_domain.XMLDesc(_libvirt().VIR_DOMAIN_XML_INACTIVE)):
        if not item.path.endswith(names.IMAGE_SUFFIX) or not os.path.exists(item.path):
            continue
        try:
            if reserved.SUSPENDED in {
                one.name for one in image.snapshot_list(item.path, force_share=True)
            }:
                image.snapshot_delete(item.path, reserved.SUSPENDED)
        except exception.PcowError as e:
            LOG.warning(
                '%s keeps the snapshot %s, of no use any more, until a server that has it is '
                'suspended: %s',
                item.path,
                reserved.SUSPENDED,
                e,
            )


def forget_all(virtual_domain: Any) -> None:
    """Let libvirt forget the snapshots of a domain, which could not be undefined otherwise.

    The images keep what an administrator has made; the state of a suspended server, which nothing
    can resume then, goes.

    :raises libvirtError:
    """
    libvirt = _libvirt()
    if suspended(virtual_domain) is not None:
        _drop_suspended(virtual_domain)
    for item in virtual_domain.listAllSnapshots():
        item.delete(libvirt.VIR_DOMAIN_SNAPSHOT_DELETE_METADATA_ONLY)
