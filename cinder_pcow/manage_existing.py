# SPDX-License-Identifier: Apache-2.0
"""Images that are in the pools and shall become volumes, and snapshots in them: manage, unmanage,
list.

A reference is ``{'source-name': NAME}``: an image of the volume's pool (or ``POOL/NAME``) by its
name without suffix, or a snapshot of the volume by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any

from cinder import context as cinder_context
from cinder import exception as cinder_exception
from cinder import objects
from cinder.volume import volume_utils
from oslo_log import log as logging
from oslo_utils import uuidutils

from cinder_pcow import errors
from cinder_pcow import volumes as volumes_module
from pcow_driver.common import exception
from pcow_driver.common import names
from pcow_driver.common import units
from pcow_driver.copies import clone
from pcow_driver.images import image
from pcow_driver.images import model
from pcow_driver.pools import bases
from pcow_driver.pools import device
from pcow_driver.pools import pool as pool_module
from pcow_driver.snapshots import attached
from pcow_driver.snapshots import trash
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)

KEY = 'source-name'


class ManageExisting:
    def __init__(self, volumes: volumes_module.Volumes) -> None:
        self._volumes = volumes
        self._backend = volumes.backend

    def manage(self, volume: Any, reference: dict[str, str]) -> None:
        """Give an image the name of the volume, and the whole GiB that Cinder counts it as.

        :raises ManageExistingInvalidReference: there is no such image, or it cannot become a volume
        """
        with _reference(reference):
            pool, name = self._image(volume, reference)
            owner = _owner(name)
            if owner not in (None, volume.id):
                raise exception.ImageInUse(path=pool.image_path(name), reason=_already(owner))
            self._check_usable(pool, name, libvirt_host.all_images())
            size = _gib(device.window(pool.existing_path(name)).size)
            device.extend(pool, name, size * units.GIB)
            clone.rename(pool, name, volume.name)

    def size(self, volume: Any, reference: dict[str, str]) -> int:
        """:raises ManageExistingInvalidReference:"""
        with _reference(reference):
            pool, name = self._image(volume, reference)
            return _gib(device.window(pool.existing_path(name), force_share=True).size)

    def list_volumes(self, cinder_volumes: Any) -> list[dict[str, Any]]:
        """What :meth:`manage` takes, and what not, with the reason."""
        volumes = {volume.name: volume for volume in cinder_volumes}
        try:
            attached_to_domains: libvirt_host.Files | exception.LibvirtFailed = (
                libvirt_host.all_images()
            )
        except exception.LibvirtFailed as e:
            attached_to_domains = e
        with errors.translated():
            return [
                one
                for pool in self._backend.pools()
                for one in self._of_pool(pool, volumes, attached_to_domains)
            ]

    def _of_pool(
        self,
        pool: pool_module.Pool,
        volumes: dict[str, Any],
        attached_to_domains: libvirt_host.Files | exception.LibvirtFailed,
    ) -> Iterator[dict[str, Any]]:
        """What is Cinder's already, mostly all of it, is not looked at one by one."""
        deleted = trash.deleted_images(pool)
        for item in pool.listed():
            if item.name in deleted:
                continue
            volume = volumes.get(item.name)
            if volume is not None:
                yield _description(pool, item.name, volume.size, 'already managed', volume.id)
            else:
                yield self._describe(pool, item, attached_to_domains)

    def _describe(
        self,
        pool: pool_module.Pool,
        item: bases.ListedImage,
        attached_to_domains: libvirt_host.Files | exception.LibvirtFailed,
    ) -> dict[str, Any]:
        reason, size, owner = None, 0, _owner(item.name)
        try:
            size = _gib(device.window(item.path, force_share=True).size)
            if owner is not None:
                reason = _already(owner)
            else:
                self._check_usable(pool, item.name, attached_to_domains)
        except exception.PcowError as e:
            reason = str(e)
        return _description(pool, item.name, size, reason, owner)

    def manage_snapshot(self, snapshot: Any, reference: dict[str, str]) -> None:
        """Give a snapshot of the volume the name that Cinder knows it by.

        :raises ManageExistingInvalidReference: there is no such snapshot, or a program other than a
            guest has the volume open
        """
        with _reference(reference):
            path = self._volumes.path(snapshot.volume)
            attached.snapshot_rename(path, self._snapshot(path, reference).name, snapshot.name)

    def snapshot_size(self, snapshot: Any, reference: dict[str, str]) -> int:
        """:raises ManageExistingInvalidReference:"""
        with _reference(reference):
            path = self._volumes.path(snapshot.volume)
            return _gib(
                device.window(
                    path, snapshot=self._snapshot(path, reference).name, force_share=True
                ).size
            )

    def list_snapshots(self, cinder_snapshots: Any, cinder_volumes: Any) -> list[dict[str, Any]]:
        """What :meth:`manage_snapshot` takes, and what not, with the reason; of volumes that Cinder
        knows.
        """
        ids = {snapshot.name: snapshot.id for snapshot in cinder_snapshots}
        found = []
        with errors.translated():
            for volume in cinder_volumes:
                try:
                    pool = self._backend.locate(volume)
                    path, marks = pool.existing_path(volume.name), trash.marks(pool)
                    for one in image.snapshot_list(path, force_share=True):
                        if trash.Mark(volume.name, one.name) not in marks:
                            found.append(_describe_snapshot(volume, path, one, ids))
                except exception.PcowError as e:
                    LOG.warning('Snapshots of %s cannot be listed: %s', volume.name, e)
        return found

    def _image(self, volume: Any, reference: dict[str, str]) -> tuple[pool_module.Pool, str]:
        pool, name = self._backend.pool_of(volume), str(reference.get(KEY) or '')
        pool_name, slash, rest = name.rpartition('/')
        if slash and pool_name != pool.name:
            raise exception.PcowError(
                reason=f'it is in the pool {pool_name} and the volume was to be in {pool.name}'
            )
        pool.existing_path(rest)
        return pool, rest

    @staticmethod
    def _snapshot(path: str, reference: dict[str, str]) -> model.Snapshot:
        for one in image.snapshot_list(path, force_share=True):
            if one.name == reference.get(KEY):
                return one
        raise exception.PcowError(reason=f'the volume has no snapshot of this name ({path})')

    @staticmethod
    def _check_usable(
        pool: pool_module.Pool,
        name: str,
        attached_to_domains: libvirt_host.Files | exception.LibvirtFailed,
    ) -> None:
        """
        :param attached_to_domains: their images; the error if libvirt does not tell: a domain
            that is off may have the image
        """
        path = pool.existing_path(name)
        # also without a domain here: shelved, or of a host that has the pool as well
        if name.startswith(names.SERVER_PREFIX):
            raise exception.ImageInUse(path=path, reason="it is Nova's, a disk of a server")
        if image.info(path).sealed:
            raise exception.IsATemplate(path=path)
        device.check_movable(path)
        children = pool.children(name)
        if children:
            raise exception.ImageInUse(
                path=path, reason=f'images stand on it: {", ".join(children[:5])}'
            )
        if isinstance(attached_to_domains, exception.LibvirtFailed):
            raise exception.ImageInUse(
                path=path,
                reason=f'it may be in the configuration of a domain: {attached_to_domains}',
            )
        if path in attached_to_domains:
            raise exception.ImageInUse(path=path, reason='it is in the configuration of a domain')


def _owner(name: str) -> str | None:
    """The ID of the volume, of whatever service, whose image has this name.

    Cinder's API compares a reference with ids only; it may name the pool as well, other services
    may have the pool, and a volume that Cinder has copied here goes on under its own ID on an image
    that was made for another.
    """
    uuid = volume_utils.extract_id_from_volume_name(name)
    if not uuidutils.is_uuid_like(uuid):
        return None
    context = cinder_context.get_admin_context()
    for field in ('_name_id', 'id'):
        for volume in objects.VolumeList.get_all(context, filters={field: uuid}):
            return str(volume.id)
    return None


def _already(volume_id: str | None) -> str:
    return f'it is the volume {volume_id} already'


def _describe_snapshot(
    volume: Any, path: str, snapshot: model.Snapshot, ids: dict[str, str]
) -> dict[str, Any]:
    managed = snapshot.name in ids
    return {
        'reference': {KEY: snapshot.name},
        'size': _gib(device.window(path, snapshot=snapshot.name, force_share=True).size),
        'safe_to_manage': not managed,
        'reason_not_safe': 'already managed' if managed else None,
        'cinder_id': ids.get(snapshot.name),
        'extra_info': None,
        'source_reference': {KEY: volume.name},
    }


@contextlib.contextmanager
def _reference(reference: dict[str, str]) -> Any:
    try:
        if set(reference) != {KEY}:
            raise exception.PcowError(reason=f'give the name as {KEY}')
        yield
    except exception.PcowError as e:
        raise cinder_exception.ManageExistingInvalidReference(
            existing_ref=reference, reason=str(e)
        ) from e


def _description(
    pool: pool_module.Pool, name: str, size: int, reason: str | None, owner: str | None
) -> dict[str, Any]:
    """One line of ``cinder manageable-list``."""
    return {
        'reference': {KEY: f'{pool.name}/{name}'},
        'size': size,
        'safe_to_manage': reason is None,
        'reason_not_safe': reason,
        'cinder_id': owner,
        'extra_info': None,
    }


def _gib(size: int) -> int:
    return -(-size // units.GIB)
