# SPDX-License-Identifier: Apache-2.0
"""What the entry points that run as root refuse; and that a daemon with few capabilities serves
them, and nothing else.
"""

import grp
import json
import os
from pathlib import Path
import re
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import fixtures
from oslo_privsep import priv_context

from pcow_driver.cli import app
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.pools import pool as pool_module
from pcow_driver.pools import registry
from pcow_driver.privileged import administration
from pcow_driver.privileged import checks
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import helper
from pcow_driver.privileged import namespaces
from pcow_driver.privileged import services
from pcow_driver.provision import provision
from tests.unit.pcow_driver import base

ENTRY_POINTS = {
    'pcow_driver.privileged.namespaces': {
        'check_unused',
        'disable_region',
        'enable_region',
        'init_labels',
        'create',
        'reconfigure',
        'destroy',
        'has_label_area',
        'label_area_holds_something',
    },
    'pcow_driver.privileged.filesystems': {
        'signature',
        'check_formattable',
        'uuid',
        'make',
        'make_directory',
        'remove_directory',
        'mount',
        'mount_memory',
        'resize_memory',
        'grow',
        'unmount',
        'set_extent_hint',
        'give',
        'wipe',
        'install_unit',
        'uninstall_unit',
        'reload_units',
    },
    'pcow_driver.privileged.services': {'set_immutable'},
}
BAD_NAMES = (
    '',
    'all',
    '-f',
    'region',
    'region0 ',
    'region0;x',
    '--help',
    '../region0',
    'region0\n',
    0,
    None,
)
BAD_DEVICES = (
    '',
    'pmem0',
    '/etc/passwd',
    '/dev/../etc/passwd',
    '/dev/shm/../../etc/passwd',
    '/dev/-f',
    '/dev/pmem0 -f',
    '/dev/',
    None,
)
BAD_DIRECTORIES = (
    '',
    'pools/x',
    '/',
    '/etc',
    '/etc/cron.d',
    '/mnt',
    '/mnt/../etc',
    '/mnt/x/../../etc',
    '/mnt//x',
    '/mnt/x\ny',
    None,
)


class EntryPointTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.pools = self.directory / 'pools'
        self.pools.mkdir()
        self.configure(pools_path=str(self.pools))
        # whatever is run says so
        self.ran = self.directory / 'ran'
        for name in (
            'ndctl',
            'mkfs.xfs',
            'mkfs.ext4',
            'mount',
            'umount',
            'xfs_io',
            'xfs_growfs',
            'resize2fs',
            'wipefs',
            'systemctl',
        ):
            self.script(name, f'#!/bin/sh\necho "$0 $*" >>{self.ran}\n')
        self.useFixture(
            fixtures.EnvironmentVariable('PATH', f'{self.directory}:{os.environ["PATH"]}')
        )

    def refuse(self, function: Any, *arguments: Any) -> None:
        """It fails with an error of ours, and nothing was run."""
        error = self.assertRaises(exception.PcowError, function, *arguments)
        self.assertTrue(str(error))
        self.assertFalse(
            self.ran.exists(),
            f'{function} {arguments}: {self.ran.read_text() if self.ran.exists() else ""}',
        )

    def test_these_are_all(self) -> None:
        """One that is new has its refusals below, too."""
        for module in (namespaces, filesystems, services):
            found = {
                name
                for name, value in vars(module).items()
                if administration.is_entrypoint(value) or services.context.is_entrypoint(value)
            }
            self.assertEqual(ENTRY_POINTS[module.__name__], found)

    def test_names(self) -> None:
        for name in BAD_NAMES:
            for function in (
                namespaces.check_unused,
                namespaces.disable_region,
                namespaces.enable_region,
                namespaces.destroy,
                namespaces.has_label_area,
                namespaces.label_area_holds_something,
            ):
                self.refuse(function, name)
            self.refuse(namespaces.create, name, None, 2 << 20, 'n')
            self.refuse(namespaces.reconfigure, name, 2 << 20, True)
            self.refuse(namespaces.init_labels, [name], False)
            self.refuse(namespaces.init_labels, [name], True)
        for align in (4096, 0, '2M', None):
            self.refuse(namespaces.create, 'region0', None, align, 'n')
            self.refuse(namespaces.reconfigure, 'namespace0.0', align, True)
        # nobody can see what it holds
        self.refuse(namespaces.reconfigure, 'namespace9.9', 2 << 20, False)
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
        # no block device
        self.refuse(filesystems.make, 'xfs', '/dev/null', 'l', 'anything')
        self.refuse(filesystems.wipe, '/dev/null', '')
        self.refuse(filesystems.mount, 'xfs', '/dev/null', str(self.pools / 'p'))
        self.refuse(filesystems.make, 'btrfs', '/dev/pmem0', 'l', 'anything')
        self.refuse(filesystems.make, 'xfs', '/dev/pmem0', 'l', 'everything')
        self.refuse(filesystems.mount, 'btrfs', '/dev/pmem0', str(self.pools / 'p'))

    def test_a_place_where_others_may_write(self) -> None:
        """mount(8) would take a file, and who may write there may exchange it between two looks."""
        (self.pools / 'p').mkdir()
        with tempfile.NamedTemporaryFile(dir='/dev/shm', prefix='pcow_test_') as file:
            for function, arguments in (
                (filesystems.mount, ('xfs', file.name, str(self.pools / 'p'))),
                (filesystems.signature, (file.name,)),
                (filesystems.wipe, (file.name, '')),
            ):
                self.assertIn(
                    'others than root may write to /dev/shm',
                    str(self.assertRaises(exception.InvalidName, function, *arguments)),
                )
        self.assertFalse(self.ran.exists())

    def test_directories(self) -> None:
        (self.pools / 'link').symlink_to('/etc')
        (self.pools / 'full').mkdir()
        (self.pools / 'full/file').touch()
        for directory in (
            *BAD_DIRECTORIES,
            str(self.pools),
            str(self.pools / 'link'),
            str(self.pools / 'link/x'),
        ):
            for function in (
                filesystems.make_directory,
                filesystems.remove_directory,
                filesystems.grow,
                filesystems.unmount,
                filesystems.set_extent_hint,
                filesystems.uninstall_unit,
            ):
                self.refuse(function, directory)
            self.refuse(filesystems.mount, 'xfs', '/dev/pmem0', directory)
            self.refuse(filesystems.mount_memory, 'p', 1 << 30, directory, False)
            self.refuse(filesystems.resize_memory, directory, 1 << 30)
            self.refuse(filesystems.give, directory, 1000, 1000)
            self.refuse(filesystems.install_unit, 'p', '/dev/null', directory, 'xfs')
        full = str(self.pools / 'full')
        # it would hide the file
        self.refuse(filesystems.mount_memory, 'p', 1 << 30, full, False)
        self.refuse(filesystems.unmount, full)  # nothing is mounted there
        self.refuse(filesystems.grow, full)
        self.refuse(filesystems.give, full, 1000, 1000)
        self.refuse(filesystems.mount_memory, 'p', 0, str(self.pools / 'new'), False)

    def test_an_empty_directory_below_the_pools_can_be_a_mount_point(self) -> None:
        path = str(self.pools / 'a/b')
        filesystems.make_directory(path)
        self.script('mount', f'#!/bin/sh\necho "$0 $* in $(pwd -P)" >>{self.ran}\n')
        # this one mounts nothing
        self.assertRaises(
            exception.UsageInvalid, filesystems.mount_memory, 'p', 1 << 30, path, False
        )
        self.assertIn(
            f'mount -t tmpfs -o size={1 << 30},huge=advise,mode=0711,nosuid,nodev pcow-p . in '
            f'{path}',
            self.ran.read_text(),
        )
        filesystems.remove_directory(path)
        self.assertEqual('/mnt/pool', checks.mount_point('/mnt/pool'))


class ErrorTest(base.TestCase):
    def test_errors_are_made_again_of_their_arguments(self) -> None:
        """As oslo.privsep does with what the daemon raises."""
        error = exception.ToolFailed(tool='mount', exit_code=32, message='busy')
        again = type(error)(*json.loads(json.dumps(error.args)))
        self.assertEqual((str(error), error.details), (str(again), again.details))
        self.assertEqual('busy', str(again))


# A service that is not root (nobody). It can become root again only until the daemon is started:
# _SUDO does, as sudo would.
_SERVICE = """
import os, sys
from pcow_driver.common import conf, exception, immutable
from pcow_driver.images import protection
from pcow_driver.privileged import services
helper, path, *refused = sys.argv[1:]
conf.CONF([], project='pcow', default_config_files=[])
conf.CONF.set_override('helper_command', helper, 'pcow_privileged')
os.setgroups([])
os.setresgid(0, 65534, 0)
os.setresuid(0, 65534, 0)
services.context.start()
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print('protected:', protection.protect(path), immutable.is_set(path))
for name in refused:
    for wanted in (True, False):
        try:
            services.set_immutable(name, wanted)
            print('done:', name)
        except (exception.PcowError, OSError) as e:
            print('refused:', e)
call = services.context.channel.remote_call
for name in ('os.system', 'pcow_driver.privileged.filesystems.unmount',
             'pcow_driver.common.immutable.set_flag'):
    try:
        call(name, ('/proc',), {}, 10.0)
    except NameError as e:
        print('refused:', e)
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        place = os.path.dirname(os.path.dirname(path)).encode()
        if place in open(f'/proc/{pid}/cmdline', 'rb').read() and pid != str(os.getpid()):
            print(*(f'daemon {line}' for line in open(f'/proc/{pid}/status')))
    except (FileNotFoundError, ProcessLookupError):
        pass                   # another process, which has ended
protection.unprotect(path)
print('unprotected:', not immutable.is_set(path))
"""
_SUDO = (
    'import os, sys; os.setresuid(0, 0, 0); os.setresgid(0, 0, 0); os.execv(sys.argv[1], '
    'sys.argv[1:])'
)
_HELPER = (
    'from pcow_driver.privileged import helper; import sys; sys.exit(helper.main(sys.argv[1:]))'
)


class ServiceTest(base.TestCase):
    """With the real oslo.privsep, the real flag of a real file system, and a daemon that root
    starts for nobody.
    """

    def setUp(self) -> None:
        super().setUp()
        if os.geteuid() != 0:
            self.fail('the unit tests run as root: they make pools')
        self.place = Path(tempfile.mkdtemp(prefix='pcow-test-privileged-', dir='/var/tmp'))
        self.addCleanup(subprocess.run, ['rm', '-rf', self.place], check=True)
        self.addCleanup(subprocess.run, ['chattr', '-R', '-f', '-i', self.place], check=False)
        self.place.chmod(0o755)
        self.pool('pool')

    def pool(self, name: str, *, owner: int = 65534, group: int = 65534, mode: int = 0o711) -> None:
        pool_module.make('p', str(self.place / name))
        os.chown(self.place / name, owner, group)
        (self.place / name).chmod(mode)

    def image(self, name: str, *, owner: int = 65534, sealed: bool = True) -> Path:
        path = self.place / name
        with path.open('wb') as f:
            f.write(
                b'\x89PCOW\r\n\x1a\n'[:8].ljust(552, b'\0') + bytes((int(sealed),)) + bytes(4096)
            )
        os.chown(path, owner, 65534)
        return path

    def serve(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, '-c', _SERVICE, command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=base.TOP,
            check=False,
        )

    def command(self, *arguments: str) -> str:
        return shlex.join(
            (
                sys.executable,
                '-c',
                _SUDO,
                sys.executable,
                '-c',
                f'{_HELPER}  # {self.place}',
                *arguments,
            )
        )

    def test_own_templates_and_nothing_else(self) -> None:
        """Runs as the service, with one capability."""
        for name, options in (
            ('foreign', {'owner': 0}),
            ('writable', {'mode': 0o777}),
            ('shared', {'owner': 0, 'mode': 0o775}),
        ):
            self.pool(name, **options)
        (self.place / 'none').mkdir()
        os.chown(self.place / 'none', 65534, 65534)
        own = self.image('pool/t.pcow')
        shared = self.image('shared/t.pcow')
        refused = [
            self.image('pool/roots.pcow', owner=0),
            self.image('pool/writable.pcow', sealed=False),
            self.image('foreign/t.pcow'),
            self.image('writable/t.pcow'),
            self.image('none/t.pcow'),
            self.image('pool/t.raw'),
            self.place / 'pool/fifo.pcow',
            self.place / 'pool/link.pcow',
            self.place / 'link/t.pcow',
            self.place / 'pool/none.pcow',
            self.place / 'pool/../pool/t.pcow',
        ]
        os.mkfifo(refused[6])
        os.chown(refused[6], 65534, 65534)
        refused[7].symlink_to(self.image('pool/behind.pcow'))
        (self.place / 'link').symlink_to(self.place / 'pool')
        done = self.serve(self.command(), own, *refused, shared)
        said = done.stdout + done.stderr
        self.assertEqual(0, done.returncode, said)
        self.assertIn('protected: True True', said)
        self.assertIn('unprotected: True', said)
        self.assertEqual(
            f'done: {shared} ' * 2,
            ''.join(f'{line} ' for line in re.findall('done: .*', said)),
            said,
        )
        self.assertEqual(2 * len(refused) + 3, said.count('refused: '), said)
        for name in ('os.system', 'unmount', 'set_flag'):
            self.assertRegex(said, f'{name} not exported')
        self.assertFalse(any(immutable.is_set(str(path)) for path in self.place.rglob('*')))
        for line in (
            'Uid:\t65534\t65534\t65534\t65534',
            'Gid:\t65534\t65534\t65534\t65534',
            'CapPrm:\t0000000000000200',
            'CapEff:\t0000000000000200',
            'CapInh:\t0000000000000000',
        ):
            self.assertIn(f'daemon {line}', said)

    def test_helper_takes_nothing_from_its_caller(self) -> None:
        """sudo may run it with any arguments: no other context, no configuration, nothing twice."""
        configuration = self.directory / 'evil.conf'
        configuration.write_text(
            '[pcow_privileged]\ncapabilities = CAP_SYS_ADMIN,CAP_DAC_OVERRIDE\nuser = root\n'
        )
        context = ['--privsep_context', services.CONTEXT, '--privsep_sock_path', '/nonexistent']
        for arguments in (
            ['--config-file', str(configuration), *context],
            ['--privsep_context', 'os.path', *context[2:]],
            [*context, '--privsep_context', 'pcow_driver.privileged.administration.entrypoint'],
            ['--config-dir', '/', *context],
            [],
            context[:2],
            context[2:],
            [*context, 'more'],
            ['--privsep_con', services.CONTEXT, *context[2:]],
            context,
        ):
            self.assertEqual(
                2, self.assertRaises(SystemExit, helper.main, arguments).code, str(arguments)
            )
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.directory / 'socket'))
            listener.listen()
            said = self.useFixture(fixtures.StringStream('stderr')).stream
            with mock.patch('sys.stderr', said):
                self.assertRaises(
                    SystemExit, helper.main, [*context[:3], str(self.directory / 'socket')]
                )
            said.seek(0)
            self.assertIn('root needs no daemon', said.read())
        # the environment is not the caller's either: oslo.config would read it
        environment = os.environ | {
            'OS_PCOW_PRIVILEGED__CAPABILITIES': 'CAP_SYS_ADMIN',
            'OS_PCOW_PRIVILEGED__USER': 'root',
        }
        with mock.patch.dict(os.environ, environment):
            self.assertIn(
                'daemon CapEff:\t0000000000000200',
                self.serve(self.command(), self.image('pool/t.pcow')).stdout,
            )

    def test_helper_of_oslo(self) -> None:
        """A rule that lets a service start ``privsep-helper`` with anything gives it nothing of
        pcow's.
        """
        program = Path(sys.executable).with_name('privsep-helper')
        done = self.serve(
            shlex.join((sys.executable, '-c', _SUDO, str(program))), self.image('pool/t.pcow')
        )
        self.assertIn('protected: False False', done.stdout, done.stderr)
        contexts = {
            id(value)
            for module in (services, administration, namespaces, filesystems, checks)
            for value in vars(module).values()
            if isinstance(value, priv_context.PrivContext)
        }
        self.assertEqual({id(services.context)}, contexts)
        code = (
            f'import os; os.setuid(65534); from pcow_driver.privileged import filesystems as f; '
            f'f.unmount({str(self.place)!r})'
        )
        done = subprocess.run(
            [sys.executable, '-c', code],
            capture_output=True,
            text=True,
            cwd=base.TOP,
            timeout=60,
            check=False,
        )
        self.assertIn('RootNeeded: only root may do this', done.stderr)


class OwnerTest(base.TestCase):
    def test_pool_of_somebody_who_is_not_root(self) -> None:
        """Root makes it, and gives it away when all is done."""
        pools = self.directory / 'pools'
        pools.mkdir()
        self.addCleanup(subprocess.run, ['umount', '-q', pools / 'quick'], check=False)
        configuration = self.directory / 'pcow.conf'
        configuration.write_text(
            f'[pcow]\nstate_path = {self.directory}/state\npools_path = {pools}\n'
        )

        def ctl(*words: str) -> int:
            return app.main(['--config-file', str(configuration), 'pool', *words])

        self.configure(pools_path=str(pools))
        lines = list(
            provision.plan_memory(
                'quick', str(pools / 'quick'), 32 << 20, owner=(65534, 65534)
            ).lines()
        )
        self.assertRegex(
            '; '.join(lines), 'mount -t tmpfs .*; .*register pool quick.*; chown 65534:65534 [^;]*$'
        )
        self.assertEqual(
            0, ctl('create', 'quick', '--memory', '--size', '32M', '--owner', 'nobody')
        )
        status = (pools / 'quick').stat()
        kvm = grp.getgrnam('kvm').gr_gid
        self.assertEqual(
            (65534, kvm, 0o710), (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
        )
        self.assertEqual(0, ctl('extend', 'quick', '--size', '64M'))
        self.assertEqual(64 << 20, registry.PoolRegistry().get('quick').capacity().total)
        (mount,) = (
            line
            for line in Path('/proc/self/mountinfo').read_text().splitlines()
            if f' {pools}/quick ' in line
        )
        self.assertIn('nosuid,nodev', mount)
        self.assertEqual(0, ctl('remove', 'quick', '--destroy'))
        self.assertFalse((pools / 'quick').is_mount())
        self.assertRaises(
            SystemExit,
            ctl,
            'create',
            'quick',
            '--memory',
            '--size',
            '32M',
            '--owner',
            'nobody:nosuch',
        )
        # no file system of its own
        self.assertEqual(1, ctl('create', 'plain', str(self.directory), '--owner', 'nobody'))


class PathTest(base.TestCase):
    """Whoever may write near the pools cannot lead root elsewhere."""

    def setUp(self) -> None:
        super().setUp()
        self.elsewhere = self.directory / 'elsewhere'
        self.elsewhere.mkdir()
        self.group = self.directory / 'group'
        self.group.mkdir()
        self.group.chmod(0o2775)
        self.configure(pools_path=str(self.group / 'pools'))

    def refuse(self, path: Path) -> None:
        for function, arguments in (
            (filesystems.make_directory, ()),
            (filesystems.remove_directory, ()),
            (filesystems.mount_memory, ('p', 1 << 20, path, False)),
            (filesystems.unmount, ()),
            (filesystems.give, (65534, 65534)),
            (filesystems.resize_memory, (2 << 20,)),
        ):
            if function is filesystems.mount_memory:
                self.assertRaises(exception.PcowError, function, 'p', 2 << 20, str(path), False)
            else:
                self.assertRaises(exception.PcowError, function, str(path), *arguments)
        self.assertEqual([], os.listdir(self.elsewhere))
        self.assertEqual(0, self.elsewhere.stat().st_uid)

    def test_root_of_the_pools_is_a_link(self) -> None:
        """As in S1: its own target would be the root of the comparison."""
        (self.group / 'pools').symlink_to(self.elsewhere)
        self.refuse(self.group / 'pools/ssh.service.d')

    def test_others_may_write_above_the_pools(self) -> None:
        (self.group / 'pools').mkdir()
        self.refuse(self.group / 'pools/p')
        error = self.assertRaises(
            exception.PathRefused, filesystems.make_directory, str(self.group / 'pools/p')
        )
        self.assertIn('chmod go-w', str(error))
        self.group.chmod(0o755)
        filesystems.make_directory(str(self.group / 'pools/p'))
        os.chown(self.group, 65534, 65534)
        self.refuse(self.group / 'pools/p')

    def test_acl(self) -> None:
        """One that lets somebody write shows in the mode."""
        (self.group / 'pools').mkdir()
        self.group.chmod(0o755)
        filesystems.make_directory(str(self.group / 'pools/p'))
        subprocess.run(['setfacl', '-m', 'u:nobody:rwx', self.group], check=True)
        self.refuse(self.group / 'pools/p')

    def test_modes_of_what_is_made(self) -> None:
        self.group.chmod(0o755)
        mask = os.umask(0)
        self.addCleanup(os.umask, mask)
        filesystems.make_directory(str(self.group / 'pools/a/b'))
        self.assertEqual(
            [0o755] * 3,
            [
                stat.S_IMODE(path.stat().st_mode)
                for path in (self.group / 'pools', self.group / 'pools/a', self.group / 'pools/a/b')
            ],
        )
