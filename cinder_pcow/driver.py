# SPDX-License-Identifier: Apache-2.0
"""The entry points that cinder-volume calls; what they do is in the modules beside this one."""

from __future__ import annotations

from typing import Any

from cinder import exception as cinder_exception
from cinder import interface
from cinder.volume import configuration as volume_configuration
from cinder.volume import driver
from cinder.volume import volume_utils
from oslo_config import cfg
from oslo_log import log as logging

from cinder_pcow import backend as backend_module
from cinder_pcow import connections
from cinder_pcow import errors
from cinder_pcow import options
from cinder_pcow import stats
from cinder_pcow import volumes as volumes_module
from pcow_driver import conf

LOG = logging.getLogger(__name__)

cfg.CONF.register_opts(options.OPTS, group=volume_configuration.SHARED_CONF_GROUP)


@interface.volumedriver
class PcowDriver(driver.BaseVD):
    """Volumes as pcow images in pools of byte-addressable memory of this host, attached to guests as NVDIMMs."""

    VERSION = '1.0.0'
    CI_WIKI_NAME = 'pcow_CI'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configuration.append_config_values(options.OPTS)
        conf.register_opts(cfg.CONF)

    @staticmethod
    def get_driver_options() -> list[cfg.Opt]:
        return options.OPTS

    def do_setup(self, context: Any) -> None:
        self.backend = backend_module.Backend(self.host, self.configuration.pcow_pools, self.configuration.pcow_compute_host)
        self.volumes = volumes_module.Volumes(self.backend, self.configuration.pcow_max_chain)
        self.connections = connections.Connections(self.backend, self.volumes)

    def check_for_setup_error(self) -> None:
        with errors.translated():
            self.backend.check()
            self.volumes.collect()

    # Volumes

    def create_volume(self, volume: Any) -> None:
        self.volumes.create(volume)

    def create_volume_from_snapshot(self, volume: Any, snapshot: Any) -> None:
        self.volumes.create_from_snapshot(volume, snapshot)

    def create_cloned_volume(self, volume: Any, src_vref: Any) -> None:
        self.volumes.clone(volume, src_vref)

    def delete_volume(self, volume: Any) -> None:
        self.connections.end(volume)
        self.volumes.delete(volume)

    def extend_volume(self, volume: Any, new_size: int) -> None:
        self.volumes.extend(volume, new_size)

    # Snapshots

    def create_snapshot(self, snapshot: Any) -> None:
        self.volumes.create_snapshot(snapshot)

    def delete_snapshot(self, snapshot: Any) -> None:
        self.volumes.delete_snapshot(snapshot)

    def revert_to_snapshot(self, context: Any, volume: Any, snapshot: Any) -> None:
        self.volumes.revert(volume, snapshot)

    def snapshot_revert_use_temp_snapshot(self) -> bool:
        return False                   # a revert happens wholly or not at all

    # Connections

    def ensure_export(self, context: Any, volume: Any) -> None:
        """Guests hold their images themselves, also across a restart of this service."""

    def create_export(self, context: Any, volume: Any, connector: Any) -> None:
        """What a connection needs is made by initialize_connection, which knows who asks."""

    def remove_export(self, context: Any, volume: Any) -> None:
        """Ended by terminate_connection."""

    def initialize_connection(self, volume: Any, connector: dict[str, Any]) -> dict[str, Any]:
        return self.connections.begin(volume, connector)

    def terminate_connection(self, volume: Any, connector: dict[str, Any] | None, **kwargs: Any) -> None:
        self.connections.end(volume)

    # Scheduling

    def get_pool(self, volume: Any) -> str | None:
        with errors.translated():
            found = self.backend.find(volume)
        return found.name if found else None

    def _update_volume_stats(self) -> None:
        with errors.translated():
            pools = [stats.of_pool(pool, volume_utils.extract_host(self.host, 'host'), self.configuration)
                     for pool in self.backend.pools()]
        for pool in pools:
            pool.update(filter_function=self.get_filter_function(), goodness_function=self.get_goodness_function())
        self._stats = {
            'volume_backend_name': self.configuration.safe_get('volume_backend_name') or stats.PROTOCOL,
            'vendor_name': stats.VENDOR,
            'driver_version': self.get_version(),
            'storage_protocol': stats.PROTOCOL,
            'pools': pools,
            **stats.CAPABILITIES,
        }

    def update_migrated_volume(self, ctxt: Any, volume: Any, new_volume: Any, original_volume_status: str) -> dict[str, Any]:
        """The volume goes on under its own id on the image of the new one, whose name stays."""
        return {'_name_id': new_volume['_name_id'] or new_volume['id'], 'provider_location': new_volume['provider_location']}

    def validate_connector(self, connector: dict[str, Any]) -> None:
        if 'host' not in connector:
            raise cinder_exception.InvalidConnectorException(missing='host')
