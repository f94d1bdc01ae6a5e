# SPDX-License-Identifier: Apache-2.0
"""The all-in-one without its services: options, settings, configuration, finding and ending
processes.
"""

import configparser
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time

from pcow_driver.common import exception
from tests.unit.pcow_driver import base
from tools.lib.openstack_aio import allinone
from tools.lib.openstack_aio import configuration
from tools.lib.openstack_aio import environment
from tools.lib.openstack_aio import options
from tools.lib.openstack_aio import processes
from tools.lib.openstack_aio import settings
from tools.lib.openstack_aio import ssh
from tools.lib.openstack_aio import tempest
from tools.lib.quickstart import state

_REAPER = Path(processes.__file__).with_name('reaper.py')


class Case(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        holder = tempfile.TemporaryDirectory(prefix='aio-')
        self.addCleanup(holder.cleanup)
        self.directory = Path(holder.name)
        self.settings = settings.Settings.create(self.directory)


class OptionsTest(Case):
    def test_unusable(self) -> None:
        for words in (
            ('up', '--port-offset', '20000'),
            ('up', '--pool', str(self.directory / 'none')),
            ('up', '--volume-backend', 'pcow', '--no-volume-backend'),
            ('status', '--state', '/' + 'x' * 80),
            ('logs', '--lines', '0'),
        ):
            self.assertRaises(exception.UsageInvalid, options.parse, words)

    def test_volume_backends_once_each(self) -> None:
        chosen = options.parse(['up', '--volume-backend', 'pcow', '--volume-backend', 'pcow'])
        self.assertEqual(('pcow',), chosen.volume_backends)
        self.assertEqual((), options.parse(['up', '--no-volume-backend']).volume_backends)


class SettingsTest(Case):
    def test_saved_and_loaded(self) -> None:
        self.assertIsNone(settings.Settings.load(self.directory))
        self.settings.save()
        self.assertEqual(self.settings, settings.Settings.load(self.directory))
        self.assertEqual(0o600, (self.directory / settings.FILE).stat().st_mode & 0o777)

    def test_damaged(self) -> None:
        (self.directory / settings.FILE).write_text('{}')
        error = self.assertRaises(exception.PcowError, settings.Settings.load, self.directory)
        self.assertIn(str(self.directory / settings.FILE), str(error))


class ConfigurationTest(Case):
    def test_ini(self) -> None:
        text = configuration.to_ini(
            {'DEFAULT': {'debug': True, 'service_plugins': ''}, 'api': {'workers': 1}}
        )
        self.assertEqual('[DEFAULT]\ndebug = true\nservice_plugins =\n\n[api]\nworkers = 1\n', text)

    def test_nodes_have_their_own_nova(self) -> None:
        # not run here, and no QEMU need have been built
        self.configure(emulator=sys.executable)
        made = configuration.Configuration(self.settings, environment.base())
        found = []
        for node in (settings.NODE1, settings.NODE2):
            made.write_nova(node, 'libvirt.LibvirtDriver')
            parser = configparser.RawConfigParser(strict=False)
            parser.read(made.file('nova', node))
            found.append(parser)
        for section, option in (
            ('DEFAULT', 'host'),
            ('DEFAULT', 'my_ip'),
            ('DEFAULT', 'state_path'),
            ('libvirt', 'connection_uri'),
            ('nova_sys_admin', 'helper_command'),
        ):
            self.assertNotEqual(found[0][section][option], found[1][section][option], option)
        self.assertEqual(0o600, made.file('nova').stat().st_mode & 0o777)


class OpenrcTest(Case):
    def test_nova_checks_extra_specs(self) -> None:
        """Which it does not at the microversion that the openstack command asks for by default."""
        allinone.AllInOne(self.settings)._write_openrc()
        self.assertIn('export OS_COMPUTE_API_VERSION=2.86\n', self.settings.openrc.read_text())


class SshTest(Case):
    def test_nodes_by_name_and_address(self) -> None:
        client = ssh.Ssh(self.settings)
        client.prepare()
        show = ['/usr/bin/ssh', '-G', '-F', str(client.client / 'ssh_config')]
        for node in (settings.NODE1, settings.NODE2):
            for host in (node.name, node.address):
                said = subprocess.check_output([*show, host], text=True).splitlines()
                self.assertIn(f'hostname {node.address}', said)
                self.assertIn(f'port {self.settings.port("sshd")}', said)


class TempestTest(Case):
    def test_output(self) -> None:
        found = tempest.Found()
        for line in (
            '{0} tempest.api.T.test_a [0.1s] ... ok',
            '{0} tempest.api.T.test_b [1.5s] ... FAILED',
            '{0} setUpClass (tempest.api.U) [0.0s] ... FAILED',
            '{0} tempest.api.T.test_c ... SKIPPED: Skipped until bug 1',
            '{0} setUpClass (tempest.api.V) ... SKIPPED: Skipped until bug 1',
            '{0} tempest.api.T.test_d [0.0s] ... SKIPPED',
            'Traceback ... ok',
            '',
        ):
            found.take(line)
        self.assertEqual(1, found.passed)
        self.assertEqual(['tempest.api.T.test_b', 'setUpClass (tempest.api.U)'], found.failed)
        self.assertEqual({'Skipped until bug 1': 2, 'no reason is told': 1}, dict(found.skipped))
        self.assertEqual(
            '1 passed, 2 failed, 3 skipped (tests, or classes of them)',
            tempest.table(found).splitlines()[0],
        )
        found.left_out = {'no network': r'\.floating_ips\.'}
        self.assertEqual(
            r'left out no network: \.floating_ips\.', tempest.table(found).splitlines()[-1]
        )

    def test_suites(self) -> None:
        self.assertEqual(set(options.TEMPEST_SUITES), set(tempest.SUITES))
        self.assertEqual('volume', options.parse(['tempest', 'volume', '--only', 'api']).suite)

    def test_left_out(self) -> None:
        self.assertLessEqual(set(tempest.LEFT_OUT), set(tempest.SUITES))
        expression = '|'.join(tempest.LEFT_OUT['scenario'].values())
        for name, out in (
            ('test_minimum_basic.TestMinimumBasicScenario.test_minimum_basic_scenario', True),
            (
                'test_server_volume_attachment.TestServerVolumeAttachmentScenario.test_server_detach_rules',
                True,
            ),
            (
                'test_volume_boot_pattern.TestVolumeBootPatternV346.test_instance_boot_after_snapshot_deletion',
                True,
            ),
            ('test_server_basic_ops.TestServerBasicOps.test_server_basic_ops', False),
            (
                'test_volume_migrate_attached.TestVolumeMigrateRetypeAttached.test_volume_retype_attached',
                False,
            ),
        ):
            self.assertEqual(
                out, re.search(expression, f'tempest.scenario.{name}[id-1]') is not None, name
            )


class ProcessesTest(Case):
    def setUp(self) -> None:
        super().setUp()
        self.settings.logs.mkdir()
        self.settings.temporary.mkdir()
        self.processes = processes.Processes(self.settings)
        self.addCleanup(self.processes.end)

    def test_end_finds_what_a_service_started(self) -> None:
        # the service ends and leaves a child of another session behind
        self.processes.start('service', ('/bin/sh', '-c', 'setsid sleep 1000 & exit 0')).wait()
        left = self._all_of_one()
        self.assertEqual(1, len(left))
        self.processes.end()
        self.assertIsNone(state.start_time(left[0]))
        self.assertEqual([], self.processes.names())

    def test_a_process_whose_program_is_being_loaded(self) -> None:
        """It shows no environment for a moment; this one loads programs all the time."""
        again = 'exec /bin/sh -c "$0" "$0"'
        self.processes.start(
            'service', ('/bin/sh', '-c', 'setsid /bin/sh -c "$0" "$0" & exit 0', again)
        ).wait()
        found = self._all_of_one()
        for _ in range(50):
            self.assertEqual(found, self.processes.all())

    def _all_of_one(self) -> list[int]:
        end = time.monotonic() + 30
        while not (found := self.processes.all()) and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def test_others_are_not_ended(self) -> None:
        other = subprocess.Popen(('sleep', '1000'))
        self.addCleanup(other.wait)
        self.addCleanup(other.kill)
        self.processes.end()
        self.assertIsNone(other.poll())

    def test_failure_tells_the_end_of_the_log(self) -> None:
        error = self.assertRaises(
            exception.PcowError,
            self.processes.run,
            'made',
            ('/bin/sh', '-c', 'echo no such table; exit 1'),
        )
        self.assertIn('made failed: no such table', str(error))
        self.processes.start('api', ('/bin/sh', '-c', 'echo bad option >&2')).wait()
        error = self.assertRaises(exception.PcowError, self.processes.check, 'api')
        self.assertIn('api ended: bad option', str(error))

    def test_nothing_starts_after_the_end(self) -> None:
        self.processes.end()
        self.assertRaises(exception.PcowError, self.processes.start, 'late', ('sleep', '1000'))
        self.assertEqual([], self.processes.all())


class ReaperTest(Case):
    def test_waits_for_what_the_program_leaves(self) -> None:
        script = '(sleep 0.2; echo child) & exit 3'
        done = subprocess.run(
            (sys.executable, str(_REAPER), '/bin/sh', '-c', script),
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
        self.assertEqual((3, 'child\n'), (done.returncode, done.stdout))
