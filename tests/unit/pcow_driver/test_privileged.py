# SPDX-License-Identifier: Apache-2.0
"""What the entry points that run as root refuse; and that a daemon with few capabilities serves them, and nothing else."""

import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
from typing import Any

import fixtures
from oslo_privsep import priv_context

from pcow_driver import exception
from pcow_driver import immutable
from pcow_driver import pool as pool_module
from pcow_driver import privileged
from pcow_driver.privileged import checks
from pcow_driver.privileged import files
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import namespaces
from tests.unit.pcow_driver import base

ENTRY_POINTS = {
    'pcow_driver.privileged.namespaces': {
        'check_unused', 'disable_region', 'enable_region', 'init_labels', 'create', 'reconfigure', 'destroy', 'has_label_area',
        'label_area_holds_something'},
    'pcow_driver.privileged.filesystems': {
        'signature', 'check_formattable', 'uuid', 'make', 'make_directory', 'remove_directory', 'mount', 'mount_memory',
        'resize_memory', 'grow', 'unmount', 'set_extent_hint', 'give', 'wipe', 'install_unit', 'uninstall_unit', 'reload_units'},
    'pcow_driver.privileged.files': {'set_immutable'},
}
BAD_NAMES = ('', 'all', '-f', 'region', 'region0 ', 'region0;x', '--help', '../region0', 'region0\n', 0, None)
BAD_DEVICES = ('', 'pmem0', '/etc/passwd', '/dev/../etc/passwd', '/dev/shm/../../etc/passwd', '/dev/-f', '/dev/pmem0 -f',
               '/dev/', None)
BAD_DIRECTORIES = ('', 'pools/x', '/', '/etc', '/etc/cron.d', '/mnt', '/mnt/../etc', '/mnt/x/../../etc', '/mnt//x', '/mnt/x\ny',
                   None)


class EntryPointTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        privileged.context.set_client_mode(False)
        self.addCleanup(privileged.context.set_client_mode, True)
        self.pools = self.directory / 'pools'
        self.pools.mkdir()
        self.configure(pools_path=str(self.pools))
        # whatever is run says so
        self.ran = self.directory / 'ran'
        for name in ('ndctl', 'mkfs.xfs', 'mkfs.ext4', 'mount', 'umount', 'xfs_io', 'xfs_growfs', 'resize2fs', 'wipefs',
                     'systemctl'):
            self.script(name, f'#!/bin/sh\necho "$0 $*" >>{self.ran}\n')
        self.useFixture(fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}'))

    def refuse(self, function: Any, *arguments: Any) -> None:
        """It fails with an error of ours, and nothing was run."""
        error = self.assertRaises(exception.PcowError, function, *arguments)
        self.assertTrue(str(error))
        self.assertFalse(self.ran.exists(), f'{function} {arguments}: {self.ran.read_text() if self.ran.exists() else ""}')

    def test_these_are_all(self) -> None:
        """One that is new has its refusals below, too."""
        for module in (namespaces, filesystems, files):
            found = {name for name, value in vars(module).items() if privileged.context.is_entrypoint(value)}
            self.assertEqual(ENTRY_POINTS[module.__name__], found)

    def test_names(self) -> None:
        for name in BAD_NAMES:
            for function in (namespaces.check_unused, namespaces.disable_region, namespaces.enable_region, namespaces.destroy,
                             namespaces.has_label_area, namespaces.label_area_holds_something):
                self.refuse(function, name)
            self.refuse(namespaces.create, name, None, 2 << 20, 'n')
            self.refuse(namespaces.reconfigure, name, 2 << 20, True)
            self.refuse(namespaces.init_labels, [name], False)
            self.refuse(namespaces.init_labels, [name], True)
        for align in (4096, 0, '2M', None):
            self.refuse(namespaces.create, 'region0', None, align, 'n')
            self.refuse(namespaces.reconfigure, 'namespace0.0', align, True)
        self.refuse(namespaces.reconfigure, 'namespace9.9', 2 << 20, False)       # nobody can see what it holds
        for size in (0, -1, '1G', True, 1 << 60):
            self.refuse(namespaces.create, 'region0', size, 2 << 20, 'n')
        for label in ('', '-x', 'a/b', 'a\nb', None):
            self.refuse(namespaces.create, 'region0', None, 2 << 20, label)

    def test_devices(self) -> None:
        (self.pools / 'p').mkdir()
        for device in BAD_DEVICES:
            self.refuse(filesystems.signature, device)
            self.refuse(filesystems.check_formattable, device, True)
            self.refuse(filesystems.uuid, device)
            self.refuse(filesystems.make, 'xfs', device, 'l', 'anything')
            self.refuse(filesystems.mount, 'xfs', device, str(self.pools / 'p'))
            self.refuse(filesystems.wipe, device, '')
            self.refuse(filesystems.install_unit, 'p', device, str(self.pools / 'p'), 'xfs')
        self.refuse(filesystems.make, 'xfs', '/dev/null', 'l', 'anything')            # no block device
        self.refuse(filesystems.wipe, '/dev/null', '')
        self.refuse(filesystems.mount, 'xfs', '/dev/null', str(self.pools / 'p'))
        self.refuse(filesystems.make, 'btrfs', '/dev/pmem0', 'l', 'anything')
        self.refuse(filesystems.make, 'xfs', '/dev/pmem0', 'l', 'everything')
        self.refuse(filesystems.mount, 'btrfs', '/dev/pmem0', str(self.pools / 'p'))

    def test_a_place_where_others_may_write(self) -> None:
        """mount(8) would take a file, and who may write there may exchange it between two looks."""
        (self.pools / 'p').mkdir()
        with tempfile.NamedTemporaryFile(dir='/dev/shm', prefix='pcow_test_') as file:
            for function, arguments in ((filesystems.mount, ('xfs', file.name, str(self.pools / 'p'))),
                                        (filesystems.signature, (file.name,)), (filesystems.wipe, (file.name, ''))):
                self.assertIn('others than root may write to /dev/shm', str(self.assertRaises(
                    exception.InvalidName, function, *arguments)))
        self.assertFalse(self.ran.exists())

    def test_directories(self) -> None:
        (self.pools / 'link').symlink_to('/etc')
        (self.pools / 'full').mkdir()
        (self.pools / 'full/file').touch()
        for directory in (*BAD_DIRECTORIES, str(self.pools), str(self.pools / 'link'), str(self.pools / 'link/x')):
            for function in (filesystems.make_directory, filesystems.remove_directory, filesystems.grow, filesystems.unmount,
                             filesystems.set_extent_hint, filesystems.uninstall_unit):
                self.refuse(function, directory)
            self.refuse(filesystems.mount, 'xfs', '/dev/pmem0', directory)
            self.refuse(filesystems.mount_memory, 'p', 1 << 30, directory, False)
            self.refuse(filesystems.resize_memory, directory, 1 << 30)
            self.refuse(filesystems.give, directory, 1000, 1000)
            self.refuse(filesystems.install_unit, 'p', '/dev/null', directory, 'xfs')
        full = str(self.pools / 'full')
        self.refuse(filesystems.mount_memory, 'p', 1 << 30, full, False)      # it would hide the file
        self.refuse(filesystems.unmount, full)                         # nothing is mounted there
        self.refuse(filesystems.grow, full)
        self.refuse(filesystems.give, full, 1000, 1000)
        self.refuse(filesystems.mount_memory, 'p', 0, str(self.pools / 'new'), False)

    def test_an_empty_directory_below_the_pools_can_be_a_mount_point(self) -> None:
        path = str(self.pools / 'a/b')
        filesystems.make_directory(path)
        filesystems.mount_memory('p', 1 << 30, path, False)
        self.assertIn(f'mount -t tmpfs -o size={1 << 30},huge=advise,mode=0711 pcow-p {path}', self.ran.read_text())
        filesystems.remove_directory(path)
        self.assertEqual('/mnt/pool', checks.mount_point('/mnt/pool'))

    def test_immutable_files(self) -> None:
        """Only sealed images of pools."""
        self.script('pcow-img', '#!/bin/sh\ncase $6 in */t.pcow) s=true ;; *) s=false ;; esac\n'
                    'echo "{\\"format-specific\\": {\\"data\\": {\\"sealed\\": $s}}}"\n')
        self.configure(pcow_img=str(self.directory / 'pcow-img'))
        pool = self.directory / 'pool'
        pool_module.make('p', str(pool))
        for name in ('vm.pcow', 't.raw', '../p.pcow'):
            (pool / name).touch()
            self.refuse(files.set_immutable, str(pool / name), True)
        (pool / 'link.pcow').symlink_to('/etc/passwd')
        self.refuse(files.set_immutable, str(pool / 'link.pcow'), True)
        self.refuse(files.set_immutable, str(self.directory / 'elsewhere.pcow'), True)
        self.refuse(files.set_immutable, 'pool/t.pcow', True)
        self.assertEqual(str(pool / 't.pcow'), immutable.checked(str(pool / 't.pcow')))


class ErrorTest(base.TestCase):
    def test_errors_are_made_again_of_their_arguments(self) -> None:
        """As oslo.privsep does with what the daemon raises."""
        error = exception.ToolFailed(tool='mount', exit_code=32, message='busy')
        again = type(error)(*json.loads(json.dumps(error.args)))
        self.assertEqual((str(error), error.details), (str(again), again.details))
        self.assertEqual('busy', str(again))


# What a process does that is not root (nobody) and whose daemon was forked before it gave root up.
_CLIENT = """
import os, sys
from oslo_privsep import priv_context
from pcow_driver import conf, exception, privileged
from pcow_driver.cli import app
from pcow_driver.privileged import filesystems, namespaces
state, pools = sys.argv[1:3]
conf.CONF([], project='pcow', default_config_files=[state + '/pcow.conf'])
privileged.context.start(priv_context.Method.FORK)
os.setgid(65534)
os.setuid(65534)
for function, arguments in ((filesystems.unmount, ('/proc',)), (filesystems.wipe, ('/dev/../etc/passwd', '')),
                            (namespaces.destroy, ('--all',))):
    try:
        function(*arguments)
    except exception.PcowError as e:
        print('refused:', e)
try:
    privileged.context.channel.remote_call('os.system', ('id',), {}, 10.0)
except NameError as e:
    print('refused:', e)
run = lambda *words: app.main(['--config-file', state + '/pcow.conf', *words])
print(run('pool', 'create', 'quick', '--memory', '--size', '32M'), flush=True)
os.system('stat -c %U:%a ' + pools + '/quick')
print(run('pool', 'extend', 'quick', '--size', '64M', '-f', 'value', '-c', 'total'), flush=True)
print(run('pool', 'remove', 'quick', '--destroy'), os.path.ismount(pools + '/quick'), flush=True)
"""


class DaemonTest(base.TestCase):
    """With the real oslo.privsep, as root once and as nobody from then on."""

    def test_pool_of_somebody_who_is_not_root(self) -> None:
        if os.geteuid() != 0:
            self.fail('the unit tests run as root: they make pools')
        pools = self.directory / 'pools'
        pools.mkdir()
        state = self.directory / 'state'
        state.mkdir()
        os.chown(state, 65534, 65534)
        pcow_img = Path(os.environ.get('PCOW_BIN_DIR', base.TOP / 'build/bin')) / 'pcow-img'
        (state / 'pcow.conf').write_text(f'[pcow]\nstate_path = {state}\npools_path = {pools}\npcow_img = {pcow_img}\n')
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_uid == os.geteuid() and directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        self.addCleanup(subprocess.run, ['umount', '-q', pools / 'quick'], check=False)
        done = subprocess.run([sys.executable, '-c', _CLIENT, state, pools], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=60, cwd=base.TOP, check=False)
        said = done.stdout
        self.assertEqual(0, done.returncode, said + done.stderr)
        self.assertEqual(4, said.count('refused: '), said + done.stderr)
        self.assertIn('os.system not exported', said)
        self.assertIn('nobody:711', said)
        self.assertRegex(said, r'(?s)0\n.*\b67108864\b.*0\n0 False\n')
        self.assertIn('mount -t tmpfs', done.stderr)


# A process that has the daemon started by the command of the configuration.
_STARTER = """
import os, sys
from pcow_driver import conf, exception
from pcow_driver.privileged import context, filesystems
conf.CONF([], project='pcow', default_config_files=[sys.argv[1]])
filesystems.make_directory(sys.argv[2])
try:
    filesystems.make_directory('/etc/pool')
except exception.UsageInvalid as e:
    print('refused:', e)
print(context.channel is not None, os.path.isdir(sys.argv[2]))
"""


class HelperTest(base.TestCase):
    def test_started_by_the_command(self) -> None:
        """As sudo would; the daemon finds the context and the configuration by itself."""
        pools = self.directory / 'pools'
        pools.mkdir()
        configuration = self.directory / 'pcow.conf'
        helper = Path(sys.executable).with_name('privsep-helper')
        configuration.write_text(f'[pcow]\npools_path = {pools}\n[pcow_privileged]\n'
                                 f'helper_command = {helper} --config-file {configuration}\n')
        done = subprocess.run([sys.executable, '-c', _STARTER, configuration, pools / 'new'], stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=60, cwd=base.TOP, check=False)
        self.assertIn('refused: /etc/pool cannot be a mount point', done.stdout, done.stderr)
        self.assertIn('True True', done.stdout)

    def test_command(self) -> None:
        """As sudo's or rootwrap's configuration names it."""
        self.assertIsInstance(privileged.context, priv_context.PrivContext)
        command = privileged.context.helper_command('/run/x.sock')
        self.assertEqual(['sudo', 'privsep-helper'], command[:2])
        self.assertEqual('pcow_driver.privileged.context', command[command.index('--privsep_context') + 1])
