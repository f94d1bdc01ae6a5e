# SPDX-License-Identifier: Apache-2.0
"""The OpenStack services: how their databases are made, and how they are started."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tools.lib.openstack_aio import configuration as configuration_module
from tools.lib.openstack_aio import environment as environment_module
from tools.lib.openstack_aio import processes as processes_module
from tools.lib.openstack_aio import settings as settings_module

_SERVE = Path(__file__).with_name('serve.py')
# The module with the WSGI application of each API.
_APIS = {
    'keystone': 'keystone.wsgi.api',
    'placement': 'placement.wsgi.api',
    'glance': 'glance.wsgi.api',
    'nova': 'nova.wsgi.osapi_compute',
    'cinder': 'cinder.wsgi.api',
    'neutron': 'neutron.wsgi.api',
}
# Some are told their configuration file in the command line, some by its directory in the
# environment.
_BY_DIRECTORY = {
    'keystone': 'OS_KEYSTONE_CONFIG_DIR',
    'placement': 'OS_PLACEMENT_CONFIG_DIR',
    'glance': 'OS_GLANCE_CONFIG_DIR',
    'nova': 'OS_NOVA_CONFIG_DIR',
    'neutron': 'OS_NEUTRON_CONFIG_DIR',
}
_BY_ARGUMENT = ('nova', 'cinder', 'neutron')


@dataclasses.dataclass(frozen=True)
class Agent:
    """A service without an API of its own, which reports to nova or cinder."""

    name: str
    project: str
    node: bool  # whether it belongs to a compute node


AGENTS = (
    Agent('nova-conductor', 'nova', False),
    Agent('nova-scheduler', 'nova', False),
    Agent('nova-compute', 'nova', True),
    Agent('cinder-scheduler', 'cinder', False),
    Agent('cinder-volume', 'cinder', True),
    Agent('cinder-backup', 'cinder', True),
)


class Services:
    def __init__(
        self,
        settings: settings_module.Settings,
        base: environment_module.Base,
        configuration: configuration_module.Configuration,
        processes: processes_module.Processes,
    ) -> None:
        self._settings = settings
        self._base = base
        self._configuration = configuration
        self._processes = processes

    def _manage(self, project: str, *words: str, name: str = '') -> None:
        """Run keystone-manage, nova-manage ...; the output goes to the log ``manage-PROJECT``."""
        program = str(self._base.program(f'{project}-manage'))
        self._processes.run(
            f'manage-{name or project}',
            (program, '--config-file', str(self._configuration.file(project)), *words),
        )

    def make_keystone(self) -> None:
        """Database, keys and the administrator of keystone.

        :raises PcowError: as all of these
        """
        self._manage('keystone', 'db_sync')
        for kind in ('fernet_setup', 'credential_setup'):
            self._manage('keystone', kind, '--keystone-user', 'root', '--keystone-group', 'root')
        url = self._settings.url('keystone')
        self._manage(
            'keystone',
            'bootstrap',
            '--bootstrap-password',
            self._settings.password,
            '--bootstrap-region-id',
            settings_module.REGION,
            '--bootstrap-public-url',
            url,
            '--bootstrap-internal-url',
            url,
            '--bootstrap-admin-url',
            url,
        )

    def make_nova(self) -> None:
        self._manage('nova', 'api_db', 'sync')
        self._manage(
            'nova',
            'cell_v2',
            'map_cell0',
            '--database_connection',
            self._settings.database_url('nova_cell0'),
        )
        self._manage('nova', 'db', 'sync')
        self._manage('nova', 'cell_v2', 'create_cell', '--name', 'cell1')

    def make_others(self) -> None:
        self._manage('placement', 'db', 'sync')
        self._manage('glance', 'db_sync')
        self._manage('cinder', 'db', 'sync')

    def make_neutron(self) -> None:
        self._processes.run(
            'manage-neutron',
            (
                str(self._base.neutron / 'bin/neutron-db-manage'),
                '--config-file',
                str(self._configuration.file('neutron')),
                'upgrade',
                'heads',
            ),
        )

    def discover_hosts(self) -> None:
        """Give nova's scheduler the compute nodes that it does not know yet."""
        self._manage('nova', 'cell_v2', 'discover_hosts', name='discover-hosts')

    @staticmethod
    def api_name(service: str) -> str:
        """Name of the process that serves the API of keystone, nova ..."""
        return f'{service}-api'

    def start_api(self, service: str) -> None:
        """Start it if it does not run; :meth:`wait_api` waits for it."""
        name = self.api_name(service)
        if self._processes.pid(name) is not None:
            return
        file = self._configuration.file(service)
        python = (
            self._base.neutron if service == 'neutron' else self._settings.venv
        ) / 'bin/python'
        environment = {}
        if service in _BY_DIRECTORY:
            environment[_BY_DIRECTORY[service]] = str(file.parent)
        if service == 'neutron':
            environment['OS_NEUTRON_CONFIG_FILES'] = file.name
        arguments = ('--config-file', str(file)) if service in _BY_ARGUMENT else ()
        self._processes.start(
            name,
            (
                str(python),
                str(_SERVE),
                _APIS[service],
                str(self._settings.port(service)),
                *arguments,
            ),
            environment,
        )

    def wait_api(self, service: str) -> None:
        self._processes.wait_port(self.api_name(service), self._settings.port(service))

    def agents(self) -> list[Agent]:
        """Those of this all-in-one: without a volume backend nothing of cinder needs more than its
        API and scheduler.
        """
        return [
            agent
            for agent in AGENTS
            if agent.name not in ('cinder-volume', 'cinder-backup')
            or self._settings.volume_backends
        ]

    def agent_command(
        self, agent: Agent, node: settings_module.Node = settings_module.NODE1
    ) -> tuple[str, ...]:
        file = self._configuration.file(agent.project, node)
        return (*self._base.overlaid(self._settings, agent.name), '--config-file', str(file))
