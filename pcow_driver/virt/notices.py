# SPDX-License-Identifier: Apache-2.0
"""Telling domains that run that what they stand on is damaged: when that is found, and when they
start.

Each gets an element in its metadata, for as long as it runs::

    <damage xmlns="urn:pcow:damage"><image path="/pool/debian.pcow">guest byte ...</image></damage>

libvirt tells whoever listens (the event *metadata-change*), and ``virsh metadata DOMAIN
urn:pcow:damage`` shows it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import os
import re
from typing import Any
import xml.etree.ElementTree as ET

from oslo_log import log as logging

from pcow_driver.common import exception
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.images import image
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.pools import scrubs
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host
from pcow_driver.virt import libvirt_xml

LOG = logging.getLogger(__name__)

_KEY = 'pcow-damage'
# names of snapshots may have what no XML may
_NOT_XML = re.compile('[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')
_FINDINGS = 3  # of each image; the others are in the pool's
_SECONDS = 60.0  # in which somebody else may be telling

# what was found, by path, by directory of a pool
Damage = Mapping[str, Mapping[str, Sequence[str]]]


def keep(pool: pool_module.Pool, name: str, result: scrubs.Result) -> None:
    """Note what was found of an image of a pool, and tell the domains that run on it.

    Who may not write to what scrubs have found, which is root's, tells the domains alone.
    """
    try:
        scrubs.put(pool.uuid, name, result)
    except exception.PcowError as e:
        LOG.warning(
            'What was found of %s is not kept; until a scrub finds it new images are made on it: '
            '%s',
            name,
            e,
        )
        tell(pool, {name: result})
    else:
        tell(pool)


def tell(pool: pool_module.Pool, more: Mapping[str, scrubs.Result] | None = None) -> None:
    """Tell each domain that runs what is known of the images of a pool that it stands on, and take
    back what it was told of others there: whether the damaged range matters, its guest alone can
    tell. Hosts without libvirt have no domain.

    :param more: what is not kept, by name
    """
    try:
        with _alone(), libvirt_host.connect() as connection:
            damaged = _known(pool.path, pool.uuid, more)
            for name in libvirt_host.names_of_all(connection):
                _try_one(connection, name, {pool.path: damaged})
    except (exception.LibvirtFailed, exception.LockHeld, exception.StateInvalid) as e:
        LOG.debug('no domain is told of damage: %s', e)


def tell_domain(name: str) -> None:
    """Tell a domain that has started what is known of all that it stands on. What it has been told
    before was of another host, or of an earlier time.

    :raises LibvirtFailed: there is no domain of this name, for instance
    :raises StateInvalid: the list of pools cannot be read
    """
    damaged = {
        entry.path: _known(entry.path, entry.uuid) for entry in registry.PoolRegistry().list()
    }
    with _alone(), libvirt_host.connect() as connection, libvirt_host.errors():
        _update(domain.Domain(connection, name), damaged, forget=True)


def _alone() -> contextlib.AbstractContextManager[None]:
    """Nobody tells what was known earlier after what is known now."""
    return locks.lock('notice', seconds=_SECONDS)


def _known(
    directory: str, uuid: str, more: Mapping[str, scrubs.Result] | None = None
) -> dict[str, Sequence[str]]:
    """What was found of the images of a pool, by path."""
    known = scrubs.read(uuid)
    known = dataclasses.replace(known, images=known.images | dict(more or {}))
    return {
        os.path.join(directory, name + names.IMAGE_SUFFIX): known.images[name].findings
        for name in known.damaged()
    }


def _try_one(connection: Any, name: str, damaged: Damage) -> None:
    """What is wrong with one domain, or in its XML, keeps no other from being told."""
    try:
        with libvirt_host.errors():
            _update(domain.Domain(connection, name), damaged)
    except (
        exception.PcowError,
        OSError,
        ValueError,
    ) as e:  # it may have ended, or be no domain of ours
        LOG.warning('domain %s is not told of damage: %s', name, e)


def _update(found: domain.Domain, damaged: Damage, *, forget: bool = False) -> None:
    """
    :param damaged: by directory of a pool, in which it may have been told of others
    :param forget: what it was told of images in other directories
    """
    if not found.active():
        return
    before = found.metadata(libvirt_xml.DAMAGE_NAMESPACE, live=True)
    if before is None and not any(damaged.values()):
        return
    known = _parse(before)
    wanted = {
        path: text
        for path, text in known.items()
        if not forget and os.path.dirname(path) not in damaged
    }
    for directory, here in damaged.items():
        for path in _chains(found, directory, known) if here else ():
            if path in here:
                wanted[path] = _NOT_XML.sub('?', '; '.join(here[path][:_FINDINGS]))
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
