# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for the end of warm images: those that are deleted from
Glance, and what is left of some that were never made; see :mod:`nova_pcow.warm_images.warm_end`.
"""

from __future__ import annotations

from typing import Any

from nova import context as nova_context
from nova import exception as nova_exception
from nova import objects
from nova import service_auth
from nova.conf import service_token
from oslo_log import log as logging

from nova_pcow.libvirt_driver import snapshots
from nova_pcow.records import warm_records
from nova_pcow.warm_images import warm_end
from pcow_driver.common import exception
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)


class WarmEndLibvirtDriver(snapshots.SnapshotLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.warm_ends`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        self._making: set[str] = set()  # IDs of warm images

    def _is_seen(self, image_id: str) -> bool:
        """Whether the service sees an image by its own rights."""
        context = _service_context()
        try:
            return context is not None and bool(self._image_api.get(context, image_id))
        except Exception as e:  # of keystoneauth, glanceclient: it may have no such rights
            LOG.info('The service itself does not see the image %s: %s', image_id, e)
            return False

    def _is_deleted(self, context: Any, record: warm_records.Record) -> bool:
        """Whether the image is, as who would see it says; False: nobody can say."""
        try:
            self._image_api.get(context, record.image)
        except nova_exception.ImageNotFound:
            return True
        except Exception as e:  # as of _is_seen(): asked again later
            LOG.debug('Whether the image %s is still there cannot be told: %s', record.image, e)
        return False

    def _drop_deleted(self, context: Any, project: str) -> None:
        """Of a project, as far as who asks would see the images. Glance has just shown him the one
        that he is making.
        """
        for record in warm_records.find():
            if record.project == project and record.owner == context.project_id:
                if record.is_complete and self._is_deleted(context, record):
                    self._give_up(record)

    def _drop_pending(self) -> None:
        """What was in the making, and nobody makes now; also what could not be given up then, or
        when its image was deleted.
        """
        for record in self._records():
            if record.is_image_deleted:
                self._drop(record)
            elif not (record.is_complete or record.image in self._making):
                self._drop(record, unless_complete=True)

    def _drop_warm_leftovers(self) -> None:
        """What is kept for images that are deleted, as far as the service sees them."""
        for record in self._records():
            self._confirm(record)
        self._drop_pending()
        context = _service_context()
        seen = [
            one
            for one in self._records()
            if one.is_complete and one.is_seen and not one.is_image_deleted
        ]
        if context is None:
            return
        missed = [one for one in seen if self._is_deleted(context, one)]
        for record in seen:
            if record.is_missed and record not in missed:
                self._note(record, is_missed=False)
        # to who has lost his rights Glance says the same as of what is deleted
        if missed and not self._sees_private(context, {one.owner for one in seen}):
            LOG.warning(
                'Glance does not show the images %s to the service, nor any private image of their '
                'projects: they are deleted, or [service_user] may not see them any more. The '
                'checkpoints stay; pcowctl server delete-warm gives them up',
                ', '.join(one.image for one in missed),
            )
            return
        for record in missed:
            if record.is_missed:
                self._give_up(record)
            else:  # one answer is not enough: the next one is an interval later
                self._note(record, is_missed=True)

    def _give_up(self, record: warm_records.Record) -> None:
        """Its image is deleted. What cannot go now, as something stands on it, is tried again."""
        self._note(record, is_image_deleted=True)
        self._drop(record)

    @staticmethod
    def _note(record: warm_records.Record, **values: Any) -> None:
        try:
            warm_records.change(record.image, **values)
        except exception.PcowError as e:  # it is found out again
            LOG.error('%s', e)

    def _sees_private(self, context: Any, owners: set[str]) -> bool:
        """Whether it sees an image of one of these projects that it sees by its rights alone."""
        try:
            return any(
                self._image_api.get_all(context, filters={'owner': owner, 'visibility': 'private'})
                for owner in owners
            )
        except Exception as e:  # as of _is_seen()
            LOG.debug('What the service sees in Glance cannot be told: %s', e)
            return False

    @staticmethod
    def _records() -> list[warm_records.Record]:
        try:
            return warm_records.find()
        except exception.PcowError as e:
            LOG.error('%s', e)
            return []

    def _confirm(self, record: warm_records.Record) -> None:
        """Note it if Nova says that the parent is deleted, also if this host could never note that
        it had begun to.
        """
        if not record.is_parent_deleted and _is_server_deleted(record.server):
            self._note(record, is_orphaned=True, is_parent_deleted=True)

    def _undo(self, image_id: str) -> None:
        """Its parent may be deleted meanwhile."""
        try:
            record = warm_records.get(image_id)
        except exception.PcowError as e:  # it is looked at again
            LOG.error('What was made for a warm image stays for now: %s', e)
            return
        if record is not None:
            self._drop(record)

    def _drop(self, record: warm_records.Record, *, unless_complete: bool = False) -> None:
        try:
            with libvirt_host.errors():
                self._confirm(record)
                parent = warm_end.find_parent(self._host.get_connection(), record)
                warm_end.remove(record, parent, unless_complete=unless_complete)
        except (exception.PcowError, OSError, nova_exception.NovaException) as e:
            LOG.warning('%s', e)


def _is_server_deleted(server: str) -> bool:
    """Whether Nova says so; False: nobody can say."""
    context = nova_context.get_admin_context(read_deleted='yes')
    try:
        return bool(objects.Instance.get_by_uuid(context, server, []).deleted)
    except nova_exception.InstanceNotFound:  # archived since
        return True
    except Exception as e:  # of the database, or of the conductor: asked again later
        LOG.warning('Whether the server %s is deleted cannot be told: %s', server, e)
        return False


def _service_context() -> Any | None:
    """By which Glance is asked as the service that nova-compute is; None: it is not configured."""
    try:
        auth = service_auth.get_service_auth_plugin(service_token.SERVICE_USER_GROUP)
    except Exception as e:  # keystoneauth's: options are missing
        LOG.debug('[service_user] cannot be used: %s', e)
        return None
    return auth and nova_context.RequestContext(user_auth_plugin=auth, is_admin=True)
