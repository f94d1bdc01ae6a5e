# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver in the deletion of what servers have, also of what a live
migration that was cut short has left.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from typing import Any

from nova import exception as nova_exception
from nova.compute import task_states
from nova.compute import vm_states
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import resizes
from nova_pcow.migration import leftovers
from nova_pcow.migration import live_migration
from nova_pcow.placement import inventory
from nova_pcow.records import notes
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from pcow_driver.common import exception
from pcow_driver.virt import domain

LOG = logging.getLogger(__name__)

_SHELVING = (
    task_states.SHELVING,
    task_states.SHELVING_IMAGE_UPLOADING,
    task_states.SHELVING_OFFLOADING,
)


def _ends(instance: Any) -> bool:
    """Whether the server itself does. What Nova has of one that has moved, or that could not begin,
    goes in the same way.
    """
    return (
        bool(instance.deleted)
        or instance.task_state == task_states.DELETING
        or instance.vm_state == vm_states.SOFT_DELETED
    )


class DeletionLibvirtDriver(resizes.ResizeLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.deletion`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        # by server: roles of images that outlive its other files
        self._kept: dict[str, frozenset[str]] = {}

    @contextlib.contextmanager
    def _keep_images(self, uuid: str, images: list[storage.ServerImage]) -> Iterator[None]:
        """Whatever deletes the files of a server meanwhile leaves these."""
        self._kept[uuid] = frozenset(item.role for item in images)
        try:
            yield
        finally:
            del self._kept[uuid]

    def delete_instance_files(self, instance: Any) -> bool:
        kept = self._kept.get(instance.uuid, frozenset())
        images_are_gone = self._delete_images(instance, kept) and not kept
        if (
            not (images_are_gone or kept)
            and flavor_module.is_pcow(instance)
            and instance.task_state in _SHELVING
        ):
            # Nova asks again for servers that are deleted here, and for no others
            raise nova_exception.InternalError(
                'images of the server stay on its host (the log of nova-compute says why): have it '
                'offloaded again'
            )
        files_are_gone = bool(super().delete_instance_files(instance))
        if not flavor_module.is_pcow(instance):
            return files_are_gone
        if images_are_gone:
            kinds = (notes.ARRIVING, notes.LEAVING, notes.GROWN, notes.RESIZING)
            notes.forget(*kinds, uuid=instance.uuid)
        # what Nova notes by the answer is of servers that end
        return files_are_gone and images_are_gone and instance.task_state != task_states.MIGRATING

    def _delete_images(self, instance: Any, kept: frozenset[str]) -> bool:
        """Whether all are gone but those that are kept, or that warm images are made of."""
        if not flavor_module.is_pcow(instance):
            return storage.delete(instance.uuid, keep=kept)
        try:
            with warm_records.lock(instance.uuid):
                kept |= self._orphan(instance, ends=not kept and _ends(instance))
                return storage.delete(instance.uuid, keep=kept)
        except exception.PcowError as e:
            # nobody knows what warm images are made of; Nova asks again, if this raises nothing
            LOG.error('The images of the server stay for now: %s', e, instance=instance)
            return False

    @staticmethod
    def _orphan(instance: Any, *, ends: bool) -> frozenset[str]:
        """Roles of images that outlive what a server has, because warm images are made of it."""
        found = warm_records.of_server(instance.uuid)
        for record in found if ends else ():
            warm_records.change_locked(record.image, is_orphaned=True)
        if not found:
            return frozenset()
        return frozenset(item.role for item in storage.find(instance.uuid))

    @staticmethod
    def _was_cut_short(uuid: str) -> bool:
        """Whether an earlier migration of the server to this host, which has not ended, has left
        something here.
        """
        return notes.get(notes.ARRIVING, uuid) is not None or bool(live_migration.arriving(uuid))

    def _delete_leftovers(self) -> None:
        """What migrations to this host have left of servers that are elsewhere now, or no more."""
        for uuid in notes.servers(notes.ARRIVING):
            try:
                with live_migration.arrival_lock(uuid, seconds=0):
                    self._delete_leftover(uuid)
            except exception.LockHeld:
                continue  # it is just being prepared
            except exception.PcowError as e:
                LOG.warning('%s', e)
            except Exception:  # libvirt, the database, ...: tried again later
                LOG.exception(
                    'What a live migration of the server %s to this host has left stays for now',
                    uuid,
                )

    def _delete_leftover(self, uuid: str) -> None:
        server = leftovers.abandoned(uuid, self._service_host)
        if server is None or self._domain(server) is not None:
            return
        leftovers.delete(uuid)
        if storage.find(uuid):
            leftovers.warn_of_unmarked(uuid)
            return
        if not (storage.discard_unfinished(uuid) and inventory.all_there()):
            return
        # else, should the hosts share instances_path by now, the directory would be its own
        if server.deleted:
            super().delete_instance_files(server)
        if not os.path.lexists(libvirt_utils.get_instance_path(server)):
            notes.forget(notes.ARRIVING, uuid=uuid)

    def _clear_for_spawn(self, instance: Any) -> None:
        """A server that begins on this host has nothing elsewhere: what an earlier migration to it
        has left is nothing.

        :raises ServerStorageError: an image of it stays
        """
        if not self._was_cut_short(instance.uuid) or self._domain(instance) is not None:
            return
        leftovers.delete(instance.uuid)
        for item in storage.find(instance.uuid):
            raise storage.ServerStorageError(reason=leftovers.unmarked(item))
        super().delete_instance_files(instance)
        notes.forget(notes.ARRIVING, uuid=instance.uuid)

    def _domain(self, instance: Any) -> domain.Domain | None:
        try:
            guest = self._host.get_guest(instance)
        except nova_exception.InstanceNotFound:
            return None
        return domain.Domain(self._host.get_connection(), guest.name)
