# SPDX-License-Identifier: Apache-2.0
"""Steps of a resize or cold migration on the host that the server leaves, and how they
are undone.
"""

from __future__ import annotations

import json
import os
from typing import Any

from nova import exception as nova_exception
from nova import objects
from nova.compute import power_state
from nova.compute import rpcapi
from nova.compute import vm_states
from nova.virt.libvirt import utils as libvirt_utils
from oslo_log import log as logging
import oslo_messaging

from nova_pcow.common import flavor as flavor_module
from nova_pcow.libvirt_driver import warm_starts
from nova_pcow.migration import cold_migration
from nova_pcow.placement import shared
from nova_pcow.records import notes
from nova_pcow.servers import config
from nova_pcow.servers import ram
from nova_pcow.servers import storage
from pcow_driver.common import units

LOG = logging.getLogger(__name__)


class ResizeLibvirtDriver(warm_starts.WarmLibvirtDriver):
    """See :mod:`nova_pcow.libvirt_driver.resizes`."""

    def _mark_or_send(
        self,
        instance: Any,
        dest: str | None,
        disk_info: str,
        *flavors: flavor_module.PcowFlavor,
        noted: bool = False,
    ) -> str:
        """What a resize does with the images when the server is off; Nova's list of disks with what
        was sent.

        :param dest: None: the images stay where they are
        :param flavors: that of the server, and the one that it is to get
        :param noted: as of :func:`storage.check_sizes`
        """
        directory = libvirt_utils.get_instance_path(instance)
        # super() renames it, and makes a new one only if it is shared
        is_shared = os.path.isdir(directory)
        try:
            # its QEMU had the time until now to write another size
            storage.check_sizes(instance.uuid, *flavors, noted=noted)
            ram.give_up(instance.uuid)  # of the old size, on the old host
            if dest is None:
                sizes = storage.sizes(flavors[-1])
                notes.put(notes.RESIZING, instance.uuid, json.dumps(sizes))
                cold_migration.mark(instance.uuid, instance.migration_context.migration_id)
                return disk_info
            return cold_migration.pack(
                disk_info,
                cold_migration.send(
                    instance.uuid,
                    directory,
                    None if is_shared else dest,
                    memory=instance.memory_mb * units.MIB,
                ),
            )
        except Exception:
            notes.forget(notes.RESIZING, uuid=instance.uuid)
            self._cleanup_remote_migration(
                dest, directory, directory + '_resize', is_shared or dest is None
            )
            raise

    def _start_again(
        self, context: Any, instance: Any, network_info: Any, block_device_info: Any
    ) -> None:
        """Nova says of a server whose resize is rolled back that it runs as before, and does not
        look whether it was stopped.
        """
        if instance.vm_state != vm_states.ACTIVE:
            return
        try:
            if self.get_info(instance).state == power_state.SHUTDOWN:
                self.power_on(context, instance, network_info, block_device_info)
        except Exception:
            LOG.exception(
                'The server whose resize failed is off, and could not be started again',
                instance=instance,
            )

    def _destination_sees_pool(self, context: Any, instance: Any) -> bool:
        """Whether the images of a server that changes its host can stay where they are.

        :raises ServerStorageError: that host does not say, or has not what the server boots by
        """
        host = self._migration(context, instance).dest_compute
        data = self.check_instance_shared_storage_local(context, instance)
        asked = shared.needing_shim(data) if config.shim_files(instance)[0] else data
        try:
            return bool(
                rpcapi.ComputeAPI().check_instance_shared_storage(
                    context, asked, instance=instance, host=host
                )
            )
        except (nova_exception.NovaException, oslo_messaging.MessagingException) as e:
            said = str(e).partition('\n')[0]  # then comes the traceback of the other host
            raise storage.ServerStorageError(
                reason=f'whether {host} sees the pool of the server cannot be told: {said}'
            ) from e
        finally:
            self.check_instance_shared_storage_cleanup(context, data)

    @staticmethod
    def _migration(context: Any, instance: Any) -> Any:
        return objects.Migration.get_by_id(
            context.elevated(), instance.migration_context.migration_id
        )

    def _destination_node(self, context: Any, instance: Any) -> str:
        return str(self._migration(context, instance).dest_node)
