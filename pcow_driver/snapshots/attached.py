# SPDX-License-Identifier: Apache-2.0
"""Snapshots of an image that is known by its path, whether a virtual machine has it open or not.

The file is tried first. If somebody has it, its server does the work if nbdkit serves it for
writing; else libvirt is asked which running domain has it, and QEMU does. What else holds an image
(a copy, another tool) cannot, and what pcow-img said of it is the error.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from typing import Any

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.common import names
from pcow_driver.export import control_socket
from pcow_driver.images import image
from pcow_driver.pools import room
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)


def snapshot_create(path: str, name: str) -> None:
    """Freeze the active layer as snapshot ``name``; a running guest goes on.

    :raises ImageNotFound:
    :raises InvalidName:
    :raises NoRoom: the operator's limits have no room for what the guest can then write once more
    :raises ToolFailed: the name exists, or the image is open, and neither in a running domain nor
        served
    :raises QmpFailed: the same, as QEMU says it
    """
    try:
        with room.for_snapshot(path):
            image.snapshot_create(path, name)
    except exception.ToolFailed as refused:
        with _user(path, refused) as (found, device):
            found.snapshot_create(name, device)


def snapshot_delete(path: str, name: str) -> None:
    """Delete a snapshot; its data goes to what needs it.

    :raises ImageNotFound:
    :raises InvalidName:
    :raises ToolFailed: an image stands on it, it is being read, or the image is open, and neither
        in a running domain nor served
    :raises QmpFailed: the same, as QEMU says it
    """
    try:
        image.snapshot_delete(path, name)
    except exception.ToolFailed as refused:
        with _user(path, refused) as (found, device):
            found.snapshot_delete(name, device)


def snapshot_rename(path: str, name: str, new_name: str) -> None:
    """Give a snapshot another name; a running guest goes on.

    :raises ImageNotFound:
    :raises InvalidName:
    :raises DomainInvalid: it is one of the whole VM
    :raises ToolFailed: there is none, or the image is open, and neither in a running domain nor
        served
    :raises QmpFailed: the same, as QEMU says it
    """
    try:
        image.snapshot_rename(path, name, new_name)
    except exception.ToolFailed as refused:
        with _user(path, refused) as (found, device):
            found.snapshot_rename(name, new_name, device)


def snapshot_create_all(wanted: Sequence[tuple[str, str]]) -> None:
    """Make snapshots of several images, given as (path, name), of one moment.

    Running guests that have one are paused meanwhile, and servers let their clients wait.

    Either all are made or none.

    :raises: as :func:`snapshot_create`
    """
    for _path, name in wanted:
        names.check_snapshot_name(name)
    if len(wanted) == 1:
        snapshot_create(*wanted[0])  # QEMU pauses the guest itself, for less long
        return
    with contextlib.ExitStack() as stack:
        for one in _users([path for path, _name in wanted], stack):
            stack.enter_context(one.paused())
        made: list[tuple[str, str]] = []
        try:
            for path, name in wanted:
                snapshot_create(path, name)
                made.append((path, name))
        except BaseException:
            for path, name in reversed(made):
                try:
                    with interrupt.clearing_up():
                        snapshot_delete(path, name)
                except exception.PcowError as e:
                    LOG.warning('%s: the snapshot %s stays: %s', path, name, e)
            raise


def _users(
    paths: list[str], stack: contextlib.ExitStack
) -> list[domain.Domain | control_socket.Server]:
    """The servers and running domains that have one of the images; no domains if nobody answers for
    libvirt.
    """
    servers = [server for path in paths if (server := control_socket.find(path))]
    for server in servers:
        stack.callback(server.close)
    try:
        connection = stack.enter_context(libvirt_host.connect())
    except exception.LibvirtFailed as e:
        LOG.info('No guest is paused: %s', e)
        return [*servers]
    return servers + list(
        {
            found.name: found
            for path in paths
            for found, _device in [_find(connection, path)]
            if found
        }.values()
    )


@contextlib.contextmanager
def _user(
    path: str, refused: exception.PcowError
) -> Iterator[tuple[domain.Domain | control_socket.Server, str]]:
    """The server or the running domain that has the image, and the path by which it knows it.

    :param refused: raised if there is none
    """
    with contextlib.ExitStack() as stack:
        server = control_socket.find(path)
        if server is not None:
            stack.callback(server.close)
            yield server, path
            return
        try:
            connection = stack.enter_context(libvirt_host.connect())
        except exception.LibvirtFailed as e:
            LOG.info('Whether a domain has %s is unknown: %s', path, e)
            raise refused from None
        found, device = _find(connection, path)
        if found is None:
            raise refused
        yield found, device


def _find(connection: Any, path: str) -> tuple[domain.Domain | None, str]:
    wanted = libvirt_host.Files()
    wanted.add(path)
    for one in connection.listAllDomains():
        if not one.isActive():
            continue
        for nvdimm in libvirt_xml.nvdimms(one.XMLDesc(0)):
            if nvdimm.path in wanted:
                return domain.Domain(connection, one.name()), nvdimm.path
    return None, path
