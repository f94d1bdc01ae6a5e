# SPDX-License-Identifier: Apache-2.0
"""OpenStack's own integration tests, run against the all-in-one on servers and volumes in
persistent memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
import contextlib
import dataclasses
import os
from pathlib import Path
import re
import signal
import subprocess

from pcow_driver.common import units
from tools.lib.openstack_aio import api as api_module
from tools.lib.openstack_aio import configuration
from tools.lib.openstack_aio import environment
from tools.lib.openstack_aio import guest
from tools.lib.openstack_aio import servers
from tools.lib.openstack_aio import settings as settings_module

# What is run by name: the tests, and whether their servers have a root in persistent memory.
# Volumes go to others as virtio disks, which can be taken away from a server that runs; an NVDIMM
# cannot.
SUITES: dict[str, tuple[str, bool]] = {
    'volume': (r'^(tempest\.api\.volume|cinder_tempest_plugin)\.', False),
    'compute': (r'^tempest\.api\.compute\.', True),
    'scenario': (r'^tempest\.scenario\.', True),
    'scenario-disk': (
        r'^tempest\.scenario\.test_(server_volume_attachment|volume_boot_pattern)\.',
        False,
    ),
}
_STAYS = 'persistent memory cannot be taken out of a running server, which they do with a volume'
_NO_VOLUME = 'a root in persistent memory is no volume, which they boot from'
_NO_NETWORK = 'servers have no network here'
# What a suite leaves out, by the reason: it could not pass, and would wait minutes before it fails.
LEFT_OUT: dict[str, dict[str, str]] = {
    'compute': {
        _STAYS: r'\.(AttachVolume|AttachSCSIVolume|VolumesAssistedSnapshots)'
        r'|test_rebuild_server_with_volume_attached'
        r'|test_rescued_vm_(attach|detach)_volume',
        _NO_VOLUME: r'\.(ServersTestBootFromVolume|ServerActionsV293Test)',
        _NO_NETWORK: r'\.floating_ips\.|\.(AutoAllocateNetwork|ServerAddresses|ServersTestMultiNic)'
        r'|test_list_security_groups_by_server|test_server_security_groups|security_group\b|test_remove_server_all_security_groups'
        r'|test_list_show_tenant_networks',
    },
    'scenario': {
        _STAYS: r'\.TestServerVolumeAttach',
        _NO_VOLUME: r'\.TestVolumeBootPattern',
        _NO_NETWORK: r'\.(TestMinimumBasicScenario|TestInstancesWithCinderVolumes'
        r'|TestVolumeBackupRestore)',
    },
}
_IMAGE = 'pcow-guest'
# properties of an image that such a server boots from
_BOOTS = ('kernel_id', 'ramdisk_id', 'os_command_line')
_FLAVORS = {
    True: ('pcow.tempest', 'pcow.tempest-large'),
    False: ('disk.tempest', 'disk.tempest-large'),
}
_MEMORY = 160  # MiB of a server
_SECONDS = 300  # that tempest waits for one step
_DONE = re.compile(r'^\{\d+\} (\S+(?: \(\S+\))?).* \.\.\. (ok|FAILED|SKIPPED(?:: (.*))?)$')


@dataclasses.dataclass
class Found:
    """What the tests of one run gave."""

    passed: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    # tests or classes of them, by reason
    skipped: Counter[str] = dataclasses.field(default_factory=Counter)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)  # expressions, by reason

    def take(self, line: str) -> None:
        """A line of tempest's output."""
        match = _DONE.match(line)
        if match is None:
            return
        name, outcome, reason = match.groups()
        if outcome == 'ok':
            self.passed += 1
        elif outcome == 'FAILED':
            self.failed.append(name)
        else:
            self.skipped[reason or 'no reason is told'] += 1


class Tempest:
    def __init__(self, settings: settings_module.Settings, api: api_module.Api) -> None:
        self._settings = settings
        self._api = api
        self._directory = settings.state / 'tempest'

    def run(self, suite: str, expression: str | None, say: Callable[[str], None]) -> Found:
        """Run a suite, or those of its tests that match an expression; the output goes to
        log/tempest-SUITE.log as well.

        :raises PcowError: it cannot be installed or set up
        """
        program = environment.prepare_tempest(say) / 'bin/tempest'
        tests, pmem = SUITES[suite]
        self._directory.mkdir(exist_ok=True)
        (self._directory / '.stestr.conf').write_text(_discovery(program))
        path = self._directory / 'tempest.conf'
        path.touch(mode=0o600)
        path.write_text(configuration.to_ini(self._configuration(pmem)))
        found = Found()
        command = [
            str(program),
            'run',
            '--config-file',
            str(path),
            '--concurrency',
            '1',
            '--regex',
            expression or tests,
        ]
        left_out = LEFT_OUT.get(suite, {})
        if left_out and not expression:
            command += ['--exclude-regex', '|'.join(left_out.values())]
            found.left_out = left_out
        # an openrc that was read would name another user than the configuration
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith('OS_')
        }
        with (
            open(self._settings.logs / f'tempest-{suite}.log', 'w') as log,
            subprocess.Popen(
                command,
                cwd=self._directory,
                env=variables | {'HOME': str(self._directory)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors='replace',
                start_new_session=True,
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    log.write(line)
                    log.flush()
                    found.take(line.rstrip())
                    if _DONE.match(line):
                        say(line.rstrip())
            finally:
                with contextlib.suppress(ProcessLookupError):
                    # the tests are its grandchildren
                    os.killpg(process.pid, signal.SIGTERM)
        return found

    def _flavors(self, pmem: bool) -> list[str]:
        """IDs of a flavor and of a larger one."""
        for disk, name in enumerate(_FLAVORS[pmem], 1):
            claims = {
                'pcow:root': 'true',
                'resources:CUSTOM_PCOW_MB': str(disk * units.KIB),
                'resources:DISK_GB': '0',
            }
            self._api.create_flavor(name, _MEMORY, disk, claims if pmem else {})
        return [servers.find_flavor(self._api, name) for name in _FLAVORS[pmem]]

    def _configuration(self, pmem: bool) -> dict[str, dict[str, object]]:
        nodes = len(self._api.hypervisors())
        image = servers.find_image(self._api, _IMAGE)
        details = self._api.call('glance', 'GET', f'/v2/images/{image}')
        small, large = self._flavors(pmem)
        logs = self._directory / 'log'
        logs.mkdir(exist_ok=True)
        return {
            'DEFAULT': {'log_dir': logs, 'log_file': 'tempest.log'},
            'oslo_concurrency': {'lock_path': self._directory / 'locks'},
            'auth': {
                'use_dynamic_credentials': True,
                'create_isolated_networks': False,
                'admin_username': 'admin',
                'admin_project_name': 'admin',
                'admin_domain_name': 'Default',
                'admin_password': self._settings.password,
                'tempest_roles': 'member',
            },
            'identity': {
                'uri_v3': self._settings.url('keystone'),
                'auth_version': 'v3',
                'region': settings_module.REGION,
                'default_domain_id': 'default',
            },
            'service_available': {
                'cinder': True,
                'glance': True,
                'neutron': True,
                'nova': True,
                'swift': False,
                'horizon': False,
            },
            # no network reaches the guests
            'validation': {'run_validation': False},
            'compute': {
                'image_ref': image,
                'image_ref_alt': image,
                'flavor_ref': small,
                'flavor_ref_alt': large,
                'min_compute_nodes': nodes,
                'build_timeout': _SECONDS,
                'max_microversion': 'latest',
                'volume_device_name': 'vdb',
            },
            'compute-feature-enabled': {
                'console_output': True,
                'resize': True,
                'cold_migration': nodes > 1,
                'live_migration': nodes > 1,
                'block_migration_for_live_migration': nodes > 1,
                'vnc_console': False,
                'personality': False,
                'change_password': False,
                'attach_encrypted_volume': False,
                'swap_volume': False,
                'volume_multiattach': False,
            },
            # some scenarios upload the image themselves
            'scenario': {
                'img_file': guest.prepare(debian=False).image,
                'img_disk_format': 'qcow2',
                'img_properties': ','.join(f'{key}:{details[key]}' for key in _BOOTS),
            },
            'image': {'build_timeout': _SECONDS},
            'volume': {
                'catalog_type': settings_module.SERVICE_TYPES['cinder'][0],
                'build_timeout': _SECONDS,
                'volume_size': 1,
                'storage_protocol': 'pcow',
                'vendor_name': 'pcow',
                'max_microversion': 'latest',
                'manage_snapshot_ref': 'source-name,snapshot-%s',
            },
            'volume-feature-enabled': {
                'backup': True,
                'clone': True,
                'snapshot': True,
                'manage_volume': True,
                'manage_snapshot': True,
                'extend_with_snapshot': True,
                'extend_attached_volume': False,
                'volume_revert': True,
                'multi_backend': False,
                'consistency_group': False,
            },
        }


def _discovery(program: Path) -> str:
    """Where stestr finds the tests, plug-ins included; those of a class are run in one process, as
    "tempest init" has it.
    """
    packages = next(program.parents[1].glob('lib/python3*/site-packages'))
    return (
        f'[DEFAULT]\ntest_path={packages}/tempest/test_discover\n'
        f'top_dir={packages}\ngroup_regex=([^\\.]*\\.)*\n'
    )


def table(found: Found) -> str:
    """For people: counts, then what failed, then why what was skipped."""
    skipped = sum(found.skipped.values())
    lines = [
        f'{found.passed} passed, {len(found.failed)} failed, {skipped} skipped (tests, or classes '
        f'of them)'
    ]
    lines += [f'FAILED   {name}' for name in found.failed]
    lines += [f'skipped  {count:3}  {reason}' for reason, count in found.skipped.most_common()]
    lines += [f'left out {reason}: {expression}' for reason, expression in found.left_out.items()]
    return '\n'.join(lines)
