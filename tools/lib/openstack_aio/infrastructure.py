# SPDX-License-Identifier: Apache-2.0
"""MariaDB and RabbitMQ with directories of their own, next to whatever of them the machine runs
itself.
"""

from __future__ import annotations

import shutil
import socket
import time

from pcow_driver.common import exception
from pcow_driver.common import tool
from tools.lib.openstack_aio import processes as processes_module
from tools.lib.openstack_aio import settings as settings_module

_RABBITMQ = '/usr/lib/rabbitmq/bin/rabbitmq-server'  # the one in PATH changes to another user
_RABBITMQ_CONF = """\
listeners.tcp.1 = {address}:{port}
default_user = openstack
default_pass = {password}
vm_memory_high_watermark.relative = 0.2
disk_free_limit.absolute = 50MB
"""


class Infrastructure:
    def __init__(
        self, settings: settings_module.Settings, processes: processes_module.Processes
    ) -> None:
        self._settings = settings
        self._processes = processes
        self._mariadb = settings.state / 'mariadb'
        self._rabbitmq = settings.state / 'rabbitmq'

    def start_mariadb(self) -> None:
        """Start the database server; without its data it is set up first.

        :raises PcowError:
        """
        self._mariadb.mkdir(exist_ok=True, mode=0o700)
        data, made = self._mariadb / 'data', self._mariadb / 'made'
        if not made.exists():
            shutil.rmtree(data, ignore_errors=True)
            self._processes.run(
                'mariadb-install-db',
                (
                    tool.find_system('mariadb-install-db', 'mariadb-server'),
                    '--no-defaults',
                    '--user=root',
                    f'--datadir={data}',
                    '--auth-root-authentication-method=normal',
                    '--skip-test-db',
                ),
            )
            made.touch()
        if self._processes.pid('mariadb') is None:
            # only its socket, in a directory that nobody else can enter; after a crash of the
            # machine the data may be lost
            self._processes.start(
                'mariadb',
                (
                    tool.find_system('mariadbd', 'mariadb-server'),
                    '--no-defaults',
                    '--user=root',
                    f'--datadir={data}',
                    f'--socket={self._settings.database_socket}',
                    f'--pid-file={self._mariadb / "pid"}',
                    '--skip-networking',
                    '--max-connections=400',
                    '--innodb-flush-log-at-trx-commit=0',
                    '--innodb-doublewrite=0',
                    '--innodb-buffer-pool-size=128M',
                    '--innodb-flush-method=nosync',
                    '--performance-schema=OFF',
                    '--character-set-server=utf8mb3',
                    '--collation-server=utf8mb3_general_ci',
                ),
            )
        self._wait_mariadb()

    def _wait_mariadb(self) -> None:
        limit = time.monotonic() + processes_module.START_SECONDS
        while time.monotonic() < limit:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self._settings.database_socket)) == 0:
                    return
            self._processes.check('mariadb')
            time.sleep(0.05)
        raise exception.PcowError(
            reason=f'mariadb does not answer: '
            f'{processes_module.log_tail(self._processes.log("mariadb"))}'
        )

    def create_databases(self) -> None:
        statements = ''.join(
            f'CREATE DATABASE IF NOT EXISTS {name};' for name in self._settings.databases
        )
        self._processes.run(
            'create-databases',
            (
                tool.find_system('mariadb', 'mariadb-client'),
                '--no-defaults',
                '--user=root',
                f'--socket={self._settings.database_socket}',
                f'--execute={statements}',
            ),
        )

    def start_rabbitmq(self) -> None:
        """Start the message broker, and Erlang's port mapper for it (which would stay behind if it
        started that itself).

        :raises PcowError:
        """
        if self._processes.pid('rabbitmq') is not None:
            return
        port, directory = self._settings.port, self._rabbitmq
        directory.mkdir(exist_ok=True, mode=0o700)
        (directory / 'rabbitmq.conf').write_text(
            _RABBITMQ_CONF.format(
                address=settings_module.LOOPBACK,
                port=port('rabbitmq'),
                password=self._settings.password,
            )
        )
        for name in ('advanced.config', 'enabled_plugins'):
            (directory / name).write_text('[].\n')
        (directory / 'empty').touch()
        environment = {
            'HOME': str(directory),
            'ERL_EPMD_ADDRESS': settings_module.LOOPBACK,
            'ERL_EPMD_PORT': str(port('epmd')),
            'RABBITMQ_NODENAME': f'pcow-{self._settings.id}@localhost',
            'RABBITMQ_DIST_PORT': str(port('rabbitmq-distribution')),
            'RABBITMQ_MNESIA_BASE': str(directory / 'data'),
            'RABBITMQ_LOG_BASE': str(directory),
            'RABBITMQ_LOGS': '-',
            'RABBITMQ_CONFIG_FILE': str(directory / 'rabbitmq.conf'),
            'RABBITMQ_ADVANCED_CONFIG_FILE': str(directory / 'advanced.config'),
            'RABBITMQ_ENABLED_PLUGINS_FILE': str(directory / 'enabled_plugins'),
            'RABBITMQ_CONF_ENV_FILE': str(directory / 'empty'),
            # with one scheduler per core and no busy waiting, it leaves the machine to the others
            'RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS': '-kernel inet_dist_use_interface {127,0,0,1} +S '
            '2:2 +sbwt none',
        }
        self._processes.start(
            'epmd',
            (
                tool.find_system('epmd', 'erlang-base'),
                '-port',
                str(port('epmd')),
                '-address',
                settings_module.LOOPBACK,
            ),
        )
        self._processes.wait_port('epmd', port('epmd'))
        self._processes.start('rabbitmq', (_RABBITMQ,), environment)

    def wait_rabbitmq(self) -> None:
        self._processes.wait_port('rabbitmq', self._settings.port('rabbitmq'))
