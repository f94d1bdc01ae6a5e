# SPDX-License-Identifier: Apache-2.0
"""What differs from Nova's libvirt driver for images of servers and suspended servers; see
:mod:`nova_pcow.snapshot`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

from nova import exception as nova_exception
from nova.compute import task_states
import nova.conf
from oslo_utils import fileutils

from nova_pcow import errors
from nova_pcow import flavor as flavor_module
from nova_pcow import ram
from nova_pcow import snapshot as snapshot_module
from nova_pcow import storage
from nova_pcow import volume_driver
from pcow_driver.virt import domain

CONF = nova.conf.CONF


class SnapshotLibvirtDriver(volume_driver.VolumeLibvirtDriver):
    """See :mod:`nova_pcow.snapshot_driver`."""

    def snapshot(self, context: Any, instance: Any, image_id: str, update_task_state: Any) -> None:
        if not flavor_module.is_pcow(instance) or not flavor_module.of(instance).root:
            super().snapshot(context, instance, image_id, update_task_state)
            return
        image_format = CONF.libvirt.snapshot_image_format or snapshot_module.FORMATS[0]
        if image_format not in snapshot_module.FORMATS:
            raise nova_exception.InvalidDiskFormat(disk_format=image_format)
        name = self._image_api.get(context, image_id)['name']
        metadata = self._create_snapshot_metadata(instance.image_meta, instance, image_format, name)
        self._host.get_guest(instance)  # InstanceNotFound is told as it is
        update_task_state(task_state=task_states.IMAGE_PENDING_UPLOAD)
        fileutils.ensure_tree(CONF.libvirt.snapshots_directory)
        with (
            errors.internal(),
            tempfile.TemporaryDirectory(dir=CONF.libvirt.snapshots_directory) as directory,
        ):
            target = os.path.join(directory, image_id)
            root = storage.root(instance.uuid)
            with snapshot_module.frozen(
                domain.Domain(self._host.get_connection(), instance.name),
                root.path,
                image_id,
                quiesce=bool(instance.image_meta.properties.get('os_require_quiesce', False)),
            ) as frozen:
                snapshot_module.export(root.path, frozen, target, image_format)
            update_task_state(
                task_state=task_states.IMAGE_UPLOADING,
                expected_state=task_states.IMAGE_PENDING_UPLOAD,
            )
            with open(target, 'rb') as f:
                self._image_api.update(context, image_id, metadata, f)

    def suspend(self, context: Any, instance: Any) -> None:
        if not flavor_module.has_memory(instance):
            super().suspend(context, instance)
            return
        virtual = self._host.get_guest(instance)._domain
        found = domain.Domain(self._host.get_connection(), instance.name)
        with snapshot_module.suspend_errors():
            if flavor_module.of(instance).has_ram:
                ram.suspend(found)
            else:
                snapshot_module.suspend(virtual, found)

    def resume(
        self,
        context: Any,
        instance: Any,
        network_info: Any,
        block_device_info: Any = None,
        share_info: Any = None,
    ) -> None:
        guest = self._host.get_guest(instance) if flavor_module.is_pcow(instance) else None
        has_ram = guest is not None and flavor_module.of(instance).has_ram
        found = domain.Domain(self._host.get_connection(), instance.name) if has_ram else None
        if guest is None or (found is None and snapshot_module.suspended(guest._domain) is None):
            super().resume(context, instance, network_info, block_device_info, share_info)
            return
        with snapshot_module.resume_errors():
            self.plug_vifs(instance, network_info)
            if found is None:
                snapshot_module.resume(guest._domain)
            else:
                ram.resume(found)
        guest.sync_guest_time()

    def _forget_suspended(self, instance: Any) -> None:
        """Give up the state that a suspended server would resume from, if it is one."""
        with contextlib.suppress(nova_exception.InstanceNotFound):
            snapshot_module.forget_suspended(self._host.get_guest(instance)._domain)
            ram.forget_suspended(domain.Domain(self._host.get_connection(), instance.name))

    def _undefine_domain(
        self, instance: Any, keep_vtpm: bool = False, keep_nvram: bool = False
    ) -> None:
        """libvirt undefines no domain that has snapshots. Those in images stay: the server may be
        another host's by now, which sees the same pool, and suspended there.
        """
        if flavor_module.is_pcow(instance):
            with contextlib.suppress(nova_exception.InstanceNotFound):
                snapshot_module.forget_all(self._host.get_guest(instance)._domain)
        super()._undefine_domain(instance, keep_vtpm=keep_vtpm, keep_nvram=keep_nvram)
