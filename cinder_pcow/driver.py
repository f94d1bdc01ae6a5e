# SPDX-License-Identifier: Apache-2.0
"""The entry points that cinder-volume calls; what they do is in the modules beside this one."""

from __future__ import annotations

from typing import Any

from cinder import context as cinder_context
from cinder import exception as cinder_exception
from cinder import interface
from cinder import objects
from cinder.objects import fields
from cinder.volume import configuration as volume_configuration
from cinder.volume import driver
from cinder.volume import volume_utils
from oslo_config import cfg
from oslo_log import log as logging

from cinder_pcow import backend as backend_module
from cinder_pcow import connections
from cinder_pcow import errors
from cinder_pcow import groups
from cinder_pcow import images
from cinder_pcow import manage_existing
from cinder_pcow import migration
from cinder_pcow import options
from cinder_pcow import stats
from cinder_pcow import validation
from cinder_pcow import volumes as volumes_module
from pcow_driver.common import conf
from pcow_driver.export import nbd

LOG = logging.getLogger(__name__)

cfg.CONF.register_opts(options.OPTS, group=volume_configuration.SHARED_CONF_GROUP)


@interface.volumedriver
class PcowDriver(
    driver.CloneableImageVD,
    driver.ManageableVD,
    driver.ManageableSnapshotsVD,
    driver.MigrateVD,
    driver.BaseVD,
):
    """Volumes as pcow images in pools of byte-addressable memory of this host, attached to guests
    as NVDIMMs.
    """

    VERSION = '1.0.0'
    CI_WIKI_NAME = 'pcow_CI'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configuration.append_config_values(options.OPTS)
        conf.register_opts(cfg.CONF)
        cfg.CONF.set_default('volume_name_template', cfg.CONF.volume_name_template, group='pcow')

    @staticmethod
    def get_driver_options() -> list[cfg.Opt]:
        return options.OPTS

    def do_setup(self, context: Any) -> None:
        self.backend = backend_module.Backend(
            self.host, self.configuration.pcow_pools, self.configuration.pcow_compute_host
        )
        self.volumes = volumes_module.Volumes(self.backend, self.configuration.pcow_max_chain)
        self.connections = connections.Connections(self.backend, self.volumes)
        self.images = images.Images(self.volumes)
        self.existing = manage_existing.ManageExisting(self.volumes)
        self.groups = groups.Groups(self.volumes, self.delete_volume, self.delete_snapshot)
        self.migration = migration.Migration(self.volumes)

    def check_for_setup_error(self) -> None:
        with errors.translated():
            self.backend.check()
            self.volumes.collect()
        if cfg.CONF.pcow.volume_name_template != cfg.CONF.volume_name_template:
            LOG.warning(
                '[pcow] volume_name_template is %s, and [DEFAULT] volume_name_template is %s: set '
                'it to the same, or images of volumes are taken for those of nobody',
                cfg.CONF.pcow.volume_name_template,
                cfg.CONF.volume_name_template,
            )
        # what counts is that of the API and the scheduler, often the same file
        if not cfg.CONF.backup_use_same_host:
            LOG.warning(
                '[DEFAULT] backup_use_same_host is off here. If Cinder\'s API and scheduler have '
                'it off too, and there is '
                'cinder-backup on several hosts, any of them is asked to back up or restore a '
                'volume; only that of the '
                "volume's host can"
            )
        if not nbd.root_may_read():
            LOG.warning(
                'This service is not root, and %s has no line user_allow_other: os-brick and '
                'Cinder, which read volumes as '
                'root, cannot use what the service shows them. Backups and copies by Cinder fail',
                nbd.FUSE_CONF,
            )

    # Volumes

    def create_volume(self, volume: Any) -> None:
        self.volumes.create(volume)

    def create_volume_from_snapshot(self, volume: Any, snapshot: Any) -> None:
        self.volumes.create_from_snapshot(volume, snapshot)

    def create_cloned_volume(self, volume: Any, src_vref: Any) -> None:
        self.connections.end(src_vref)
        self.volumes.clone(volume, src_vref)

    def delete_volume(self, volume: Any) -> None:
        with errors.volume_busy(volume.name):
            self.connections.stop(volume.name)
        self.migration.forget(volume)
        self.volumes.delete(volume)

    def extend_volume(self, volume: Any, new_size: int) -> None:
        self.connections.end(volume)
        self.volumes.extend(volume, new_size)

    # Snapshots

    def create_snapshot(self, snapshot: Any) -> None:
        self.connections.end(snapshot.volume)
        self.volumes.create_snapshot(snapshot)

    def delete_snapshot(self, snapshot: Any) -> None:
        with errors.snapshot_busy(snapshot.name):
            self.connections.stop(snapshot.name)
        self.volumes.delete_snapshot(snapshot)

    def revert_to_snapshot(self, context: Any, volume: Any, snapshot: Any) -> None:
        self.connections.end(volume)
        self.volumes.revert(volume, snapshot)

    def snapshot_revert_use_temp_snapshot(self) -> bool:
        return False  # a revert happens wholly or not at all

    # Images

    def clone_image(
        self,
        context: Any,
        volume: Any,
        image_location: Any,
        image_meta: dict[str, Any],
        image_service: Any,
    ) -> tuple[dict[str, Any] | None, bool]:
        return None, self.images.clone(context, volume, image_meta, image_service)

    def copy_image_to_volume(
        self,
        context: Any,
        volume: Any,
        image_service: Any,
        image_id: str,
        disable_sparse: bool = False,
    ) -> None:
        self.images.copy_to_volume(
            context, volume, image_service, image_id, over_data=disable_sparse
        )

    def copy_volume_to_image(
        self, context: Any, volume: Any, image_service: Any, image_meta: dict[str, Any]
    ) -> None:
        self.images.copy_to_image(context, volume, image_service, image_meta)

    # What is in the pools already

    def manage_existing(self, volume: Any, existing_ref: dict[str, str]) -> None:
        validation.check_volume(volume)
        self.existing.manage(volume, existing_ref)

    def manage_existing_get_size(self, volume: Any, existing_ref: dict[str, str]) -> int:
        return self.existing.size(volume, existing_ref)

    def get_manageable_volumes(
        self,
        cinder_volumes: Any,
        marker: Any,
        limit: int,
        offset: int,
        sort_keys: Any,
        sort_dirs: Any,
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = volume_utils.paginate_entries_list(
            self.existing.list_volumes(cinder_volumes), marker, limit, offset, sort_keys, sort_dirs
        )
        return found

    def unmanage(self, volume: Any) -> None:
        """The image stays in its pool, under the name of the volume."""
        self.connections.end(volume)
        self.migration.release(volume)

    def manage_existing_snapshot(self, snapshot: Any, existing_ref: dict[str, str]) -> None:
        self.existing.manage_snapshot(snapshot, existing_ref)

    def manage_existing_snapshot_get_size(self, snapshot: Any, existing_ref: dict[str, str]) -> int:
        return self.existing.snapshot_size(snapshot, existing_ref)

    def get_manageable_snapshots(
        self,
        cinder_snapshots: Any,
        marker: Any,
        limit: int,
        offset: int,
        sort_keys: Any,
        sort_dirs: Any,
    ) -> list[dict[str, Any]]:
        volumes = {one.volume.id: one.volume for one in cinder_snapshots}
        volumes.update({one.id: one for one in self._volumes_of_host()})
        found: list[dict[str, Any]] = volume_utils.paginate_entries_list(
            self.existing.list_snapshots(cinder_snapshots, volumes.values()),
            marker,
            limit,
            offset,
            sort_keys,
            sort_dirs,
        )
        return found

    def _volumes_of_host(self) -> Any:
        return objects.VolumeList.get_all_by_host(cinder_context.get_admin_context(), self.host)

    def unmanage_snapshot(self, snapshot: Any) -> None:
        """The snapshot stays in the image, under the same name."""

    # Groups

    def create_group(self, context: Any, group: Any) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group):
            return super().create_group(context, group)  # Cinder's generic groups
        return {'status': fields.GroupStatus.AVAILABLE}

    def delete_group(self, context: Any, group: Any, volumes: Any) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group):
            return super().delete_group(context, group, volumes)
        return self.groups.delete(volumes)

    def update_group(
        self, context: Any, group: Any, add_volumes: Any = None, remove_volumes: Any = None
    ) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group):
            return super().update_group(context, group, add_volumes, remove_volumes)
        return None, None, None

    def create_group_from_src(
        self,
        context: Any,
        group: Any,
        volumes: Any,
        group_snapshot: Any = None,
        snapshots: Any = None,
        source_group: Any = None,
        source_vols: Any = None,
    ) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group):
            return super().create_group_from_src(
                context, group, volumes, group_snapshot, snapshots, source_group, source_vols
            )
        for source in source_vols or ():
            self.connections.end(source)
        return self.groups.create_from(volumes, snapshots, source_vols)

    def create_group_snapshot(self, context: Any, group_snapshot: Any, snapshots: Any) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group_snapshot):
            return super().create_group_snapshot(context, group_snapshot, snapshots)
        for snapshot in snapshots:
            self.connections.end(snapshot.volume)
        return self.groups.create_snapshot(snapshots)

    def delete_group_snapshot(self, context: Any, group_snapshot: Any, snapshots: Any) -> Any:
        if not volume_utils.is_group_a_cg_snapshot_type(group_snapshot):
            return super().delete_group_snapshot(context, group_snapshot, snapshots)
        return self.groups.delete_snapshot(snapshots)

    # Moving and changing

    def migrate_volume(
        self, context: Any, volume: Any, host: dict[str, Any]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.connections.end(volume)
        return self.migration.migrate(volume, host), None

    def update_migrated_volume(
        self, ctxt: Any, volume: Any, new_volume: Any, original_volume_status: str
    ) -> dict[str, Any]:
        """The volume goes on under its own id on the image of the new one, whose name stays."""
        return {
            '_name_id': new_volume['_name_id'] or new_volume['id'],
            'provider_location': new_volume['provider_location'],
        }

    def update_provider_info(self, volumes: Any, snapshots: Any) -> tuple[None, None]:
        """Called with all volumes and snapshots when the service starts; there is no provider info
        to update.
        """
        self.connections.collect(volumes, snapshots)
        with errors.translated():
            self.migration.settle(volumes)
        return None, None

    def retype(
        self, context: Any, volume: Any, new_type: Any, diff: Any, host: dict[str, Any]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A type says nothing about how an image is made, so none of its bytes change; another pool
        is a migration, which Cinder itself would do with a full copy. False leaves it to Cinder: of
        an attached volume, for which it asks Nova.
        """
        validation.check_type(new_type)
        if volume_utils.extract_host(host['host'], 'pool') == volume_utils.extract_host(
            volume.host, 'pool'
        ):
            return True, None
        if volume.volume_attachment:
            return False, None
        return self.migrate_volume(context, volume, host)

    # Connections

    def ensure_export(self, context: Any, volume: Any) -> None:
        """Guests hold their images themselves, also across a restart of this service."""

    def create_export(self, context: Any, volume: Any, connector: Any) -> None:
        """What a connection needs is made by initialize_connection, which knows who asks."""

    def remove_export(self, context: Any, volume: Any) -> None:
        """Ended by terminate_connection."""

    def initialize_connection(self, volume: Any, connector: dict[str, Any]) -> dict[str, Any]:
        return self.connections.begin(volume, connector)

    def terminate_connection(
        self, volume: Any, connector: dict[str, Any] | None, **kwargs: Any
    ) -> None:
        self.connections.end(volume)

    def create_export_snapshot(self, context: Any, snapshot: Any, connector: Any) -> None:
        """As :meth:`create_export`."""

    def remove_export_snapshot(self, context: Any, snapshot: Any) -> None:
        """As :meth:`remove_export`."""

    def initialize_connection_snapshot(
        self, snapshot: Any, connector: dict[str, Any], **kwargs: Any
    ) -> dict[str, Any]:
        return self.connections.begin_snapshot(snapshot, connector)

    def terminate_connection_snapshot(
        self, snapshot: Any, connector: dict[str, Any] | None, **kwargs: Any
    ) -> None:
        self.connections.end(snapshot)

    # Scheduling

    def get_pool(self, volume: Any) -> str | None:
        with errors.translated():
            found = self.backend.find(volume)
        return found.name if found else None

    def _update_volume_stats(self) -> None:
        with errors.translated():
            pools = stats.of_pools(
                self.backend.pools(),
                volume_utils.extract_host(self.host, 'host'),
                self.configuration,
            )
        for pool in pools:
            pool.update(
                filter_function=self.get_filter_function(),
                goodness_function=self.get_goodness_function(),
                pcow_migration_address=self.configuration.pcow_migration_address or cfg.CONF.my_ip,
            )
        self._stats = {
            'volume_backend_name': self.configuration.safe_get('volume_backend_name')
            or stats.PROTOCOL,
            'vendor_name': stats.VENDOR,
            'driver_version': self.get_version(),
            'storage_protocol': stats.PROTOCOL,
            'pools': pools,
            **stats.CAPABILITIES,
        }

    def validate_connector(self, connector: dict[str, Any]) -> None:
        if 'host' not in connector:
            raise cinder_exception.InvalidConnectorException(missing='host')
