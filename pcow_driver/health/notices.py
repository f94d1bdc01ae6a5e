# SPDX-License-Identifier: Apache-2.0
"""Telling domains that run that what they stand on is damaged.

Each gets an element in its metadata, for as long as it runs::

    <damage xmlns="urn:pcow:damage"><image path="/pool/debian.pcow">guest byte ...</image></damage>

libvirt tells whoever listens (the event *metadata-change*), and ``virsh metadata DOMAIN
urn:pcow:damage`` shows it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import os
import re
from typing import Any
import xml.etree.ElementTree as ET

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)

_KEY = 'pcow-damage'
# names of snapshots may have what no XML may
_NOT_XML = re.compile('[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')
_FINDINGS = 3  # of each image; the others are in the pool's


def update(directory: str, damaged: Mapping[str, Sequence[str]]) -> None:
    """Tell each domain that runs of the damaged images of one pool that it stands on, and take back
    what it was told of others there. Hosts without libvirt have none.

    :param directory: of the pool
    :param damaged: what was found, by path
    """
    try:
        with domain.connect() as connection:
            for name in domain.names_of_all(connection):
                _try_one(connection, name, directory, damaged)
    except exception.LibvirtFailed as e:
        LOG.debug('no domain is told of damage: %s', e)


def _try_one(
    connection: Any, name: str, directory: str, damaged: Mapping[str, Sequence[str]]
) -> None:
    """What is wrong with one domain, or in its XML, keeps no other from being told."""
    try:
        with domain.errors():
            _update_one(domain.Domain(connection, name), directory, damaged)
    except (
        exception.PcowError,
        OSError,
        ValueError,
    ) as e:  # it may have ended, or be no domain of ours
        LOG.warning('domain %s is not told of damage: %s', name, e)


def _update_one(found: domain.Domain, directory: str, damaged: Mapping[str, Sequence[str]]) -> None:
    if not found.active():
        return
    before = found.metadata(libvirt_xml.DAMAGE_NAMESPACE, live=True)
    if before is None and not damaged:
        return
    known = _parse(before)
    wanted = {path: text for path, text in known.items() if os.path.dirname(path) != directory}
    for path in _chains(found, directory, known):
        if path in damaged:
            wanted[path] = _NOT_XML.sub('?', '; '.join(damaged[path][:_FINDINGS]))
    if wanted != known:
        LOG.warning('domain %s stands on damaged images: %s', found.name, sorted(wanted))
        element = _format(wanted) if wanted else None
        found.set_metadata(libvirt_xml.DAMAGE_NAMESPACE, _KEY, element, live=True)


def _chains(found: domain.Domain, directory: str, known: Mapping[str, str]) -> list[str]:
    """Paths of the images of this pool that it has or stands on. What one stands on that cannot be
    read nobody can tell, and the domain was told before.

    :param known: what of, by path
    """
    ram = found.ram()
    tops = [item.path for item in found.images()] + ([ram] if ram else [])
    paths: list[str] = []
    for top in tops:
        if not _is_in(top, directory):
            continue
        try:
            chain = [one.filename for one in image.chain(top, force_share=True)]
        except exception.PcowError as e:
            LOG.warning('domain %s may not be told of all damage: %s', found.name, e)
            paths += [path for path in known if os.path.dirname(path) == directory]
            chain = [top]
        paths += [os.path.join(directory, os.path.basename(name)) for name in chain]
    return paths


def _is_in(path: str, directory: str) -> bool:
    """Not if it is in none, as that of a pool that is not mounted."""
    try:
        return os.path.samefile(os.path.dirname(path), directory)
    except FileNotFoundError:
        return False


def _parse(text: str | None) -> dict[str, str]:
    if text is None:
        return {}
    try:
        root = ET.fromstring(text)
    except ET.ParseError:  # somebody else's words
        return {}
    return {
        one.attrib.get('path', ''): one.text or ''
        for one in root
        if one.attrib.get('path', '').endswith(names.IMAGE_SUFFIX)
    }


def _format(damaged: Mapping[str, str]) -> str:
    root = ET.Element('damage')
    for path, text in sorted(damaged.items()):
        ET.SubElement(root, 'image', path=path).text = text
    return ET.tostring(root, encoding='unicode')
