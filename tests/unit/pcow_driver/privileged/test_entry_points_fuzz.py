# SPDX-License-Identifier: Apache-2.0
"""Hostile trees against what root does below the pools: links, FIFOs, sockets, mounts, and renames
in a loop by another process.

PCOW_FUZZ_SECONDS makes it longer.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import pwd
import random
import shutil
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fixtures

from pcow_driver.common import conf
from pcow_driver.common import exception
from pcow_driver.common import immutable
from pcow_driver.common import locks
from pcow_driver.common import names
from pcow_driver.common import workspace
from pcow_driver.copies import view
from pcow_driver.export import control_socket
from pcow_driver.export import nbd
from pcow_driver.export import nbdkit_unit
from pcow_driver.pmem import block_device
from pcow_driver.pmem import filesystem
from pcow_driver.pmem import mount_unit
from pcow_driver.pools import device
from pcow_driver.privileged import checks
from pcow_driver.privileged import filesystems
from pcow_driver.privileged import services
from pcow_driver.provision import host
from pcow_driver.virt import disk_server
from pcow_driver.virt import disk_xml
from pcow_driver.virt import domain_xml
from tests.unit.pcow_driver import base

SECONDS = float(os.environ.get('PCOW_FUZZ_SECONDS', '3'))
CALLS = 20

hook = base.load_script(base.TOP / 'etc/libvirt/hooks/qemu.d/pcow')
HOOK_XML = "<domain id='7'><name>vm</name></domain>"
USER = pwd.getpwnam('daemon')
UUID = '6f0c1c52-5d1e-4c0b-9a3f-2b7e4f90d1a6'
NOBODY, GROUP = 65534, 'nogroup'
DOMAINS = disk_xml.DIRECTORY
NAMES = ('p', 'q', 'pools', 'export', 'x', 'mine')

# As nobody, in directories of its own: what is there is exchanged for links and back, all the time.
_ATTACKER = """
import os, random, sys
outside, *places = sys.argv[1:]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(flush=True)
names = ['p', 'q', 'pools', 'export', 'control', '.x.control', 'x', 'pcow-x', 't.pcow', 'u.pcow']
targets = [outside, f'{outside}/victim', f'{outside}/run', f'{outside}/run/x', '/', '..',
           f'{outside}/t.pcow', f'{outside}/u.pcow']
while True:
    name, other = random.choice(names), random.choice(names)
    try:
        os.chdir(random.choice(places))
        match random.randrange(9):
            case 0 | 1:
                os.symlink(random.choice([*targets, other]), name)
            case 2: os.mkdir(name)
            case 3: os.mkfifo(name)
            case 4: os.rename(name, other)
            case 5: os.unlink(name)
            case 6: os.rmdir(name)
            case 7: os.symlink(f'{outside}/.victim.control', f'{name}/control')
            case 8: open(f'{name}/nbdkit.pid', 'x').write('1')
    except OSError:
        pass
"""


class _Nobody:
    """The module ``os`` for one who is root and does not know it: what the code refuses, and not
    the kernel.
    """

    geteuid = staticmethod(lambda: NOBODY)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class FuzzTest(base.TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.outside = self.directory / 'outside'
        self.outside.mkdir()
        for name in ('victim', '.victim.control', 'x.lock', 'pcow-x'):
            (self.outside / name).write_text('precious')
        self.make_pool(self.outside)
        self.make_pool(self.directory / 'pool', NOBODY)
        shutil.copy(self.outside / 'u.pcow', self.directory / 'ram.pcow')
        self.make_export(self.outside / 'run/x')
        (self.outside / 'libvirt/qemu/7-vm').mkdir(parents=True)
        self.make_export(self.outside / f'domains/{UUID}-vda/export')
        self.place = self.directory / 'place'
        self.place.mkdir()
        self.make_export(self.place / 'export')
        self.make_socket(self.directory / 'socket')
        for directory in (self.directory, *self.directory.parents):
            if directory.stat().st_mode & 0o077 == 0:
                directory.chmod(0o755)
        self.configure(
            pools_path=str(self.place),
            nbdkit_plugin=self.script('plugin.so', ''),
            # a socket, and a process that has ended
            nbdkit=self.script(
                'nbdkit',
                f'#!/bin/sh\ncp -a {self.place.parent}/socket "$2" && echo 999999999 >"$4"\n',
            ),
        )
        self.image = self.directory / 'vm.pcow'
        self.image.touch()
        self.places = [self.place, self.directory / 'pool', *self.make_state()]
        self.places.append(self.directory / f'domains/{UUID}-vda')
        self.without_the_kernel()
        self.addCleanup(self.unmount)
        self.addCleanup(
            subprocess.run, ['chattr', '-R', '-f', '-i', str(self.directory)], check=False
        )

    @staticmethod
    def make_pool(directory: Path, owner: int = 0) -> None:
        """With a template and an image."""
        directory.mkdir(exist_ok=True)
        for name, state in (('t.pcow', b'\1'), ('u.pcow', b'\0')):
            header = b'\x89PCOW\r\n\x1a\2'.ljust(552, b'\0') + state
            (directory / name).write_bytes(header.ljust(4096, b'\0'))
            (directory / name).chmod(0o600)
        (directory / names.MARKER).touch()
        for path in (directory, directory / 't.pcow', directory / 'u.pcow'):
            os.chown(path, owner, owner)

    @staticmethod
    def make_export(directory: Path) -> None:
        """All that root's export has, and a process that is none of it."""
        directory.mkdir(parents=True, mode=0o700)
        FuzzTest.make_socket(directory / 'socket')
        (directory / 'nbdkit.pid').write_text('999999999')
        (directory / 'nbdkit.log').write_text('precious')

    @staticmethod
    def make_socket(path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))

    def make_state(self) -> list[Path]:
        """As host setup makes it: the attacker is in the group of the services."""
        state = self.directory / 'state'
        state.mkdir()
        made = [state / name for name in ('locks', 'frozen', 'exports', 'disks')]
        for path in made:
            path.mkdir()
            os.chown(path, 0, NOBODY)
            path.chmod(0o2770)
        return made

    def without_the_kernel(self) -> None:
        """What a host has that root's entry points need, and this one may lack."""
        xml = domain_xml.Domain(
            name='vm',
            memory=1 << 30,
            disks=[disk_xml.Disk(path=str(self.image), size=1 << 22)],
            uuid=UUID,
        ).to_xml()
        self.xml = xml
        command = ('mount', '-t', 'tmpfs', 'none', '.')
        window = device.Window(offset=2 << 20, size=2 << 20)
        for module, name, value in (
            (checks, 'device', lambda path: path),
            (block_device, 'check_block_device', lambda _path: None),
            (filesystem, 'mount_command', lambda *_arguments: command),
            (filesystems, 'uuid', lambda _device: UUID),
            (mount_unit, 'DIRECTORY', str(self.directory / 'units')),
            (nbdkit_unit, 'SOCKET', str(self.directory / 'none')),
            (device, 'window', lambda *_arguments, **_options: window),
            (device, 'grow', lambda *_arguments: None),
            (services, 'os', _Nobody()),
        ):
            self.useFixture(fixtures.MockPatchObject(module, name, value))
        services.context.set_client_mode(False)
        self.addCleanup(services.context.set_client_mode, True)

    def unmount(self) -> None:
        for line in reversed(Path('/proc/self/mountinfo').read_text().splitlines()):
            if line.split()[4].startswith(f'{self.directory}/'):
                subprocess.run(['umount', '-l', line.split()[4]], check=False)

    @staticmethod
    def state(top: Path) -> list[tuple[Any, ...]]:
        """Of all that is not the attacker's."""
        found = []
        for path in (top, *sorted(top.rglob('*'))):
            status = path.lstat()
            found.append(
                (
                    path.relative_to(top),
                    status.st_ino,
                    status.st_uid,
                    status.st_gid,
                    status.st_mode,
                    status.st_size,
                    status.st_dev,
                    os.listxattr(path, follow_symlinks=False),
                    immutable.is_set(str(path)),
                )
            )
        return found

    def host_setup(self, path: str) -> None:
        with conf_of(self, state_path=f'{path}/state', pools_path=f'{path}/pools'):
            list(host.set_up(GROUP))

    def workspaces(self, path: str) -> None:
        with conf_of(self, conversion_dir=path):
            nbd.collect()
            workspace.collect()
            with workspace.directory('template'):
                pass

    def domain(self, path: str, owner: int) -> None:
        """Its disks, from its start to its end."""
        os.chown(self.image, owner, owner)
        with mock.patch.object(disk_xml, 'DIRECTORY', path):
            xml = self.xml.replace(DOMAINS, path)
            disk_server.serve(xml, NOBODY)
            disk_server.unserve(xml)

    def lock(self) -> None:
        with locks.lock('x'):
            locks.note('x', 'text')
        locks.collect()

    def hook_read(self, path: str) -> None:
        """As it does with a base."""
        with hook.opened(path, 'the base') as file:
            hook.grant_read(file, USER)

    def hook_ram(self, place: str, path: str) -> None:
        """From the start of a guest whose RAM is an image to its end; QEMU's user has the place."""
        conf_file = self.directory / 'qemu.conf'
        conf_file.write_text(f'memory_backing_dir = "{place}"\nuser = "{USER.pw_name}"\n')
        hook.grant_ram(path, USER, hook.NO_UUID)
        try:
            hook.link_ram(HOOK_XML, path, str(conf_file))
        finally:
            hook.unlink_ram(HOOK_XML, str(conf_file))
            hook.revoke_ram(path, USER)

    def call(self, chosen: random.Random) -> None:
        path = str(self.place.joinpath(*chosen.choices(NAMES, k=chosen.randint(1, 3))))
        behind = str(self.place.joinpath(chosen.choice(NAMES), chosen.choice(('run/x', 'x', ''))))
        pooled = str(self.directory / 'pool' / chosen.choice(('t.pcow', 'u.pcow', 'x/t.pcow')))
        function, *arguments = chosen.choice(
            (
                (filesystems.make_directory, path),
                (filesystems.remove_directory, path),
                (filesystems.mount_memory, 'p', 1 << 20, path, False),
                (filesystems.mount, 'xfs', '/dev/pmem0', path),
                (filesystems.install_unit, 'p', '/dev/pmem0', path, 'xfs'),
                (filesystems.uninstall_unit, path),
                (filesystems.unmount, path),
                (filesystems.grow, path),
                (filesystems.resize_memory, path, 2 << 20),
                (filesystems.give, path, NOBODY, NOBODY),
                (filesystems.set_extent_hint, path),
                (services.set_immutable, f'{path}/t.pcow', True),
                (services.set_immutable, pooled, True),
                (services.set_immutable, pooled, False),
                (nbd.start, path, str(self.image)),
                (nbd.start, str(self.place / 'export'), str(self.image)),
                (nbd.stop, path),
                (nbd.stop, behind),
                (nbd.stop, str(self.place / 'export')),
                (control_socket.remove_dead, f'{path}/.victim.control'),
                (control_socket.remove_dead, f'{path}/.x.control'),
                (view.collect, SimpleNamespace(uuid=chosen.choice(NAMES))),
                (self.host_setup, path),
                (self.workspaces, path),
                (self.domain, f'{path}/domains', 0),
                (self.domain, str(self.directory / 'domains'), chosen.choice((0, NOBODY))),
                (self.lock,),
                (immutable.is_set, path),
            )
        )
        try:
            function(*arguments)
        except (exception.PcowError, OSError):
            pass

    def call_hook(self, chosen: random.Random) -> None:
        path = str(self.place.joinpath(*chosen.choices(NAMES[:5], k=chosen.randint(1, 2))))
        pooled = str(self.directory / 'pool' / chosen.choice(('t.pcow', 'u.pcow', 'x/t.pcow')))
        try:
            match chosen.randrange(8):
                case 0:
                    self.hook_read(pooled)
                case 1:
                    self.hook_ram(path, f'{path}/u.pcow')
                case 2:
                    self.hook_ram(path, f'{self.directory}/ram.pcow')
                case _:
                    self.hook_read(f'{path}/t.pcow')
        except (hook.HookError, OSError):
            pass

    def run_for(self, seconds: float, call: Callable[[random.Random], None]) -> None:
        """For so long, and on a busy machine until it has called often enough to tell something."""
        chosen, calls, end = random.Random(), 0, time.monotonic() + seconds
        before = self.state(self.outside)
        while time.monotonic() < end or calls < CALLS:
            call(chosen)
            calls += 1
        self.assertEqual(before, self.state(self.outside))
        for line in Path('/proc/self/mountinfo').read_text().splitlines():
            self.assertFalse(line.split()[4].startswith(str(self.outside)), line)

    def attack(self) -> subprocess.Popen[bytes]:
        attacker = subprocess.Popen(
            [sys.executable, '-c', _ATTACKER, self.outside, *self.places], stdout=subprocess.PIPE
        )
        assert attacker.stdout is not None
        attacker.stdout.readline()
        self.addCleanup(attacker.stdout.close)
        self.addCleanup(attacker.wait)
        self.addCleanup(attacker.kill)
        return attacker

    def test_directory_of_the_attacker(self) -> None:
        """Nothing is ever done in it, nor in root's own export that lies there."""
        export = self.place / 'export'
        before = self.state(export)
        os.chown(self.place, NOBODY, NOBODY)
        self.attack()
        self.run_for(SECONDS, self.call)
        self.assertNotIn(f' {self.place}/', Path('/proc/self/mountinfo').read_text())
        for path in self.place.iterdir():
            if path.lstat().st_uid != NOBODY:
                self.assertEqual(before, self.state(path))
                before = []
        self.assertEqual([], before)

    def test_directory_that_anybody_may_write_to(self) -> None:
        """With the sticky bit: what is root's there stays root's, and only that is used."""
        self.place.chmod(0o1777)
        self.attack()
        self.run_for(SECONDS, self.call)

    def test_hook_of_libvirt(self) -> None:
        """It opens a service's own files to QEMU's user, and nobody else's."""
        os.chown(self.place, NOBODY, NOBODY)
        self.attack()
        self.run_for(SECONDS, self.call_hook)


@contextlib.contextmanager
def conf_of(test: FuzzTest, **options: str) -> Iterator[None]:
    before = {name: conf.CONF.pcow[name] for name in options}
    test.configure(**options)
    try:
        yield
    finally:
        test.configure(**before)
