# SPDX-License-Identifier: Apache-2.0
"""Brings an all-in-one up and down."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from concurrent import futures
import contextlib
import datetime
import fcntl
import functools
import shlex
import shutil
import signal
import time

from pcow_driver.common import exception
from pcow_driver.common import units
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import configuration as configuration_module
from tools.lib.openstack_aio import environment as environment_module
from tools.lib.openstack_aio import guest as guest_module
from tools.lib.openstack_aio import infrastructure as infrastructure_module
from tools.lib.openstack_aio import node as node_module
from tools.lib.openstack_aio import pools
from tools.lib.openstack_aio import processes as processes_module
from tools.lib.openstack_aio import services as services_module
from tools.lib.openstack_aio import settings as settings_module
from tools.lib.openstack_aio import ssh

_READY_SECONDS = 180.0
_LISTENERS = ('epmd', 'rabbitmq')
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def locked(settings: settings_module.Settings) -> Iterator[None]:
    """One command at a time changes an all-in-one.

    :raises PcowError: another one does
    """
    settings.state.mkdir(parents=True, exist_ok=True)
    with open(settings.state / 'lock', 'wb') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise exception.PcowError(
                reason=f'another command is at work on {settings.state}: wait for it'
            ) from None
        yield


class AllInOne:
    def __init__(self, settings: settings_module.Settings) -> None:
        self.settings = settings
        self.processes = processes_module.Processes(settings)
        self.base = environment_module.base()
        self.configuration = configuration_module.Configuration(settings, self.base)
        self.services = services_module.Services(
            settings, self.base, self.configuration, self.processes
        )
        self.infrastructure = infrastructure_module.Infrastructure(settings, self.processes)
        self.api = api_module.Api(settings)
        self._begun = time.monotonic()
        self._workers = futures.ThreadPoolExecutor()

    def say(self, text: str) -> None:
        print(f'[{time.monotonic() - self._begun:5.1f} s] {text}', flush=True)

    # Up

    def up(self) -> None:
        """Start what does not run.  If that fails, or is interrupted, everything is ended.

        :raises PcowError: a service does not start; the message has the end of its log
        """
        environment_module.prepare_base(self.say)
        with self._ended_on_failure():
            self._check_ports()
            self.settings.save()
            for directory in (self.settings.logs, self.settings.temporary):
                directory.mkdir(exist_ok=True)
            environment_module.prepare_overlay(self.settings, self.base)
            self.configuration.write()
            self._write_openrc()
            if pools.wanted(self.settings):
                pools.prepare(self.settings)
            self._start()

    def _start(self) -> None:
        node = self.compute_node(settings_module.NODE1)
        submit = self._workers.submit
        libvirt = submit(
            self._step,
            'libvirt and pools',
            node.start_libvirtd,
            functools.partial(self._make_pools, node),
        )
        broker = submit(
            self._step,
            'RabbitMQ',
            self.infrastructure.start_rabbitmq,
            self.infrastructure.wait_rabbitmq,
        )
        self._step(
            'MariaDB', self.infrastructure.start_mariadb, self.infrastructure.create_databases
        )
        made = self.settings.state / 'databases'
        work: list[futures.Future[None]] = []
        if not made.exists() or made.read_text() != environment_module.key():
            keystone = submit(self._step, 'keystone: database', self.services.make_keystone)
            nova = submit(self._step, 'nova: databases', self.services.make_nova)
            others = submit(
                self._step, 'placement, glance, cinder: databases', self.services.make_others
            )
            neutron = submit(self._step, 'neutron: database', self.services.make_neutron)
            _all([keystone])
            self._serve('keystone')
            self.api.log_in()
            self.api.fill_catalog()
            _all([others])
            work += [submit(self._serve, 'placement', 'glance', 'cinder')]
            _all([nova, neutron])
            made.write_text(environment_module.key())
            work += [submit(self._serve, 'nova', 'neutron')]
        else:
            work += [submit(self._serve, *settings_module.SERVICE_TYPES)]
            self._serve('keystone')
            self.api.log_in()
        _all([broker, libvirt])
        begun = datetime.datetime.now(datetime.UTC)
        started = self._start_agents(node)
        _all(work)
        # Neutron 29 cannot list ports before any other request has loaded its models
        # (port_forwardings).
        self.api.call('neutron', 'GET', '/v2.0/networks')
        self._make_volume_types()
        self._wait_ready(node, started, begun)

    def compute_node(self, node: settings_module.Node) -> node_module.ComputeNode:
        return node_module.ComputeNode(
            self.settings, self.processes, node, pools.places(self.settings, node)
        )

    def _make_pools(self, node: node_module.ComputeNode) -> None:
        if pools.wanted(self.settings):
            pools.register(self.settings, node)

    def _step(self, name: str, *steps: Callable[[], None]) -> None:
        for step in steps:
            step()
        self.say(f'{name}: done')

    def _serve(self, *names: str) -> None:
        for name in names:
            self.services.start_api(name)
        for name in names:
            self.services.wait_api(name)
            self.say(f'{name}: serves {self.settings.url(name)}')

    def _start_agents(self, node: node_module.ComputeNode) -> set[str]:
        """Returns the names of those that did not run before."""
        started = set()
        for agent in self.services.agents():
            if self.processes.pid(agent.name) is None:
                command = self.services.agent_command(agent)
                if agent.node:
                    node.start(agent.name, command)
                else:
                    self.processes.start(agent.name, command)
                started.add(agent.name)
        return started

    def _make_volume_types(self) -> None:
        there = self.api.volume_types() if self.settings.volume_backends else set()
        for backend in self.settings.volume_backends:
            name = configuration_module.volume_type(backend)
            if name not in there:
                self.api.create_volume_type(name, backend)

    def _wait_ready(
        self, node: node_module.ComputeNode, started: set[str], begun: datetime.datetime
    ) -> None:
        """Wait until every agent has reported, those that were started now since then, and the node
        has its place in nova.
        """
        wanted = {(agent.project, agent.name) for agent in self.services.agents() if not agent.node}
        limit = time.monotonic() + _READY_SECONDS
        discovered = False
        missing: set[str] = set()
        while time.monotonic() < limit:
            for name in self.processes.names():
                self.processes.check(name)
            reports = {service: self.api.services(service) for service in ('nova', 'cinder')}
            missing = {
                name
                for service, name in wanted
                if not any(
                    binary == name for binary, _host in _fresh(reports[service], started, begun)
                )
            }
            missing |= {
                f'{name} of {host}'
                for service, name, host in self._wanted_of_node(node.node)
                if (name, host) not in _fresh(reports[service], started, begun)
            }
            if (
                f'nova-compute of {node.node.name}' not in missing
                and node.node.name not in self.api.hypervisors()
            ):
                if not discovered:
                    self.services.discover_hosts()
                    discovered = True
                missing.add(f'hypervisor {node.node.name}')
            if not missing:
                # a backend that cannot be used has a service that is up, and no pool
                usable = self.api.volume_pools()
                missing |= {
                    f'pool of {host} (its reason is in the log of cinder-volume)'
                    for host in self._volume_hosts(node.node)
                    if not any(pool.startswith(f'{host}#') for pool in usable)
                }
            if not missing:
                return
            time.sleep(0.5)
        logs = ', '.join(sorted(missing))
        raise exception.PcowError(
            reason=f'not ready within {_READY_SECONDS:.0f} s: {logs}; look into '
            f'{self.settings.logs}'
        )

    def _wanted_of_node(self, node: settings_module.Node) -> list[tuple[str, str, str]]:
        """Agents of a node: service, name, and the host that they report as."""
        wanted = [('nova', 'nova-compute', node.name)]
        if hosts := self._volume_hosts(node):
            wanted += [('cinder', 'cinder-volume', host) for host in hosts]
            wanted += [('cinder', 'cinder-backup', node.name)]
        return wanted

    def _volume_hosts(self, node: settings_module.Node) -> list[str]:
        """Names of the volume backends of a node among cinder's services; a node that shares the
        pools has none.
        """
        if self.settings.shared_pools and node != settings_module.NODE1:
            return []
        return [
            f'{node.name}@{configuration_module.volume_type(name)}'
            for name in self.settings.volume_backends
        ]

    def _check_ports(self) -> None:
        """:raises PcowError: a port is taken by something else"""
        names = [*settings_module.PORTS]
        for name in names:
            port = self.settings.port(name)
            owner = {'rabbitmq-distribution': 'rabbitmq', 'sshd': ssh.SERVICE}.get(
                name, name if name in _LISTENERS else self.services.api_name(name)
            )
            if self.processes.pid(owner) is None and processes_module.port_open(port):
                raise exception.PcowError(
                    reason=f'port {port} ({name}) is in use on this machine: give another '
                    f'--port-offset'
                )

    def _write_openrc(self) -> None:
        values = {
            'OS_AUTH_URL': self.settings.url('keystone'),
            'OS_USERNAME': 'admin',
            'OS_PASSWORD': self.settings.password,
            'OS_PROJECT_NAME': 'admin',
            'OS_USER_DOMAIN_ID': 'default',
            'OS_PROJECT_DOMAIN_ID': 'default',
            'OS_IDENTITY_API_VERSION': '3',
            'OS_COMPUTE_API_VERSION': api_module.NOVA_VERSION,
            'OS_REGION_NAME': settings_module.REGION,
        }
        programs = self.settings.state / 'bin'
        programs.mkdir(exist_ok=True)
        for name in ('openstack', 'nova-manage', 'cinder-manage'):
            (programs / name).unlink(missing_ok=True)
            (programs / name).symlink_to(self.base.program(name))
        text = ''.join(f'export {name}={shlex.quote(value)}\n' for name, value in values.items())
        self.settings.openrc.touch(mode=0o600)
        self.settings.openrc.write_text(f'{text}PATH={shlex.quote(str(programs))}:$PATH\n')

    # Images

    def image(self, debian: bool) -> list[str]:
        """Put a guest into Glance, and flavors into Nova; returns the names of the image and of the
        flavors.

        :raises PcowError:
        """
        files = guest_module.prepare(debian)
        self.api.log_in()
        name = 'debian' if debian else 'pcow-guest'
        kernel = self.api.upload_image(f'{name}-kernel', files.kernel, 'aki')
        ramdisk = self.api.upload_image(f'{name}-ramdisk', files.initrd, 'ari')
        self.api.upload_image(
            name,
            files.image,
            'qcow2',
            kernel_id=kernel,
            ramdisk_id=ramdisk,
            os_command_line=guest_module.KERNEL_ARGUMENTS,
        )
        size = 'small' if debian else 'tiny'
        memory, disk = (512, 4) if debian else (160, 1)
        # what the flavor claims of the pool is not claimed of the host's disks as well
        specs = {
            'pcow:root': 'true',
            'resources:CUSTOM_PCOW_MB': str(disk * units.KIB),
            'resources:DISK_GB': '0',
        }
        self.api.create_flavor(f'pcow.{size}', memory, disk, specs)
        self.api.create_flavor(f'disk.{size}', memory, disk, {})
        return [name, f'pcow.{size}', f'disk.{size}']

    # Second node

    def node2(self, compute_driver: str) -> None:
        """Add a second node with the agents that the first one has as a node, as far as it is not
        there.

        :raises PcowError:
        """
        self.api.log_in()
        node = self.compute_node(settings_module.NODE2)
        try:
            started = set()
            begun = datetime.datetime.now(datetime.UTC)
            node.start_libvirtd()
            self.configuration.write_pcow(node.node)
            self._make_pools(node)
            self.configuration.write_nova(node.node, compute_driver)
            self.configuration.write_cinder(node.node)
            for agent in self._node2_agents():
                if self.processes.pid(node.service(agent.name)) is None:
                    node.start(agent.name, self.services.agent_command(agent, node.node))
                    started.add(agent.name)
            for one in (self.compute_node(settings_module.NODE1), node):
                one.start_sshd()
            self._wait_ready(node, started, begun)
        except BaseException:
            self.end_node2()
            raise

    def _node2_agents(self) -> list[services_module.Agent]:
        """One cinder-volume serves a pool: a second node that shares the pools has nothing of
        Cinder's.
        """
        agents = [agent for agent in self.services.agents() if agent.node]
        return (
            [agent for agent in agents if agent.project == 'nova']
            if self.settings.shared_pools
            else agents
        )

    def kill_and_start(self, name: str, ready: str) -> None:
        """SIGKILL for an agent of the first node, as a crash would end it, and a new one.

        :param ready: words of its log by which it works again
        :raises PcowError: it does not run, or does not start
        """
        self.processes.kill(name, name)
        self.start_agent(name, ready)

    def start_agent(self, name: str, ready: str) -> None:
        """One of the first node that does not run, as :meth:`kill_and_start` does."""
        (agent,) = (agent for agent in self.services.agents() if agent.name == name)
        log = self.processes.log(name)
        begin = log.stat().st_size
        command = self.services.agent_command(agent)
        self.compute_node(settings_module.NODE1).start(name, command)
        limit = time.monotonic() + _READY_SECONDS
        while ready.encode() not in log.read_bytes()[begin:]:
            self.processes.check(name)
            if time.monotonic() > limit:
                raise exception.PcowError(reason=f'{name} does not say {ready!r}: look into {log}')
            time.sleep(0.1)

    def has_node2(self) -> bool:
        """Whether it runs."""
        return (
            self.processes.pid(self.compute_node(settings_module.NODE2).service('nova-compute'))
            is not None
        )

    def end_node2(self) -> None:
        """As if its power failed: nothing of it runs any more, its servers neither."""
        node = self.compute_node(settings_module.NODE2)
        with _undisturbed():
            self.processes.end_node(
                *map(
                    node.service,
                    (*(agent.name for agent in self._node2_agents()), 'libvirtd', ssh.SERVICE),
                )
            )

    def on_node(self, name: str, *command: str) -> str:
        """Run a program on a compute node and return what it prints.

        :raises ToolFailed:
        """
        (node,) = (
            node for node in (settings_module.NODE1, settings_module.NODE2) if node.name == name
        )
        return self.compute_node(node).run(*command)

    # Down

    @contextlib.contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            with _undisturbed():
                self.say('ending what was started')
                self.processes.end()
            raise
        finally:
            self._workers.shutdown(cancel_futures=True)

    def down(self, purge: bool) -> None:
        """End everything.

        :param purge: and delete all that it kept
        """
        with _undisturbed():
            self.processes.end()
            shutil.rmtree(self.settings.temporary, ignore_errors=True)
            if purge:
                pools.purge(self.settings)
                shutil.rmtree(self.settings.state)

    def is_up(self) -> bool:
        """Whether all of it runs."""
        names = self.processes.names()
        wanted = {agent.name for agent in self.services.agents()} | {
            self.services.api_name(name) for name in _apis()
        }
        return wanted <= set(names) and all(self.processes.pid(name) is not None for name in names)


def _apis() -> tuple[str, ...]:
    return ('keystone', *settings_module.SERVICE_TYPES)


def _all(work: list[futures.Future[None]]) -> None:
    """Wait for them; the first failure is raised at once."""
    for future in futures.as_completed(work):
        future.result()


def _fresh(
    reports: dict[tuple[str, str], str], started: set[str], begun: datetime.datetime
) -> set[tuple[str, str]]:
    """Agents whose last report counts: an old one of an agent that was started again does not."""
    return {
        (name, host)
        for (name, host), when in reports.items()
        if name not in started
        or (when and datetime.datetime.fromisoformat(when).replace(tzinfo=datetime.UTC) > begun)
    }


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Clearing up is not interrupted."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
