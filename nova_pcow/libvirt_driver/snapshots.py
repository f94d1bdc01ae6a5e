# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for images of servers and suspended servers; see
:mod:`nova_pcow.snapshots.snapshot`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from nova import exception as nova_exception
from nova.compute import task_states
from nova.compute import vm_states
import nova.conf
from oslo_utils import fileutils

from nova_pcow.common import errors
from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import volumes
from nova_pcow.servers import storage
from nova_pcow.snapshots import snapshot as snapshot_module
from nova_pcow.snapshots import suspension
from nova_pcow.warm_images import warm
from pcow_driver.copies import verify
from pcow_driver.virt import domain
from pcow_driver.virt import libvirt_call

CONF = nova.conf.CONF


class SnapshotLibvirtDriver(volumes.VolumeLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.snapshots`."""

    def __init__(self, virtapi: Any, read_only: bool = False) -> None:
        super().__init__(virtapi, read_only)
        # servers, by UUID, whose suspension or resumption was cut off and is not settled yet
        self._interrupted = set[str]()

    def snapshot(self, context: Any, instance: Any, image_id: str, update_task_state: Any) -> None:
        if not flavor_module.is_pcow(instance) or not flavor_module.of(instance).root:
            super().snapshot(context, instance, image_id, update_task_state)
            return
        self._make_image(context, instance, image_id, update_task_state)

    def _make_image(
        self,
        context: Any,
        instance: Any,
        image_id: str,
        update_task_state: Any,
        *,
        taken: str | None = None,
        **properties: str,
    ) -> None:
        """Upload what its root holds as an image.

        :param taken: snapshot of the root that it is; None: of this moment
        :param properties: of the image, beside those that Nova gives it
        """
        image_format = CONF.libvirt.snapshot_image_format or snapshot_module.FORMATS[0]
        if image_format not in snapshot_module.FORMATS:
            raise nova_exception.InvalidDiskFormat(disk_format=image_format)
        name = self._image_api.get(context, image_id)['name']
        metadata = self._create_snapshot_metadata(instance.image_meta, instance, image_format, name)
        if warm.INHERITED in instance.system_metadata:
            # Nova gives it what the server's own image says
            properties.setdefault(warm.PROPERTY, 'false')
        metadata['properties'].update(properties)
        self._host.get_guest(instance)  # InstanceNotFound is told as it is
        update_task_state(task_state=task_states.IMAGE_PENDING_UPLOAD)
        fileutils.ensure_tree(CONF.libvirt.snapshots_directory)
        with (
            errors.internal(),
            tempfile.TemporaryDirectory(dir=CONF.libvirt.snapshots_directory) as directory,
        ):
            target = os.path.join(directory, image_id)
            root = storage.root(instance.uuid)
            verify.check_chain(root.path)  # an image of Glance has no checksums of what it was
            with (
                contextlib.nullcontext(taken)
                if taken is not None
                else self._frozen(instance, root.path, image_id)
            ) as frozen:
                # an image says what its QEMU likes, and so does a snapshot in it
                window = storage.window(instance.uuid, root, flavor_module.of(instance), frozen)
                snapshot_module.export(root.path, window, frozen, target, image_format)
            update_task_state(
                task_state=task_states.IMAGE_UPLOADING,
                expected_state=task_states.IMAGE_PENDING_UPLOAD,
            )
            with open(target, 'rb') as f:
                self._image_api.update(context, image_id, metadata, f)

    def _frozen(
        self, instance: Any, path: str, image_id: str
    ) -> contextlib.AbstractContextManager[str | None]:
        return snapshot_module.frozen(
            domain.Domain(self._host.get_connection(), instance.name),
            path,
            image_id,
            quiesce=bool(instance.image_meta.properties.get('os_require_quiesce', False)),
        )

    def suspend(self, context: Any, instance: Any) -> None:
        if not flavor_module.has_memory(instance):
            super().suspend(context, instance)
            return
        with suspension.suspend_errors():
            self._interrupted.discard(instance.uuid)
            suspension.check_task(context, instance, task_states.SUSPENDING)
            suspension.suspend(instance, self._host)

    def resume(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        block_device_info: Any = None,
        share_info: Any = None,
    ) -> None:
        """A server with persistent memory never boots by it."""
        if not flavor_module.has_memory(instance):
            super().resume(context, instance, network_info, block_device_info, share_info)
            return
        with suspension.resume_errors():
            self._interrupted.discard(instance.uuid)
            suspension.check_task(context, instance, task_states.RESUMING)
            self.plug_vifs(instance, network_info)
            suspended = suspension.Suspension.of(instance, self._host)
            suspended.resume()
        suspended.set_clock()

    def resume_state_on_host_boot(
        self, context: Any, instance: Any, network_info: Any, *more: Any, **later: Any
    ) -> None:
        """It is a hard reboot, which gives up what a server was suspended at."""
        if flavor_module.is_pcow(instance) and (
            instance.vm_state == vm_states.SUSPENDED
            or (instance.task_state in suspension.TASKS and flavor_module.has_memory(instance))
        ):
            return
        super().resume_state_on_host_boot(context, instance, network_info, *more, **later)

    def _forget_suspended(self, instance: Any) -> None:
        """Give up the state that a suspended server would resume from, if it is one."""
        with contextlib.suppress(nova_exception.InstanceNotFound):
            suspension.Suspension.of(instance, self._host).give_up()

    def _undefine_domain(
        self, instance: Any, keep_vtpm: bool = False, keep_nvram: bool = False
    ) -> None:
        """libvirt undefines no domain that has snapshots. Those in images stay: the server may be
        another host's by now, which sees the same pool, and suspended there.
        """
        if flavor_module.is_pcow(instance):
            with contextlib.suppress(nova_exception.InstanceNotFound):
                guest = self._host.get_guest(instance)
                snapshot_module.forget_all(libvirt_call.Proxy(guest._domain, guest.name))
        super()._undefine_domain(instance, keep_vtpm=keep_vtpm, keep_nvram=keep_nvram)
