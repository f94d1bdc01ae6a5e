# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for warm images, and servers that begin with one; see
:mod:`nova_pcow.warm_images.warm`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from nova.compute import task_states
from nova.compute import utils as compute_utils
import nova.conf
from nova.virt import configdrive
from nova.virt.libvirt import guest as libvirt_guest
from oslo_log import log as logging
from oslo_utils import excutils
from oslo_utils import timeutils

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.common import reserved
from nova_pcow.libvirt_driver import warm_ends
from nova_pcow.records import warm_records
from nova_pcow.servers import storage
from nova_pcow.warm_images import warm
from nova_pcow.warm_images import warm_xml
from pcow_driver.common import exception
from pcow_driver.common import interrupt
from pcow_driver.pools import pool as pool_module
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_host

LOG = logging.getLogger(__name__)
CONF = nova.conf.CONF

_ASKED = 'true'
_BEGUN = 'compute_pcow_warm'  # event of the action that creates a server
_MADE = 'compute_pcow_warm_image'  # of the action that makes an image
_NO_CONFIG_DRIVE = (
    'leave it out (--no-config-drive, img_config_drive of the image, [DEFAULT] force_config_drive)'
)
_TASKS = (task_states.IMAGE_SNAPSHOT_PENDING, task_states.IMAGE_SNAPSHOT)


class WarmLibvirtDriver(warm_ends.WarmEndLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.warm_starts`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        # by server that is being built, and is to go on from a checkpoint
        self._warm: dict[str, warm.Start] = {}

    # ---- images ------------------------------------------------------------------------------

    def snapshot(self, context: Any, instance: Any, image_id: str, update_task_state: Any) -> None:
        if not self._is_warm_asked(context, instance, image_id):
            super().snapshot(context, instance, image_id, update_task_state)
            return
        self._host.get_guest(instance)  # InstanceNotFound is told as it is
        try:
            self._making.add(image_id)
            with errors.internal(), libvirt_host.errors():
                self._make_warm_image(context, instance, image_id, update_task_state)
        except Exception as e:
            with excutils.save_and_reraise_exception():
                # Nova's own event has ended by now, with success
                LOG.warning('No warm image was made: %s', e, instance=instance)
                errors.tell(context, instance, self._service_host, _MADE, e)
        finally:
            self._making.discard(image_id)

    def _make_warm_image(
        self, context: Any, instance: Any, image_id: str, update_task_state: Any
    ) -> None:
        self._drop_deleted(context, instance.project_id)
        found = domain.Domain(self._host.get_connection(), instance.name)
        record = self._new_record(context, instance, image_id, found)
        with warm.taken(found, record, self._undo) as taken:
            self._make_image(
                context,
                instance,
                image_id,
                update_task_state,
                taken=taken,
                **{warm.PROPERTY: taken},
            )
            made = self._image_api.get(context, image_id)
            warm.complete(
                image_id, checksum=storage.checksum(made), is_seen=self._is_seen(image_id)
            )

    def _is_warm_asked(self, context: Any, instance: Any, image_id: str) -> bool:
        """By a property of the new image, and not of the one that the server was made of, from
        which Nova inherits it. Shelving asks for none.
        """
        if not flavor_module.is_pcow(instance) or instance.task_state not in _TASKS:
            return False
        properties = self._image_api.get(context, image_id)['properties']
        inherited = instance.system_metadata.get(warm.INHERITED)
        return (
            str(properties.get(warm.PROPERTY)).lower() == _ASKED
            and str(inherited).lower() != _ASKED
        )

    def _new_record(
        self, context: Any, instance: Any, image_id: str, found: domain.Domain
    ) -> warm_records.Record:
        """:raises WarmRefused:"""
        if configdrive.required_by(instance):
            raise warm.WarmRefused(
                reason=f'it has a config drive, and others would go on over another one: '
                f'{_NO_CONFIG_DRIVE}'
            )
        if instance.image_meta.properties.get('os_require_quiesce', False):
            raise warm.WarmRefused(
                reason=(
                    'its image has os_require_quiesce, and others would go on with file systems '
                    'that are frozen'
                )
            )
        wanted = flavor_module.of(instance)
        machine = warm.check(found, instance.uuid, wanted)
        root = storage.root(instance.uuid)
        return warm_records.Record(
            image=image_id,
            owner=str(context.project_id),
            project=str(instance.project_id),
            server=str(instance.uuid),
            pool=root.pool.uuid,
            vcpus=int(instance.flavor.vcpus),
            ram_size=wanted.ram_size or 0,
            root_size=wanted.root_size or 0,
            machine=machine,
            taken=warm_records.now(),
            processor=warm.processor(found),
        )

    # ---- servers -----------------------------------------------------------------------------

    def _fork_warm(
        self,
        context: Any,
        instance: Any,
        wanted: flavor_module.PcowFlavor,
        pool: pool_module.Pool,
        source: storage.RootSource,
    ) -> list[str]:
        """The names of the images of a new server which goes on from the checkpoint of its image,
        if this host has it and it fits. Else none, and its events say why.
        """
        try:
            record = warm_records.get(source.image.id)
            if record is None:
                said = str(instance.system_metadata.get(warm.INHERITED))
                if said.startswith(reserved.WARM_PREFIX):
                    raise warm.WarmUnfit(reason='this host has no checkpoint for its image')
                return []
            self._check_fresh(instance)
            warm.check_fits(
                record,
                project=instance.project_id,
                checksum=source.image.checksum,
                vcpus=int(instance.flavor.vcpus),
                wanted=wanted,
                pool=pool,
            )
            made = self._forked(record, instance.uuid, wanted)
        except (exception.PcowError, OSError) as e:
            self._tell_boots(context, instance, e)
            return []
        self._warm[instance.uuid] = warm.Start(
            record, functools.partial(self._boot_instead, instance.uuid, made, wanted, pool, source)
        )
        return made

    @staticmethod
    def _forked(
        record: warm_records.Record, uuid: str, wanted: flavor_module.PcowFlavor
    ) -> list[str]:
        """Names of images that a domain of the flavor may have; none stays if it may not."""
        made = warm.fork(record, uuid)
        try:
            storage.check_startable(uuid, wanted)
        except BaseException:
            with interrupt.clearing_up():
                storage.discard(uuid, made)
            raise
        return made

    @staticmethod
    def _check_fresh(instance: Any) -> None:
        """:raises WarmUnfit: it was given what only a guest that boots would look at"""
        if instance.user_data or instance.key_name:
            raise warm.WarmUnfit(
                reason='it has user data or a key pair, which its guest reads when it boots'
            )
        if configdrive.required_by(instance):
            raise warm.WarmUnfit(
                reason=f'it has a config drive, which its guest reads when it boots: '
                f'{_NO_CONFIG_DRIVE}'
            )
        if instance.trusted_certs or CONF.glance.verify_glance_signatures:
            raise warm.WarmUnfit(
                reason='the signature of its image is to be checked, and a checkpoint has none'
            )

    @staticmethod
    def _boot_instead(
        uuid: str,
        made: list[str],
        wanted: flavor_module.PcowFlavor,
        pool: pool_module.Pool,
        source: storage.RootSource,
    ) -> None:
        storage.discard(uuid, made)
        storage.check_none(uuid)
        storage.create(uuid, wanted, pool, source)

    def _tell_boots(self, context: Any, instance: Any, error: Exception) -> None:
        if not isinstance(error, warm.WarmUnfit):
            error = warm.WarmUnfit(reason=str(error))
        LOG.info('%s', error, instance=instance)
        errors.tell(context, instance, self._service_host, _BEGUN, error)

    def _create_guest(
        self,
        context: Any,
        xml: str,
        instance: Any,
        power_on: bool = True,
        pause: bool = False,
        post_xml_callback: Callable[[], None] | None = None,
    ) -> Any:
        self._restore_parent(instance)
        start = self._warm.pop(instance.uuid, None)
        if start is None:
            return super()._create_guest(context, xml, instance, power_on, pause, post_xml_callback)
        prepare = functools.cache(post_xml_callback or (lambda: None))  # once, whatever follows
        try:
            with libvirt_host.errors(), timeutils.StopWatch() as watch:
                guest = self._create_warm_guest(xml, instance, start, prepare)
        except exception.PcowError as e:
            with errors.build(context, instance, self._service_host):
                self._end(instance)
                start.boot_instead()
            self._tell_boots(context, instance, e)
            return super()._create_guest(context, xml, instance, power_on, pause, prepare)
        with compute_utils.EventReporter(
            context, _BEGUN, self._service_host, instance.uuid, graceful_exit=True
        ):
            if not pause:
                guest.resume()
        LOG.info(
            'It went on from the checkpoint of %s %.3f s after its domain was begun',
            start.record.image,
            watch.elapsed(),
            instance=instance,
        )
        return guest

    @staticmethod
    def _restore_parent(instance: Any) -> None:
        """A server that has a domain again is not deleted, whatever was begun."""
        if not flavor_module.is_pcow(instance):
            return
        try:
            warm_records.restore(instance.uuid)
        except exception.PcowError as e:  # its domain keeps its images
            LOG.error('%s', e, instance=instance)

    def _create_warm_guest(
        self, xml: str, instance: Any, start: warm.Start, prepare: Callable[[], None]
    ) -> Any:
        """It is paused where its parent was at the checkpoint.

        :raises PcowError: it cannot be; it has not run
        :raises libvirtError: the same
        """
        bare, interfaces = warm_xml.split(xml)
        libvirt_guest.Guest.create(bare, self._host)
        found = domain.Domain(self._host.get_connection(), instance.name)
        guest = libvirt_guest.Guest.create(
            warm_xml.adopt(found.definition(), start.record.machine), self._host
        )
        prepare()
        guest.launch(pause=True)
        warm.check_processor(start.record, found)
        found.qmp('pcow-checkpoint-revert')
        for interface in interfaces:
            found.attach(interface)
        return guest

    def _end(self, instance: Any) -> None:
        """:raises PcowError: it does not"""
        with libvirt_host.errors():
            found = domain.Domain(self._host.get_connection(), instance.name)
            if found.active():
                found.destroy()
