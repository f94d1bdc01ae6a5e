# SPDX-License-Identifier: Apache-2.0
"""Configuration files of the OpenStack services."""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
from pathlib import Path
import shutil

from tools.lib.openstack_aio import environment as environment_module
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import settings as settings_module

Sections = dict[str, dict[str, object]]
_WARM_IMAGES = 1  # of a project on a node


def to_ini(sections: Mapping[str, Mapping[str, object]]) -> str:
    """Text of a file for oslo.config; true and false in its spelling."""
    lines = []
    for section, options in sections.items():
        lines.append(f'[{section}]')
        for key, value in options.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f'{key} = {text}'.rstrip())
        lines.append('')
    return '\n'.join(lines)


class Configuration:
    def __init__(self, settings: settings_module.Settings, base: environment_module.Base) -> None:
        self._settings = settings
        self._base = base

    def file(self, service: str, node: settings_module.Node = settings_module.NODE1) -> Path:
        """Configuration file of nova, cinder ...; a second node has one of its own."""
        directory = service if node == settings_module.NODE1 else f'{service}-{node.name}'
        name = 'glance-api' if service == 'glance' else service
        return self._settings.etc / directory / f'{name}.conf'

    def write(self) -> None:
        """Write all of them, and make the directories that they name."""
        made = {
            'keystone': self._keystone(),
            'placement': self._placement(),
            'glance': self._glance(),
            'cinder': self._cinder(settings_module.NODE1),
            'neutron': self._neutron(),
        }
        for service, sections in made.items():
            self._write(self.file(service), sections)
        self.write_nova(settings_module.NODE1, self._settings.compute_driver)
        self.write_pcow(settings_module.NODE1)
        shutil.copy(self._base.openstack / 'etc/nova/api-paste.ini', self._settings.etc / 'nova')
        shutil.copy(
            self._base.neutron / 'etc/neutron/api-paste.ini', self._settings.etc / 'neutron'
        )
        data = self._settings.data
        for name in (
            'keystone/keys',
            'glance/images',
            'glance/staging',
            'glance/tasks',
            'nova',
            'cinder/conversion',
            'cinder/coordination',
            'cinder/backup',
            'neutron',
            'locks',
            'conversion',
            'pcow',
        ):
            (data / name).mkdir(parents=True, exist_ok=True)
        (data / 'keystone/keys').chmod(0o700)

    def write_nova(self, node: settings_module.Node, compute_driver: str) -> None:
        self._nova_state(node).mkdir(parents=True, exist_ok=True)
        self._write(self.file('nova', node), self._nova(node, compute_driver))

    def write_cinder(self, node: settings_module.Node) -> None:
        """For cinder-volume on a further node."""
        self._write(self.file('cinder', node), self._cinder(node))

    def _nova_state(self, node: settings_module.Node) -> Path:
        """State of nova-compute: one directory for each node, as on two machines."""
        return self._settings.data / (
            'nova' if node == settings_module.NODE1 else f'nova-{node.name}'
        )

    def write_pcow(self, node: settings_module.Node) -> None:
        """For pcowctl on a node."""
        name = 'pcow.conf' if node == settings_module.NODE1 else f'pcow-{node.name}.conf'
        self._write(self._settings.etc / name, {'pcow': pools.configuration(self._settings, node)})

    @staticmethod
    def _write(path: Path, sections: Sections) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(to_ini(sections))

    def _default(self, **more: object) -> dict[str, object]:
        return {'use_stderr': True, 'debug': self._settings.debug, **more}

    def _database(self, name: str) -> dict[str, object]:
        # ConfigParser's own "%" is not used by oslo.config, but "$" is: neither is in the URL
        return {'connection': self._settings.database_url(name)}

    def _credentials(self, user: str) -> dict[str, object]:
        return {
            'auth_url': self._settings.url('keystone'),
            'auth_type': 'password',
            'username': user,
            'password': self._settings.password,
            'project_name': 'service',
            'user_domain_id': 'default',
            'project_domain_id': 'default',
        }

    def _token_check(self, user: str) -> dict[str, object]:
        return {
            'www_authenticate_uri': self._settings.url('keystone'),
            **self._credentials(user),
            'interface': 'public',
            'service_token_roles_required': True,
            'service_token_roles': 'service',
        }

    def _client(self, user: str, **more: object) -> dict[str, object]:
        return {**self._credentials(user), 'region_name': settings_module.REGION, **more}

    def _privileged(
        self, service: str, node: settings_module.Node = settings_module.NODE1
    ) -> dict[str, object]:
        """Everything runs as root: the helper that gets privileges needs no sudo."""
        helper = self._base.overlaid(self._settings, 'privsep-helper')
        return {
            'helper_command': ' '.join((*helper, '--config-file', str(self.file(service, node))))
        }

    def _locks(self) -> dict[str, object]:
        return {'lock_path': self._settings.data / 'locks'}

    def _keystone(self) -> Sections:
        keys = {'key_repository': self._settings.data / 'keystone/keys/fernet'}
        return {
            'DEFAULT': self._default(),
            'database': self._database('keystone'),
            'token': {'provider': 'fernet'},
            'fernet_tokens': dict(keys),
            'fernet_receipts': dict(keys),
            'credential': {'key_repository': self._settings.data / 'keystone/keys/credential'},
            # the users are this machine's own services: cheap hashes make every request faster
            'identity': {'password_hash_rounds': 4},
            'oslo_policy': {'enforce_scope': True},
        }

    def _placement(self) -> Sections:
        return {
            'DEFAULT': self._default(),
            'placement_database': self._database('placement'),
            'api': {'auth_strategy': 'keystone'},
            'keystone_authtoken': self._token_check('placement'),
        }

    def _glance(self) -> Sections:
        data = self._settings.data / 'glance'
        return {
            'DEFAULT': self._default(
                bind_host=settings_module.LOOPBACK,
                enabled_backends='file:file',
                node_staging_uri=f'file://{data}/staging',
                worker_self_reference_url=self._settings.url('glance'),
            ),
            'database': self._database('glance'),
            'glance_store': {'default_backend': 'file'},
            'file': {'filesystem_store_datadir': data / 'images'},
            'os_glance_tasks_store': {'filesystem_store_datadir': data / 'tasks'},
            'os_glance_staging_store': {'filesystem_store_datadir': data / 'staging'},
            'paste_deploy': {
                'flavor': 'keystone',
                'config_file': self._base.openstack / 'etc/glance/glance-api-paste.ini',
            },
            'oslo_concurrency': self._locks(),
            'keystone_authtoken': self._token_check('glance'),
        }

    def _nova(self, node: settings_module.Node, compute_driver: str) -> Sections:
        settings = self._settings
        socket = settings.state / 'nodes' / '%s' / 'libvirt-sock'
        privileged = self._privileged('nova', node)
        return {
            'DEFAULT': self._default(
                transport_url=settings.transport_url,
                my_ip=node.address,
                host=node.name,
                compute_driver=compute_driver,
                state_path=self._nova_state(node),
                instances_path=settings.instances,
                shutdown_timeout=1,
                allow_resize_to_same_host=True,
                graceful_shutdown_timeout=3,
                osapi_compute_workers=1,
                heal_instance_info_cache_interval=-1,
                resume_guests_state_on_host_boot=True,
                reserved_host_memory_mb=0,
                cpu_allocation_ratio=16,
                ram_allocation_ratio=4,
                disk_allocation_ratio=100,
            ),
            'api': {'auth_strategy': 'keystone'},
            'wsgi': {'api_paste_config': settings.etc / 'nova/api-paste.ini'},
            'conductor': {'workers': 1},
            # the machine itself is the limit
            'quota': {'instances': -1, 'cores': -1, 'ram': -1},
            'scheduler': {'workers': 1, 'discover_hosts_in_cells_interval': 10},
            'database': self._database('nova_cell1'),
            'api_database': self._database('nova_api'),
            'oslo_concurrency': self._locks(),
            'vnc': {'enabled': False},
            'spice': {'enabled': False},
            'serial_console': {'enabled': False},
            'libvirt': {
                'virt_type': 'qemu',
                'cpu_mode': 'none',
                'images_type': 'default',
                'inject_partition': -2,
                # for a guest that does not listen to ACPI: soon a hard one
                'wait_soft_reboot_seconds': 3,
                'connection_uri': settings.libvirt_uri(node),
                'live_migration_uri': f'qemu+unix:///system?socket={socket}',
                'live_migration_inbound_addr': node.address,
            },
            'nova_sys_admin': privileged,
            'vif_plug_linux_bridge_privileged': privileged,
            'vif_plug_ovs_privileged': privileged,
            'privsep_osbrick': privileged,
            'pcow': pools.configuration(settings, node),
            'nova_pcow': {'pools': pools.NOVA, 'warm_images': _WARM_IMAGES},
            'oslo_messaging_rabbit': {'rabbit_quorum_queue': False},
            'keystone_authtoken': self._token_check('nova'),
            'placement': self._client('placement'),
            'glance': self._client('nova', service_type='image'),
            'service_user': self._client('nova', send_service_user_token=True),
            'neutron': self._client('neutron', service_metadata_proxy=False),
            'cinder': self._client(
                'nova',
                catalog_info='block-storage::publicURL',
                os_region_name=settings_module.REGION,
            ),
        }

    def _cinder(self, node: settings_module.Node) -> Sections:
        settings, data = self._settings, self._settings.data / 'cinder'
        etc = self._base.openstack / 'etc/cinder'
        privileged = self._privileged('cinder', node)
        backends = settings.volume_backends
        default = self._default(
            transport_url=settings.transport_url,
            my_ip=node.address,
            host=node.name,
            auth_strategy='keystone',
            state_path=data,
            api_paste_config=etc / 'api-paste.ini',
            resource_query_filters_file=etc / 'resource_filters.json',
            rootwrap_config=etc / 'rootwrap.conf',
            enabled_backends=','.join(map(volume_type, backends)),
            glance_api_servers=settings.url('glance'),
            image_conversion_dir=data / 'conversion',
            osapi_volume_workers=1,
            backup_driver='cinder.backup.drivers.posix.PosixBackupDriver',
            backup_posix_path=data / 'backup',
            # volumes are memory of one host: the last filter is that of the hint local_to_instance,
            # the others are Cinder's own
            backup_use_same_host=True,
            scheduler_default_filters='AvailabilityZoneFilter,CapacityFilter,CapabilitiesFilter,InstanceLocalityFilter',
            graceful_shutdown_timeout=3,
        )
        if backends:
            default['default_volume_type'] = volume_type(backends[0])
        return {
            'DEFAULT': default,
            **{volume_type(name): self._backend(name, node) for name in backends},
            'pcow': pools.configuration(settings, node),
            'database': self._database('cinder'),
            'oslo_concurrency': self._locks(),
            'cinder_sys_admin': privileged,
            'privsep_osbrick': privileged,
            'coordination': {'backend_url': f'file://{data}/coordination'},
            # without a key manager no volume type can be encrypted, and nothing would have to be
            # refused
            'key_manager': {
                'backend': 'cinder.keymgr.conf_key_mgr.ConfKeyManager',
                'fixed_key': hashlib.sha256(settings.password.encode()).hexdigest(),
            },
            'oslo_messaging_rabbit': {'rabbit_quorum_queue': False},
            'keystone_authtoken': self._token_check('cinder'),
            'service_user': self._client('cinder', send_service_user_token=True),
            'nova': self._client(
                'nova', interface='public', token_auth_url=settings.url('keystone')
            ),
        }

    def _backend(self, name: str, node: settings_module.Node) -> dict[str, object]:
        return {
            'volume_backend_name': name,
            'volume_driver': 'cinder_pcow.driver.PcowDriver',
            'pcow_pools': pools.CINDER,
            'pcow_compute_host': node.name,
        }

    def _neutron(self) -> Sections:
        settings = self._settings
        return {
            # networks exist as far as nova asks for them; no agent runs, so no server has a port
            'DEFAULT': self._default(
                core_plugin='ml2',
                service_plugins='',
                transport_url=settings.transport_url,
                auth_strategy='keystone',
                state_path=settings.data / 'neutron',
                api_workers=1,
                rpc_workers=0,
                notify_nova_on_port_status_changes=False,
                notify_nova_on_port_data_changes=False,
            ),
            'database': self._database('neutron'),
            'ml2': {
                'type_drivers': 'local,flat',
                'tenant_network_types': 'local',
                'mechanism_drivers': '',
                'extension_drivers': '',
            },
            'oslo_concurrency': self._locks(),
            'keystone_authtoken': self._token_check('neutron'),
            'placement': {'auth_type': 'none'},
        }


def volume_type(backend: str) -> str:
    """The volume type that stands for a backend; also its section in cinder.conf, where [pcow] is
    the group of pcow_driver.
    """
    return 'pcow-pmem' if backend == settings_module.PCOW_BACKEND else backend
