# SPDX-License-Identifier: Apache-2.0
"""A host of its own with a libvirtd and a pool *fast*, and a guest that checks its own memory, for
pages whose commands are about domains.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import signal
import subprocess
import time
import unittest

from tests.functional import domain_case
from tests.functional import libvirt_vm
from tests.functional import own_host
from tests.functional import page_case
from tests.functional import pages

TEMPLATE = 'debian12'
POOL = '/var/lib/pcow/pools/fast'
SECONDS = 60
REPORT = rb'check: gen=(\d+) mark=\S+ ok'
BOOTED = rb'check: booted \S+'
# also where there is KVM: what runs is the same everywhere
_PLACES = {
    f'domain-xml fast/{name}': f'domain-xml fast/{name} --type qemu' for name in ('web1', 'web2')
}


class LibvirtPageTestCase(page_case.PageTestCase):
    """One host for all tests of a class; each has a pool *fast* with a template, and leaves
    nothing.
    """

    guest_host: libvirt_vm.Host
    own: own_host.OwnHost

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.own = own_host.OwnHost()
        cls.addClassCleanup(cls.own.close)
        cls.guest_host = libvirt_vm.Host()
        cls.addClassCleanup(cls.guest_host.close)
        cls.guest_host.start(*cls.own.launcher)
        cls._settings()
        shell = cls.own.shell()
        shell.type('mkfs.ext4 -q -b 4096 disk.raw 56M')
        shell.type(f'qemu-img convert -f raw -O qcow2 disk.raw {TEMPLATE}.qcow2; rm disk.raw')

    @classmethod
    def _settings(cls) -> None:
        """What a domain without a kernel boots is the guest of the tests."""
        shim = cls.own.directory / 'shim'
        shim.mkdir()
        (shim / 'kernel').symlink_to(cls.guest_host.kernel)
        (shim / 'initrd').symlink_to(cls.guest_host.initrd)
        cls.own.write_settings(f'boot_shim = {shim}\nlibvirt_uri = {cls.guest_host.daemon.uri}\n')

    def setUp(self) -> None:
        unittest.TestCase.setUp(self)
        self.host = self.own
        self.shell = self.own.shell(_PLACES, {'LIBVIRT_DEFAULT_URI': self.guest_host.daemon.uri})
        self.pool = self.host.own(POOL)
        self.addCleanup(self._clear)
        self.make_pool()

    def make_pool(self, size: str | None = None) -> None:
        """:param size: of one that can be filled"""
        self._delete_pools()
        how = f'--memory --size {size}' if size else POOL
        self.do(f'pcowctl pool create fast {how}')
        kept = self.home(f'{TEMPLATE}.pcow')
        if kept.exists():
            self.do(f'cp --sparse=always {kept.name} {POOL}/')
        else:
            name = f'{TEMPLATE}.qcow2 fast/{TEMPLATE}'
            self.do(f'pcowctl template build --source-format qcow2 {name}')
            self.do(f'cp --sparse=always {POOL}/{kept.name} .')

    def _delete_pools(self) -> None:
        self.do('umount /var/lib/pcow/pools/* 2>/dev/null', None)
        self.do('chattr -R -f -i /var/lib/pcow', None)
        self.do('rm -rf /var/lib/pcow/*; mkdir /var/lib/pcow/pools')

    def _clear(self) -> None:
        for name in self.do('virsh list --all --name').split():
            if self.state(name) != 'shut off':
                self.kill(name)  # libvirt's own way waits for QEMU
            self.do(f'virsh undefine {name} --snapshots-metadata')
        self._delete_pools()

    # ---- domains

    def state(self, name: str = 'web1') -> str:
        return self.do(f'virsh domstate {name}').strip()

    def pid(self, name: str = 'web1') -> int:
        return int((self.guest_host.directory / 'run' / 'qemu' / f'{name}.pid').read_text())

    def kill(self, name: str = 'web1') -> None:
        os.kill(self.pid(name), signal.SIGKILL)
        self.wait(lambda: self.state(name) == 'shut off')

    def wait(self, until: Callable[[], object], seconds: float = SECONDS) -> None:
        limit = time.monotonic() + seconds
        while not until():
            self.assertLess(time.monotonic(), limit)
            time.sleep(0.1)

    def console(self, name: str = 'web1') -> domain_case.Console:
        return domain_case.Console(self.do(f'virsh dumpxml {name}'))

    def wait_boot(self, name: str = 'web1') -> int:
        """The generation that its guest has come to."""
        with self.console(name) as console:
            console.expect(BOOTED, libvirt_vm.BOOT_SECONDS)
            return int(console.expect(REPORT, SECONDS)[1])

    def mark(self, word: str, name: str = 'web1') -> None:
        """Have its guest store a word in RAM and on persistent memory."""
        with self.console(name) as console:
            console.send(f'mark {word}')
            console.expect(f'mark={word} ok'.encode(), SECONDS)

    def holds(self, word: str, image: str = 'web1') -> bool:
        """Whether the guest's persistent memory has the word that it was to store."""
        self.do(f'pcow-img convert -f pcow -O raw {POOL}/{image}.pcow view.raw')
        view = self.home('view.raw')
        found = word.encode() + b'\0' in view.read_bytes()
        view.unlink()
        return found

    def wait_report(self, name: str = 'web1') -> int:
        """The same of one that runs; it has not been started anew."""
        with self.console(name) as console:
            found = console.expect(rb'check: (?:gen=(\d+) mark=\S+ ok|booted|BROKEN)', SECONDS)
            self.assertIsNotNone(found[1], found[0])
            return int(found[1])

    def begin(self, line: str) -> 'subprocess.Popen[str]':
        """A line that goes on until it is ended."""
        process = subprocess.Popen(
            self.shell.words(f'exec stdbuf -oL {line}'),
            env=self.shell.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process: 'subprocess.Popen[str]') -> str:
        """What it has said."""
        if process.stdout is None or process.stdout.closed:
            return ''
        process.terminate()
        return process.communicate(timeout=SECONDS)[0]

    @contextlib.contextmanager
    def listening(self, page: pages.Page, pattern: str) -> Iterator[list[str]]:
        """A line of a page that listens meanwhile; then what it has said."""
        listener, said = self.begin(page.take(pattern)), []
        time.sleep(1)  # virsh does not say when it listens
        yield said
        time.sleep(1)
        said.append(self.end(listener))

    def start_console(self, line: str) -> None:
        """One that shows the console of a guest, until that has come up."""
        master, terminal = os.openpty()
        with os.fdopen(master, 'rb', buffering=0) as screen:
            process = subprocess.Popen(
                self.shell.words(f'exec {line}'),
                env=self.shell.environment | {'TERM': 'dumb'},
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
            os.close(terminal)
            seen = b''
            try:
                limit = time.monotonic() + libvirt_vm.BOOT_SECONDS
                while b'check: booted' not in seen:
                    self.assertLess(time.monotonic(), limit, seen)
                    seen += screen.read(4096)
                os.write(master, b'\x1d')  # ^], as a user ends it
                process.wait(SECONDS)
            finally:
                process.kill()
                process.wait()

    def define(self, *options: str) -> None:
        """web1 on the template, as the pages begin."""
        self.do(f'pcowctl image create fast/web1 --template {TEMPLATE}')
        words = ' '.join(('--memory', '192M', *options))
        self.do(f'pcowctl domain-xml fast/web1 {words} >web1.xml')
        self.do('virsh define web1.xml')

    def home(self, name: str) -> Path:
        return self.host.home / name
