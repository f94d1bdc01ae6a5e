# SPDX-License-Identifier: Apache-2.0
"""The libvirt of this host: connections to it, and what all of its domains have."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import importlib
import os
from typing import Any

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.virt import disk_xml
from pcow_driver.virt import libvirt_call
from pcow_driver.virt import libvirt_xml


def binding(name: str) -> Any:
    """libvirt's binding, which is not needed for anything else here, so not at import time."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise exception.LibvirtFailed(
            uri=conf.CONF.pcow.libvirt_uri,
            reason=(
                f"{e}; install python3-libvirt, or 'pip install libvirt-python' with libvirt-dev"
            ),
        ) from None


@contextlib.contextmanager
def connect(uri: str | None = None) -> Iterator[Any]:
    """A libvirt connection (virConnect), closed at the end; libvirt's errors become LibvirtFailed.
    Its calls end, as :mod:`pcow_driver.virt.libvirt_call` says.

    :param uri: [pcow] libvirt_uri if not given
    :raises LibvirtFailed:
    """
    uri = uri or str(conf.CONF.pcow.libvirt_uri)
    libvirt = binding('libvirt')
    # it would print what is raised as well
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    with errors(uri):
        connection = libvirt_call.Proxy(
            libvirt_call.call(None, f'open {uri}', libvirt.open, uri, seconds=libvirt_call.limit())
        )
        try:
            yield connection
        finally:
            with contextlib.suppress(exception.NoAnswer):  # libvirt closes it when it goes on
                connection.close()


@contextlib.contextmanager
def errors(uri: str | None = None) -> Iterator[None]:
    """libvirt's errors become LibvirtFailed here already, for who goes on with the connection."""
    libvirt = binding('libvirt')
    try:
        yield
    except libvirt.libvirtError as e:
        raise exception.LibvirtFailed(
            uri=uri or str(conf.CONF.pcow.libvirt_uri), reason=str(e)
        ) from None


class Files:
    """Files by what they are: of a pool that is mounted twice, two paths lead to an image."""

    def __init__(self) -> None:
        self._known: set[str | tuple[int, int]] = set()

    def add(self, path: str) -> None:
        self._known |= self._names(path)

    def __contains__(self, path: str) -> bool:
        return bool(self._known & self._names(path))

    @staticmethod
    def _names(path: str) -> set[str | tuple[int, int]]:
        real = os.path.realpath(path)
        try:
            status = os.stat(real)
        except OSError:  # not there now, and the path alone tells
            return {real}
        return {real, (status.st_dev, status.st_ino)}


def all_images() -> Files:
    """The files that NVDIMMs and disks of any domain name, and its RAM, running or not, now or
    after its next start.

    :raises LibvirtFailed: then nobody knows
    :raises DomainInvalid: the same, for what one of them has in its XML
    """
    found = Files()
    with connect() as connection:
        libvirt = binding('libvirt')
        for one in connection.listAllDomains():
            for flags in (0, libvirt.VIR_DOMAIN_XML_INACTIVE):
                xml = one.XMLDesc(flags)
                try:
                    paths = libvirt_xml.images(xml) + [item.path for item in disk_xml.disks(xml)]
                except exception.XmlInvalid as e:
                    raise exception.DomainInvalid(domain=one.name(), reason=str(e)) from None
                for path in paths:
                    found.add(path)
    return found


def names_of_all(connection: Any) -> list[str]:
    """Of all domains, running or not."""
    return [str(one.name()) for one in libvirt_call.Proxy(connection).listAllDomains()]


def names_by_uuid(connection: Any) -> dict[str, str]:
    """The same."""
    found = libvirt_call.Proxy(connection).listAllDomains()
    return {str(one.UUIDString()): str(one.name()) for one in found}


def exists(connection: Any, name: str) -> bool:
    """Whether there is a domain of that name, running or not."""
    return name in names_of_all(connection)
